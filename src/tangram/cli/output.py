"""How commands print: tables for people (plain text where nobody looks), JSON for programs, progress on stderr."""

import contextlib
import json
import sys
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.status import Status

from tangram.text import plain
from tangram.training.observe.text_tables import drawn


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


@contextlib.contextmanager
def byte_bar(what: str, total: int | None) -> Generator[Callable[[int], None]]:
    """A bar with bytes a second, on stderr and only if that is a terminal; tell it how many more bytes are done.

    `total`: None where nobody knows.
    """
    if not sys.stderr.isatty():
        yield lambda count: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=total)
        yield lambda count: bar.advance(task, count)


def note(what: str) -> None:
    """A line on what has been done, on stderr and only if that is a terminal.

    For benches: `progress` turns its spinner from a thread, which would take the interpreter from what is measured.
    """
    if sys.stderr.isatty():
        print(what, file=sys.stderr)


def figure(number: float | None) -> str:
    """A number at four significant digits, nothing for None."""
    return "" if number is None else f"{number:.4g}"


def size(nbytes: float) -> str:
    """So many bytes, at three digits: 812 B, 2.05 GB."""
    for unit, least in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("KB", 1e3)):
        if nbytes >= least * 0.9995:
            digits = 2 if nbytes < least * 9.995 else 1 if nbytes < least * 99.95 else 0
            return f"{nbytes / least:,.{digits}f} {unit}"
    return f"{nbytes:.0f} B"
