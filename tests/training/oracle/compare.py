"""Compare a run with the oracle: every loss, and every element of every gradient and value, by parameter."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from tests.training.oracle.trace import Tensors, Trace


@dataclass(frozen=True)
class Bounds:
    """How far a run may be from the oracle, relative: single losses, and each parameter in the L2 norm."""

    gradients: float = 1e-5
    values: float = 1e-5
    losses: float = 1e-5
    """Of the first 20 steps."""
    later: float = 1e-4
    """Of the losses after them."""


def findings(ours: Trace, oracle: Trace, bounds: Bounds = Bounds()) -> list[str]:
    """A sentence for everything that differs by more than the bounds; all that the oracle has must be there."""
    found: list[str] = []
    if len(ours.losses) != len(oracle.losses):
        found.append(f"{len(ours.losses)} losses, not {len(oracle.losses)}")
    for step, (one, right) in enumerate(zip(ours.losses, oracle.losses, strict=False), 1):
        if not abs(one - right) <= (bounds.losses if step <= 20 else bounds.later) * abs(right):
            found.append(f"the loss of step {step} is {one}, not {right}")
    for what, one, right, most in (
        ("gradient", ours.gradients, oracle.gradients, bounds.gradients),
        ("value", ours.values, oracle.values, bounds.values),
    ):
        if one.keys() != right.keys() or not right:
            found.append(f"{what}s of the steps {sorted(one)}, not {sorted(right)}")
        for step in one.keys() & right.keys():
            found += unlike_names(one[step], right[step], what)
            found += [
                f"the {what} of {name} at step {step} differs by {apart:.1e}"
                for name, apart in apart_by_name(one[step], right[step]).items()
                if not apart <= most
            ]
    return found


def completed(traces: Sequence[Trace]) -> list[Trace]:
    """Each trace with what only other ranks have, whose stages of the model are others."""

    def all_of(one: Mapping[int, Tensors], every: Sequence[Mapping[int, Tensors]]) -> dict[int, Tensors]:
        return {step: {k: v for own in (*every, one) for k, v in own.get(step, {}).items()} for step in one}

    return [
        replace(
            trace,
            gradients=all_of(trace.gradients, [other.gradients for other in traces]),
            values=all_of(trace.values, [other.values for other in traces]),
        )
        for trace in traces
    ]


def unlike_names(ours: Tensors, oracle: Tensors, what: str) -> list[str]:
    """A sentence for each parameter that only one side has, and if there is none to compare."""
    found = [f"there is no {what} of {name}" for name in sorted(oracle.keys() - ours.keys())]
    found += [f"there is a {what} of {name}" for name in sorted(ours.keys() - oracle.keys())]
    return found if oracle else [*found, f"there is no {what} to compare"]


def apart_by_name(ours: Tensors, oracle: Tensors) -> Mapping[str, float]:
    """The relative L2 difference of each parameter that both have.

    Infinite for another shape, and where the oracle's is zero although ours is not.
    """
    found: dict[str, float] = {}
    for name in sorted(ours.keys() & oracle.keys()):
        one, right = ours[name].astype(np.float64), oracle[name].astype(np.float64)
        if one.shape != right.shape:
            found[name] = float("inf")
            continue
        size, apart = float(np.linalg.norm(right)), float(np.linalg.norm(one - right))
        found[name] = apart / size if size else (0.0 if apart == 0 else float("inf"))
    return found


def worst(ours: Trace, oracle: Trace) -> float:
    """The largest relative difference of anything that both have."""
    apart = [abs(one - right) / abs(right) for one, right in zip(ours.losses, oracle.losses, strict=False)]
    for one, right in ((ours.gradients, oracle.gradients), (ours.values, oracle.values)):
        for step in one.keys() & right.keys():
            apart += apart_by_name(one[step], right[step]).values()
    return max(apart)
