"""Memory and files that are read and written past the page cache.

Such requests need memory that begins on a page, and pin every page of it. Where the kernel has huge pages a block is
two of them instead of a thousand: a write then costs a quarter of the processor's time, a copy a little less.
"""

import contextlib
import errno
import fcntl
import mmap
import os
from pathlib import Path

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
