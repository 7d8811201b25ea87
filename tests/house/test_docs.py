"""Links in the documentation lead somewhere, and the keys of jobs and plans that it names are taken."""

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, get_args

import pytest
from pydantic import BaseModel, TypeAdapter, ValidationError

from tangram.schema.plan import Plan

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.md")])


def dead_links(page: Path) -> list[str]:
    """Links to files that are not there, or to parts that a page does not have."""
    links = re.findall(r"\]\(([^)#\s]*)(#[^)\s]*)?\)", page.read_text())
    ours = [(link, part[1:]) for link, part in links if "://" not in link]
    return [
        f"{link}#{part}".rstrip("#")
        for link, part in ours
        if not leads_somewhere(page.parent / link if link else page, part)
    ]


def leads_somewhere(path: Path, part: str) -> bool:
    """Whether there is such a file, and, of a page, such a heading or anchor in it."""
    return path.exists() and (not part or path.suffix != ".md" or part in anchors(path.read_text()))


def anchors(text: str) -> set[str]:
    """What a link may name behind `#`: headings as GitHub and mkdocs spell them, and anchors of a page's own."""
    headings = re.findall(
        r"^#+ (.*)$", re.sub(r"^( *)```.*?^\1```", "", text, flags=re.DOTALL | re.MULTILINE), re.MULTILINE
    )
    slugs = {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}
    return slugs | set(re.findall(r'<a id="([^"]+)"', text))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    assert dead_links(page) == []


def test_a_dead_link_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# A part\n[here](page.md#a-part) [there](gone.md#part) [out](https://example.org/x) [x](#a-part) [y](#no)\n"
    )
    assert dead_links(page) == ["gone.md#part", "#no"]


def test_every_page_is_in_the_index() -> None:
    index = (ROOT / "docs" / "README.md").read_text()
    pages = {page.name for page in (ROOT / "docs").glob("*.md")} - {"README.md"}
    assert {page for page in pages if f"]({page})" not in index} == set()


GUIDE = 1500
"""Words that a guide may have, tables and blocks of code apart."""
REFERENCES = {"limits.md", "attention-numerics.md", "op-accuracy.md", "swept.md", "matrix.md", "glossary.md", "api.md"}


def words(text: str) -> int:
    """Of a page, without its tables and its blocks of code."""
    lines = re.sub(r"^( *)```.*?^\1```", "", text, flags=re.DOTALL | re.MULTILINE).splitlines()
    return sum(len(line.split()) for line in lines if not line.lstrip().startswith("|"))


def test_guides_are_short() -> None:
    counts = {page.name: words(page.read_text()) for page in (ROOT / "docs").rglob("*.md")}
    assert {name: count for name, count in counts.items() if name not in REFERENCES and count > GUIDE} == {}


def test_words_of_tables_and_blocks_do_not_count() -> None:
    assert words("One two.\n\n| a | b |\n\n- three\n\n  ```python\n  x = 1\n  ```\n\n```sh\nls\n```\nfour\n") == 5


def of_a_table(annotation: Any) -> type[BaseModel] | None:
    """The table that a key is, also an optional one."""
    return next((one for one in (annotation, *get_args(annotation)) if hasattr(one, "model_fields")), None)


TABLES = [name for name, one in Plan.model_fields.items() if of_a_table(one.annotation)]
NAMED = re.compile(rf"`((?:{'|'.join(TABLES)})\.[a-z_.]+)(?: ?= ?([^`\n]+))?`")


def untaken(text: str) -> Iterator[str]:
    """Keys that a page names and a plan has not, and values that such a key does not take."""
    for key, value in NAMED.findall(text):
        table: Any = Plan
        *_, last = parts = key.split(".")
        for part in parts:
            if part not in table.model_fields:
                yield key
                break
            field = table.model_fields[part]
            table = of_a_table(field.annotation)
            if table is None and value and part == last:
                kind: Any = Annotated[(field.annotation, *field.metadata)] if field.metadata else field.annotation
                try:
                    TypeAdapter(kind).validate_python(tomllib.loads(f"x = {value}")["x"])
                except ValidationError:
                    yield f"{key} = {value}"
                except tomllib.TOMLDecodeError:  # a letter in the place of a number
                    pass
            if table is None:  # its own keys are a person's
                break


GUIDES = [page for page in PAGES if page.name != "CHANGELOG.md"]  # which names keys that were


@pytest.mark.parametrize("page", GUIDES, ids=lambda page: str(page.relative_to(ROOT)))
def test_keys_that_are_named_are_taken(page: Path) -> None:
    assert [one for one in untaken(page.read_text()) if not one.endswith((".weight", ".json"))] == []


def test_a_key_that_is_not_taken_is_found() -> None:
    wrong = '`run.recompute_keep = ["products of it"]` `run.stepps` `data.sequence = N` `run.hang_seconds = -1`'
    assert [*untaken(wrong)] == ['run.recompute_keep = ["products of it"]', "run.stepps", "run.hang_seconds = -1"]
    assert [*untaken('`run.hang_seconds` `model.change.vocab_size = 3` `lora.base = "nf4"`')] == []
