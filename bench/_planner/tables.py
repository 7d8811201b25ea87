"""CSV files as rows of text. What is no table, or lacks a column, is said in a sentence."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path

from tangram.errors import UserError

__all__ = ["table"]


def table(path: Path, needed: Sequence[str], others: Sequence[str] = ()) -> list[Mapping[str, str]]:
    """The rows; of `others` those that the file lacks, and what a short row lacks, are "". Raises UserError."""
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.DictReader(file, restkey="", restval="")
            names, found = reader.fieldnames, list(reader)
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UserError(f"{path} cannot be read: it is no text in UTF-8") from None
    except csv.Error as error:
        raise UserError(f"{path} is no CSV file: {error}") from None
    if not names:
        raise UserError(f"{path} has no columns: write {', '.join(needed)} into its first line")
    for name in needed:
        if name not in names:
            raise UserError(f"{path} has no column {name}: it has {', '.join(names)}")
    empty = dict.fromkeys((*needed, *others), "")
    return [{**empty, **row} for row in found]
