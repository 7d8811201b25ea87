"""A choice for every variable, and what none can cost less than: exact where tables fit, else with the gap between.

    1. elimination in parts where a table would be too large (`solve.eliminated`)
    2. the same without choices that no best one needs (`reduce`), where that was not exact
    3. the variables that were in parts, some at a time, anew with the others as they are, while the choice gets better

Everything is counted and nothing timed, so that all ranks find the same.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from tangram.sharding.derive.solve.prune_dominated import Kept, reduced, restricted
from tangram.sharding.derive.solve.solve import LIMIT, Name, Solution, SolverCosts, TooWideError, eliminated

ROUNDS = 12
"""How often variables are chosen anew at most."""
CLOSE = 1e-9
"""A gap that is none."""


def bounded(costs: SolverCosts, limit: int = LIMIT) -> Solution:
    """The least choice, or a good one, and the bound; an infinite bound: there is none.

    Raises TooWideError where some may be and none was found.
    """
    found = eliminated(costs, limit)
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
