"""Windows: memory that the ranks of a node share while they read, one window for each rank.

    head     words that are written by one side and read by the other: process, failed, done, what each slot has,
             how far each other rank is, and a sentence
    slots    blocks of the checkpoint; the owner fills them, everybody copies from them

There is no lock: each word has one writer, and grows. A word is written after what it speaks of, and read before;
between lie calls that are barriers of memory (the lock of Python, the kernel). The memory has no name in any file
system: others open it through the owner's process, so it is gone with its last user, however that one ends. Where there
is no such memory, a file in the folder for temporary files serves, whose name goes as soon as all have opened it.
"""

import mmap
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tangram.checkpoint.header import PAGE
from tangram.checkpoint.manifest import BLOCK

_WORDS = 8
_PROCESS, _FAILED, _DONE, _LENGTH, _MOVES = range(5)
_GONE = 2
_TEXT = 4 * PAGE


@dataclass(frozen=True)
class Shape:
    """Of all windows of an exchange."""

    slots: int
    ranks: int

    @property
    def head(self) -> int:
        """Bytes before the first slot: whole pages."""
        return -(-(8 * (_WORDS + self.slots + self.ranks) + _TEXT) // PAGE) * PAGE

    @property
    def size(self) -> int:
        """Of a window."""
        return self.head + self.slots * BLOCK


class Window:
    """One window, seen by its owner or by another rank."""

    def __init__(self, memory: mmap.mmap, shape: Shape) -> None:
        whole = np.frombuffer(memory, np.uint8)
        words = whole[: shape.head].view(np.int64)
        self._words = words
        self.ready = words[_WORDS : _WORDS + shape.slots]
        """For each slot, one more than the number of the block that lies there."""
        self.passed = words[_WORDS + shape.slots : _WORDS + shape.slots + shape.ranks]
        """For each rank, how many blocks of this window it needs no more."""
        self._text = whole[shape.head - _TEXT : shape.head]
        self.slots = [whole[shape.head + i * BLOCK : shape.head + (i + 1) * BLOCK] for i in range(shape.slots)]

    def begin(self) -> None:
        """Say whose it is."""
        self._words[_PROCESS] = os.getpid()

    def fail(self, text: str, *, gone: bool) -> None:
        """Say that the owner has failed, and how; `gone`: because another rank ended."""
        data = np.frombuffer(text.encode()[:_TEXT], np.uint8)
        self._text[: len(data)] = data
        self._words[_LENGTH] = len(data)
        self._words[_FAILED] = _GONE if gone else 1

    def move(self) -> None:
        """Say that the owner gets on. (Its threads may count one step twice: only that it changes matters.)"""
        self._words[_MOVES] += 1

    def finish(self) -> None:
        """Say that the owner has all that it wants."""
        self._words[_DONE] = 1

    @property
    def moves(self) -> int:
        """Changes whenever the owner gets on."""
        return int(self._words[_MOVES])

    @property
    def failure(self) -> tuple[str | None, bool]:
        """How the owner failed, and whether that was because another rank ended."""
        if not self._words[_FAILED]:
            return None, False
        text = self._text[: int(self._words[_LENGTH])].tobytes().decode(errors="replace")
        return text, bool(self._words[_FAILED] == _GONE)

    @property
    def done(self) -> bool:
        """Whether the owner has all that it wants."""
        return bool(self._words[_DONE])

    @property
    def alive(self) -> bool:
        """Whether the owner's process still runs."""
        return runs(int(self._words[_PROCESS]))


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


# ---------------------------------------------------------------- memory that several processes have


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
    descriptor = os.memfd_create("tangram-window", os.MFD_CLOEXEC)
    return _made(f"/proc/{os.getpid()}/fd/{descriptor}", descriptor, size, in_folder=False)


def in_a_file(size: int) -> Shared:
    """Memory that is a file in the folder for temporary files. Raises OSError."""
    descriptor, name = tempfile.mkstemp(prefix="tangram-window-")
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
