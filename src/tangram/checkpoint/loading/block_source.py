"""The files of a checkpoint while they are read: whole blocks, each proved before it is given to anybody.

A file is opened by its name inside the folder, never through a link, and looked at once: its size, and the id of the
save in its header, must be the manifest's. A block is read in one request past the page cache where the file system
takes that (O_DIRECT: what is read once should not push out what others need, and it costs half the processor time), and
its checksum is compared before the caller sees it.

Threads share the work: while one waits for the disk the others sum and copy, so the three overlap; memory is a block
for each thread, however large the model is.
"""

import errno
import json
import os
import re
import stat
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

from tangram.checkpoint.loading.page_memory import DirectFile, pages
from tangram.checkpoint.loading.scatter import BlockCopies, Item
from tangram.checkpoint.store.digest import Bytes, one_thread
from tangram.checkpoint.store.manifest import BLOCK, Manifest, checksum
from tangram.checkpoint.store.safetensors_header import PAGE
from tangram.errors import UserError


class DamagedError(UserError):
    """What lies in a checkpoint is not what was written; the sentence names the tensor and the file."""


class Sources:
    """The open files of one checkpoint. Several threads may read from it."""

    def __init__(self, path: Path, manifest: Manifest, wanted: BlockCopies) -> None:
        """`wanted`: what is read of it, for errors that name tensors."""
        self._path = path
        self._manifest = manifest
        self._wanted = wanted
        self._open: dict[str, DirectFile] = {}
        self._lock = threading.Lock()
        try:
            self._folder = os.open(path, os.O_RDONLY | getattr(os, "O_DIRECTORY", 0))
        except OSError as error:
            raise UserError(f'the checkpoint "{path}" cannot be read: {error.strerror}') from None

    def __enter__(self) -> "Sources":
        return self

    def __exit__(self, *_: object) -> None:
        for source in self._open.values():
            source.close()
        os.close(self._folder)

    def length(self, file: str, block: int) -> int:
        """The bytes of a block: the last of a file may be shorter."""
        return min(BLOCK, self._manifest.files[file].size - block * BLOCK)

    def read(self, file: str, block: int, out: Bytes) -> Bytes:
        """The bytes of a block, proved, in `out`, which begins on a page and has room for whole pages.

        Raises DamagedError, or OSError as the disk does.
        """
        source = self._source(file)
        start, length = block * BLOCK, self.length(file, block)
        found = source.read(start, out[: -(-length // PAGE) * PAGE])
        if found < length:
            raise self.damaged(file, block, f"ends after {start + found} bytes")
        return self.proved(file, block, out[:length])

    def proved(self, file: str, block: int, data: Bytes, whence: str = "") -> Bytes:
        """The bytes of a block, which have the checksum that was written; raises DamagedError for others."""
        if checksum(data.data) != self._manifest.files[file].sums[block]:
            start = block * BLOCK
            how = f"has other bytes from {start} to {start + len(data)}{whence} than were written"
            raise self.damaged(file, block, how)
        return data

    def damaged(self, file: str, block: int | None, how: str) -> DamagedError:
        """The error that names checkpoint, file and tensors; of a whole file without `block`."""
        found = self._wanted.names(file, block) or _names(self._manifest, file, block)
        more = f" and {len(found) - 1} more tensors" if len(found) > 1 else ""
        what = f", with {found[0]}{more}," if found else ""
        return DamagedError(f'the checkpoint "{self._path}" is damaged: its file "{file}"{what} {how}')

    def _source(self, file: str) -> DirectFile:
        source = self._open.get(file)
        if source is None:
            with self._lock:
                source = self._open.get(file)
                if source is None:
                    source = self._open[file] = self._opened(file)
        return source

    def _opened(self, file: str) -> DirectFile:
        stored = self._manifest.files[file]
        if Path(file).name != file:
            raise self.damaged(file, None, "has a name that leads out of the folder")
        try:
            source = DirectFile(file, self._folder)
        except OSError as error:
            how = "is a link" if error.errno == errno.ELOOP else f"cannot be opened: {error.strerror}"
            raise self.damaged(file, None, how) from None
        try:
            found = os.fstat(source.descriptor)
            if not stat.S_ISREG(found.st_mode):
                raise self.damaged(file, None, "is no plain file")
            if found.st_size != stored.size:
                raise self.damaged(file, None, f"has {found.st_size} of {stored.size} bytes")
            own = _save_id(source)
            if own != (stored.save or self._manifest.id):
                raise self.damaged(file, None, f"is of another save: its header has the id {own}, not the manifest's")
        except BaseException:
            source.close()
            raise
        return source


def _names(manifest: Manifest, file: str, block: int | None) -> list[str]:
    """The tensors that have bytes in a block, or in a whole file."""
    low, high = (0, manifest.files[file].size) if block is None else (block * BLOCK, (block + 1) * BLOCK)
    return [
        name
        for name, tensor in manifest.tensors.items()
        for piece in tensor.pieces
        if piece.file == file and piece.offset < high and piece.offset + piece.region.size * tensor.itemsize > low
    ]


_METADATA = re.compile(rb'\{"__metadata__":(\{[^{}]*\})')


def _save_id(source: DirectFile) -> str | None:
    """The id of the save that a file's header has, which begins with its metadata; None where there is none.

    Only its first page is read: that block's checksum is compared when something of it is wanted.
    """
    page = pages(PAGE)
    head = page[: source.read(0, page)].tobytes()
    match = _METADATA.match(head, 8)
    if match is None:
        return None
    try:
        fields: dict[str, Any] = json.loads(match[1])
    except ValueError:
        return None
    found = fields.get("tangram_save")
    return found if isinstance(found, str) else None


T = TypeVar("T")

MEMORY = 64 << 20
"""Bytes that a rank reads through, if nobody says otherwise."""
READERS = 3
"""Threads of a rank."""


class WorkQueue(Generic[T]):
    """Things that threads take in turn."""

    def __init__(self, items: Sequence[T]) -> None:
        self._items = iter(items)
        self._lock = threading.Lock()

    def take(self) -> T | None:
        """The next one, None after the last."""
        with self._lock:
            return next(self._items, None)


def read_blocks(path: Path, manifest: Manifest, wanted: BlockCopies, memory: int = MEMORY) -> None:
    """Read all blocks that have something of what is wanted, in this process alone. Raises DamagedError, OSError."""
    items = wanted.items
    with Sources(path, manifest, wanted) as sources:
        line = WorkQueue(items)
        in_threads(lambda: filler(sources, wanted, line), min(READERS, len(items), max(1, memory // BLOCK)))


def filler(sources: Sources, wanted: BlockCopies, line: WorkQueue[Item]) -> Callable[[], bool]:
    """A step for one thread: the next block of a line is read, and what is wanted of it taken."""
    room = pages(BLOCK)

    def step() -> bool:
        item = line.take()
        if item is not None:
            wanted.put(*item, sources.read(*item, room))
        return item is not None

    return step


def in_threads(
    make: Callable[[], Callable[[], bool]], threads: int, meanwhile: Callable[[], None] | None = None
) -> None:
    """Let threads repeat a step, one made for each, until it says False; raises the first error of any.

    `meanwhile` runs in this thread; without it, this thread is one of them.
    """
    errors: list[BaseException] = []
    stop = threading.Event()

    def run(act: Callable[[], None]) -> None:
        try:
            act()
        except BaseException as error:  # noqa: BLE001  it is raised again by who waits
            errors.append(error)
            stop.set()

    def repeat() -> None:
        step = make()
        with one_thread():
            while not stop.is_set() and step():
                pass

    here = meanwhile or (repeat if threads else None)
    count = threads if meanwhile else threads - 1
    others = [threading.Thread(target=run, args=(repeat,), name=f"tangram-read-{i}") for i in range(count)]
    for thread in others:
        thread.start()
    if here is not None:
        run(here)
    for thread in others:
        thread.join()
    if errors:
        raise errors[0]
