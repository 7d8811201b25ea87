"""New files made of a checkpoint's elements, read ahead of who writes them: window after window, in bounded memory.

A window is a stretch of a new file. A thread fills it from wherever its elements lie, every block proved before it is
used, while the window before it is written; the two take turns in two buffers. What a block has for the window that
comes next is kept until then, so blocks are read once as long as that fits.
"""

import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from tangram.checkpoint.loading.block_source import Sources, WorkQueue, in_threads
from tangram.checkpoint.loading.page_memory import pages
from tangram.checkpoint.loading.scatter import BlockCopies, Item, Want, block_copies
from tangram.checkpoint.saving.file_layout import Image, parts
from tangram.checkpoint.store.digest import Bytes
from tangram.checkpoint.store.manifest import BLOCK, Manifest
from tangram.layout import Region

READERS = 3
"""Threads that read and prove blocks, each with memory for one."""
LEAST = (READERS + 2) * BLOCK
"""Bytes of memory without which nothing can be read ahead."""
WINDOW = 96 << 20
"""Longer ones make nothing faster; shorter ones begin to write earlier."""


@dataclass(frozen=True)
class FileWindow:
    """Some blocks of a new file that are read together."""

    image: Image
    start: int
    stop: int


class Ahead:
    """The bytes of new files, in their order. Use it as a context manager: its thread ends with it."""

    def __init__(self, source: Path, manifest: Manifest, planned: Sequence[Image], memory: int) -> None:
        """`planned`: the files, of pieces that are whole tensors of the manifest, perhaps of other dtypes."""
        self._source, self._manifest = source, manifest
        self._kept_most = (memory - LEAST) // 4 // BLOCK
        size = min(WINDOW, (memory - (READERS + self._kept_most) * BLOCK) // 2 // BLOCK * BLOCK)
        self._windows = [
            FileWindow(image, start, min(start + size, image.size))
            for image in planned
            for start in range(0, image.size, size)
        ]
        longest = max(window.stop - window.start for window in self._windows)
        self._buffers = [pages(longest) for _ in self._windows[:2]]
        self._rooms = [pages(BLOCK) for _ in range(READERS)]
        self._free: queue.SimpleQueue[bool] = queue.SimpleQueue()
        for _ in self._buffers:
            self._free.put(True)
        self._ready: queue.SimpleQueue[int | BaseException] = queue.SimpleQueue()
        self._now: int | None = None
        self._kept: dict[Item, Bytes] = {}
        self._thread = threading.Thread(target=self._run, name="tangram-ahead")

    def __enter__(self) -> "Ahead":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._free.put(False)
        self._thread.join()

    def copy(self, start: int, out: Bytes) -> None:
        """The bytes from `start` on of the file whose turn it is; the caller asks for block after block.

        Raises what went wrong while they were read.
        """
        if self._now is None:
            found = self._ready.get()
            if isinstance(found, BaseException):
                raise found
            self._now = found
        window, buffer = self._windows[self._now], self._buffers[self._now % 2]
        out[:] = buffer[start - window.start : start - window.start + len(out)]
        if start + len(out) == window.stop:
            self._now = None
            self._free.put(True)

    def _run(self) -> None:
        try:
            with Sources(self._source, self._manifest, BlockCopies()) as sources:
                following = self._copies(0)
                for number in range(len(self._windows)):
                    wanted, following = following, self._copies(number + 1)
                    if not self._free.get():  # nobody wants the rest
                        return
                    self._read(sources, number, wanted, following)
                    self._ready.put(number)
        except BaseException as error:  # noqa: BLE001  it is raised where the window is waited for
            self._ready.put(error)

    def _copies(self, number: int) -> BlockCopies:
        """What a window needs, and where it goes; the buffer may still be in use."""
        if number >= len(self._windows):
            return BlockCopies()
        window, buffer = self._windows[number], self._buffers[number % 2]
        wants: list[Want] = []
        for placed, first, last in parts(window.image, window.start, window.stop):
            piece, at = placed.piece, placed.offset + first - window.start
            into = torch.from_numpy(buffer[at : at + last - first]).view(getattr(torch, piece.spec.dtype))
            region = Region.flat(piece.spec.shape, first // piece.itemsize, last // piece.itemsize)
            wants.append(Want(piece.name, region, into))
        return block_copies(self._manifest, wants, cast=True)

    def _read(self, sources: Sources, number: int, wanted: BlockCopies, following: BlockCopies) -> None:
        window, buffer = self._windows[number], self._buffers[number % 2]
        head = window.image.head[window.start : window.stop]
        buffer[: len(head)] = np.frombuffer(head, np.uint8)
        items = wanted.items
        line, rooms = WorkQueue(items), iter(self._rooms)

        def make() -> Callable[[], bool]:
            room = next(rooms)

            def step() -> bool:
                item = line.take()
                if item is None:
                    return False
                data = self._kept.pop(item, None)
                if data is None:
                    data = sources.read(*item, room)
                wanted.put(*item, data)
                if following.has(item) and len(self._kept) < self._kept_most:
                    self._kept[item] = data.copy()
                return True

            return step

        in_threads(make, min(READERS, len(items)))
