"""What one operator does when nothing is known but what it is given: over each axis the move that sends least.

The moves are those of a derivation (`derive.moves`), and so are the prices, forward and backward. But where a
derivation weighs the whole graph, here each operator takes the cheapest for itself: it goes on with a cut that it is
given, or undoes it, and begins none of its own. That can send more bytes; it cannot give other values. A parameter is
used where it lies.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Protocol

from tangram.sharding.derive.collectives_between import Comm, Label, comms, labels
from tangram.sharding.derive.problem.states import SAME, SUM, State, received
from tangram.sharding.eager.trace_function import TracedOperator
from tangram.sharding.ops.bind import BoundOp
from tangram.sharding.propagation.axis_choices import ALL_REDUCE, REDUCE_SCATTER

NEVER = float("inf")


class TensorPlacement(Protocol):
    """A tensor as a choice sees it."""

    @property
    def states(self) -> Mapping[str, State]:
        """How it lies over each axis."""
        ...

    def price(self, axis: str, target: State) -> float:
        """Bytes that a rank receives to have it so, forward and backward."""
        ...


def decide(
    operator: TracedOperator,
    bound: BoundOp,
    inputs: Sequence[TensorPlacement | None],
    sizes: Mapping[str, int],
    nbytes: Sequence[float],
    differentiable: bool,
    fixed: Collection[int] = (),
) -> dict[str, Comm] | None:
    """Over each axis what the operator does; None where all that it can do moves a parameter or what is `fixed`.

    `sizes`: of the axes; `nbytes`: of the whole results; `fixed`: places that are written, and have to stay.
    """
    found: dict[str, Comm] = {}
    for axis, k in sizes.items():
        there = [() if one is None else (one.states[axis],) for one in inputs]
        if all(state == SAME for some in there for state in some):
            needs = tuple(SAME if one is not None else None for one in inputs)
            found[axis] = Comm(None, needs, (SAME,) * len(bound.outputs), 1.0)
            continue
        some = labels(bound, [*there, *[()] * len(bound.outputs)], k)
        fitting = [one for one in some if _is_even(bound, one, k, found, sizes)]
        options = comms(operator.call, bound, fitting, k, [differentiable] * len(bound.outputs))
        best = min(options, key=lambda one: _cost(operator, one, inputs, axis, k, nbytes, differentiable, fixed))
        if _cost(operator, best, inputs, axis, k, nbytes, differentiable, fixed)[0] == NEVER:
            return None
        found[axis] = best
    return found


def _cost(
    operator: TracedOperator,
    move: Comm,
    inputs: Sequence[TensorPlacement | None],
    axis: str,
    k: int,
    nbytes: Sequence[float],
    differentiable: bool,
    fixed: Collection[int],
) -> tuple[float, int, float]:
    """Bytes; of equal ones what passes on a sum alone, and last what others have to wait with; then what works less."""
    total = 0.0
    own = [one.states[axis] for one in inputs if one is not None]
    for place, (one, need) in enumerate(zip(inputs, move.inputs, strict=True)):
        if one is None or need is None:
            continue
        if place in operator.written:
            now = one.states[axis]
            moves_nothing = {now.kind, need.kind} <= {"same", "several"}  # would be a view, and written through it
            if now != need and (differentiable or not moves_nothing) and (place in fixed or moves_nothing):
                return NEVER, 0, 0.0
            back = [out for out, v in zip(move.outputs, operator.results, strict=False) if v == operator.inputs[place]]
            if any(out != need for out in back):
                return NEVER, 0, 0.0
        total += one.price(axis, need)
    waits = move.label is None and SUM in move.outputs
    for out, n in zip(move.outputs, nbytes, strict=False):
        if out == SUM:
            total += received(ALL_REDUCE if waits else REDUCE_SCATTER, n, k)
    order = 0 if not waits else 1 if any(state != SUM for state in own) else -1
    return total, order, move.share


def _is_even(bound: BoundOp, label: Label, k: int, done: Mapping[str, Comm], sizes: Mapping[str, int]) -> bool:
    """Whether a cut is even beside those of the axes before."""
    n = bound.sizes[label.factor] // label.inner
    for axis, move in done.items():
        own = move.label
        if own is None or own.factor != label.factor:
            continue
        if own.inner == label.inner:
            n //= sizes[axis]
        elif own.inner < label.inner:
            if label.inner % (own.inner * sizes[axis]):
                return False
        elif (own.inner // label.inner) % k:
            return False
    return n % k == 0
