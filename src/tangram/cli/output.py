"""How commands print: tables for people (plain text where nobody looks), JSON for programs, progress on stderr."""

import json
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager

from rich.console import Console
from rich.status import Status
from rich.table import Table
from rich.text import Text

__all__ = ["figure", "note", "print_json", "print_table", "progress"]

_STYLES = {"ok": "green", "yes": "green", "missing": "yellow", "failed": "red", "no": "red"}


def print_json(value: object) -> None:
    """One JSON document on stdout, nothing else."""
    print(json.dumps(value, indent=2, ensure_ascii=False))


def print_table(title: str, headers: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A table on stdout: drawn by rich on a terminal, aligned columns of plain text elsewhere."""
    if not sys.stdout.isatty():
        print("\n".join(_plain(title, headers, rows)), end="\n\n")
        return
    table = Table(*headers, title=title, title_justify="left")
    for row in rows:
        table.add_row(*(Text(cell, style=_STYLES.get(cell, "")) for cell in row))
    Console().print(table)


def progress(what: str) -> AbstractContextManager[Status]:
    """A spinner with a word on what goes on, on stderr and only if that is a terminal."""
    return Console(stderr=True).status(what)


def note(what: str) -> None:
    """A line on what has been done, on stderr and only if that is a terminal.

    For benches: `progress` turns its spinner from a thread, which would take the interpreter from what is measured.
    """
    if sys.stderr.isatty():
        print(what, file=sys.stderr)


def figure(number: float | None) -> str:
    """A number at four significant digits, nothing for None."""
    return "" if number is None else f"{number:.4g}"


def _plain(title: str, headers: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(headers, *rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in (headers, *rows)]
    return [title, *(line.rstrip() for line in lines)]
