"""Memory that files are read into and written from past the page cache.

Such requests need memory that begins on a page, and pin every page of it. Where the kernel has huge pages a block is
two of them instead of a thousand: a write then costs a quarter of the processor's time, a copy a little less.
"""

import contextlib
import mmap

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
