"""The documents of a source, one after the other, without holding more than a few of them.

`list_files` says what a source consists of before anything is read; `documents` reads it, from any document on. What
kind a file is its content says, with its name where that leaves a choice: JSON lines, JSON, cells (CSV, TSV), parquet;
any other text is one document. A `datasets` directory is one source as a whole. Text in columns is in the column
`field`; null and empty text is no document.
"""

import json
import zlib
from collections import Counter
from collections.abc import Generator, Iterator
from lzma import LZMAError
from pathlib import Path
from typing import NamedTuple, cast

from tangram.errors import UserError
from tangram.training.data.files import (
    JSON_LINES,
    LEFT_OUT,
    ROW,
    TAKEN,
    Files,
    NoField,
    TextRow,
    no_field,
    row_text,
    text_of,
    unreadable,
)
from tangram.training.data.opened import OpenedDataset, cell_rows, dataset_rows, opened, parquet_rows

READING = 4
"""The rules by which files are read; to be raised when the same files come to give other documents."""

EMPTY = f"{LEFT_OUT}: documents without text"


class Document(NamedTuple):
    """A document, where it stands, and how many bytes of the source's files have been read with it."""

    file: int
    number: int
    text: bytes
    done: int


def documents(
    files: Files, field: str, begin: tuple[int, int] = (0, 0), tally: Counter[str] | None = None
) -> Iterator[Document]:
    """Every document from number `begin[1]` of file `begin[0]` on, always in the same order.

    `tally` counts files as they are begun, by kind, and what is left out, by reason; `corpus` puts it into words.
    Raises UserError, with the name of the file, for what cannot be read.
    """
    tally = Counter() if tally is None else tally
    if files.table:
        if not begin[1]:
            tally[f"{TAKEN}: `datasets` directory"] += 1
        length = max(1, files.size)
        for number, text, share in _with_text(dataset_rows(files.root, field, begin[1]), tally):
            yield Document(0, number, text, int(share * length))
        return
    before = sum(file.size for file in files.files[: begin[0]])
    for file in range(begin[0], len(files.files)):
        first = begin[1] if file == begin[0] else 0
        size = files.files[file].size
        for number, text, share in _with_text(_file_rows(files.path(file), files.choice, field, first, tally), tally):
            yield Document(file, number, text, before + max(1, int(share * size)))
        before += size


def _with_text(rows: Iterator[TextRow], tally: Counter[str]) -> Iterator[TextRow]:
    for row in rows:
        if row.text:
            yield row
        else:
            tally[EMPTY] += 1


def _file_rows(path: Path, choice: str, field: str, first: int, tally: Counter[str]) -> Generator[TextRow]:
    try:
        with opened(path, field) as file:
            if file.kind == "binary":
                if choice != "pattern":
                    raise UserError(f'the file "{path}" is no text by its first bytes: leave it out by a pattern')
                tally[f"{LEFT_OUT}: binary"] += 1
                return
            if field == ROW and file.kind == "text":
                if choice != "folder":
                    raise UserError(f'the file "{path}" has no rows: give JSON lines, JSON, cells or parquet')
                tally[f"{LEFT_OUT}: text without rows"] += 1
                return
            # A folder is given for what it has: tables of something else may lie beside the text.
            soft = choice == "folder" and not first and not file.name.endswith(JSON_LINES) and file.kind != "parquet"
            rows = _rows(path, file, field, first)
            try:
                one = next(rows, None)
            except NoField:
                if not soft:
                    raise
                tally[f'{LEFT_OUT}: {path.suffix.lower()} without "{field}"'] += 1
                return
            if not first:
                tally[f"{TAKEN}: {file.kind}"] += 1
            if one is not None:
                yield one
                yield from rows
    except (OSError, EOFError, zlib.error, LZMAError) as error:
        raise unreadable(path, error) from None


def _rows(path: Path, file: OpenedDataset, field: str, first: int) -> Iterator[TextRow]:
    match file.kind:
        case "parquet":
            yield from parquet_rows(path, field, first)
        case "JSON lines":
            yield from _json_lines(path, file, field, first)
        case "JSON":
            yield from _json_values(path, file, field, first)
        case "cells":
            for number, text in cell_rows(path, file.stream, file.name[-4:], field, first):
                yield TextRow(number, text, file.share)
        case _:
            if not first:
                yield TextRow(0, file.stream.read(), 1.0)


def _json_lines(path: Path, file: OpenedDataset, field: str, first: int) -> Iterator[TextRow]:
    decoder = _decoder(field)
    for number, line in enumerate(file.stream):
        if number < first or not line.strip():
            continue
        where = f'line {number + 1} of "{path}"'
        try:
            row: object = decoder.decode(line.decode(json.detect_encoding(line), "surrogatepass"))
        except KeyError as error:
            raise UserError(f"{where} has the key {error} twice: leave the one that is meant") from None
        except ValueError as error:  # of JSON, or of UTF-8
            raise UserError(f"{where} is no JSON: {error}. Mend the line or leave the file out") from None
        yield TextRow(number, _column(row, field, where), file.share)


def _json_values(path: Path, file: OpenedDataset, field: str, first: int) -> Iterator[TextRow]:
    """The objects of an array, or one after the other without one: all of the text is in memory, but not of them."""
    text, number, decoder = "", -1, _decoder(field)
    try:
        text = file.stream.read().decode().strip()
        array = text.startswith("[")
        at = _after_space(text, 1) if array else 0
        while at < len(text) and not (array and text.startswith("]", at)):
            number += 1
            row, at = decoder.raw_decode(text, at)
            if number >= first:
                yield TextRow(number, _column(row, field, f'object {number + 1} of "{path}"'), at / len(text))
            at = _after_space(text, at)
            if array and text[at : at + 1] not in (",", "]"):
                raise json.JSONDecodeError("Expecting ',' or ']'", text, at)
            at = _after_space(text, at + 1) if array and text[at] == "," else at
        if array and at != len(text) - 1:
            raise json.JSONDecodeError("Expecting one array and nothing after it", text, at)
    except KeyError as error:
        raise UserError(
            f'object {number + 1} of "{path}" has the key {error} twice: leave the one that is meant'
        ) from None
    except UnicodeDecodeError as error:
        raise UserError(f'the file "{path}" is no UTF-8 text ({error.reason}): write it as UTF-8') from None
    except json.JSONDecodeError as error:
        raise UserError(f'"{path}" is no JSON: {error}. Mend it or leave the file out') from None


def _decoder(field: str) -> json.JSONDecoder:
    """A reader of rows. It raises KeyError for a column that is there twice, of which JSON's own takes the last."""

    def once(pairs: list[tuple[str, object]]) -> dict[str, object]:
        row = dict(pairs)
        twice = (
            [key for key, count in Counter(key for key, _ in pairs).items() if count > 1]
            if len(row) < len(pairs)
            else []
        )
        for key in twice:
            if field in (key, ROW):
                raise KeyError(key)
        return row

    return json.JSONDecoder(object_pairs_hook=once)


def _after_space(text: str, at: int) -> int:
    while at < len(text) and text[at] in " \t\r\n":
        at += 1
    return at


def _column(row: object, field: str, where: str) -> bytes:
    if not isinstance(row, dict):
        raise NoField(f"{where} is no JSON object: each has to be one, with its text under a name")
    columns = cast("dict[str, object]", row)
    if field == ROW:
        return row_text(columns)
    if field not in columns:
        raise no_field(field, columns, where)
    return text_of(columns[field], field, where)
