"""What a file is, by its content: how it is packed, and which bytes begin it.

The name says only what content cannot: whether lines of cells are separated by commas, and that a file which begins
as nothing known is damaged rather than text.
"""

import bz2
import gzip
import io
import json
import lzma
import re
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal, cast

from tangram.errors import UserError
from tangram.models.building.directory import POINTER, refuse_pointers
from tangram.training.data.files import CELLS, COMPRESSED, JSON, JSON_LINES, PARQUET
from tangram.training.data.tables import needs_extra

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
