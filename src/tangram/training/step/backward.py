"""The forwards and backwards of a step on one rank: its gradients, and its parts of the sums of the global batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tangram.tracing.files.format import Phase
from tangram.tracing.trace import Trace
from tangram.training.data import RankBatches
from tangram.training.mesh.drawing import Draws, drawing
from tangram.training.objective.loss import Logits
from tangram.training.objective.model_inputs import model_inputs
from tangram.training.parallel.model import ParallelModel
from tangram.training.parallel.pipeline import ModelPart, PipelineRun
from tangram.training.step.objectives import LossSum, Objective, Sums, objective_of


class BackwardSums(NamedTuple):
    """A rank's parts of a global batch's sums, in float64."""

    loss: Tensor
    """A scalar."""
    figures: Tensor
    """What the objective tells, summed over samples."""


def backward(
    model: ParallelModel, batches: RankBatches, loss_sum: LossSum | None = None, scale: float = 1.0
) -> BackwardSums:
    """Add the gradients of this rank's micro-batches; its part of the global batch's loss.

    The gradients are `scale` times as large; a power of two rounds nothing.
    """
    objective = objective_of(model.plan, loss_sum)
    model.trace.phase(Phase.FORWARD if model.pipeline is None else Phase.PIPELINE)  # references are run, too
    references = objective.references(model, batches.micro)
    with drawing(model.draw_sources, model.plan.seed, batches) as draws:
        if model.pipeline is not None:
            return _backward_of_stage(model.pipeline, batches, objective, references, draws, scale)
        return _backward_of_model(model.parts[0], batches, objective, references, draws, scale, model.trace)


def _backward_of_model(
    part: ModelPart,
    batches: RankBatches,
    objective: Objective,
    references: Sequence[Tensor | None],
    draws: Draws,
    scale: float,
    trace: Trace,
) -> BackwardSums:
    losses: list[Tensor] = []
    figures: list[Tensor] = []
    routers, capacity = part.routers, part.capacity
    for micro, batch in enumerate(batches.micro):
        draws.begin(micro)
        if part.data_parallel is not None:
            part.data_parallel.before(last=micro + 1 == len(batches.micro))
        if capacity is not None:
            capacity.before(model_inputs(part.tokens, batch))
        trace.phase(Phase.FORWARD)
        sums = objective.of_part(part, batch, references[micro])
        loss = trained = objective.loss(sums, batches)
        if routers is not None:
            ordered = model_inputs(part.tokens, batch).batch
            trained = loss + routers.loss(routers.sums(ordered.labels_BS), batches.counted)
        trace.phase(Phase.BACKWARD)
        (trained * scale if scale != 1 else trained).backward()
        if routers is not None:
            routers.forget()
        losses.append(loss.detach())
        figures += [] if sums.figures is None else [sums.figures]
    return _summed(losses, figures, objective.no_sums(batches.micro[0].inputs_BS.device))


def _backward_of_stage(
    pipeline: PipelineRun,
    batches: RankBatches,
    objective: Objective,
    references: Sequence[Tensor | None],
    draws: Draws,
    scale: float,
) -> BackwardSums:
    """The same for a stage; its part of the sums is nothing but on the last."""
    objective.refuse_own()
    figures: list[Tensor] = []

    def loss(logits: Logits, micro: int) -> Tensor:
        sums = objective.sums(logits, batches.micro[micro], references[micro])
        figures.extend([] if sums.figures is None else [sums.figures])
        return objective.loss(sums, batches) * scale

    losses = pipeline.backward(batches.micro, loss, draws, lambda r, sums: r.loss(sums, batches.counted) * scale)
    found = _summed(losses, figures, objective.no_sums(batches.micro[0].inputs_BS.device))
    return found._replace(loss=found.loss / scale)


def _summed(losses: Sequence[Tensor], figures: Sequence[Tensor], none: Sums) -> BackwardSums:
    """`none`: of no losses."""
    assert none.figures is not None
    return BackwardSums(
        torch.stack([*losses]).double().sum() if losses else none.terms[0],
        torch.stack([*figures]).sum(0) if figures else none.figures,
    )
