"""Memory of the host that two processes share: taken page by page ahead of use, and pinned where an accelerator copies.

It has no name in any folder (memfd, or a file that is unlinked at once), so nothing is left whoever is killed; another
process gets it as an open file. And it does not count against the size of /dev/shm, which containers keep small.
"""

import mmap
import os
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tangram.errors import UserError
from tangram.hardware.host.machine import limits

STEP = 1 << 28  # bytes taken between two looks at what is left: several ranks of a node take memory at once
SPARE = 1 << 28  # bytes left to the rest of the machine


def available() -> int | None:
    """The bytes of memory that this process may still take; None where the system does not tell."""
    meminfo = Path("/proc/meminfo")
    if not meminfo.exists():
        return None
    rows = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
    left = int(rows["MemAvailable"].split()[0]) * 1024
    allowed = limits().memory
    return left if allowed is None else min(left, allowed)


class Shared:
    """Memory of `nbytes`, on a page, every page of it there; `descriptor` is the open file that another maps.

    Raises UserError when the machine has not so much left.
    """

    def __init__(self, nbytes: int, device: torch.device | None = None) -> None:
        self.nbytes = nbytes
        self._module: Any = None if device is None or device.type == "cpu" else torch.get_device_module(device)
        self.descriptor = _file()
        try:
            _take(self.descriptor, nbytes)
            self.bytes = mapped(self.descriptor, nbytes)
        except BaseException:
            os.close(self.descriptor)
            raise
        self.bytes[:: mmap.PAGESIZE] = 0
        self.pinned = self._module is not None and _pinned(self._module, self.bytes)

    def close(self) -> None:
        """Give it back, once nobody holds a view of it any more; the other process's map stays until it drops it."""
        if self.descriptor < 0:
            return
        if self.pinned:
            self._module.cudart().cudaHostUnregister(self.bytes.__array_interface__["data"][0])
        os.close(self.descriptor)
        self.descriptor = -1
        self.bytes = np.empty(0, np.uint8)


def mapped(descriptor: int, nbytes: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """The bytes of an open file as memory, for reading and writing."""
    return np.frombuffer(mmap.mmap(descriptor, nbytes), np.uint8)


def _file() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("tangram-checkpoint")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def _take(descriptor: int, nbytes: int) -> None:
    """Make a file as large as that, every page of it there. Looks first whether the whole fits, then at each step."""
    for start in range(0, nbytes, STEP):
        left, length = available(), min(STEP, nbytes - start)
        if left is not None and left < nbytes - start + SPARE:
            raise UserError(
                f"{nbytes / 1e9:.2f} GB of memory are needed for a copy of the state, but of the machine's memory"
                f" {(left + start) / 1e9:.2f} GB are left: use more machines, or save while training waits"
            )
        os.ftruncate(descriptor, start + length)
        if hasattr(os, "posix_fallocate"):
            try:
                os.posix_fallocate(descriptor, start, length)
            except OSError as error:
                raise UserError(f"{nbytes / 1e9:.2f} GB of shared memory cannot be had: {error.strerror}") from None


def _pinned(module: Any, memory: np.ndarray[Any, np.dtype[np.uint8]]) -> bool:
    """Pin memory that is there already; False where this kind of accelerator cannot, and copies are only slower."""
    if not hasattr(module, "cudart"):
        return False
    return int(module.cudart().cudaHostRegister(memory.__array_interface__["data"][0], memory.nbytes, 0)) == 0
