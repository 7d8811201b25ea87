"""The schedules that the search knows, as rows of numbers: what they wait for, and what they keep.

The closed forms are those that playing the schedules' own tables gives (`schema.schedules`; a test compares), in units
of a virtual stage with forward F, gradient of inputs I and gradient of weights W:

    1F1B, Interleaved1F1B         a rank waits (p - 1) (F + I + W)
    InterleavedZeroBubble         (p - 1) (F + I - W), all ranks keep v p virtual stages; of one virtual stage each
                                  ZB-H1
    ZBVZeroBubble, DualPipeV      the same wait with two virtual stages a rank, all ranks keep 2 p and 2 p + 1 virtual
                                  stages

(Narayanan et al. 2021; Qi et al. 2024; DeepSeek 2024.) W is taken as half of the matmuls' backward.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


@dataclass(frozen=True)
class Pipeline:
    """A schedule."""

    name: str
    chunks: int
    """Of each rank; 0: any number from the fewest on."""
    fewest: int = 2
    """Chunks of a rank at least, of those that take any number."""
    splits: bool = False
    """Whether gradients of weights fill what would be waited."""
    folded: bool = False
    """Whether stages go down the ranks and up again, so that the first rank has the head, too."""
    least: int = 1
    """Micro-batches that it takes, in multiples of the ranks."""
    beyond: int = 0
    """Chunks that each rank keeps beyond those that fill the pipeline."""


SCHEDULES = (
    Pipeline("1F1B", 1),
    Pipeline("Interleaved1F1B", 0),
    Pipeline("InterleavedZeroBubble", 0, fewest=1, splits=True),
    Pipeline("ZBVZeroBubble", 2, splits=True, folded=True),
    Pipeline("DualPipeV", 2, splits=True, folded=True, least=2, beyond=1),
)
"""By the code that a grid has."""


def code(name: str) -> int:
    """Of a schedule; -1 for a name that is none."""
    return next((i for i, one in enumerate(SCHEDULES) if one.name == name), -1)


def _column(values: list[Any], schedule: Array) -> Array:
    return np.asarray(values)[np.asarray(schedule, dtype=np.int64)]


def splits(schedule: Array) -> Array:
    """Which split the backward."""
    return _column([one.splits for one in SCHEDULES], schedule)


def folded(schedule: Array) -> Array:
    """Which go down the ranks and up again."""
    return _column([one.folded for one in SCHEDULES], schedule)


def many(schedule: Array) -> Array:
    """Chunks of each rank as the schedule says; 0 where it takes any number from two."""
    return _column([one.chunks for one in SCHEDULES], schedule)


def fewest(schedule: Array) -> Array:
    """Chunks of each rank at least, where the schedule takes any number."""
    return _column([one.fewest for one in SCHEDULES], schedule)


def least(schedule: Array) -> Array:
    """Multiples of the ranks that micro-batches have to be at least."""
    return _column([one.least for one in SCHEDULES], schedule)


def beyond(schedule: Array) -> Array:
    """Chunks that each rank keeps beyond those that fill the pipeline."""
    return _column([one.beyond for one in SCHEDULES], schedule)
