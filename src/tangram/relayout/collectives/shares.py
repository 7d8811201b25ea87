"""How much of a tensor a rank has in two layouts, on average: what it need not receive."""

from __future__ import annotations

import itertools
import math
from functools import lru_cache

import numpy as np

from tangram.relayout.collectives.digits import WAITING, DigitProblem, State

_GRID = 1 << 20
"""Blocks that are counted one by one where digits do not nest; of more the share counts as none."""

_Cut = tuple[int, int, int]
"""A digit of a dim: dim, blocks before it, size."""


def in_common(problem: DigitProblem, a: State, b: State) -> float:
    """The share of the whole tensor. An element counts on the ranks whose digits are the element's own in both."""
    parts = 1
    pairs: list[tuple[_Cut, _Cut]] = []
    for (_, k), x, y in zip(problem.digits, a, b, strict=True):
        if x is y or x == y:
            parts *= k if x is not None and x != WAITING else 1
        elif x != WAITING and y != WAITING:
            parts *= k
            if x is not None and y is not None:
                pairs.append(((x.dim, x.outer, k), (y.dim, y.outer, k)))
    return _equal(tuple(pairs)) / parts if pairs else 1 / parts


@lru_cache(1 << 14)
def _equal(pairs: tuple[tuple[_Cut, _Cut], ...]) -> float:
    """The share of the elements in which the two digits of each pair are the same."""
    cuts = sorted({cut for pair in pairs for cut in pair})
    for (d, outer, k), (e, start, _) in itertools.pairwise(cuts):
        if d == e and start % (outer * k):
            return _counted(pairs)
    share = 1.0
    joined: dict[_Cut, _Cut] = {cut: cut for cut in cuts}

    def root(cut: _Cut) -> _Cut:
        while joined[cut] != cut:
            cut = joined[cut]
        return cut

    for x, y in pairs:  # independent digits are equal once in k; those that follow from others always
        if root(x) != root(y):
            share /= x[2]
            joined[root(x)] = root(y)
    return share


def _counted(pairs: tuple[tuple[_Cut, _Cut], ...]) -> float:
    sizes = {d: math.lcm(*[outer * k for pair in pairs for e, outer, k in pair if e == d]) for d in _dims(pairs)}
    if math.prod(sizes.values()) > _GRID:
        return 0.0
    grids = dict(zip(sizes, np.ogrid[tuple(slice(0, n) for n in sizes.values())], strict=True))
    same = np.ones(tuple(sizes.values()), dtype=bool)
    for pair in pairs:
        x, y = [grids[d] // (sizes[d] // (outer * k)) % k for d, outer, k in pair]
        same &= x == y
    return float(same.mean())


def _dims(pairs: tuple[tuple[_Cut, _Cut], ...]) -> list[int]:
    return sorted({cut[0] for pair in pairs for cut in pair})
