"""Where every rank stands in its code, gathered from outside, also of one whose interpreter is stuck.

`faulthandler` writes the stacks of all threads of a process into a file when the process is sent a signal, in C and
without the interpreter. What it wrote is read, equal stacks are put together, and the fewest come first: where one
rank stands alone is where to look.
"""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tangram.tracing.files.format import file_of

SIGNAL = signal.SIGUSR2
_FRAME = re.compile(r'\s+File "(?P<file>.*)", line (?P<line>\d+) in (?P<function>.*)')
_THREAD = re.compile(r"(Current thread|Thread) 0x")
SHOWN = 6
"""Frames of a stack that are shown, from the call outwards."""


@dataclass(frozen=True)
class Stack:
    """The main thread of a rank, from the call outwards: file, line, function."""

    frames: tuple[tuple[str, int, str], ...]

    @property
    def lines(self) -> tuple[str, ...]:
        """For people: files by their last two parts, without the frames of torch around collectives."""
        shown = [
            f"{'/'.join(file.split('/')[-2:])}:{line} in {function}"
            for file, line, function in self.frames
            if "/torch/distributed/" not in file and "/tracing/groups.py" not in file
        ]
        return tuple(shown[:SHOWN])


def request(folder: Path, pids: Mapping[int, int], seconds: float) -> dict[int, Stack]:
    """The stacks of ranks on this machine, by rank; of those that write theirs within that time."""
    before = {rank: _size(folder, rank) for rank in pids}
    for pid in pids.values():
        with suppress(OSError):  # it is gone
            os.kill(pid, SIGNAL)
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and any(_size(folder, rank) == before[rank] for rank in pids):
        time.sleep(0.05)
    time.sleep(0.1)  # what has begun to write goes on to its end
    every = {rank: last_stack(folder, rank, before[rank]) for rank in pids}
    return {rank: stack for rank, stack in every.items() if stack is not None}


def _size(folder: Path, rank: int) -> int:
    path = folder / file_of(rank, "stacks")
    return path.stat().st_size if path.exists() else 0


def last_stack(folder: Path, rank: int, since: int = 0) -> Stack | None:
    """The stack of a rank's main thread that was written behind so many bytes; None: there is none."""
    path = folder / file_of(rank, "stacks")
    if not path.exists() or path.stat().st_size <= since:
        return None
    threads: list[list[tuple[str, int, str]]] = []
    for line in path.read_bytes()[since:].decode(errors="replace").splitlines():
        if _THREAD.match(line):
            threads.append([])
        elif threads and (frame := _FRAME.fullmatch(line)):
            threads[-1].append((frame["file"], int(frame["line"]), frame["function"]))
    # The main thread is the oldest one and so comes last.
    return Stack(tuple(threads[-1])) if threads and threads[-1] else None


def grouped(stacks: Mapping[int, Stack]) -> list[tuple[list[int], Stack]]:
    """Ranks with equal stacks together, the fewest first."""
    by_lines: dict[tuple[str, ...], list[int]] = {}
    for rank in sorted(stacks):
        by_lines.setdefault(stacks[rank].lines, []).append(rank)
    groups = sorted(by_lines.values(), key=lambda ranks: (len(ranks), ranks))
    return [(ranks, stacks[ranks[0]]) for ranks in groups]


def rank_words(ranks: Iterable[int]) -> str:
    """ "rank 3", "ranks 0 to 5, 7", "ranks 1 to 41 in steps of 8"."""
    some = sorted(ranks)
    step = some[1] - some[0] if len(some) > 3 else 1
    if step > 1 and some == [*range(some[0], some[-1] + 1, step)]:
        return f"ranks {some[0]} to {some[-1]} in steps of {step}"
    runs: list[list[int]] = []
    for rank in some:
        if runs and runs[-1][-1] == rank - 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    parts = [str(run[0]) if len(run) == 1 else f"{run[0]}{' to ' if len(run) > 2 else ', '}{run[-1]}" for run in runs]
    return ("rank " if len(some) == 1 else "ranks ") + ", ".join(parts)
