"""What a rank tells its trace: `recorder.Recorder` writes it, `UNTRACED` takes the same and does nothing.

Whoever trains is handed one of the two.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from torch import nn

from tangram.tracing.files.format import Phase
from tangram.tracing.planned import PlannedCalls, ProgramCheck
from tangram.tracing.spikes import StepNumbers
from tangram.tracing.weights import WeightGroup


class Trace:
    """What a rank tells of itself; this one takes everything and does nothing."""

    def step(self, number: int, length: int = 0) -> None:
        """A step begins, from 1, with its data. `length`: of its rows, by which the sizes of its calls differ."""

    def phase(self, phase: Phase) -> None:
        """From now on it does this."""

    def not_finite(self, flags: int) -> None:
        """This rank's own part of the step's loss or gradient is not finite (`format`'s flags)."""

    def first_not_finite(self, words: str, layer: str) -> None:
        """Where numbers of a step that was not finite began to be so, over all ranks; "" where no layer is known."""

    def label(self, modules: Iterable[nn.Module]) -> None:
        """The parts of the model that will run, whose modules and parameters are called by their paths."""

    def expect(self, planned: PlannedCalls, program: ProgramCheck | None = None) -> None:
        """Before the first step: the calls of a step that the plan says; `program` is told of each forward's."""

    def numbers(self, numbers: StepNumbers) -> None:
        """What the step has come to, before its update; all of it finite."""

    def experts(self, loads: Mapping[str, Sequence[int]]) -> None:
        """By layer how often each expert was chosen of late, over all ranks."""

    def peaks(self, peaks: Mapping[str, tuple[float, float]]) -> None:
        """By layer the largest activation and the largest attention logit of this rank's part of the step, in those
        steps in which somebody looks."""

    def weights(self, groups: Sequence[WeightGroup], trained: Sequence[str] = (), *, in_backward: bool = False) -> None:
        """The weights whose bits are summed now and then, and of each trained parameter the layer.

        `in_backward`: they are updated then, too.
        """

    def failure(self) -> str:
        """Why nothing is written any more, once; "" while all is well."""
        return ""


UNTRACED = Trace()
"""It has no state, so one is enough."""
