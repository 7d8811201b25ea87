"""How a tensor is brought from one way to lie over the axes of a mesh to another: what ranks do, and what it costs.

    Step     over one axis: a collective and its dual
    Joint    over several at once: the cheapest sequence that `relayout.collectives.sequences` knows, there and back

One rule: what one axis after the other takes several steps for is asked of `sequences`, and done so where ranks then
receive fewer bytes or, of as many, take part in fewer collectives. Rows in orders of their own (`states.Routed`) and
cuts that do not nest have no such sequence, and are moved one axis after the other.

Trade-off: bytes are compared, and no links, so that what runs does not depend on a cluster's file.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

from torch import Tensor

from tangram.layout import Mesh
from tangram.layout.intervals import size
from tangram.relayout.collectives import digits, one_collective, sequences
from tangram.sharding.derive.problem.states import (
    SAME,
    SEVERAL,
    Routed,
    State,
    alike,
    cut,
    part_dim,
    plain,
    received,
    scaled,
    way,
)

States = Mapping[str, State]
NOTHING_SENT = frozenset({sequences.SLICE, sequences.ZERO})


class StateStep(NamedTuple):
    """A tensor that lies otherwise over one axis, after."""

    axis: str
    source: State
    target: State


@dataclass(frozen=True)
class Joint:
    """A tensor that lies otherwise over several axes, by a sequence of collectives over some of them at once."""

    apart: tuple[StateStep, ...]
    """The same, one axis after the other."""
    there: tuple[sequences.CollectiveStep, ...] = field(compare=False)
    back: tuple[sequences.CollectiveStep, ...] | None = field(compare=False)
    """What is done with the gradient; None where there is none."""


Change = tuple[StateStep | Joint, ...]
"""One after the other."""


class Cost(NamedTuple):
    """What a rank does in a part of a change, forward and backward, and the bytes that it then receives."""

    axes: tuple[str, ...]
    forward: str
    backward: str
    forward_bytes: float
    backward_bytes: float


def apart(change: Change) -> Iterator[StateStep]:
    """A change one axis after the other."""
    for one in change:
        yield from one.apart if isinstance(one, Joint) else (one,)


def sizes_after(sizes: Sequence[int], change: Change, ks: Mapping[str, int], at: Mapping[str, int]) -> list[int]:
    """The shape of what a rank at these coordinates has after a change, given that of what it has before."""
    found = [*sizes]
    for axis, source, target in apart(change):
        if (dim := part_dim(source)) is not None:
            found[dim] = source.outer * source.block if source.parts else found[dim] * ks[axis]
        if (dim := part_dim(target)) is not None:
            parts = target.parts
            found[dim] = target.outer * size(parts[at[axis]]) if parts else found[dim] // ks[axis]
    return found


def states_to_change(source: States, target: States, *, differentiable: bool) -> dict[str, State]:
    """Over which axes something is done between two ways to lie, and how the tensor lies then."""
    found: dict[str, State] = {}
    for axis, a in source.items():
        b = target.get(axis, a)  # of what is not read, as it is
        step = way(a, b) if a != b else None
        if step is not None and (step.forward or (step.backward and differentiable)):
            found[axis] = b
    return found


def summed_once(source: States, target: States, *, differentiable: bool) -> tuple[str, ...]:
    """The axes over which every rank has a whole parameter for something of its own: its gradient is summed once."""
    goals = states_to_change(source, target, differentiable=differentiable)
    return tuple(axis for axis, b in goals.items() if (source[axis], b) == (SAME, SEVERAL))


def change(
    shape: Sequence[int],
    itemsize: int,
    source: States,
    goals: States,
    mesh: Mesh,
    *,
    differentiable: bool,
    at_once: bool = True,
) -> Change:
    """What brings a tensor of a whole `shape` from how it lies over each axis to how it is to lie over some (`wanted`).

    `source`: over every axis that it may be cut over, in the order of the mesh. `differentiable`: whether a gradient
    comes back. `at_once` false: one axis after the other, whatever it costs.
    """
    if not goals:
        return ()
    own = {axis: plain(state) for axis, state in source.items()}
    goals = {axis: plain(state) for axis, state in goals.items()}
    steps = tuple(ordered(own, goals, {axis: mesh.axes[axis][0] for axis in source}))
    sides = (*own.values(), *goals.values())
    unlike = any(isinstance(s, Routed) or s.parts for s in sides)
    if len(steps) == 1 or unlike or not at_once:
        return steps
    lies = tuple((digits.RankDigit(mesh.axes[a][1], mesh.axes[a][0]), a, own[a], goals.get(a, own[a])) for a in source)
    found = _joint(tuple(shape), itemsize, lies, steps, differentiable)
    return steps if found is None else (found,)


def change_of(part: Tensor, source: States, target: States, mesh: Mesh, *, differentiable: bool) -> Change:
    """`change` of a tensor of which a rank has a part; over every axis that differs."""
    shape = [*part.shape]
    for axis, state in source.items():
        if state.kind == "cut":
            shape[state.dim] = state.outer * state.block if state.parts else shape[state.dim] * mesh.axes[axis][0]
    goals = {axis: state for axis, state in target.items() if state != source[axis]}
    return change(shape, part.element_size(), source, goals, mesh, differentiable=differentiable)


@lru_cache(1 << 12)
def _joint(
    shape: tuple[int, ...],
    itemsize: int,
    states: tuple[tuple[digits.RankDigit, str, State, State], ...],
    steps: tuple[StateStep, ...],
    differentiable: bool,
) -> Joint | None:
    """The cheapest sequences between two states; None where one axis after the other is as cheap, or there is none."""
    there = _sequence(shape, itemsize, states)
    turned = tuple((digit, axis, one_collective.dual(b), one_collective.dual(a)) for digit, axis, a, b in states)
    back = _sequence(shape, itemsize, turned) if differentiable else ()
    if there is None or back is None:
        return None
    found = Joint(steps, there, back if differentiable else None)
    source = {axis: a for _, axis, a, _ in states}
    sizes = {axis: digit.k for digit, axis, _, _ in states}
    nbytes = float(itemsize * math.prod(shape))
    sides = [[*costs(one, nbytes, source, sizes, differentiable=differentiable)] for one in ((found,), steps)]
    paid = [sum(c.forward_bytes + c.backward_bytes for c in side) for side in sides]
    if math.isclose(*paid, rel_tol=1e-9):
        paid = [len(_sent((*there, *back))), sum(bool(n) for cost in sides[1] for n in cost[3:])]
    return found if paid[0] < paid[1] else None


def _sent(steps: Sequence[sequences.CollectiveStep]) -> list[str]:
    """The collectives that send something."""
    return [step.collective for step in steps if step.collective not in NOTHING_SENT]


def _sequence(
    shape: tuple[int, ...], itemsize: int, states: Sequence[tuple[digits.RankDigit, str, State, State]]
) -> tuple[sequences.CollectiveStep, ...] | None:
    sides = _spots([(digit.k, a) for digit, _, a, _ in states]), _spots([(digit.k, b) for digit, _, _, b in states])
    summed = any(a == digits.WAITING != b for a, b in zip(*sides, strict=True))
    rows = [row for row in zip(states, *sides, strict=True) if summed or row[1] is not None or row[2] is not None]
    rows.sort(key=lambda row: -row[0][0].stride)
    names = tuple(axis for (_, axis, *_), _, _ in rows)
    own = tuple(digit for (digit, *_), _, _ in rows)
    source, target = tuple(a for _, a, _ in rows), tuple(b for _, _, b in rows)
    problem = digits.DigitProblem(shape, own, names, names, source, target)
    if not (digits.fits(problem, source) and digits.fits(problem, target)):
        return None
    return sequences.cheapest(problem, itemsize)


def _spots(states: Sequence[tuple[int, State]]) -> list[digits.DigitSpot | None]:
    """Where the digits of axes (ranks and state of each, in the order of the mesh) stand in a tensor."""
    before: dict[tuple[int, int], int] = {}
    found: list[digits.DigitSpot | None] = []
    for k, state in states:
        if state.kind == "cut":
            at = before.get((state.dim, state.outer), 1)
            before[state.dim, state.outer] = at * k
            found.append(digits.DigitSpot(state.dim, state.outer * at))
        else:
            found.append(digits.WAITING if state.kind == "sum" else None)
    return found


# ---------------------------------------------------------------- one axis after the other


def ordered(source: States, target: States, sizes: Mapping[str, int]) -> Iterator[StateStep]:
    """Steps over single axes, of which each can be done by itself; cuts as they are on what ranks have at that time.

    What lies under a cut that moves is put together before, and cut again. `sizes`: of the axes, in the order of the
    mesh: of two that cut one factor the first lies outside.
    """
    axes, now = [*sizes], dict(source)
    goals = {axis: state for axis, state in target.items() if state != now[axis]}
    final = {**now, **goals}

    def under(axis: str, goal: State) -> list[str]:
        cuts = {(s.dim, s.outer) for s in (now[axis], goal) if s.kind == "cut"}
        later = (a for a in axes[axes.index(axis) + 1 :] if a in now and now[a].kind == "cut")
        crossed = [a for a in goals if a != axis and _crossed(goal, now[a], now, sizes, axis)]
        return [*crossed, *(a for a in later if (now[a].dim, now[a].outer) in cuts)]

    def waits(axis: str) -> bool:
        """For an axis that lies outside, on what this one is to cut."""
        goal = goals[axis]
        outer = (s for a in axes[: axes.index(axis)] if a in goals for s in (now[a], goals[a]))
        return goal.kind == "cut" and any((s.kind, s.dim, s.outer) == ("cut", goal.dim, goal.outer) for s in outer)

    def step(axis: str, goal: State) -> StateStep:
        found = StateStep(axis, here(now[axis], axis, now, sizes), here(goal, axis, now, sizes))
        now[axis] = goal
        return found

    while goals:
        axis = next((a for a in reversed(axes) if a in goals and not waits(a) and not under(a, goals[a])), None)
        if axis is not None:
            yield step(axis, goals.pop(axis))
        else:
            blocked = next(a for a in axes if a in goals)
            inner = under(blocked, goals[blocked])[-1]
            while deeper := under(inner, SAME):
                inner = deeper[-1]
            goals[inner] = final[inner]
            yield step(inner, SAME)


def _crossed(goal: State, states: State, now: States, sizes: Mapping[str, int], axis: str) -> bool:
    """Whether two cuts of one dim cannot be at a time: the parts of the outer one are no whole blocks of the inner.

    The outer one is of all axes together that cut it: parts of 2 x 2 ranks are no whole blocks where there are two.
    """
    if goal.kind != "cut" or states.kind != "cut" or goal.dim != states.dim or goal.outer == states.outer:
        return False
    coarse, fine = sorted((goal, states), key=lambda s: s.outer)
    if coarse.parts:
        unit = coarse.outer * coarse.block // fine.outer
        return not (alike(coarse.parts) and alike(fine.parts)) or scaled(coarse.parts, 1, unit) is None
    outer, blocks = coarse.outer, fine.outer
    then = {**now, axis: goal}
    k = math.prod(sizes[a] for a, s in then.items() if (s.kind, s.dim, s.outer) == ("cut", goal.dim, outer))
    return blocks % (outer * k) != 0


def here(state: State, axis: str, others: Mapping[str, State], sizes: Mapping[str, int]) -> State:
    """A cut as it is one of what a rank has by the cuts of other axes: fewer blocks stand before it."""
    if state.kind != "cut":
        return state
    outer, parts = state.outer, state.parts
    for other, own in others.items():
        if other != axis and own.kind == "cut" and own.dim == state.dim:
            outer //= sizes[other] if own.outer < state.outer else 1
            if parts and own.outer > state.outer:  # what is cut within a unit leaves smaller ones, alike on all ranks
                parts = scaled(parts, 1, sizes[other]) or ()
    return cut(state.dim, outer, parts)


# ---------------------------------------------------------------- what it costs


def costs(
    change: Change, nbytes: float, source: States, sizes: Mapping[str, int], *, differentiable: bool
) -> Iterator[Cost]:
    """What each part of a change costs, of a tensor of so many bytes that lies so before. `sizes`: of all axes."""
    own = nbytes / math.prod(sizes[axis] for axis, state in source.items() if part_dim(state) is not None)
    for one in change:
        if isinstance(one, Joint):
            axes = tuple(axis for axis in source if any(axis == step.axis for step in one.apart))
            ways = one.there, one.back or ()
            there, back = map(sequences.received, ways)
            yield Cost(axes, _described(ways[0]), _described(ways[1]), there, back)
        else:
            yield _cost(one, own, sizes[one.axis], differentiable=differentiable)
        for axis, a, b in apart((one,)):
            own *= sizes[axis] if part_dim(a) is not None else 1
            own /= sizes[axis] if part_dim(b) is not None else 1


def _cost(step: StateStep, own: float, k: int, *, differentiable: bool) -> Cost:
    """Of a step over an axis of `k` ranks, each of which has `own` bytes before it."""
    found = way(step.source, step.target) or one_collective.way(step.source, step.target)
    forward, backward = found[0], found[1] if differentiable else ""
    together = own * (k if part_dim(step.source) is not None else 1)
    return Cost((step.axis,), forward, backward, received(forward, together, k), received(backward, together, k))


def _described(steps: Sequence[sequences.CollectiveStep]) -> str:
    """The collectives that send something; what a rank does by itself where none does."""
    return " + ".join(_sent(steps) or [step.collective for step in steps])
