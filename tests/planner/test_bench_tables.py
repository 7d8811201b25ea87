"""What `tangram bench planner` takes for a table of runs, sets and members, and what it says of what is none."""

import csv
from collections.abc import Callable
from pathlib import Path

import pytest

from bench import planner
from bench._planner import ranking
from bench._planner.rows import Row, cases, read
from tangram.cli import main

ROOT = Path(__file__).parents[2]
RUNS = ROOT / "data" / "published" / "runs.csv"


def some(path: Path, keep: Callable[[Row], bool], without: tuple[str, ...] = (), head: str = "") -> list[Row]:
    """Write published runs of which this is true, without some columns."""
    rows = [row for row in read(RUNS) if keep(row)]
    names = [name for name in rows[0] if name not in without]
    with path.open("w", encoding="utf-8", newline="") as file:
        file.write(head)
        writer = csv.DictWriter(file, names, extrasaction="ignore")
        writer.writeheader()
        writer.writerows(rows)
    return rows


def of_simumax(row: Row) -> bool:
    """Few runs, all of which can be predicted."""
    return row["source_id"] == "simumax_b200"


def test_a_table_without_columns_that_it_can_do_without(tmp_path: Path) -> None:
    path = tmp_path / "runs.csv"
    rows = some(path, of_simumax, without=("date", "extra", "gated_mlp", "mem_kind", "oom", "step_s"), head="\ufeff")
    found = list(cases(read(path)))
    assert len(found) == len(list(cases(rows)))
    assert {one.row["date"] for one in found} == {""}
    # What a row has of tokens a second and device is its step, too.
    told = {one.row["row"]: one.step for one in cases(rows)}
    assert [one.step for one in found] == pytest.approx([told[one.row["row"]] for one in found], rel=0.01)


def test_a_short_row_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "runs.csv"
    rows = some(path, of_simumax)
    path.write_text(path.read_text() + "1,2,3\n")
    assert len(list(cases(read(path)))) == len(list(cases(rows)))


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "has no columns"),
        (b"a,b\n1,2\n", "has no column row"),
        (bytes(range(256)), "cannot be read: it is no text in UTF-8"),
        (None, "cannot be read: No such file or directory"),
    ],
)
@pytest.mark.parametrize("option", ["--runs", "--sets", "--members"])
def test_what_is_no_table_is_one_sentence(
    option: str, content: bytes | None, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(ROOT)
    path, runs = tmp_path / "wrong.csv", tmp_path / "runs.csv"
    some(runs, of_simumax)
    if content is not None:
        path.write_bytes(content)
    given = [] if option == "--runs" else ["--runs", str(runs)]
    assert main(["bench", "planner", "--only", "ranking", *given, option, str(path)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines()[-1].startswith(f"error: {path}")
    assert said.replace("column row", "column set" if option != "--runs" else "column row") in err
    assert "Traceback" not in err


def test_members_without_a_time_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "members.csv"
    path.write_text("set,row,step_s,oom\na,1,2.5,\na,2,nan,\na,3,soon,\na,4,inf,\na,5,-1,\na,6,9.0,1\n")
    assert ranking.members(path) == {"a": {"1": 2.5}}


def test_a_small_table_has_intervals_and_says_what_it_leaves_out(tmp_path: Path) -> None:
    path = tmp_path / "runs.csv"
    rows = some(path, of_simumax)
    text = path.read_text()
    one = next(row for row in rows if row["step_s"])
    path.write_text(text + ",".join({**one, "gpu": "Quantum9"}[name] for name in one).replace("\n", " ") + "\n")
    found = [row.figure for row in planner.rows(True, ("time",), runs=path)]
    assert any(figure.startswith("runs in their 90 % interval") for figure in found)
    assert any('left out: there is no device "Quantum9"' in figure for figure in found)
