"""Choices that no best one needs: left out before the search, with the same least costs.

A choice of a variable can go where another one of it is no dearer with whatever its neighbours choose, by each of the
costs (as seconds and bytes).
Source: R. Goldstein, Efficient rotamer elimination applied to protein side-chains, Biophys. J. 66 (1994).
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from tangram.sharding.derive.solve.solve import Name, SolverCosts

Kept = Mapping[Name, NDArray[np.intp]]
"""Of each variable, the choices that are left."""
LARGEST = 1 << 22
"""Entries of what is compared at once."""


def all_of(costs: SolverCosts) -> dict[Name, NDArray[np.intp]]:
    """Every choice."""
    return {name: np.arange(n) for name, n in costs.sizes.items()}


def restricted(costs: SolverCosts, kept: Kept) -> SolverCosts:
    """The same costs of the choices that are left."""
    tables = {names: table[np.ix_(*(kept[name] for name in names))] for names, table in costs.tables.items()}
    return SolverCosts({name: len(kept[name]) for name in costs.sizes}, tables)


def reduced(every: Sequence[SolverCosts], stop: float) -> dict[Name, NDArray[np.intp]]:
    """What is left, by the clock's `stop` (`time.monotonic`)."""
    kept = all_of(every[0])
    near: dict[Name, list[tuple[Name, ...]]] = {name: [] for name in kept}
    for costs in every:
        for names in costs.tables:
            for name in names:
                if names not in near[name]:
                    near[name].append(names)
    todo = dict.fromkeys(sorted(kept, key=lambda name: len(kept[name])))
    while todo and time.monotonic() < stop:
        name = next(iter(todo))
        del todo[name]
        before = kept[name]
        kept[name] = before[_needed(every, name, near[name], kept)]
        if len(kept[name]) < len(before):
            todo.update(dict.fromkeys(o for names in near[name] for o in names if len(kept[o]) > 1))
    return kept


def _needed(every: Sequence[SolverCosts], name: Name, near: Sequence[tuple[Name, ...]], kept: Kept) -> NDArray[np.intp]:
    n = len(kept[name])
    worse = [np.zeros((n, n)) for _ in every]  # by how much one is dearer than another at most
    for names in near:
        for costs, total in zip(every, worse, strict=True):
            table = costs.tables.get(names)
            if table is None:
                continue
            own = table[np.ix_(*(kept[one] for one in names))]
            own = own.reshape(n, 1) if len(names) == 1 else own if names[0] == name else own.T
            if n * n * own.shape[1] > LARGEST:
                return np.arange(n)
            more = _dearer(own)
            never = np.isneginf(total) | np.isneginf(more)  # the other cannot be at all
            np.add(total, more, out=total, where=~never)
            total[never] = -np.inf
    left = np.ones(n, dtype=bool)
    for one in range(n - 1, -1, -1):
        left[one] = False
        instead = np.logical_and.reduce([more[:, one] <= 0 for more in worse]) & left
        left[one] = not instead.any()
    return np.flatnonzero(left)


def _dearer(own: NDArray[np.float64]) -> NDArray[np.float64]:
    """By how much each row is above each other at most; where the other cannot be, not at all."""
    with np.errstate(invalid="ignore"):
        apart = own[:, None, :] - own[None, :, :]
    return np.where(np.isinf(own)[None, :, :], -np.inf, apart).max(axis=2)
