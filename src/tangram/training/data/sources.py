"""The documents of a source, one after the other, without holding more than a few of them.

`list_files` says what a source consists of before anything is read; `documents` reads it, from any document on. What
kind a file is its name says: JSONL, parquet, and everything else is one document of text. A `datasets` directory is one
source as a whole. Text in columns is in the column `field`; null and empty text is no document.
"""

import gzip
import json
import os
import sysconfig
import zlib
from collections.abc import Generator, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, cast

from tangram.errors import UserError
from tangram.planner.job import SourcePlan
from tangram.training.data.rows import Row, no_field, text_of, unreadable
from tangram.training.data.tables import dataset_rows, parquet_rows

STDLIB = "stdlib"
SKIPPED_FOLDERS = frozenset({"site-packages", "dist-packages", "test", "tests", "__pycache__"})  # of the stdlib
TEXT = (".txt", ".md", ".rst", ".py")  # taken without a pattern; with one, every file that it matches
JSONL = (".jsonl", ".jsonl.gz")
PARQUET = ".parquet"
_BINARY = (".arrow", ".gz", ".zst", ".bz2", ".xz", ".zip", ".tar", ".7z")


class Document(NamedTuple):
    """A document, where it stands, and how many bytes of the source's files have been read with it."""

    file: int
    number: int
    text: bytes
    done: int


@dataclass(frozen=True)
class File:
    """A file as it was found; its name is relative to the source's root."""

    name: str
    size: int
    changed_ns: int


@dataclass(frozen=True)
class Files:
    """What a source consists of. `table`: the whole is one `datasets` directory."""

    root: Path
    files: tuple[File, ...]
    table: bool = False

    @property
    def size(self) -> int:
        """The bytes of all files."""
        return sum(file.size for file in self.files)

    def path(self, file: int) -> Path:
        """Where a file lies."""
        return self.root / self.files[file].name


def list_files(source: SourcePlan) -> Files:
    """The files of a source, by name. Raises UserError when there are none."""
    root = Path(sysconfig.get_path("stdlib")) if source.path == STDLIB else Path(source.path)
    if root.is_file():
        return Files(root.parent, (_found(root, root.parent),))
    if not root.is_dir():
        raise UserError(f'the source "{root}" in data.sources does not exist: give a file, a folder, or "{STDLIB}"')
    table = source.pattern is None and any((root / name).is_file() for name in ("state.json", "dataset_dict.json"))
    if table:
        paths = [path for path in root.rglob("*") if path.is_file()]
    else:
        paths = [path for path in _matches(root, source) if path.is_file()]
    if not paths:
        kinds = ", ".join([*TEXT, *JSONL, PARQUET])
        what = f'matches "{source.pattern}"' if source.pattern else f"is of a known kind ({kinds})"
        raise UserError(
            f'no file under the source "{root}" {what}: give the source a pattern, as in pattern = "**/*.txt"'
        )
    return Files(root, tuple(_found(path, root) for path in sorted(paths)), table)


def _matches(root: Path, source: SourcePlan) -> Iterator[Path]:
    stdlib = source.path == STDLIB
    if source.pattern is None:
        kinds = (".py",) if stdlib else (*TEXT, *JSONL, PARQUET)
        yield from _walk(root, kinds, stdlib)
        return
    try:
        paths = list(root.glob(source.pattern))
    except (ValueError, NotImplementedError, IndexError) as error:
        raise UserError(
            f'the pattern "{source.pattern}" in data.sources cannot be used: {error}. Give one relative to its path, '
            'as in "**/*.py"'
        ) from None
    for path in paths:
        if not (stdlib and SKIPPED_FOLDERS.intersection(path.relative_to(root).parts[:-1])):
            yield path


def _walk(root: Path, kinds: tuple[str, ...], stdlib: bool) -> Iterator[Path]:
    """The files of these kinds; what is skipped is not even looked into, for it may hold more than all the rest."""
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if not (name in SKIPPED_FOLDERS if stdlib else name.startswith("."))]
        for name in names:
            if name.lower().endswith(kinds) and not name.startswith("."):
                yield Path(folder) / name


def _found(path: Path, root: Path) -> File:
    try:
        status = path.stat()
    except OSError as error:
        raise unreadable(path, error) from None
    return File(path.relative_to(root).as_posix(), status.st_size, status.st_mtime_ns)


def documents(files: Files, field: str, begin: tuple[int, int] = (0, 0)) -> Iterator[Document]:
    """Every document from number `begin[1]` of file `begin[0]` on, always in the same order.

    Raises UserError, with the name of the file, for what cannot be read.
    """
    if files.table:
        rows = dataset_rows(files.root, field, begin[1])
        length = max(1, files.size)
        for number, text, share in rows:
            yield Document(0, number, text, int(share * length))
        return
    before = sum(file.size for file in files.files[: begin[0]])
    for file in range(begin[0], len(files.files)):
        first = begin[1] if file == begin[0] else 0
        size = files.files[file].size
        for number, text, share in _file_rows(files.path(file), field, first):
            yield Document(file, number, text, before + int(share * size))
        before += size


def _file_rows(path: Path, field: str, first: int) -> Generator[Row]:
    name = path.name.lower()
    try:
        if name.endswith(JSONL):
            yield from _json_rows(path, field, first)
        elif name.endswith(PARQUET):
            yield from parquet_rows(path, field, first)
        elif name.endswith(_BINARY):
            raise UserError(f'the file "{path}" is no text: unpack it, or leave it out by the source\'s pattern')
        elif not first and (text := path.read_bytes()):
            yield Row(0, text, 1.0)
    except (OSError, EOFError, zlib.error) as error:
        raise unreadable(path, error) from None


def _json_rows(path: Path, field: str, first: int) -> Generator[Row]:
    size = max(1, path.stat().st_size)
    with path.open("rb") as raw:
        lines = cast("Iterable[bytes]", gzip.GzipFile(fileobj=raw) if path.name.lower().endswith(".gz") else raw)
        read = 0
        for number, line in enumerate(lines):
            read += len(line)
            if number < first or not line.strip():
                continue
            where = f'line {number + 1} of "{path}"'
            try:
                row: object = json.loads(line)
            except ValueError as error:  # of JSON, or of UTF-8
                raise UserError(f"{where} is no JSON: {error}. Mend the line or leave the file out") from None
            if not isinstance(row, dict):
                raise UserError(f"{where} is no JSON object: each line has to be one, with its text under a name")
            columns = cast("dict[str, object]", row)
            if field not in columns:
                raise no_field(field, columns, where)
            if text := text_of(columns[field], field, where):
                yield Row(number, text, min(1.0, (read if lines is raw else raw.tell()) / size))
