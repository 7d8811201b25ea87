"""What disk and process do: raw writes and reads, files put out of the page cache, bytes read, memory at its peak."""

import ctypes
import gc
import mmap
import os
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
BLOCK = 1 << 24
THREADS = 2  # of a process: the best of 1, 2 and 4 here, for writes and for reads


def pages(size: int) -> Bytes:
    """New memory of so many bytes in whole pages, touched."""
    memory = np.frombuffer(mmap.mmap(-1, -(-size // mmap.PAGESIZE) * mmap.PAGESIZE), np.uint8)
    memory[:: mmap.PAGESIZE] = 0
    return memory


def write_raw(path: Path, memory: Bytes) -> None:
    """Write memory that begins on a page, around the page cache, and wait until it is on the disk."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_DIRECT, 0o644)
    try:
        _in_blocks(len(memory), lambda a, b: os.pwrite(descriptor, memory[a:b].data, a))
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_raw(path: Path, start: int, memory: Bytes, direct: bool = True) -> None:
    """Fill memory that begins on a page from a page of a file on."""
    descriptor = os.open(path, os.O_RDONLY | (os.O_DIRECT if direct else 0))
    try:
        _in_blocks(len(memory), lambda a, b: os.preadv(descriptor, [memory[a:b].data], start + a))
    finally:
        os.close(descriptor)


def _in_blocks(size: int, act: Callable[[int, int], int]) -> None:
    blocks = iter(range(0, size, BLOCK))
    lock = threading.Lock()
    errors: list[BaseException] = []

    def run() -> None:
        try:
            while not errors:
                with lock:
                    start = next(blocks, None)
                if start is None:
                    return
                stop = min(start + BLOCK, size)
                if act(start, stop) != stop - start:
                    raise OSError(f"only a part of the bytes from {start} to {stop} came through")
        except BaseException as error:  # noqa: BLE001  raised again below
            errors.append(error)

    threads = [threading.Thread(target=run) for _ in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


# ---------------------------------------------------------------- the page cache


def files_of(path: Path) -> list[Path]:
    """All plain files of a folder, or the file itself."""
    return [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.is_file() and not p.is_symlink())


def settle(path: Path, files: Iterable[Path] | None = None) -> None:
    """Wait until files and the folder that they are in are on the disk, for who does not do so."""
    for one in [*(files_of(path) if files is None else files), path]:
        descriptor = os.open(one, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)


def evict(path: Path) -> None:
    """Put a checkpoint out of the page cache. Raises RuntimeError where some of it stays."""
    settle(path)
    left = 0
    for _ in range(20):
        left = sum(_evicted(file) for file in files_of(path))
        if not left:
            return
        gc.collect()  # what a peer has still mapped stays
        time.sleep(0.1)
    raise RuntimeError(f"{left} pages of {path} stay in the page cache")


def _evicted(path: Path) -> int:
    """Evict one file; how many pages of it are resident afterwards."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        return resident(descriptor)
    finally:
        os.close(descriptor)


def resident(descriptor: int) -> int:
    """The pages of a file that are in the page cache, as mincore tells."""
    size = os.fstat(descriptor).st_size
    if not size:
        return 0
    with mmap.mmap(descriptor, size, prot=mmap.PROT_READ) as mapped:
        whole = np.frombuffer(mapped, np.uint8)
        flags = np.zeros(-(-size // mmap.PAGESIZE), np.uint8)
        libc = ctypes.CDLL(None, use_errno=True)
        address = ctypes.c_void_p(whole.__array_interface__["data"][0])
        if libc.mincore(address, ctypes.c_size_t(size), ctypes.c_void_p(flags.__array_interface__["data"][0])):
            raise OSError(ctypes.get_errno(), "mincore")
        del whole
        return int((flags & 1).sum())


# ---------------------------------------------------------------- the process


def bytes_read() -> tuple[int, int]:
    """What this process has had read from storage so far, and what has come through its calls of read().

    A second process that reads the same file is served by the page cache of one machine, by the network of many.
    """
    rows = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(rows["read_bytes"]), int(rows["rchar"])


class Peak:
    """The memory that a process takes beyond what it has when this is made, at its peak."""

    def __init__(self) -> None:
        gc.collect()
        Path("/proc/self/clear_refs").write_text("5")  # sets the peak back to what there is
        self._before = _status("VmRSS")

    def extra(self) -> int:
        """In bytes."""
        return max(0, _status("VmHWM") - self._before)


def _status(key: str) -> int:
    rows = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(rows[key].split()[0]) * 1024
