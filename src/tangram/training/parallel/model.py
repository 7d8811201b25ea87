"""A model that was made parallel for a run, as a value that is passed to those who need it.

Made once, by `training.parallel.apply`. Nothing is hidden on the module: whoever has that alone (an optimiser, a
checkpoint) sees parameters and buffers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import nn

from tangram.schema.plan import Plan
from tangram.tracing.trace import UNTRACED, Trace
from tangram.training.mesh.drawing import DrawSource
from tangram.training.mesh.local_parts import PlainPart, PlainParts
from tangram.training.mesh.world import World
from tangram.training.parallel.model_part import ModelPart
from tangram.training.parallel.pipeline import PipelineRun
from tangram.training.parallel.reference import Reference


@dataclass(frozen=True, eq=False)
class ParallelModel:
    """This rank's part of a model, and how it is one."""

    module: nn.Module
    """With all that this rank has; of a pipeline its forward is not called, but those of its stages."""
    plan: Plan
    world: World
    parts: tuple[ModelPart, ...]
    """What runs here: the model, or its stages of this rank in order."""
    pipeline: PipelineRun | None = None
    """What runs the stages; None where the model has none."""
    plain: PlainParts = field(default_factory=dict[str, PlainPart])
    """Parameters that model axes cut in parts that torch has no placement for."""
    trace: Trace = UNTRACED
    """Where this rank says what it does."""
    reference: Reference | None = None
    """What a loss of preferences compares with."""

    @property
    def draw_sources(self) -> Sequence[DrawSource]:
        """For `training.mesh.drawing.drawing`."""
        return [draws for _, draws in self.named_draw_sources]

    @property
    def named_draw_sources(self) -> Sequence[tuple[str, DrawSource]]:
        """With the name of each one's class."""
        return [(type(part.module).__name__, part.draws) for part in self.parts if part.draws is not None]

    def sum_gradients(self) -> None:
        """Add up, once a step, gradients of which the ranks of model axes have a part each. Collective over them."""
        for part in self.parts:
            if part.derived is not None:
                part.derived.sum_gradients()
