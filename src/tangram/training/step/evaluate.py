"""The loss and the logits of a model that was made parallel, and the mean loss of held-out samples."""

from collections.abc import Callable, Iterable
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tangram.training.data import IGNORE, Batch, Corpus, held_out_batches
from tangram.training.objective.loss import leaving, logits_placement, token_loss
from tangram.training.objective.model_inputs import TokenOrder, logits_in_order, model_inputs
from tangram.training.objective.step_guard import must_be_finite
from tangram.training.parallel.fsdp import resharded
from tangram.training.parallel.model import ParallelModel
from tangram.training.parallel.model_part import ModelPart

LossSum = Callable[[nn.Module, Batch], Tensor]
"""The loss of a module on a batch, summed over its counted tokens."""


def loss_of(part: ModelPart, batch: Batch, loss_sum: LossSum | None) -> Tensor:
    """The summed loss of a batch: of the next token unless said otherwise."""
    return next_token_loss(part, batch) if loss_sum is None else loss_sum(part.module, batch)


def next_token_loss(part: ModelPart, batch: Batch) -> Tensor:
    """The cross-entropy in nats of the next token, summed over the tokens that count.

    Of a derived model the logits stay in parts (`training.objective.loss`).
    """
    inputs = model_inputs(part.tokens, batch)
    with leaving(part.derived):
        logits: Tensor = part.module(input_ids=inputs.batch.inputs_BS, use_cache=False, **inputs.keywords).logits
    return token_loss(logits, inputs.batch.labels_BS, logits_placement(part.derived))


def logits_of(model: ParallelModel, batch: Batch) -> Tensor:
    """A Hugging Face model's logits, whole and in the order of the batch.

    Of a stage of a pipeline without gradients, and on every stage.
    """
    if model.pipeline is not None:
        return model.pipeline.logits(batch)
    return logits_in_order(model.module, model.parts[0].tokens, batch)


@torch.no_grad()
def evaluate(model: ParallelModel, batches: Iterable[Batch], loss_sum: LossSum | None = None) -> float:
    """The mean loss per counted token over all DP ranks' batches."""
    model.module.eval()
    pipeline = model.pipeline

    def of_batch(batch: Batch) -> Tensor:
        if pipeline is None:
            return loss_of(model.parts[0], batch, loss_sum)
        losses = pipeline.losses([batch], token_loss)
        return losses[0] if losses else torch.zeros((), device=batch.inputs_BS.device)

    return _mean_loss(of_batch, batches, model.world.group, counts=pipeline is None or pipeline.is_last)


@torch.no_grad()
def evaluate_unsharded(module: nn.Module, batches: Iterable[Batch], tokens: TokenOrder | None = None) -> float:
    """The mean loss of the next token per counted token, of a model that this process has all of."""
    module.eval()
    part = ModelPart(module, tokens)
    return _mean_loss(lambda batch: next_token_loss(part, batch), batches, None)


def _mean_loss(
    loss_of: Callable[[Batch], Tensor], batches: Iterable[Batch], group: dist.ProcessGroup | None, counts: bool = True
) -> float:
    """`counts`: whether this rank has the loss of its batches; of a stage that is not the last it is 0."""
    totals: Tensor | None = None
    for batch in batches:
        loss = loss_of(batch).double()
        counted = (batch.labels_BS != IGNORE).sum().double() * counts
        pair = torch.stack([loss, counted])
        totals = pair if totals is None else totals + pair
    if totals is None:
        raise ValueError("there is no batch to evaluate")
    total, counted = sum_over(group, totals)  # of tensor-parallel ranks both are multiples
    return total / counted


def held_out_loss(model: ParallelModel, corpus: Corpus) -> float:
    """The held-out loss, measured by all ranks together."""
    data, world = model.plan.data, model.world
    batches = held_out_batches(corpus, data, index=world.data_index, size=world.data_size, device=world.device)
    with resharded(model.module):
        loss = evaluate(model, batches)
    must_be_finite("the held-out loss", loss)
    return loss


def sum_over(group: dist.ProcessGroup | None, values: Tensor) -> list[float]:
    """Each value summed over the ranks of a group, which get the same numbers."""
    if group is not None:
        dist.all_reduce(values, group=group)
    return cast("list[float]", values.tolist())
