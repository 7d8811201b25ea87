"""Tokens on disk, part by part: written so that a kill at any instruction loses at most the part in hand.

A folder holds four files that only grow (tokens and document ends of the two splits), a journal, and a manifest. A part
is appended to the four, they are synced, then one line of the journal says that it is there, with checksums. Whoever
goes on after a kill keeps the parts that the journal has and the checksums confirm, and cuts off the rest. The manifest
comes last: without it there is nothing to read.

Tokens are checked block by block when they are first touched, so opening costs nothing and no damage is read silently.
The trade-off: a process that reads every token has computed a checksum over every token.
"""

import hashlib
import json
import os
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, ClassVar, cast

import numpy as np
import numpy.typing as npt

from tangram.checkpoint.store.commits import flush_folder
from tangram.errors import UserError
from tangram.training.data.samples import Split

FORMAT = 2
MANIFEST = "manifest"
JOURNAL = "journal"
SPLITS = ("training", "held_out")
BLOCK = 1 << 16  # bytes under one checksum

Rows = Sequence[npt.NDArray[Any]]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class StorePart:
    """A line of the journal: where the source goes on after it, what all parts so far hold, checksums of this one."""

    PAIRS: ClassVar = ("cursor", "tokens", "documents", "blocks", "ends")

    cursor: tuple[int, int]
    done: int
    tokens: tuple[int, int] = (0, 0)
    documents: tuple[int, int] = (0, 0)
    blocks: tuple[list[int], list[int]] = ([], [])
    ends: tuple[int, int] = (0, 0)
    tally: dict[str, int] = field(default_factory=dict[str, int])
    """What was counted while all parts so far were made, for people."""

    def line(self) -> bytes:
        """As it is written."""
        return _line(asdict(self))


BEGIN = StorePart((0, 0), 0)


def read_journal(folder: Path) -> list[StorePart]:
    """The parts that the journal has, up to the first line that is not whole."""
    parts: list[StorePart] = []
    with suppress(FileNotFoundError):
        for line in (folder / JOURNAL).read_bytes().splitlines(keepends=True):
            fields = _fields(line)
            if fields is None:
                break
            pairs = {name: cast(Any, tuple(fields[name])) for name in StorePart.PAIRS}
            parts.append(StorePart(done=fields["done"], tally=fields["tally"], **pairs))
    return parts


def _line(fields: dict[str, Any]) -> bytes:
    """A line of JSON, its checksum first."""
    text = json.dumps(fields).encode()
    return b"%08x %s\n" % (zlib.crc32(text), text)


def _fields(line: bytes) -> dict[str, Any] | None:
    """What a line says; None when it is not what was written."""
    text = line[9:-1]
    return json.loads(text) if line == b"%08x %s\n" % (zlib.crc32(text), text) else None


class TokenWriter:
    """Appends parts to a folder, after those that are whole. Only one may be at work; `cache` sees to that."""

    def __init__(self, folder: Path, dtype: npt.DTypeLike) -> None:
        self.folder, self._dtype = folder, np.dtype(dtype)
        (folder / MANIFEST).unlink(missing_ok=True)
        self.parts = self._complete(read_journal(folder))
        self._cut_off()

    @property
    def last(self) -> StorePart:
        return self.parts[-1] if self.parts else BEGIN

    def append(self, rows: tuple[Rows, Rows], cursor: tuple[int, int], done: int, tally: Mapping[str, int]) -> None:
        """Write a part: the training and the held-out documents up to `cursor`, as rows of tokens."""
        tokens = [np.concatenate([np.zeros(0, self._dtype), *own]).astype(self._dtype).tobytes() for own in rows]
        ends = [
            (np.cumsum([len(row) for row in own], dtype=np.uint64) + np.uint64(begin)).astype("<u8").tobytes()
            for own, begin in zip(rows, self.last.tokens, strict=True)
        ]
        for split in range(2):
            _append(_tokens_file(self.folder, split), tokens[split])
            _append(_ends_file(self.folder, split), ends[split])
        last = self.last
        part = StorePart(
            cursor,
            done,
            tokens=(
                last.tokens[0] + len(tokens[0]) // self._dtype.itemsize,
                last.tokens[1] + len(tokens[1]) // self._dtype.itemsize,
            ),
            documents=(last.documents[0] + len(rows[0]), last.documents[1] + len(rows[1])),
            blocks=(_checksums(tokens[0]), _checksums(tokens[1])),
            ends=(zlib.crc32(ends[0]), zlib.crc32(ends[1])),
            tally=dict(tally),
        )
        _append(self.folder / JOURNAL, part.line())
        self.parts.append(part)

    def finish(self, about: dict[str, Any], tally: Mapping[str, int]) -> None:
        """Say that it is complete. `about` is for people who look into the folder."""
        manifest = {
            "format": FORMAT,
            "dtype": self._dtype.str,
            "parts": len(self.parts),
            "journal": zlib.crc32((self.folder / JOURNAL).read_bytes()),
            "about": about,
            "tally": dict(tally),
        }
        unfinished = self.folder / f"{MANIFEST}.new"
        unfinished.unlink(missing_ok=True)
        _append(unfinished, _line(manifest))
        unfinished.replace(self.folder / MANIFEST)
        flush_folder(self.folder)

    def _complete(self, parts: list[StorePart]) -> list[StorePart]:
        """The parts from the first on whose files hold what the journal says."""
        whole: list[StorePart] = []
        with ExitStack() as stack:
            files = [
                [
                    stack.enter_context(path.open("rb"))
                    for path in (_tokens_file(self.folder, i), _ends_file(self.folder, i))
                ]
                for i in range(2)
                if _tokens_file(self.folder, i).is_file() and _ends_file(self.folder, i).is_file()
            ]
            if len(files) < 2:
                return []
            before = BEGIN
            for part in parts:
                for split, (tokens, ends) in enumerate(files):
                    count = part.tokens[split] - before.tokens[split]
                    if _checksums(tokens.read(count * self._dtype.itemsize)) != part.blocks[split]:
                        return whole
                    if zlib.crc32(ends.read(8 * (part.documents[split] - before.documents[split]))) != part.ends[split]:
                        return whole
                whole.append(part)
                before = part
        return whole

    def _cut_off(self) -> None:
        """Leave nothing but the whole parts."""
        unfinished = self.folder / f"{JOURNAL}.new"
        unfinished.unlink(missing_ok=True)
        _append(unfinished, b"".join(part.line() for part in self.parts))
        unfinished.replace(self.folder / JOURNAL)
        for split in range(2):
            _cut(_tokens_file(self.folder, split), self.last.tokens[split] * self._dtype.itemsize)
            _cut(_ends_file(self.folder, split), self.last.documents[split] * 8)
        flush_folder(self.folder)


class _Reader:
    """The tokens of one split, mapped; a block is checked when it is first touched."""

    def __init__(self, folder: Path, split: int, dtype: np.dtype[Any], parts: Sequence[StorePart]) -> None:
        self._path = _tokens_file(folder, split)
        size = dtype.itemsize
        begins, sums, at = list[int](), list[int](), 0
        for part in parts:
            begins += range(at, at + len(part.blocks[split]) * BLOCK, BLOCK)
            sums += part.blocks[split]
            at = part.tokens[split] * size
        self._begins: Ints = np.array([*begins, at], np.int64)
        self._sums = np.array(sums, np.uint32)
        self._checked = bytearray(len(sums))
        # A plain view of the map: slices of a memmap are told of its file, which takes longer than a row's tokens.
        self._bytes = np.asarray(np.memmap(self._path, np.uint8, "r")) if at else np.zeros(0, np.uint8)
        self._dtype = dtype

    def __call__(self, start: int, stop: int) -> Ints:
        """The tokens from `start` up to `stop`. Raises UserError when they are not those that were written."""
        size = self._dtype.itemsize
        first, last = np.searchsorted(self._begins, [start * size, max(start, stop - 1) * size], "right").tolist()
        for block in range(first - 1, min(last, len(self._checked))):
            if not self._checked[block]:
                self._check(block)
        return self._bytes[start * size : stop * size].view(self._dtype).astype(np.int64)

    def _check(self, block: int) -> None:
        begin, end = int(self._begins[block]), int(self._begins[block + 1])
        if zlib.crc32(self._bytes[begin:end].data) != self._sums[block]:
            raise damaged(self._path)
        self._checked[block] = 1


@dataclass(frozen=True)
class TokenStore:
    """A complete folder."""

    splits: tuple[Split, Split]
    digest: str
    """Of the tokens and of where documents end."""
    tally: Counter[str] = field(default_factory=Counter[str])
    """What was counted while they were made."""


def open_store(folder: Path) -> TokenStore | None:
    """Map a folder; None when it is not complete. Raises UserError when it does not hold what it should."""
    try:
        manifest = _fields((folder / MANIFEST).read_bytes())
    except FileNotFoundError:
        return None
    if manifest is None:
        raise damaged(folder / MANIFEST)
    dtype = np.dtype(cast(str, manifest["dtype"]))
    parts = read_journal(folder)
    if len(parts) != manifest["parts"] or zlib.crc32((folder / JOURNAL).read_bytes()) != manifest["journal"]:
        raise damaged(folder / JOURNAL)
    content = hashlib.blake2b(dtype.str.encode(), digest_size=16)
    for part in parts:
        content.update(json.dumps([part.tokens, part.documents, part.blocks, part.ends]).encode())
    last = parts[-1] if parts else BEGIN
    splits: list[Split] = []
    for split in range(2):
        if _length(_tokens_file(folder, split)) != last.tokens[split] * dtype.itemsize:
            raise damaged(_tokens_file(folder, split))
        reader = _Reader(folder, split, dtype, parts)
        splits.append(Split(last.tokens[split], _ends(folder, split, parts), reader))
    return TokenStore((splits[0], splits[1]), content.hexdigest(), Counter(cast("dict[str, int]", manifest["tally"])))


def _ends(folder: Path, split: int, parts: Sequence[StorePart]) -> npt.NDArray[np.uint64]:
    path, at = _ends_file(folder, split), 0
    documents = parts[-1].documents[split] if parts else 0
    if _length(path) != 8 * documents:
        raise damaged(path)
    if not documents:
        return np.zeros(0, np.uint64)
    mapped = np.asarray(np.memmap(path, np.dtype("<u8"), "r"))
    for part in parts:
        if zlib.crc32(mapped[at : part.documents[split]].data) != part.ends[split]:
            raise damaged(path)
        at = part.documents[split]
    return mapped


def damaged(path: Path) -> UserError:
    """What to say of a file that does not hold what was written. The folder counts as incomplete from now on."""
    with suppress(OSError):
        (path.parent / MANIFEST).unlink(missing_ok=True)
    return UserError(f'the tokens in "{path}" are damaged: run the same command again, and they are made anew')


def _tokens_file(folder: Path, split: int) -> Path:
    return folder / f"{SPLITS[split]}.tokens"


def _ends_file(folder: Path, split: int) -> Path:
    return folder / f"{SPLITS[split]}.ends"


def _checksums(content: bytes) -> list[int]:
    view = memoryview(content)
    return [zlib.crc32(view[at : at + BLOCK]) for at in range(0, len(content), BLOCK)]


def _length(path: Path) -> int:
    return path.stat().st_size if path.is_file() else -1


def _append(path: Path, content: bytes) -> None:
    with path.open("ab") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _cut(path: Path, size: int) -> None:
    with path.open("ab") as file:
        file.truncate(size)
        os.fsync(file.fileno())
