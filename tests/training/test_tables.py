"""Tables for people: whole on a wide terminal, in parts on a narrow one."""

import io

import pytest
from rich.console import Console

from tangram.text import plain
from tangram.training.observe.text_tables import count, drawn, printable

HEADERS = ("", "plan", "mesh", "micro-batch", "memory", "step", "tokens/s")
ROWS = (
    ("1", "DDP", "dp=2", "4", "437.6 MB", "123 ms", "8,341"),
    ("-", "one process", "dp=1", "4", "1 MB", "9 ms", "7"),
)


def lines(width: int, *table: object) -> list[str]:
    out = io.StringIO()
    Console(file=out, width=width, force_terminal=True, color_system=None).print(drawn(*table))  # pyright: ignore[reportArgumentType]
    return out.getvalue().splitlines()


def test_a_table_that_fits_is_one() -> None:
    shown = lines(80, "Plans", HEADERS, ROWS)
    assert shown[0].strip() == "Plans"
    assert sum("┏" in line for line in shown) == 1
    assert any("DDP" in line and "8,341" in line for line in shown)


@pytest.mark.parametrize("width", [30, 40, 60, 79])
def test_no_cell_is_cut_on_a_narrow_terminal(width: int) -> None:
    shown = lines(width, "Plans", HEADERS, ROWS)
    assert all(len(line) <= width for line in shown)
    assert "…" not in "".join(shown)
    cells = [cell.strip() for line in shown for cell in line.replace("┃", "│").split("│")]
    for at, header in enumerate(HEADERS[1:], start=1):
        assert cells.count(header) == 1  # each column once
        assert {row[at] for row in ROWS} <= set(cells)
    assert cells.count("1") == sum("┏" in line for line in shown)  # but the first, which says whose the rows are


@pytest.mark.parametrize("width", [30, 45, 60, 100])
def test_sentences_are_wrapped(width: int) -> None:
    why = "the 2 key-value heads do not divide by tp=4, and so there is no plan of this kind for the model"
    shown = lines(width, "Not possible", ("plan", "mesh", "why not"), (("tensor", "tp=4", why),))
    assert all(len(line) <= width for line in shown)
    cells = " ".join(line.strip("│").split("│")[-1].strip() for line in shown)
    assert [word for word in why.split() if word not in cells] == []


def test_one_column() -> None:
    assert any("alone" in line for line in lines(40, "Title", ("name",), (("alone",),)))


def test_plain_text_has_no_width() -> None:
    assert plain("Title", ("what", "how"), (("a", "b" * 200),))[2] == f"a     {'b' * 200}"


def test_words() -> None:
    assert [count(number, "rank") for number in (1, 2, 1024)] == ["1 rank", "2 ranks", "1,024 ranks"]
    assert count(2, "process", "es") == "2 processes"


def test_what_a_model_writes_does_not_steer_the_terminal() -> None:
    assert printable("a\x1b[31mb\r\x07\x9bc\n\td é") == "a\ufffd[31mb\ufffd\ufffd\ufffdc\n\td é"
