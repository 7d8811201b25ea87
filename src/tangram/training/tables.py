"""Short tables for people: drawn by rich on a terminal, aligned columns of plain text elsewhere."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from rich.table import Table
from rich.text import Text

STYLES: Mapping[str, str] = MappingProxyType(
    {"ok": "green", "yes": "green", "missing": "yellow", "failed": "red", "no": "red"}
)


def drawn(title: str, headers: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    """A table for a terminal; cells that say how something went are coloured."""
    table = Table(*headers, title=title, title_justify="left")
    for row in rows:
        table.add_row(*(Text(cell, style=STYLES.get(cell, "")) for cell in row))
    return table


def plain(title: str, headers: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """The lines of the same table as text."""
    widths = [max(map(len, column)) for column in zip(headers, *rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in (headers, *rows)]
    return [title, *(line.rstrip() for line in lines)]
