"""Texts that every room needs: tables in plain lines, files that come with it or are written, names that were meant."""

import difflib
import itertools
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from importlib import resources
from pathlib import Path

from tangram.errors import UserError


def plain(title: str, headers: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """The lines of a table in aligned columns, its title first."""
    widths = [max(map(len, column)) for column in zip(headers, *rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in (headers, *rows)]
    return [title, *(line.rstrip() for line in lines)]


@cache
def packaged(package: str, *names: str) -> str:
    """The text of a file that comes with a package, as `packaged("tangram.hardware", "devices.toml")`."""
    return resources.files(package).joinpath(*names).read_text(encoding="utf-8")


def alternatives(pattern: str) -> Iterator[str]:
    """`a.{b,c}` as `a.b` and `a.c`, `a.{0..2}` as `a.0`, `a.1` and `a.2`."""
    parts = re.split(r"\{([^}]*)\}", pattern)
    choices = [
        [one for some in part.split(",") for one in _range(some)] if i % 2 else [part] for i, part in enumerate(parts)
    ]
    return ("".join(chosen) for chosen in itertools.product(*choices))


def _range(text: str) -> list[str]:
    """The numbers of `0..31`; of another text the text."""
    ends = re.fullmatch(r"(\d+)\.\.(\d+)", text)
    return [str(number) for number in range(int(ends[1]), int(ends[2]) + 1)] if ends else [text]


def refuse_unwritable(path: Path, what: str) -> None:
    """Raise UserError for a file that has no place: asked before the work whose result it is to hold."""
    if not path.resolve().parent.is_dir() or path.is_dir():
        raise UserError(f"{what} cannot be written to {path}: give a file in a folder that is there")


def write_file(path: Path, text: str, what: str) -> None:
    """Write a file under a temporary name and rename it, so that nobody reads half of it and a full disk leaves the
    one that was there. `what` it is, as "the plan". Raises UserError where it cannot be written.

    A path in the text may hold bytes that are no text; they are written as escapes, which JSON reads back. Into what is
    no file, and through links as /dev/stdout, is written as it is.
    """
    through = path.is_symlink() or (path.exists() and not path.is_file())
    unfinished = path if through else path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with unfinished.open("w", encoding="utf-8", errors="backslashreplace") as stream:
            stream.write(text)
            if not through:
                stream.flush()
                os.fsync(stream.fileno())
        if not through:
            unfinished.replace(path)
    except OSError as error:
        raise UserError(f"{what} cannot be written to {path}: {error.strerror}; make room or give another") from None
    finally:
        if not through:
            unfinished.unlink(missing_ok=True)


def nearest_hint(name: str, known: Iterable[str]) -> str:
    """ " (did you mean 'torchtitan'?)", or nothing where no known name is near."""
    near = difflib.get_close_matches(name, list(known), 1)
    return f" (did you mean {near[0]!r}?)" if near else ""
