"""Write one data file: in large blocks past the page cache, each summed while it passes.

    fill a block -> checksum and digest, while it is in the cache -> a thread writes it -> the next

The blocks come from a ring, so memory is bounded however large the file is. Where the file system takes it, writes go
around the page cache (O_DIRECT): what is written once and not read soon should not push out what is. The last block is
written padded and the file is cut to its length afterwards. `write_image` returns when the file is on the disk.
"""

import contextlib
import errno
import os
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from torch import Tensor

from tangram.checkpoint.loading.page_memory import DIRECT, pages, through_the_cache
from tangram.checkpoint.saving.file_layout import Image, add_sums, fill
from tangram.checkpoint.store.digest import Bytes, Sums, one_thread
from tangram.checkpoint.store.manifest import BLOCK, StoredFile, checksum
from tangram.checkpoint.store.safetensors_header import PAGE

WRITERS = 2
"""Threads that write one file: one fills the time in which the other's request comes back."""
RING = 6
"""Blocks on their way."""


@dataclass(frozen=True)
class WrittenFile:
    """A file that is on the disk, and what its pieces add to the digests of their tensors."""

    name: str
    file: StoredFile
    sums: Mapping[str, Sums]


def write_image(folder: Path, image: Image, values: Sequence[Tensor], ring: "Ring | None" = None) -> WrittenFile:
    """Write a file of pieces whose elements are `values`, in the order of `image.placed`.

    Raises OSError as the disk does; what was written by then is left to the caller to remove.
    """

    def take(start: int, out: Bytes) -> Bytes:
        fill(image, values, start, out)
        return out

    return write_from(folder, image, take, ring or Ring())


def write_mapped(folder: Path, image: Image, memory: Bytes, summed: bool = True, over: bool = False) -> WrittenFile:
    """Write a file that lies in memory as it will lie on the disk; `memory` begins on a page and ends on one.

    `over`: the file is there, and nobody reads it.
    """

    def take(start: int, out: Bytes) -> Bytes:
        return memory[start : start + len(out)]

    ring = Ring()  # whose memory nobody touches: it counts the blocks on their way
    return write_from(folder, image, take, ring, summed=summed, over=over)


class Ring:
    """Blocks that begin on a page, used again and again."""

    def __init__(self, blocks: int = RING) -> None:
        whole = pages(blocks * BLOCK)
        self.blocks = [whole[i * BLOCK : (i + 1) * BLOCK] for i in range(blocks)]
        self.free: queue.SimpleQueue[Bytes] = queue.SimpleQueue()
        for block in self.blocks:
            self.free.put(block)


def write_from(
    folder: Path,
    image: Image,
    take: Callable[[int, Bytes], Bytes],
    ring: Ring,
    checked: bool = True,
    summed: bool = True,
    over: bool = False,
) -> WrittenFile:
    """Write a file whose bytes come block by block, in their order, from `take(start, room)`.

    `take` fills the room, a block of the ring, and returns it; or other memory, which nobody may change meanwhile.
    Without `checked` its blocks have no checksums afterwards, without `summed` its tensors no sums for digests.
    """
    found: list[int] = []
    sums: dict[str, Sums] = {}
    threads = WRITERS if image.size > BLOCK else 0
    with one_thread(), _Sink(folder / image.name, ring, threads, over) as sink:
        for start in range(0, image.size, BLOCK):
            length = min(BLOCK, image.size - start)
            room = sink.room()
            block = take(start, room[:length])
            if checked:
                found.append(checksum(block.data))
            if summed:
                add_sums(image, start, block, sums)
            sink.put(start, room, block)
        sink.finish(image.size)
    return WrittenFile(image.name, StoredFile(image.size, tuple(found)), sums)


class FileStream:
    """A new file that is written in its order, by writes of any size that are gathered into blocks."""

    def __init__(self, path: Path, ring: Ring) -> None:
        self._sink = _Sink(path, ring)
        self._room: Bytes | None = None
        self._at = 0

    def __enter__(self) -> "FileStream":
        return self

    def __exit__(self, *_: object) -> None:
        self._sink.__exit__()

    def tell(self) -> int:
        """The bytes that were written."""
        return self._at

    def write(self, data: bytes) -> int:
        """Take the next bytes. Raises OSError as the disk does, perhaps for bytes before these."""
        left = np.frombuffer(data, np.uint8)
        while len(left):
            used = self._at % BLOCK
            if self._room is None:
                self._room = self._sink.room()
            count = min(len(left), BLOCK - used)
            self._room[used : used + count] = left[:count]
            self._at, left = self._at + count, left[count:]
            if self._at % BLOCK == 0:
                self._sink.put(self._at - BLOCK, self._room, self._room)
                self._room = None
        return memoryview(data).nbytes

    def finish(self) -> None:
        """Wait until everything is on the disk."""
        if self._room is not None:
            used = self._at % BLOCK
            self._sink.put(self._at - used, self._room, self._room[:used])
            self._room = None
        self._sink.finish(self._at)


class _Sink:
    """A new file that threads write blocks into; without threads, for a single block, whoever puts it writes it."""

    def __init__(self, path: Path, ring: Ring, threads: int = WRITERS, over: bool = False) -> None:
        self._ring = ring
        self._direct = True
        flags = os.O_WRONLY | os.O_NOFOLLOW | (0 if over else os.O_CREAT | os.O_EXCL)
        try:
            self._descriptor = os.open(path, flags | DIRECT, 0o644)
        except OSError:  # a file system without it, as tmpfs; another reason is found again
            if not over:
                with contextlib.suppress(FileNotFoundError):
                    path.unlink()
            self._descriptor, self._direct = os.open(path, flags, 0o644), False
        self._work: queue.SimpleQueue[tuple[int, Bytes, Bytes] | None] = queue.SimpleQueue()
        self._error: OSError | None = None
        self._threads = [threading.Thread(target=self._run, name=f"tangram-write-{i}") for i in range(threads)]
        for thread in self._threads:
            thread.start()

    def __enter__(self) -> "_Sink":
        return self

    def __exit__(self, *_: object) -> None:
        self._join()
        os.close(self._descriptor)

    def room(self) -> Bytes:
        """The next free block of the ring; waits for one."""
        block = self._ring.free.get()
        self._refuse()
        return block

    def put(self, start: int, room: Bytes, block: Bytes) -> None:
        """Have a block written at `start`. `room`: what goes back to the ring afterwards."""
        if self._threads:
            self._work.put((start, room, block))
        else:
            self._write(start, room, block)

    def finish(self, size: int) -> None:
        """Wait until everything is on the disk."""
        self._join()
        self._refuse()
        os.ftruncate(self._descriptor, size)
        os.fsync(self._descriptor)

    def _join(self) -> None:
        for _ in self._threads:
            self._work.put(None)
        for thread in self._threads:
            thread.join()
        self._threads = []

    def _refuse(self) -> None:
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        while (item := self._work.get()) is not None:
            self._write(*item)

    def _write(self, start: int, room: Bytes, block: Bytes) -> None:
        try:
            if self._error is None:
                self._write_at(start, block)
        except OSError as error:
            self._error = error
        finally:
            self._ring.free.put(room)

    def _write_at(self, start: int, block: Bytes) -> None:
        if self._direct:
            padded = -(-len(block) // PAGE) * PAGE
            block = _padded(block, padded)
        data = block.data
        while data:
            try:
                done = os.pwrite(self._descriptor, data, start)
            except OSError as error:
                if not self._direct or error.errno != errno.EINVAL:  # it was taken at opening, but not here
                    raise
                through_the_cache(self._descriptor)
                self._direct = False
                continue
            data, start = data[done:], start + done


def _padded(block: Bytes, size: int) -> Bytes:
    """The block up to the end of its page: what follows it in its own memory, which is cut off again."""
    if len(block) == size:
        return block
    base = block.base if isinstance(block.base, np.ndarray) else block
    start = block.__array_interface__["data"][0] - base.__array_interface__["data"][0]
    return base[start : start + size]
