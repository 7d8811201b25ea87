"""Memory and files that are read and written past the page cache.

Such requests need memory that begins on a page, and pin every page of it. Where the kernel has huge pages a block is
two of them instead of a thousand: a write then costs a quarter of the processor's time, a copy a little less.

An iterator whose next items are made by a thread while those before are used.
"""

import contextlib
import errno
import fcntl
import mmap
import os
import queue
import threading
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import TypeVar

import numpy as np

from tangram.checkpoint.store.digest import Bytes
from tangram.checkpoint.store.safetensors_header import PAGE

HUGE = 1 << 21


def pages(size: int) -> Bytes:
    """New memory for at least so many bytes, in whole pages: zeros, that take nothing before they are used."""
    size = max(PAGE, -(-size // PAGE) * PAGE)
    if size < HUGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return np.frombuffer(mmap.mmap(-1, size), np.uint8)
    memory = mmap.mmap(-1, size + HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # shared memory has no huge pages
    with contextlib.suppress(OSError):  # a kernel without them
        memory.madvise(mmap.MADV_HUGEPAGE)
    whole = np.frombuffer(memory, np.uint8)
    start = -int(whole.__array_interface__["data"][0]) % HUGE
    return whole[start : start + size]


DIRECT: int = getattr(os, "O_DIRECT", 0)
_FLAGS = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)


class DirectFile:
    """A plain file that is read in whole pages, around the page cache where the file system takes that (O_DIRECT).

    Several threads may read from it. It is never opened through a link; raises OSError as the disk does.
    """

    def __init__(self, path: Path | str, folder: int | None = None) -> None:
        """`folder`: the descriptor of the folder that the path is in, where it is none by itself."""
        self._direct = bool(DIRECT)
        try:
            self.descriptor = os.open(path, _FLAGS | DIRECT, dir_fd=folder)
        except OSError as error:
            if not DIRECT or error.errno != errno.EINVAL:  # a file system without it
                raise
            self.descriptor, self._direct = os.open(path, _FLAGS, dir_fd=folder), False

    def read(self, start: int, out: Bytes) -> int:
        """Fill `out`, whole pages, from the page `start` on; how many bytes there were."""
        done = 0
        while done < len(out):
            try:
                got = os.preadv(self.descriptor, [out[done:].data], start + done)
            except OSError as error:
                if not self._direct or error.errno != errno.EINVAL:  # taken at opening, but not here
                    raise
                through_the_cache(self.descriptor)
                self._direct = False
                continue
            if not got:
                break
            done += got
            if done % PAGE and self._direct:  # the end of the file; past it no aligned request can begin
                break
        return done

    def close(self) -> None:
        os.close(self.descriptor)


def through_the_cache(descriptor: int) -> None:
    """Let an open file go on through the page cache."""
    fcntl.fcntl(descriptor, fcntl.F_SETFL, fcntl.fcntl(descriptor, fcntl.F_GETFL) & ~DIRECT)


T = TypeVar("T")
TOGETHER = 1 << 20
"""Bytes that change hands together."""
MOST = 1 << 10
"""Items that do."""


@contextlib.contextmanager
def fetched(items: Iterator[T], size: Callable[[T], int] | None = None) -> Generator[Iterator[T]]:
    """The same items, made ahead; an error of their making is raised where the item would be.

    `size`: the bytes of an item, with which small ones change hands together, since that costs more than to make one;
    else each is handed over alone. Left early, the thread makes no further ones, and has ended when this is left.
    """
    made: queue.Queue[tuple[list[T], BaseException | None, bool]] = queue.Queue(maxsize=1)
    left = threading.Event()

    def put(some: list[T], error: BaseException | None = None, more: bool = True) -> None:
        while not left.is_set():
            with contextlib.suppress(queue.Full):
                made.put((some, error, more), timeout=0.1)
                return

    def make() -> None:
        some, nbytes = list[T](), 0
        try:
            for item in items:
                some.append(item)
                nbytes += size(item) if size else TOGETHER
                if nbytes >= TOGETHER or len(some) == MOST:
                    put(some)
                    some, nbytes = [], 0
                if left.is_set():
                    return
            put(some, more=False)
        except BaseException as error:  # noqa: BLE001  raised where the item would be
            put(some, error)

    def take() -> Iterator[T]:
        more = True
        while more:
            some, error, more = made.get()
            yield from some
            if error is not None:
                raise error

    thread = threading.Thread(target=make, name="tangram-fetch")
    thread.start()
    try:
        yield take()
    finally:
        left.set()
        thread.join()
