"""A model that was made parallel for a run, as a value that is passed to those who need it.

Made once, by `training.parallel.apply`. Nothing is hidden on the module: whoever has that alone (an optimiser, a
checkpoint) sees parameters and buffers.

The reference of preferences is the model with the values that its trained parameters began with, kept beside the
others, on each rank its part of each: of adapters little, else as much as the parameters again. What is computed with
them is computed by the same model, so it lies and communicates alike on any mesh. A teacher is a model of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from tangram.schema.plan import Plan
from tangram.tracing.trace import UNTRACED, Trace
from tangram.training.data import Batch
from tangram.training.mesh.drawing import DrawSource
from tangram.training.mesh.local_parts import PlainPart, PlainParts, local
from tangram.training.mesh.world import World
from tangram.training.objective.cached_teacher import TopLogits
from tangram.training.parallel.fsdp import resharded
from tangram.training.parallel.layer_stream import LayerStream
from tangram.training.parallel.pipeline import ModelPart, PipelineRun


@contextmanager
def evaluating(module: nn.Module) -> Generator[None]:
    """Within, a module computes in evaluation and without gradients. All ranks call it alike."""
    training = module.training
    module.eval()
    try:
        with torch.no_grad(), resharded(module):
            yield
    finally:
        module.train(training)


class Reference:
    """A copy of this rank's parts of what is trained of a module, as it is now."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self.before_write: Callable[[], None] = lambda: None
        """Called before the module's parameters are exchanged: somebody may be copying them for a checkpoint."""
        self._kept = {name: part.clone() for name, part in self._trained()}

    @property
    def kept(self) -> list[Tensor]:
        return [*self._kept.values()]

    @contextmanager
    def used(self) -> Generator[None]:
        """Within, the module computes with them, in evaluation and without gradients. All ranks call it alike."""
        self._exchange()
        try:
            with evaluating(self._module):
                yield
        except BaseException:
            with suppress(RuntimeError):  # FSDP leaves some gathered after a forward that failed
                self._exchange()
            raise
        self._exchange()

    def _trained(self) -> list[tuple[str, Tensor]]:
        """Asked each time: FSDP changes where parameters lie."""
        named = [(name, p.detach()) for name, p in self._module.named_parameters() if p.requires_grad]
        return [(name, local(p)) for name, p in named]

    def _exchange(self) -> None:
        """One tensor at a time, so that no third copy of all of them is ever there."""
        self.before_write()
        for name, part in self._trained():
            now = part.clone()
            part.copy_(self._kept[name])
            self._kept[name].copy_(now)


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
    teacher: ParallelModel | None = None
    """What a student learns from, on the same mesh."""
    cached_teacher: Callable[[Batch], TopLogits] | None = None
    """What was kept of one, in its place."""

    stream: LayerStream | None = None
    """What copies the parameters of layers, where they are streamed."""

    @property
    def draw_sources(self) -> Sequence[DrawSource]:
        """For `training.mesh.drawing.drawing`."""
        return [draws for _, draws in self.named_draw_sources]

    @property
    def named_draw_sources(self) -> Sequence[tuple[str, DrawSource]]:
        """With the name of each one's class."""
        return [(type(part.module).__name__, part.draws) for part in self.parts if part.draws is not None]

    def sum_gradients(self) -> None:
        """Add up, once a step, gradients of which ranks of model axes, or two stages of a pipeline, have a part each.

        Collective over them.
        """
        for part in self.parts:
            if part.derived is not None:
                part.derived.sum_gradients()
        if self.pipeline is not None:
            self.pipeline.sum_tied()

    @property
    def counted_elsewhere(self) -> frozenset[str]:
        """The trained parameters whose gradients another rank counts in the norm: tied ones, but on their own stage."""
        if self.pipeline is None:
            return frozenset()
        tied = [name for some in self.pipeline.tied().values() for name in some]
        return frozenset(name for name in tied if self.plan.places_of(name)[0] != self.world.stage)
