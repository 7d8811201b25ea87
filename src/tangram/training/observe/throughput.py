"""How fast a run was, worked out from its events: seconds, tokens and FLOPs of each step.

A step's time is that of training alone: what the evaluation or the save before it took is not in it. The clock of the
events goes on during both, so it is taken off where an event tells how long it was.
"""

import math
from collections.abc import Callable
from itertools import pairwise
from statistics import median

from tangram.training.observe.events import Evaluated, Record, StepDone

FIRST_FEW = (
    3  # steps in which caches fill and kernels are compiled; a median over the others says what a run settles at
)


def duration(
    step: StepDone, before: StepDone | None, evaluated: Evaluated | None = None, blocked: float = 0.0
) -> float | None:
    """How long a step took; None where that cannot be told.

    `before` is the step that came just before it in this process group, `evaluated` what was measured between the two
    and `blocked` how long training stood still there for a checkpoint.
    """
    if before is None:
        return step.seconds if step.step == step.first and step.seconds > 0 else None
    if before.step != step.step - 1:
        return None
    if evaluated is not None and before.seconds <= evaluated.seconds < step.seconds:
        return step.seconds - evaluated.seconds  # a save comes before the evaluation, so it is taken off too
    whole = step.seconds - before.seconds
    return (whole - blocked if blocked < whole else whole) if whole > 0 else None


def durations(record: Record) -> list[float | None]:
    """How long each step of the record took."""
    evaluated = {event.step: event for event in record.evaluations}
    blocked = {event.step: event.blocked_seconds for event in record.saves}
    after = [
        duration(step, before, evaluated.get(before.step), blocked.get(before.step, 0.0))
        for before, step in pairwise(record.steps)
    ]
    return [*(duration(step, None) for step in record.steps[:1]), *after]


def step_seconds(record: Record) -> float | None:
    """The median time of a step, the first few left out."""
    return _settled(record, lambda _, took: took)


def tokens_per_s(record: Record) -> float | None:
    """The median rate over the steps, the first few left out."""
    return _settled(record, lambda step, took: step.tokens / took)


def tflops(record: Record) -> float | None:
    """The median of what the model computed in a second, over all ranks, in 10^12 FLOPs; None where that is unknown."""
    return _settled(record, lambda step, took: step.flops / took / 1e12 if step.flops else None)


def mfu(record: Record) -> float | None:
    """Model FLOPs utilisation: the median share of what the devices can do; None where either is unknown."""
    return _settled(record, share_of_peak)


def share_of_peak(step: StepDone, took: float) -> float | None:
    """The model FLOPs utilisation of one step that took so many seconds."""
    return step.flops / took / step.peak_flops if step.flops and step.peak_flops else None


def _settled(record: Record, figure: Callable[[StepDone, float], float | None]) -> float | None:
    """The median of a figure over the steps, the first few left out where there are as many again."""
    timed = [(step, took) for step, took in zip(record.steps, durations(record), strict=True) if took]
    if len(timed) >= 2 * FIRST_FEW:
        timed = timed[FIRST_FEW:]
    known = [value for step, took in timed if (value := figure(step, took)) is not None and math.isfinite(value)]
    return median(known) if known else None
