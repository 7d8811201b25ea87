"""Tables of pages that benches write, between marks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from tangram.errors import UserError


def between(text: str, name: str, table: str, page: Path) -> str:
    """The page's text with a table in the place of what lies between two marks; refused where a mark is missing."""
    begin, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->\n"
    if text.count(begin) != 1 or text.count(end) != 1:
        raise UserError(f'"{page}" lacks the marks {begin.strip()} and {end.strip()}, between which a table is written')
    head, rest = text.split(begin)
    return head + begin + table + end + rest.split(end)[1]


def table(headers: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """In Markdown."""
    lines = ["| " + " | ".join(row) + " |" for row in (headers, *rows)]
    return "\n".join([lines[0], "|---" * len(headers) + "|", *lines[1:]]) + "\n"
