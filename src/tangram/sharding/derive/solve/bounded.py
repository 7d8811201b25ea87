"""A choice for every variable, and what none can cost less than: exact where tables fit, else with the gap between.

    1. elimination with small tables, in parts where one would be larger (`solve.eliminated`)
    2. the same with large ones without choices that no best one needs (`reduce`), where that was not exact
    3. the variables that were in parts, some at a time, anew with the others as they are, while the choice gets better

Everything is counted and nothing timed, so that all ranks find the same.

First choices are left out that no best one needs: another of the same variable is no dearer with whatever its
neighbours choose, by each of the costs (R. Goldstein, Efficient rotamer elimination applied to protein side-chains,
Biophys. J. 66, 1994).
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from tangram.sharding.derive.solve.solve import LIMIT, Name, Solution, SolverCosts, TooWideError, eliminated

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
    todo = dict.fromkeys(sorted((name for name in kept if len(kept[name]) > 1), key=lambda name: len(kept[name])))
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


SMALL = 1 << 20
"""Entries of a table that is not worth leaving out choices for first."""
ROUNDS = 12
"""How often variables are chosen anew at most."""
CLOSE = 1e-9
"""A gap that is none."""


def bounded(costs: SolverCosts, limit: int = LIMIT) -> Solution:
    """The least choice, or a good one, and the bound; an infinite bound: there is none.

    Raises TooWideError where some may be and none was found.
    """
    found = eliminated(costs, min(limit, SMALL))
    if not found.parted or not np.isfinite(found.bound) or gap(costs, found) == 0.0:
        return found
    kept = reduced([costs], math.inf)
    seen = _within(costs, kept, limit)
    bound = max(found.bound, seen.bound)
    if not np.isfinite(bound):
        return Solution(seen.choice, bound)
    best = min((found.choice, seen.choice), key=costs.of)
    if seen.parted:
        best = _improved(costs, kept, best, Solution(best, bound, seen.parted), limit)
    if not np.isfinite(costs.of(best)):
        raise TooWideError("the marks leave so much open that no layouts were found that fit them: mark more tensors")
    return Solution(best, min(bound, costs.of(best)))


def gap(costs: SolverCosts, found: Solution) -> float:
    """By how much a choice may be dearer than the least there is, as a part of it."""
    own = costs.of(found.choice)
    if not math.isfinite(own):
        return 0.0 if found.bound == own else math.inf
    more = own - found.bound
    return 0.0 if more <= CLOSE * abs(own) else more / found.bound if found.bound > 0 else math.inf


def _within(costs: SolverCosts, kept: Kept, limit: int) -> Solution:
    """The choice among some, as one among all."""
    found = eliminated(restricted(costs, kept), limit)
    choice = {name: int(kept[name][i]) for name, i in found.choice.items()}
    return Solution(choice, found.bound, found.parted)


def _improved(
    costs: SolverCosts, kept: Kept, start: Mapping[Name, int], known: Solution, limit: int
) -> Mapping[Name, int]:
    """A choice that is no dearer, with other choices of the variables whose tables were too large.

    What cannot be costs much instead, so that a choice that cannot be is left by steps.
    """
    most = 1.0 + sum(float(np.abs(table[np.isfinite(table)]).max(initial=0.0)) for table in costs.tables.values())
    soft = SolverCosts(costs.sizes, {n: np.where(np.isfinite(table), table, most) for n, table in costs.tables.items()})
    now, parted = dict(start), [*known.parted]
    for _ in range(ROUNDS):
        before = soft.of(now)
        for opened in _windows(parted):
            fixed = {name: np.array([now[name]]) for name in parted if name not in opened}
            own = {name: np.union1d(some, [now[name]]).astype(np.intp) for name, some in kept.items()}
            found = _within(soft, {**own, **fixed}, limit)
            if soft.of(found.choice) < soft.of(now) * (1 - CLOSE):
                now = dict(found.choice)
        if soft.of(now) >= before * (1 - CLOSE) or gap(costs, Solution(now, known.bound)) == 0.0:
            break
    return now


def _windows(parted: Sequence[Name]) -> list[set[Name]]:
    """Three windows that share half of what is in them, and all but nothing."""
    width = max(1, len(parted) // 2)
    return [set(parted[i : i + width]) for i in range(0, len(parted), max(1, width // 2))]
