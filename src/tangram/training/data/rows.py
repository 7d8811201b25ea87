"""What all readers of files share: a row, its text, and what is said of a row or file that is wrong."""

import difflib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from tangram.errors import UserError

ROW = "*"
"""Stands for a column where a whole row is meant, as JSON."""


def row_text(columns: Mapping[str, object]) -> bytes:
    """A whole row as JSON; what JSON has no word for, as a date, is text."""
    return json.dumps(columns, default=str).encode()


class TextRow(NamedTuple):
    """A document of a file, and which share of the file has been read with it."""

    number: int
    text: bytes
    share: float


def text_of(value: object, field: str, where: str) -> bytes:
    """The bytes of a column's value; none for null."""
    if value is None:
        return b""
    if isinstance(value, bytes):
        return value
    if not isinstance(value, str):
        raise UserError(f'"{field}" in {where} is {type(value).__name__}, not text: set the source\'s field')
    try:
        return value.encode()
    except UnicodeEncodeError:
        raise UserError(f'"{field}" in {where} is no text: it holds one half of a surrogate pair') from None


class NoField(UserError):
    """A file or row has no column of the name that the source gives."""


def no_field(field: str, known: Iterable[str], where: str) -> NoField:
    names = list(known)
    near = difflib.get_close_matches(field, names, 1)
    hint = f'did you mean "{near[0]}"?' if near else f"it has {', '.join(names) or 'none'}"
    return NoField(f'{where} has no "{field}": {hint} Set the source\'s field')


def unreadable(path: Path, error: Exception) -> UserError:
    why = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return UserError(f'the file "{path}" cannot be read: {why}. Leave it out by the pattern of its source')
