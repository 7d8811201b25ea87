"""Where a chain of layers is cut into stages that are not alike: the quickest cut in which every stage fits.

Of m micro-batches through stages that take s_i each a step takes (Narayanan et al. 2021, 2.2)

    (m - 1) max_i(s_i) + sum_i(s_i) + max_i(b_i)

with b_i what a stage does once in a step, so much for each of its layers: all stages do it at the same time.

For a longest stage that is given the least sum is found by dynamic programming over stages and layers; longest stages
are tried from the least with which there is a cut, until a longer one alone is more than the best. Then stages that do
more than any less than the longest b_i are left out, and it is cut again, until the rest alone is more than the best.
So the result is that of trying every cut, which tests compare.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


def best_cut(
    costs: Sequence[Floats], reaches: Sequence[NDArray[np.int64]], micros: int, beside: Sequence[float]
) -> tuple[float, list[int]]:
    """Seconds, and the block behind each stage's last; infinite and [] where no cut fits.

    `costs`: of each stage, shape (layers + 1, layers + 1): seconds if it has layers from the row to before the column.
    `reaches`: of each stage, shape (layers + 1): if it begins at a block, behind which one it may end at most.
    `beside`: of each stage seconds that each of its layers takes once in a step.
    """
    best, found = np.inf, list[int]()
    places = np.arange(len(costs[0]))
    while True:
        through, ends = _quickest(costs, reaches, micros)
        if not ends or through >= best:
            return best, found
        sizes = np.diff([0, *ends])
        once = max(each * int(size) for each, size in zip(beside, sizes, strict=True))
        if through + once < best:
            best, found = through + once, ends
        if once == 0:
            return best, found
        most = [_below(once, each) for each in beside]
        reaches = [np.minimum(reach, places + few) for reach, few in zip(reaches, most, strict=True)]


def _below(seconds: float, each: float) -> float:
    """How many take less at most; rounding does not make it one more."""
    few = np.ceil(seconds / each) - 1 if each else np.inf
    return float(few - 1 if each * few >= seconds and each else few)


def _quickest(costs: Sequence[Floats], reaches: Sequence[NDArray[Any]], micros: int) -> tuple[float, list[int]]:
    """The same of what takes time in each micro-batch."""
    allowed = [_allowed(cost, reach) for cost, reach in zip(costs, reaches, strict=True)]
    times = np.unique(np.concatenate([cost[np.isfinite(cost)] for cost in allowed]))
    least, ends = _least_sum(allowed, np.inf)
    if not ends:
        return np.inf, []
    low, high = 0, len(times) - 1  # the shortest longest stage with which there is a cut lies in here
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if _least_sum(allowed, times[middle])[1] else (middle + 1, high)
    best, found = np.inf, list[int]()
    for longest in times[low:]:
        if (micros - 1) * longest + least >= best:
            break
        whole, ends = _least_sum(allowed, longest)
        if (took := (micros - 1) * float(longest) + whole) < best:
            best, found = took, ends
    return best, found


def _allowed(cost: Floats, reach: NDArray[Any]) -> Floats:
    """Costs, infinite where a stage has no block or too many."""
    places = np.arange(len(cost))
    return np.where((places[None, :] > places[:, None]) & (places[None, :] <= reach[:, None]), cost, np.inf)


def _least_sum(allowed: Sequence[Floats], longest: float) -> tuple[float, list[int]]:
    """The least sum of stages of which none is longer, and where they end; infinite and [] where there is no cut."""
    blocks = allowed[0].shape[0] - 1
    found = np.full(blocks + 1, np.inf)
    found[0] = 0.0
    froms: list[NDArray[np.int64]] = []
    for cost in allowed:
        sums = found[:, None] + np.where(cost <= longest, cost, np.inf)
        froms.append(np.argmin(sums, axis=0))
        found = sums[froms[-1], np.arange(blocks + 1)]
    if not np.isfinite(found[blocks]):
        return np.inf, []
    ends = [blocks]
    for before in reversed(froms[1:]):
        ends.append(int(before[ends[-1]]))
    return float(found[blocks]), ends[::-1]
