"""The logits of a model that was made parallel, and the mean loss of held-out samples."""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tangram.training.data import Batch, Corpus, held_out_batches
from tangram.training.objective.loss import Logits
from tangram.training.objective.packing import TokenOrder, logits_in_order
from tangram.training.objective.step_guard import must_be_finite
from tangram.training.parallel.fsdp import resharded
from tangram.training.parallel.model import ParallelModel
from tangram.training.parallel.pipeline import ModelPart
from tangram.training.step.objectives import NEXT_TOKEN, LossSum, Objective, Sums, objective_of


def logits_of(model: ParallelModel, batch: Batch) -> Tensor:
    """A Hugging Face model's logits, whole and in the order of the batch.

    Of a stage of a pipeline without gradients, and on every stage.
    """
    if model.pipeline is not None:
        return model.pipeline.logits(batch)
    return logits_in_order(model.module, model.parts[0].tokens, batch)


@dataclass(frozen=True)
class Measured:
    """Of samples that are not trained on."""

    loss: float
    figures: Mapping[str, float]
    """What the objective tells beside it."""


@torch.no_grad()
def evaluate(model: ParallelModel, batches: Iterable[Batch], loss_sum: LossSum | None = None) -> float:
    """The mean loss over all DP ranks' batches: per counted token, or as the plan's task has it."""
    return measure(model, batches, objective_of(model.plan, loss_sum)).loss


@torch.no_grad()
def measure(model: ParallelModel, batches: Iterable[Batch], objective: Objective) -> Measured:
    """The loss over all DP ranks' batches, with what else the objective tells. Collective over all ranks."""
    pipeline = model.pipeline
    if objective.taught:  # of one batch at a time, as its logits are large
        batches = list(batches)
        references = (objective.references(model, [batch])[0] for batch in batches)
    elif objective.rows is not None:
        batches = list(batches)
        references = objective.references(model, batches)
    else:
        references = itertools.repeat(None)
    model.module.eval()
    if pipeline is not None:
        objective.refuse_own()

    def of_batch(batch: Batch, reference: Any) -> Sums:
        if pipeline is None:
            return objective.of_part(model.parts[0], batch, reference)
        found = objective.no_sums(batch.inputs_BS.device)

        def keep(logits: Logits, micro: int) -> Tensor:
            nonlocal found
            found = objective.sums(logits, batch, reference)
            return found.terms[0]

        pipeline.losses([batch], keep)
        return found

    each = ((batch, of_batch(batch, reference)) for batch, reference in zip(batches, references, strict=False))
    return _means(each, objective, model.world.group, counts=pipeline is None or pipeline.is_last)


@torch.no_grad()
def evaluate_unsharded(
    module: nn.Module, batches: Iterable[Batch], tokens: TokenOrder | None = None, objective: Objective = NEXT_TOKEN
) -> float:
    """The mean loss, by an objective without a reference, of a model that this process has all of."""
    module.eval()
    part = ModelPart(module, tokens)
    return _means(((batch, objective.of_part(part, batch, None)) for batch in batches), objective, None).loss


def _means(
    each: Iterable[tuple[Batch, Sums]], objective: Objective, group: dist.ProcessGroup | None, counts: bool = True
) -> Measured:
    """`counts`: whether this rank has the loss of its batches; of a stage that is not the last it is 0."""
    totals: Tensor | None = None
    for batch, sums in each:
        figures = [] if sums.figures is None else [sums.figures]
        found = torch.cat([torch.stack([*sums.terms]).double(), objective.counts(batch) * counts, *figures])
        totals = found if totals is None else totals + found
    if totals is None:
        raise ValueError("there is no batch to evaluate")
    found = sum_over(group, totals)  # of tensor-parallel ranks all are multiples
    terms, over, per_figure, figures = _cut(found, len(objective.over), len(objective.over), 1)
    loss = sum(term / count for term, count in zip(terms, over, strict=True))
    return Measured(loss, {name: x / per_figure[0] for name, x in zip(objective.figures, figures, strict=True)})


def _cut(values: Sequence[float], *sizes: int) -> list[Sequence[float]]:
    """One after the other, and the rest."""
    ends = [0, *itertools.accumulate(sizes), len(values)]
    return [values[begin:end] for begin, end in itertools.pairwise(ends)]


def held_out_loss(model: ParallelModel, corpus: Corpus) -> float:
    """The held-out loss, measured by all ranks together."""
    return held_out(model, corpus).loss


def held_out(model: ParallelModel, corpus: Corpus) -> Measured:
    """The same with what else the task tells."""
    data, world = model.plan.data, model.world
    batches = held_out_batches(corpus, data, index=world.data_index, size=world.data_size, device=world.device)
    with resharded(model.module):
        found = measure(model, batches, objective_of(model.plan))
    must_be_finite("the held-out loss", found.loss)
    return found


def sum_over(group: dist.ProcessGroup | None, values: Tensor) -> list[float]:
    """Each value summed over the ranks of a group, which get the same numbers."""
    if group is not None:
        dist.all_reduce(values, group=group)
    return cast("list[float]", values.tolist())
