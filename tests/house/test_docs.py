"""Links in the documentation lead somewhere."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.md")])


def dead_links(page: Path) -> list[str]:
    """Links to files that are not there."""
    links = re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text())
    return [link for link in links if "://" not in link and not (page.parent / link).exists()]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    assert dead_links(page) == []


def test_a_dead_link_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("[here](page.md) [there](gone.md#part) [out](https://example.org/x)\n")
    assert dead_links(page) == ["gone.md"]


def test_every_page_is_in_the_index() -> None:
    index = (ROOT / "docs" / "README.md").read_text()
    pages = {page.name for page in (ROOT / "docs").glob("*.md")} - {"README.md"}
    assert {page for page in pages if f"]({page})" not in index} == set()


GUIDE = 1500
"""Words that a guide may have, tables and blocks of code apart."""
REFERENCES = {"limits.md", "attention-numerics.md", "op-accuracy.md", "swept.md", "matrix.md", "glossary.md", "api.md"}
LONGER = {
    "checkpoint.md": 4000,
    "planner.md": 4000,
    "sharding-derive.md": 4200,
    "sharding.md": 3100,
    "training.md": 6300,
}
"""Guides that are longer, still, and what they may have: a figure here only goes down."""


def words(text: str) -> int:
    """Of a page, without its tables and its blocks of code."""
    lines = re.sub(r"^( *)```.*?^\1```", "", text, flags=re.DOTALL | re.MULTILINE).splitlines()
    return sum(len(line.split()) for line in lines if not line.lstrip().startswith("|"))


def test_guides_are_short() -> None:
    counts = {page.name: words(page.read_text()) for page in (ROOT / "docs").rglob("*.md")}
    assert {n: c for n, c in counts.items() if n not in REFERENCES and c > LONGER.get(n, GUIDE)} == {}
    assert {n: c for n, c in counts.items() if n in LONGER and c <= GUIDE} == {}, "these are short now: no row for them"


def test_words_of_tables_and_blocks_do_not_count() -> None:
    assert words("One two.\n\n| a | b |\n\n- three\n\n  ```python\n  x = 1\n  ```\n\n```sh\nls\n```\nfour\n") == 5
