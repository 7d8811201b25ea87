"""What a file is, by its content: how it is packed, and which bytes begin it.

The name says only what content cannot: whether lines of cells are separated by commas, and that a file which begins
as nothing known is damaged rather than text.

Rows of tables are read some at a time. The libraries of parquet and of `datasets` are an extra, and have no types: what
they return is checked here, where it enters.
"""

import bz2
import csv
import gzip
import io
import json
import lzma
import re
import sys
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal, cast

from tangram.errors import UserError
from tangram.models.building.directory import POINTER, refuse_pointers
from tangram.training.data.files import (
    CELLS,
    COMPRESSED,
    JSON,
    JSON_LINES,
    PARQUET,
    ROW,
    TextRow,
    no_field,
    row_text,
    text_of,
    unreadable,
)

Kind = Literal["text", "JSON lines", "JSON", "cells", "parquet", "binary"]

BOM = b"\xef\xbb\xbf"
_HEAD = 1 << 16  # bytes that are looked at
_LONG_LINE = 1 << 28
_MAGIC = {rb"\x1f\x8b": ".gz", rb"BZh[1-9]1AY&": ".bz2", rb"\xfd7zXZ\x00": ".xz", rb"\x28\xb5\x2f\xfd": ".zst"}
_ARCHIVES = (".arrow", ".zip", ".tar", ".7z", ".tgz", ".lz4", ".br")
_NO_TEXT = (
    b"%PDF-", b"{\\rtf", b"PK\x03\x04", b"7z\xbc\xaf", b"Rar!\x1a", b"\x04\x22\x4d\x18", b"\x1f\x9d", b"\x89PNG",
    b"\xff\xd8\xff", b"GIF87a", b"GIF89a", b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05", b"\x93NUMPY",
    b"Obj\x01", b"ARROW1", b"\x89HDF",
)  # fmt: skip
"""How documents of office programs, archives, pictures, pickles and tables begin; a zero byte may come late in them."""
_UNICODE = {b"\xff\xfe\0\0": "UTF-32", b"\0\0\xfe\xff": "UTF-32", b"\xff\xfe": "UTF-16", b"\xfe\xff": "UTF-16"}


@dataclass(frozen=True)
class OpenedDataset:
    """A file to be read from its begin: its content unpacked and without a byte order mark."""

    stream: BinaryIO
    raw: BinaryIO
    """The same as it is on disk; the place in it says how much has been read."""
    size: int
    kind: Kind
    name: str
    """Without the ending that says how it is packed, in small letters."""

    @property
    def share(self) -> float:
        """Which share of the file has been read; above 0."""
        return min(1.0, max(1, self.raw.tell()) / max(1, self.size))


@contextmanager
def opened(path: Path, field: str) -> Generator[OpenedDataset]:
    """Open a file and find out what it is. `field` is the column by which rows are told from text."""
    name = path.name.lower()
    with path.open("rb") as raw:
        packed = _packing(raw.read(8), name)
        raw.seek(0)
        first = _unpacked(raw, packed)
        head = cast(bytes, first.read(_HEAD))
        if head.removeprefix(BOM).lstrip().startswith((b"{", b"[")):
            head += first.readline(_LONG_LINE)
    with path.open("rb") as raw:
        stream = _unpacked(raw, packed)
        if head.startswith(BOM):
            stream.read(len(BOM))
        name = name.removesuffix(packed)
        if name.endswith(_ARCHIVES):
            raise UserError(f'the file "{path}" is no text: unpack it, or leave it out by the source\'s pattern')
        if head.startswith(POINTER):
            refuse_pointers(path, (path.suffix,))
        if code := next((name for mark, name in _UNICODE.items() if head.startswith(mark)), ""):
            raise UserError(f'the file "{path}" is {code} text: write it as UTF-8 (iconv -f {code} -t UTF-8)')
        kind = kind_of(head.removeprefix(BOM), name, field)
        yield OpenedDataset(stream, cast(BinaryIO, raw), path.stat().st_size, kind, name)


def kind_of(head: bytes, name: str, field: str) -> Kind:
    """What a file is, by its first bytes and, where these leave a choice, its name."""
    if head.startswith(b"PAR1") or name.endswith(PARQUET):
        return "parquet"
    if b"\0" in head or head.startswith(_NO_TEXT):
        return "binary"
    if name.endswith(CELLS):
        return "cells"
    begin = head.lstrip()
    line, first = _value(begin.partition(b"\n")[0], whole=True), _value(begin.removeprefix(b"["), whole=False)
    if not name.endswith((*JSON_LINES, JSON)) and not (isinstance(first, dict) and field in first):
        return "text"
    lines = not begin.startswith(b"[") and (name.endswith(JSON_LINES) or isinstance(line, dict))
    return "JSON lines" if lines else "JSON"


def _value(text: bytes, *, whole: bool) -> Any:
    """What a text is in JSON, or the value that it begins with; None where that is no array and no object."""
    decoded = text.decode(errors="replace").strip() if text.lstrip()[:1] in (b"[", b"{") else ""
    try:
        return json.loads(decoded) if whole else json.JSONDecoder().raw_decode(decoded)[0]
    except ValueError:
        return None


def _packing(begin: bytes, name: str) -> str:
    by_name = next((ending for ending in COMPRESSED if name.endswith(ending)), "")
    return next((ending for magic, ending in _MAGIC.items() if re.match(magic, begin)), by_name)


def _unpacked(raw: Any, packed: str) -> Any:
    match packed:
        case ".gz":
            return gzip.GzipFile(fileobj=raw)
        case ".bz2":
            return bz2.BZ2File(raw)
        case ".xz":
            return lzma.LZMAFile(raw)
        case ".zst":
            try:
                import pyarrow  # pyright: ignore[reportMissingTypeStubs]
            except ImportError:
                raise needs_extra("files packed with zstd", "pyarrow") from None
            arrow = cast(Any, pyarrow)
            return io.BufferedReader(arrow.CompressedInputStream(arrow.PythonFile(raw, "r"), "zstd"))
        case _:
            return raw


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
    return [
        row_text({name: _own(value) for name, value in row.items()}) if field == ROW else row[field] for row in rows
    ]


def _own(value: Any) -> Any:
    """A cell with the keys of its own: a table gives all dicts of a column the same, with null where a row had none.

    A null that was written cannot be told from those and goes, too; not a message's `content`: templates look for it.
    """
    if isinstance(value, dict):
        table = cast("dict[str, Any]", value)
        kept = "content" if table.get("role") else None
        return {key: _own(one) for key, one in table.items() if one is not None or key == kept}
    return [_own(one) for one in cast("list[Any]", value)] if isinstance(value, list) else value


def needs_extra(what: str, package: str) -> UserError:
    return UserError(f'{what} are read with {package}, which is not installed: pip install "tangram-train[data]"')
