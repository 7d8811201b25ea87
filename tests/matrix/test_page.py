"""The page of the matrix: what it says of each cell, and what a browser shows of it."""

from dataclasses import replace
from pathlib import Path

from bench._matrix.models import MODELS
from bench._matrix.page import html, markdown, write_pages
from bench._matrix.results import Kept, Result
from bench._matrix.strategies import STRATEGIES
from tests.training.browser import browser

EVIL = "</td><script>document.title = 'stolen'</script> & more"
SAME = Result(
    "Llama", "tp=2", 2, "same", apart=6e-7, tokens_per_s=1234.0, predicted_tokens_per_s=2000.0, memory=5e5, day="a day"
)
CELLS = (
    SAME,
    replace(SAME, model="Qwen3", state="slower", before_tokens_per_s=4321.0),
    replace(SAME, strategy="ep=2", state="refused", why=f"the plan {EVIL}"),
    replace(SAME, strategy="sp=2", state="broken", why=f"the loss {EVIL}"),
)
KEPT = Kept("a machine", {"torch": "2.13"}, {one.name: one for one in CELLS})


def test_markdown_has_a_row_for_every_strategy_and_says_what_broke() -> None:
    text = markdown(KEPT)
    rows = {line.split("`")[1]: line for line in text.splitlines() if line.startswith("| `")}
    assert {*rows} == {*STRATEGIES}
    assert all(row.count("|") == len(MODELS) + 2 for row in rows.values())
    assert "6e-07<br>1,234 / 2,000 tok/s<br>500 kB" in rows["tp=2"]
    assert "**slower**" in rows["tp=2"]
    assert "**BROKEN**" in rows["sp=2"]
    assert "refused" in rows["ep=2"]
    assert f"- the loss {EVIL}: Llama `sp=2`" in text
    assert text.startswith("# The capability matrix\n\n1 same, 1 slower, 1 BROKEN, 1 refused")


def test_html_escapes_what_it_is_told() -> None:
    text = html(KEPT)
    assert "<script" not in text
    assert text.count("&lt;script&gt;") == 5  # of each in a title and below; of the broken one in the cell, too


def test_a_browser_shows_the_cells_in_their_colours(tmp_path: Path) -> None:
    write_pages(tmp_path, KEPT)
    with browser() as window:
        window.open(tmp_path / "matrix.html", width=1300)
        assert window.value("document.title") == "The capability matrix"
        count = "document.querySelectorAll('td.{}').length"
        shown = {name: window.value(count.format(name)) for name in ("same", "slower", "broken", "refused", "open")}
        rest = len(MODELS) * len(STRATEGIES) - 4
        assert shown == {"same": 1, "slower": 1, "broken": 1, "refused": 1, "open": rest}
        colour = "getComputedStyle(document.querySelector('td.{}')).backgroundColor"
        assert len({window.value(colour.format(name)) for name in shown}) == 5
        assert window.value("document.body.scrollWidth") <= 1300
        assert window.complaints() == []
        assert len(window.requests()) == 1
