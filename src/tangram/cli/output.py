"""How commands print: tables for people (plain text where nobody looks), JSON for programs, progress on stderr."""

import json
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager

from rich.console import Console
from rich.status import Status

from tangram.training.tables import drawn, plain

__all__ = ["figure", "note", "print_json", "print_table", "progress"]


def print_json(value: object) -> None:
    """One JSON document on stdout, nothing else."""
    print(json.dumps(value, indent=2, ensure_ascii=False))


def print_table(title: str, headers: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A table on stdout: drawn by rich on a terminal, aligned columns of plain text elsewhere."""
    if not sys.stdout.isatty():
        print("\n".join(plain(title, headers, rows)), end="\n\n")
        return
    Console().print(drawn(title, headers, rows))


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
