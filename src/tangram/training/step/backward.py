"""The forwards and backwards of a step on one rank: its gradients, and its parts of the sums of the global batch."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from tangram.tracing.files.format import Phase
from tangram.tracing.trace import Trace
from tangram.training.data import RankBatches
from tangram.training.mesh.drawing import Draws, drawing
from tangram.training.objective.loss import Logits
from tangram.training.objective.packing import model_inputs
from tangram.training.objective.router_loss import Routers
from tangram.training.parallel.model import ParallelModel
from tangram.training.parallel.pipeline import ModelPart, PipelineRun
from tangram.training.step.objectives import LossSum, Objective, Sums, objective_of
from tangram.training.step.optimiser_step import LocalGradient, local_gradient, norms_of, round_for


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
    compared: dict[int, Any] = {}

    def ahead(micro: int) -> None:
        compared[micro] = references[micro]

    def loss(logits: Logits, micro: int) -> Tensor:
        sums = objective.sums(logits, batches.micro[micro], compared.pop(micro))
        figures.extend([] if sums.figures is None else [sums.figures])
        return objective.loss(sums, batches) * scale

    def of_routers(routers: Routers, sums: Tensor) -> Tensor:
        return routers.loss(sums, batches.counted) * scale

    losses = pipeline.backward(batches.micro, loss, draws, of_routers, ahead)
    found = _summed(losses, figures, objective.no_sums(batches.micro[0].inputs_BS.device))
    return found._replace(loss=found.loss / scale)


def _summed(losses: Sequence[Tensor], figures: Sequence[Tensor], none: Sums) -> BackwardSums:
    """`none`: of no losses."""
    assert none.figures is not None
    return BackwardSums(
        torch.stack([*losses]).double().sum() if losses else none.terms[0],
        torch.stack([*figures]).sum(0) if figures else none.figures,
    )


@contextmanager
def early_updates(model: ParallelModel, optimiser: Optimizer, first_row: int) -> Generator[dict[str, LocalGradient]]:
    """Within, a backward updates what the plan says is updated early; by name what of each gradient is left.

    Each parameter by its gradient as soon as that is whole, which is freed then: so at most one gradient is there at a
    time, of FSDP those of a unit. A gradient that ranks of model axes have still to add up, or to compare, waits for
    the end of the backward (`Plan.updates_early`), and is used as without this.

    `first_row`: of the step. The learning rate is that which the optimiser has.
    """
    used: dict[str, LocalGradient] = {}
    if not model.plan.optimiser.in_backward:
        yield used
        return
    names = {p: name for name, p in model.module.named_parameters() if p.requires_grad}

    def update(group: dict[str, Any], parameter: Tensor) -> None:
        name = names[parameter]  # pyright: ignore[reportArgumentType]  it is a Parameter
        if name in used:
            raise RuntimeError(f"{name} got its gradient twice in one backward")
        own = local_gradient(name, parameter, model.plain)
        used[name] = LocalGradient(own.part.new_empty(0), own.cut, norms_of([own])[0])
        round_for(optimiser, model.plan.seed, first_row)
        # Its states are kept by parameter, so an optimiser of this one alone steps as it would among all.
        every = optimiser.param_groups
        optimiser.param_groups = [{**group, "params": [parameter]}]
        try:
            optimiser.step()
        finally:
            optimiser.param_groups = every
        parameter.grad = None

    hooks = [
        p.register_post_accumulate_grad_hook(partial(update, group))
        for group in optimiser.param_groups
        for p in group["params"]
        if model.plan.updates_early(names[p])
    ]
    try:
        yield used
    finally:
        for hook in hooks:
            hook.remove()
