"""What a rank writes: its ring, the steps that leave it, and the names that its numbers stand for.

Memory is taken before the first event: a disk that is full is met at the begin and not in the midst of a step, where
it would be a signal that ends the process. Names and chunks of steps grow; when they cannot be written `failure` says
why, and nothing more is written. `Pending` are calls under way of which only the end is to be written yet.
"""

from __future__ import annotations

import json
import mmap
import os
import socket
import threading
import time
import zlib
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from weakref import finalize

import numpy as np
import numpy.typing as npt

from tangram.tracing.files.format import (
    CHUNK,
    CHUNK_HEADER,
    CHUNK_MAGIC,
    EVENTS,
    HEADER,
    HEADER_BYTES,
    MAGIC,
    ROW,
    ROW_DTYPE,
    ROW_DTYPES,
    ROWS,
    VERSION,
    file_of,
    ring_bytes,
)

LARGEST_STEPS = 2**24
"""Bytes of a file of steps, after which it becomes the older one of two."""


class TraceFiles:
    """The files of one rank. Raises OSError where they cannot be made."""

    def __init__(self, folder: Path, run: bytes, rank: int, world: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        for kind in ("ring", "names.jsonl", "steps", "steps-before"):  # whoever still writes to those keeps them
            (folder / file_of(rank, kind)).unlink(missing_ok=True)
        self.failure = ""
        self._steps = folder / file_of(rank, "steps")
        self._written = 0  # rows that are in chunks
        path, size = folder / file_of(rank, "ring"), ring_bytes()
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644)
        try:
            os.posix_fallocate(descriptor, 0, size)
            self.memory = mmap.mmap(descriptor, size)
        except OSError:
            path.unlink(missing_ok=True)
            raise
        finally:
            os.close(descriptor)
        host = socket.gethostname().encode()[:64]
        HEADER.pack_into(
            self.memory, 0, MAGIC, VERSION, rank, world, os.getpid(), EVENTS, ROWS, run, host,
            time.monotonic_ns(), time.time_ns(),
        )  # fmt: skip
        self._names = os.open(folder / file_of(rank, "names.jsonl"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)

    def name(self, words: Mapping[str, object]) -> None:
        """Write a line of names, in one piece."""
        if not self.failure:
            try:
                os.write(self._names, json.dumps(words).encode() + b"\n")
            except OSError as error:
                self._give_up(error)

    def row(self, number: int, values: tuple[int, ...]) -> None:
        """Write the `number`-th step, from 0; a chunk of them goes to its file when it is whole."""
        ROW.pack_into(self.memory, HEADER_BYTES + EVENTS_BYTES + (number % ROWS) * ROW.size, *values)
        if number + 1 - self._written >= CHUNK and not self.failure:
            self._flush(number + 1)

    def _flush(self, stop: int) -> None:
        ring = np.frombuffer(self.memory, ROW_DTYPE, ROWS, HEADER_BYTES + EVENTS_BYTES)
        packed = packed_rows(ring[np.arange(self._written, stop) % ROWS])
        del ring  # else the memory could not be given back
        try:
            if self._steps.exists() and self._steps.stat().st_size > LARGEST_STEPS:
                self._steps.replace(self._steps.with_suffix(".steps-before"))
            with self._steps.open("ab") as file:
                file.write(packed)
        except OSError as error:
            self._give_up(error)
        self._written = stop

    def _give_up(self, error: OSError) -> None:
        self.failure = f"tracing has stopped, training goes on: {error.strerror or error}"


EVENTS_BYTES = ring_bytes(EVENTS, 0) - HEADER_BYTES


def packed_rows(rows: npt.NDArray[np.void]) -> bytes:
    """A chunk: the columns one after the other, each as differences from row to row, compressed."""
    columns = [rows[name].reshape(len(rows), -1).T for name in ROW_DTYPE.names or ()]
    data = b"".join(
        np.ascontiguousarray(np.diff(column, prepend=column.dtype.type(0), axis=1)).tobytes() for column in columns
    )
    body = zlib.compress(data, 6)
    return CHUNK_HEADER.pack(CHUNK_MAGIC, len(rows), len(body), zlib.crc32(body)) + body


def unpacked_rows(rows: int, body: bytes) -> npt.NDArray[np.void]:
    """The inverse of `packed_rows`, of what stands behind its header; of any version."""
    data, at = zlib.decompress(body), 0
    form = next((form for form in ROW_DTYPES.values() if rows * form.itemsize == len(data)), ROW_DTYPE)
    found = np.zeros(rows, ROW_DTYPE)
    for name in form.names or ():
        kind = form[name]
        base, width = kind.base, int(np.prod(kind.shape, dtype=int))
        stop = at + rows * width * base.itemsize
        differences = np.frombuffer(data[at:stop], base).reshape(width, rows)
        found[name] = np.cumsum(differences, axis=1, dtype=base).T.reshape(found[name].shape)
        at = stop
    return found


class Processor:
    """How long the thread that asks has run, and how long it was ready to and another had the CPU; ns."""

    def __init__(self) -> None:
        self._file, self._last, self._spent = -1, (0, 0), 0
        with suppress(OSError):  # not of Linux, or of one that does not count: of waiting nothing is known
            self._file = os.open(f"/proc/self/task/{threading.get_native_id()}/schedstat", os.O_RDONLY | os.O_CLOEXEC)
            finalize(self, os.close, self._file)
        self.since()

    def since(self) -> tuple[int, int]:
        """Since it was asked last."""
        ready = int(os.pread(self._file, 64, 0).split()[1]) if self._file >= 0 else 0
        now = time.thread_time_ns(), ready
        before, self._last = self._last, now
        return now[0] - before[0], now[1] - before[1]

    def spent(self) -> int:
        """For how long the thread that made this has run or was ready to, since any asked last; ns, 0: unknown."""
        now = self._spent
        with suppress(OSError):  # there is no such file, or no longer such a thread
            now = sum(int(one) for one in os.pread(self._file, 64, 0).split()[:2])
        before, self._spent = self._spent, now
        return now - before


@dataclass
class Pending:
    """Calls whose end is waited for where nobody can be told of it, as torch's DDP waits for its buckets in C++.

    It asks each call for its future, starts the next ones, and waits for all of them at the end of the backward. So
    the time from the last call that was begun to the last end is waiting, and what ended before another began was
    computing.
    """

    _begun: dict[int, tuple[int, int]] = field(default_factory=dict[int, tuple[int, int]])
    """By the number of its event: the group, and when it began, ns."""
    _last: tuple[int, int] = (0, 0)
    """Group and begin of the newest one."""
    until: int = 0
    """When the last of them ended, ns; 0: none has since the rank did something else."""

    def begins(self, number: int, group: int, now: int) -> int:
        """A call is under way; the number of the one that is waited for first."""
        self._begun[number] = self._last = group, now
        self.until = 0
        return self._first()

    def ends(self, number: int, now: int) -> tuple[int, int] | None:
        """A call has ended: since when it was under way, and the number of the next that is waited for, 0: none.

        None of a call that is not known, as one of another thread.
        """
        if number not in self._begun:
            return None
        _, since = self._begun.pop(number)
        self.until = now
        return since, self._first()

    def _first(self) -> int:
        """The oldest call under way, or 0. A copy is looked at, as another thread may end one at any time."""
        return min(tuple(self._begun), default=0)

    def settle(self) -> tuple[int, int, int] | None:
        """The rank does something else: over which group it waited since the last time, and from when to when."""
        if not self.until:
            return None
        (group, since), until, self.until = self._last, self.until, 0
        return group, since, until
