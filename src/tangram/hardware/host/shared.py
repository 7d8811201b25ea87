"""Memory that several processes of one machine have, and whether those processes still run.

The memory has no name in any file system: others open it through its owner's process, so it is gone with its last user,
however that one ends. Where there is no such memory, a file in the folder for temporary files serves, whose name goes
as soon as all have opened it.
"""

import mmap
import os
import platform
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Shared:
    """Memory that this rank has made, and the name by which others open it."""

    name: str
    descriptor: int
    memory: mmap.mmap
    in_folder: bool

    def close(self) -> None:
        """Nobody opens it any more: take its name away. Who has it keeps it."""
        os.close(self.descriptor)
        if self.in_folder:
            Path(self.name).unlink(missing_ok=True)


def nameless(size: int) -> Shared:
    """Memory without a name in a file system. Raises OSError where the system has none, or not enough."""
    if not hasattr(os, "memfd_create"):
        raise OSError("this system has no memory without a name")
    descriptor = os.memfd_create("tangram-shared", os.MFD_CLOEXEC)
    return _made(f"/proc/{os.getpid()}/fd/{descriptor}", descriptor, size, in_folder=False)


def in_a_file(size: int) -> Shared:
    """Memory that is a file in the folder for temporary files. Raises OSError."""
    descriptor, name = tempfile.mkstemp(prefix="tangram-shared-")
    return _made(name, descriptor, size, in_folder=True)


WAYS: tuple[Callable[[int], Shared], ...] = (nameless, in_a_file)
"""Tried one after the other, by all ranks of a node alike."""


def opened(name: str, size: int) -> mmap.mmap:
    """The memory that another rank of this node has made. Raises OSError."""
    descriptor = os.open(name, os.O_RDWR | os.O_CLOEXEC)
    try:
        return mmap.mmap(descriptor, size)
    except ValueError as error:  # it is shorter
        raise OSError(str(error)) from None
    finally:
        os.close(descriptor)


def _made(name: str, descriptor: int, size: int, *, in_folder: bool) -> Shared:
    try:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(descriptor, 0, size)  # now, rather than to be killed when it is written
        else:
            os.ftruncate(descriptor, size)
        return Shared(name, descriptor, mmap.mmap(descriptor, size), in_folder)
    except OSError:
        os.close(descriptor)
        if in_folder:
            Path(name).unlink()
        raise


# ---------------------------------------------------------------- who has it


def node() -> str:
    """Where this rank is: the same for ranks that can open each other's memory and see each other's processes."""
    try:
        space = Path("/proc/self/ns/pid").readlink()
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        space = boot = ""
    return f"{platform.node()} {boot} {space}"


def process() -> int:
    """The number of this process, for `runs`."""
    return os.getpid()


def runs(process: int) -> bool:
    """Whether a process of this machine is there and no zombie."""
    try:
        return Path(f"/proc/{process}/stat").read_bytes().rpartition(b")")[2].split()[0] not in (b"Z", b"X", b"x")
    except OSError:
        if Path("/proc/self").is_dir():
            return False
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
