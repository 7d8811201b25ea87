"""Whether a step is applied: the scale of the loss, and what happens to a step that has gone astray.

Everything is decided from the loss and the norm of a step, which the one all-reduce of the step has made the same on
all ranks. So no rank has to be asked, and all skip alike: an overflow on one rank makes the norm of all infinite.

    float16     the loss is multiplied by a scale before the backward, so that small gradients stay above zero. A norm
                that is not finite skips the step and halves the scale; `precision.scale.every` good steps in a row
                double it (the arithmetic of torch.amp.GradScaler, but that the scale stays at 1 or more)
    not finite  of a loss or a norm for which no scale is to blame: `run.on_nonfinite`
    diverged    losses above `run.diverged.above` times the median of the last ones: the same

A skipped step counts as a step: its samples are not given again, and the learning rate goes on with the steps. The
optimiser has not seen it. What steps are judged by, the scale and the losses of which the median is taken, is in a
checkpoint, so a run that goes on judges as one that was never interrupted.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, replace
from statistics import median

from torch import Tensor

from tangram.errors import UserError
from tangram.schema.job import DivergencePlan, Job
from tangram.schema.precision import ScalePlan


@dataclass(frozen=True)
class Scale:
    """What the loss is multiplied by before the backward."""

    value: float
    good: int = 0
    """Steps that were applied since it changed."""

    def after(self, finite: bool, plan: ScalePlan) -> Scale:
        if not finite:
            return Scale(max(1.0, self.value * plan.backoff))
        if self.good + 1 == plan.every:
            return Scale(self.value * plan.growth)
        return replace(self, good=self.good + 1)


@dataclass(frozen=True)
class Judged:
    """What is kept of steps that were judged, beside the scale."""

    astray: int = 0
    """Steps in a row that were skipped, but for overflows that lower the scale."""
    high: int = 0
    """Losses in a row that were far above the median."""
    losses: tuple[float, ...] = ()
    """Of which the median is taken."""


class AstrayError(FloatingPointError):
    """A step that the plan stops at: its loss or its gradient is not finite, or its loss has diverged."""


class NotFiniteError(AstrayError):
    """Its loss or its gradient is not finite."""


class Guard:
    """What a job knows of the steps before, to judge the next one by. The same on every rank."""

    def __init__(
        self, plan: Job, scale: float = 0.0, good: int = 0, skipped: int = 0, judged: Judged = Judged()
    ) -> None:
        """`scale`, `good`, `skipped` and `judged` as a run left them; 0: as a run begins."""
        self._policy, self._plan = plan.run, plan.precision.scale
        self.scale = Scale(1.0)
        """Of the next step."""
        if scaled := plan.precision.compute == "float16":
            self.scale = Scale(scale, good) if scale else Scale(plan.precision.scale.initial)
        self.skipped = skipped
        """Steps in the whole run."""
        self.scaled = scaled
        """Whether the loss is scaled at all."""
        self.astray = judged.astray
        """Steps in a row that were skipped, but for overflows that lower the scale."""
        self._losses = Losses(plan.run.diverged, judged)

    @property
    def judged(self) -> Judged:
        """For whoever goes on."""
        return Judged(self.astray, self._losses.high, (*self._losses.last,))

    def judge(self, loss: float, norm: float) -> str | None:
        """Why a step of this loss and norm (before clipping, of the unscaled gradient) is skipped; None: it is applied.

        Raises AstrayError where the plan stops.
        """
        finite = math.isfinite(norm) and math.isfinite(loss)
        if self.scaled and not finite and self.scale.value > 1:
            before, self.scale = self.scale, self.scale.after(False, self._plan)
            self.skipped += 1
            return f"the gradient overflows at a loss scale of {before.value:g}: it is {self.scale.value:g} now"
        reason = _not_finite(loss, norm) or self._losses.diverged(loss)
        if reason is None:
            self.astray = 0
            if self.scaled:
                self.scale = self.scale.after(True, self._plan)
            return None
        kind = AstrayError if finite else NotFiniteError
        if self._policy.on_nonfinite == "stop":
            raise kind(f"{reason}: a smaller optimiser.lr may help")
        self.astray += 1
        if self.astray > self._policy.skips_in_a_row:
            raise kind(
                f"{reason}, and {self._policy.skips_in_a_row} steps in a row were skipped already "
                "(run.skips_in_a_row): a smaller optimiser.lr may help"
            )
        self.skipped += 1
        return reason


def _not_finite(loss: float, norm: float) -> str | None:
    if not math.isfinite(loss):
        return f"the loss is {loss}"
    return None if math.isfinite(norm) else f"the gradient norm is {norm}"


class Losses:
    """The last losses, to say whether another one has diverged from them."""

    def __init__(self, plan: DivergencePlan, before: Judged) -> None:
        self._plan = plan
        self.last: deque[float] = deque(before.losses, maxlen=plan.window)
        self.high = before.high

    def diverged(self, loss: float) -> str | None:
        """Why this one has: it and as many before it as the plan says are above a multiple of the median."""
        if not self._plan.above:
            return None
        if len(self.last) < self._plan.window:
            self.last.append(loss)
            return None
        usual = median(self.last)
        if loss <= self._plan.above * usual:
            self.high = 0
            self.last.append(loss)
            return None
        self.high += 1
        if self.high < self._plan.steps:
            return None
        return (
            f"the loss has diverged: it is {loss:.4g}, and in {self.high} steps in a row it was above "
            f"{self._plan.above:g} times the median of {usual:.4g} before"
        )


def guard_for(plan: Job, guard: Guard | None) -> Guard:
    """The guard that is given, or one for a single step. Raises UserError for none where the loss is scaled."""
    if guard is None and plan.precision.compute == "float16":
        raise UserError("the loss of a float16 computation is scaled: make one Guard(plan), and give it to every step")
    return guard or Guard(plan)


def is_finite(tensor: Tensor) -> bool:
    """Whether all values are, without memory for an answer of each."""
    if not tensor.is_floating_point() or not tensor.numel():
        return True
    return all(bool(one.isfinite()) for one in tensor.detach().aminmax())


def must_be_finite(what: str, number: float) -> None:
    """FloatingPointError for a number that says that training has gone astray; it is the same on every rank."""
    if not math.isfinite(number):
        raise FloatingPointError(f"{what} is {number}: a smaller optimiser.lr may help")
