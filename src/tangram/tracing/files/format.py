"""The bytes of a trace: what a rank writes while it runs, and what a reader finds of it whatever became of the rank.

    rank-00000.ring        a file of fixed size that the rank maps: a header, the last `EVENTS` events, the last `ROWS`
                           steps. The kernel keeps what was written when the process is killed.
    rank-00000.steps       steps that have left the ring: chunks of columns, differences, compressed, with a checksum
    rank-00000.names.jsonl what numbers in events stand for, a line each, and what deviated, in words
    rank-00000.stacks      what `faulthandler` wrote when it was asked for

An event or a step counts once its own number stands in it, so what was half written is left out by who reads. No value
of a tensor is ever written: sizes, dtypes, names, places in code and times alone.
"""

from __future__ import annotations

import struct
from enum import IntEnum

import numpy as np
import numpy.typing as npt

MAGIC, VERSION = b"TNGTRACE", 2
EVENTS = 4096
ROWS = 256
CHUNK = 64
"""Steps of a chunk of columns."""
AXES_AT_MOST = 8
"""Groups over one set of axes have one place in a step; what is over more sets shares the last."""

HEADER_BYTES = 1024
HEADER = struct.Struct("<8sIIIIII16s64sqq")
"""Magic, version, rank, ranks, process, events, rows, run, host, and when it began: monotonic and wall clock, ns."""
LIVE_AT = 512
LIVE = struct.Struct("<QQQIIII")
"""The heartbeat and CPU time of the process (ns), the number + 1 of the call that is waited for (0: none), phase, step,
deviations, how it ended."""
BEAT = struct.Struct("<QQ")
BEAT_AT, WAITING_AT = LIVE_AT, LIVE_AT + 16
PHASE_AT, STEP_AT, DEVIATIONS_AT, ENDED_AT = LIVE_AT + 24, LIVE_AT + 28, LIVE_AT + 32, LIVE_AT + 36

EVENT = struct.Struct("<QQQIIHBBI")
EVENT_DTYPE = np.dtype(
    [("number", "<u8"), ("time", "<u8"), ("size", "<u8"), ("site", "<u4"), ("turn", "<u4"), ("group", "<u2"),
     ("kind", "u1"), ("op", "u1"), ("step", "<u4")]
)  # fmt: skip
"""`number` counts from 1. `time`: monotonic ns. `size`: bytes of an enter, waited ns of an exit. `site`: of an enter
what the names file says, of an exit the low bits of the enter's number. `turn`: how many calls the group had before."""


class Kind(IntEnum):
    """What happened."""

    ENTER = 1
    EXIT = 2
    PHASE = 3
    """Its number is in `op`."""
    STEP = 4
    DEVIATION = 5
    """Which one is in `site`."""


class Phase(IntEnum):
    """What a rank does."""

    START = 0
    DATA = 1
    FORWARD = 2
    BACKWARD = 3
    PIPELINE = 4
    """Forwards and backwards of stages, as their schedule has them."""
    OPTIMISER = 5
    EVALUATION = 6
    CHECKPOINT = 7
    OTHER = 8
    STEP = 9
    """A step of a program that says no more of it."""

    @property
    def word(self) -> str:
        return self.name.lower()


CHECKED = frozenset({Phase.FORWARD, Phase.BACKWARD, Phase.PIPELINE, Phase.OPTIMISER, Phase.STEP})
"""The phases whose calls are the same in every step."""
COUNTED = (Phase.DATA, Phase.FORWARD, Phase.BACKWARD, Phase.PIPELINE, Phase.OPTIMISER, Phase.STEP)
"""The phases that every step has; evaluations and checkpoints are other work."""
PATIENT = frozenset({Phase.START, Phase.EVALUATION, Phase.CHECKPOINT, Phase.OTHER})
"""The phases in which a rank may be busy for long while others wait for it."""


class End(IntEnum):
    """How the life of a rank ended."""

    RUNNING = 0
    """It has not said."""
    FINISHED = 1
    FAILED = 2


ROW_DTYPE = np.dtype(
    [("step", "<u4"), ("flags", "<u2"), ("calls", "<u2"), ("begin", "<u8"), ("nanoseconds", "<u8"),
     ("memory_kb", "<u4"), ("own_us", "<u4", (len(Phase),)), ("wait_us", "<u4", (AXES_AT_MOST,)),
     ("cpu_us", "<u4"), ("ready_us", "<u4")]
)  # fmt: skip
"""A step of a rank, until the next one begins: `own_us` by phase is the time outside of collectives, `wait_us` by the
axes of the group the time in them; `cpu_us` that for which its thread ran in the phases that count, `ready_us` that for
which it could have and had no CPU, as far as the system tells. `step` is from 1; 0 is an empty place."""
ROW = struct.Struct("<IHHQQI" + f"{len(Phase)}I{AXES_AT_MOST}I2I")
ROW_DTYPES = {1: np.dtype([(name, ROW_DTYPE[name]) for name in (ROW_DTYPE.names or ())[:-2]]), 2: ROW_DTYPE}
"""By the version that wrote it."""

LOSS_NOT_FINITE, GRADIENT_NOT_FINITE, DEVIATED = 1, 2, 4
"""Flags of a step: of this rank's own part."""

CHUNK_HEADER = struct.Struct("<4sIII")
CHUNK_MAGIC = b"TCOL"
"""Magic, rows, compressed bytes, crc32 of these."""

OPS = (
    "all-reduce", "all-gather", "reduce-scatter", "all-to-all", "broadcast", "reduce", "gather", "scatter", "send",
    "recv", "barrier",
)  # fmt: skip


def ring_bytes(events: int = EVENTS, rows: int = ROWS, version: int = VERSION) -> int:
    return HEADER_BYTES + events * EVENT.size + rows * ROW_DTYPES[version].itemsize


def as_now(rows: npt.NDArray[np.void]) -> npt.NDArray[np.void]:
    """Steps of any version: what an older one does not have is 0."""
    found = np.zeros(len(rows), ROW_DTYPE)
    for name in rows.dtype.names or ():
        found[name] = rows[name]
    return found


def file_of(rank: int, ending: str) -> str:
    return f"rank-{rank:05d}.{ending}"
