"""Windows: memory that the ranks of a node share while they read, one window for each rank.

    head     words that are written by one side and read by the other: failed, done, what each slot has,
             how far each other rank is, and a sentence
    slots    blocks of the checkpoint; the owner fills them, everybody copies from them

There is no lock: each word has one writer, and grows. A word is written after what it speaks of, and read before;
between lie calls that are barriers of memory (the lock of Python, the kernel).
"""

import mmap
from dataclasses import dataclass

import numpy as np

from tangram.checkpoint.store.manifest import BLOCK
from tangram.checkpoint.store.safetensors_header import PAGE
from tangram.hardware.host import shared

_WORDS = 8
_FAILED, _DONE, _LENGTH, _MOVES = range(4)
_GONE = 2
_TEXT = 4 * PAGE


@dataclass(frozen=True)
class WindowShape:
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


class SharedWindow:
    """One window, seen by its owner or by another rank."""

    def __init__(self, memory: mmap.mmap, shape: WindowShape, process: int) -> None:
        """`process`: its owner's."""
        self._process = process
        whole = np.frombuffer(memory, np.uint8)
        words = whole[: shape.head].view(np.int64)
        self._words = words
        self.ready = words[_WORDS : _WORDS + shape.slots]
        """For each slot, one more than the number of the block that lies there."""
        self.passed = words[_WORDS + shape.slots : _WORDS + shape.slots + shape.ranks]
        """For each rank, how many blocks of this window it needs no more."""
        self._text = whole[shape.head - _TEXT : shape.head]
        self.slots = [whole[shape.head + i * BLOCK : shape.head + (i + 1) * BLOCK] for i in range(shape.slots)]

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
    def progress(self) -> int:
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
        return shared.runs(self._process)
