"""Blocks of a checkpoint read by the threads of one process: each reads a block, proves it, and copies from it.

While one thread waits for the disk the others sum and copy, so the three overlap; memory is a block for each thread,
however large the model is.
"""

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, TypeVar

from tangram.checkpoint.loading.block_source import Sources
from tangram.checkpoint.loading.page_memory import pages
from tangram.checkpoint.loading.scatter import BlockCopies, Item
from tangram.checkpoint.store.digest import one_thread
from tangram.checkpoint.store.manifest import BLOCK, Manifest

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
