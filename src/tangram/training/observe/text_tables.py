"""Short tables for people: drawn by rich on a terminal, aligned columns of plain text elsewhere.

A table that is wider than the terminal is drawn in parts, one below the other, each with the first column again:
numbers that are cut or wrapped in the middle cannot be compared. Only a column of sentences is wrapped, where room is
left for it.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions
from rich.table import Table
from rich.text import Text

STYLES: Mapping[str, str] = MappingProxyType(
    {"ok": "green", "yes": "green", "missing": "yellow", "failed": "red", "no": "red"}
)
READABLE = 30  # columns of the terminal below which a column of sentences is not wrapped


@dataclass(frozen=True)
class Drawn:
    """A table for a terminal of any width."""

    title: str
    headers: Sequence[str]
    rows: Sequence[Sequence[str]]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Table]:
        title: str | None = self.title
        for part in self._parts(options.max_width):
            table = Table(title=title, title_justify="left")
            for at in part:
                wraps = at == part[-1] and _width(self._widths(part)) > options.max_width
                table.add_column(self.headers[at], no_wrap=not wraps, overflow="fold")
            for row in self.rows:
                table.add_row(*(Text(row[at], style=STYLES.get(row[at], "")) for at in part))
            yield table
            title = None

    def _parts(self, most: int) -> Iterator[list[int]]:
        """The columns of each part; the last of a part may be wider than what is left for it, then it is wrapped."""
        part = [0]
        for at in range(1, len(self.headers)):
            others = _width([*self._widths(part), 0])
            fits = others + self._widths([at])[0] <= most
            if len(part) > 1 and not fits and most - others < READABLE:
                yield part
                part = [0]
                fits = _width(self._widths([0, at])) <= most
            part.append(at)
            if not fits:
                yield part
                part = [0]
        if len(part) > 1 or len(self.headers) == 1:
            yield part

    def _widths(self, columns: Sequence[int]) -> list[int]:
        return [max(cell_len(row[at]) for row in (self.headers, *self.rows)) for at in columns]


def drawn(title: str, headers: Sequence[str], rows: Sequence[Sequence[str]]) -> Drawn:
    """A table for a terminal; cells that say how something went are coloured."""
    return Drawn(title, headers, rows)


def count(number: int, what: str, more: str = "s") -> str:
    """So many of something, in words: one rank, 1,024 ranks."""
    return f"{number:,} {what}{'' if number == 1 else more}"


def printable(text: str) -> str:
    """The text with what would move a terminal's cursor or change its colours made visible: a model may write it."""
    return "".join(one if one in "\n\t" or one.isprintable() else "\N{REPLACEMENT CHARACTER}" for one in text)


def _width(columns: Sequence[int]) -> int:
    """Of a drawn table with columns of these widths: a line and a space to each side."""
    return sum(columns) + 3 * len(columns) + 1
