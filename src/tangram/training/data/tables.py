"""Text in tables: lines of cells, parquet files and `datasets` directories, some rows at a time.

The libraries of the last two are an extra, and have no types: what they return is checked here, where it enters.
"""

import csv
import io
import sys
from collections.abc import Generator
from pathlib import Path
from typing import Any, BinaryIO, cast

from tangram.errors import UserError
from tangram.training.data.rows import ROW, TextRow, no_field, row_text, text_of, unreadable

_DELIMITERS = {".csv": ",;\t|", ".tsv": "\t", ".tab": "\t", ".psv": "|"}
_ROWS = 1000  # of a table that are in memory at once


def cell_rows(path: Path, stream: BinaryIO, ending: str, field: str, first: int) -> Generator[tuple[int, bytes]]:
    """The texts of the column `field` of separated cells under a line of names, with their numbers.

    Which delimiter separates the cells, the line of names says: the one by which `field` is a name.
    """
    lines = io.TextIOWrapper(stream, encoding="utf-8-sig", newline="")
    number = -1
    limit = csv.field_size_limit(sys.maxsize)  # of the process: a document may be longer than its 131,072 characters
    try:
        header = lines.readline()
        cut = {by: next(csv.reader([header], delimiter=by), list[str]()) for by in _DELIMITERS[ending]}
        delimiter, names = next(((by, names) for by, names in cut.items() if field in names), ("", list[str]()))
        if field == ROW:
            delimiter, names = max(cut.items(), key=lambda one: len(one[1]))
        if not names:
            raise no_field(field, cut[_DELIMITERS[ending][0]], f'"{path}"')
        _refuse_twice(names, field, path)
        column = -1 if field == ROW else names.index(field)
        for number, cells in enumerate(csv.reader(lines, delimiter=delimiter, strict=True)):
            where = f'row {number + 1} of "{path}"'
            if cells and len(cells) != len(names):
                raise UserError(f"{where} has {len(cells)} cells under {len(names)} names: mend it, quotes above all")
            if cells and number >= first:
                whole = row_text(dict(zip(names, cells, strict=True))) if column < 0 else None
                yield number, whole or text_of(cells[column], field, where)
    except csv.Error as error:
        raise UserError(f'row {number + 2} of "{path}" cannot be read: {error}. Mend it, quotes above all') from None
    except UnicodeDecodeError as error:
        raise UserError(f'the file "{path}" is no UTF-8 text ({error.reason}): write it as UTF-8') from None
    finally:
        csv.field_size_limit(limit)
        lines.detach()


def parquet_rows(path: Path, field: str, first: int) -> Generator[TextRow]:
    """The documents of a parquet file from row `first` on; row groups before that are not read."""
    try:
        import pyarrow as arrow_  # pyright: ignore[reportMissingTypeStubs]
        import pyarrow.parquet as parquet_  # pyright: ignore[reportMissingTypeStubs]
    except ImportError:
        raise needs_extra("parquet files", "pyarrow") from None
    arrow, parquet = cast(Any, arrow_), cast(Any, parquet_)
    try:
        with parquet.ParquetFile(path) as file:
            names = cast("list[str]", file.schema_arrow.names)
            if field not in (*names, ROW):
                raise no_field(field, names, f'"{path}"')
            _refuse_twice(names, field, path)
            columns = None if field == ROW else [field]
            rows, number = max(1, int(file.metadata.num_rows)), 0
            for group in range(int(file.num_row_groups)):
                size = int(file.metadata.row_group(group).num_rows)
                if number + size <= first:
                    number += size
                    continue
                for batch in file.iter_batches(_ROWS, row_groups=[group], columns=columns):
                    values = _texts(batch.to_pylist(), field)
                    for row, value in enumerate(values, number):
                        if row >= first:
                            yield TextRow(row, text_of(value, field, f'row {row + 1} of "{path}"'), (row + 1) / rows)
                    number += len(values)
    except cast("type[Exception]", arrow.ArrowException) as error:
        raise unreadable(path, error) from None


def dataset_rows(root: Path, field: str, first: int) -> Generator[TextRow]:
    """The documents of a directory that `save_to_disk` has written, from row `first` on; of splits, the one "train"."""
    try:
        import datasets as datasets_  # pyright: ignore[reportMissingTypeStubs]
    except ImportError:
        raise needs_extra("`datasets` directories", "datasets") from None
    datasets = cast(Any, datasets_)
    hidden = bool(datasets.are_progress_bars_disabled())
    datasets.disable_progress_bars()
    try:
        found = datasets.load_from_disk(str(root))
    except Exception as error:  # noqa: BLE001  arrow's, datasets' and json's errors all mean the same to the user
        raise unreadable(root, error) from None
    finally:
        if not hidden:
            datasets.enable_progress_bars()
    if isinstance(found, datasets.DatasetDict):
        splits = cast("dict[str, Any]", found)
        if "train" not in splits:
            raise UserError(
                f'the `datasets` directory "{root}" has no split "train" but {", ".join(splits)}: give the '
                "directory of one of them"
            )
        found = splits["train"]
    names = cast("list[str]", found.column_names)
    if field not in (*names, ROW):
        raise no_field(field, names, f'"{root}"')
    columns, rows = found if field == ROW else found.select_columns([field]), len(found)
    for start in range(first, rows, _ROWS):
        values = _texts(columns.select(range(start, min(rows, start + _ROWS))).to_list(), field)
        for row, value in enumerate(values, start):
            yield TextRow(row, text_of(value, field, f'row {row + 1} of "{root}"'), (row + 1) / rows)


def _refuse_twice(names: list[str], field: str, path: Path) -> None:
    twice = next((name for name in names if names.count(name) > 1 and field in (name, ROW)), None)
    if twice is not None:
        raise UserError(f'"{path}" has {names.count(twice)} columns "{twice}": give each a name of its own')


def _texts(rows: list[dict[str, object]], field: str) -> list[object]:
    """The column of some rows, or each as a whole."""
    return [row_text(row) if field == ROW else row[field] for row in rows]


def needs_extra(what: str, package: str) -> UserError:
    return UserError(f'{what} are read with {package}, which is not installed: pip install "tangram-train[data]"')
