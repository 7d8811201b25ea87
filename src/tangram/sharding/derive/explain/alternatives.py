"""What it would cost if one tensor lay otherwise: the problem of an axis solved again with that state forced.

All else is free to follow, at the prices of the derivation, so a difference is what that state costs at least. Only the
axis itself is solved again; those after it are not asked.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from tangram.sharding.derive.derive import AxisProblem, Derived, Over, WorkRates, fixed_by
from tangram.sharding.derive.layouts import moved
from tangram.sharding.derive.problem.states import SAME, SUM, State
from tangram.sharding.derive.solve.bounded import bounded


@dataclass(frozen=True)
class Alternative:
    """One way for a tensor to be used over one axis."""

    axis: str
    state: State
    """`same` stands for `several`, too: whole."""
    chosen: bool
    more: float
    """What the axis costs more than as derived, as the derivation weighs it (work and all); infinite: it cannot be."""
    received: float
    """The bytes that a rank receives more over this axis, forward and backward."""


def alternatives(found: Derived, v: int, rates: WorkRates | None = None) -> Iterator[Alternative]:
    """Every state that a class could have, over each axis, that of the derivation first."""
    wanted = fixed_by(found.folded, found.marks, found.mesh)
    for i, over in enumerate(found.axes):
        if v not in over.used:
            continue
        fixed = {w: own[over.axis] for w, own in wanted.items() if over.axis in own}
        own_rates = (rates or WorkRates()).along(found.mesh, over.axis)
        problem = AxisProblem(found.folded, over.axis, over.k, found.axes[:i], fixed, own_rates, opened=v)
        chosen = _plain(over.used[v])
        options: dict[State, list[int]] = {}
        standing = v in found.folded.standing
        for place, state in enumerate(problem.used[v]):
            if not standing or state != SUM:  # a parameter is no sum of what ranks hold
                options.setdefault(_plain(state), []).append(place)
        as_it_is, _ = _forced(problem, v, options[chosen])
        before = _received(found, i, over)
        for state in sorted(options, key=lambda one: one != chosen):
            if state == chosen:
                yield Alternative(over.axis, state, True, 0.0, 0.0)
                continue
            cost, other = _forced(problem, v, options[state])
            more = 0.0 if other is None else _received(found, i, other) - before
            yield Alternative(over.axis, state, False, cost - as_it_is, more)


def _plain(state: State) -> State:
    return SAME if state.kind == "several" else state


def _forced(problem: AxisProblem, v: int, places: Sequence[int]) -> tuple[float, Over | None]:
    """The least cost with a class in one of some states, and what is done then."""
    costs = problem.costs()
    own = costs.tables[("used", v),]
    barred = np.full(own.shape, np.inf)
    barred[[*places]] = 0.0
    costs.tables[("used", v),] = own + barred
    best = bounded(costs).choice
    cost = costs.of(best)
    return cost, problem.over(best) if np.isfinite(cost) else None


def _received(found: Derived, i: int, over: Over) -> float:
    upto = replace(found, axes=(*found.axes[:i], over))
    return sum(one.nbytes for one in moved(upto) if over.axis in one.axes)
