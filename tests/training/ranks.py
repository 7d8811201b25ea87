"""What the ranks of the tests run, and the planted mistakes that the gradient check must find."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from tangram.training import data, loop, state
from tangram.training.data import IGNORE, RankBatches
from tangram.training.job import build_parallel
from tangram.training.launch import Rank
from tangram.training.plan import Plan

Gradients = dict[str, npt.NDArray[np.float32]]
Mistake = Callable[[PreTrainedModel, RankBatches, Rank], RankBatches]


def mean_of_means(model: PreTrainedModel, batches: RankBatches, rank: Rank) -> RankBatches:
    """Each rank divides by its own tokens, and the ranks' means are averaged."""
    own = sum(int((batch.labels_BS != IGNORE).sum()) for batch in batches.micro)
    return replace(batches, counted=own * rank.world)


def averaged_over_ranks(model: PreTrainedModel, batches: RankBatches, rank: Rank) -> RankBatches:
    """FSDP2's own scaling: the sum over ranks is divided by their number."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(float(rank.world))
    return batches


def one_layer_averaged(model: PreTrainedModel, batches: RankBatches, rank: Rank) -> RankBatches:
    """The same for a single block, as when the scaling is set on the root only: most gradients stay right."""
    block = next(module for module in model.modules() if isinstance(module, FSDPModule) and module is not model)
    block.set_gradient_divide_factor(float(rank.world))
    return batches


def last_micro_batch_lost(model: PreTrainedModel, batches: RankBatches, rank: Rank) -> RankBatches:
    """Accumulation stops one short on rank 1 (which still takes part, with labels that count nothing)."""
    if rank.index != 1:
        return batches
    last = replace(batches.micro[-1], labels_BS=batches.micro[-1].labels_BS.fill_(IGNORE))
    return replace(batches, micro=(*batches.micro[:-1], last))


def padding_counted(model: PreTrainedModel, batches: RankBatches, rank: Rank) -> RankBatches:
    """The loss is divided by all positions, those that fill up short samples too."""
    return replace(batches, counted=sum(batch.labels_BS.numel() for batch in batches.micro) * rank.world)


MISTAKES: Mapping[str, Mistake] = {
    mistake.__name__: mistake
    for mistake in (mean_of_means, averaged_over_ranks, one_layer_averaged, last_micro_batch_lost, padding_counted)
}


@dataclass(frozen=True)
class Work:
    """Everything that one warm start of the ranks does for the tests."""

    plan: Plan
    tied: Plan
    checkpoint: Path
    tied_checkpoint: Path
    hurried_checkpoint: Path


@dataclass(frozen=True)
class Measured:
    """What came of it on one rank."""

    gradients: Gradients
    tied_gradients: Gradients
    wrong_gradients: Mapping[str, Gradients]
    loss_part: float
    counted: int
    losses: tuple[float, ...]
    held_out: float
    tied_held_out: float
    hurried_steps: int


def do_work(rank: Rank, work: Work) -> Measured:
    """The task of the warm ranks."""
    part, counted, gradients = first_step(rank, work.plan)
    losses, held_out = train_and_save(rank, work.plan, work.checkpoint)
    _, tied_held_out = train_and_save(rank, work.tied, work.tied_checkpoint)
    no_time = work.plan.run.model_copy(update={"steps": 1000, "max_seconds": 1e-6})
    hurried, _ = train_and_save(rank, work.plan.model_copy(update={"run": no_time}), work.hurried_checkpoint)
    return Measured(
        gradients=gradients,
        tied_gradients=first_step(rank, work.tied)[2],
        wrong_gradients={name: first_step(rank, work.plan, mistake)[2] for name, mistake in MISTAKES.items()},
        loss_part=part,
        counted=counted,
        losses=losses,
        held_out=held_out,
        tied_held_out=tied_held_out,
        hurried_steps=len(hurried),
    )


def first_step(rank: Rank, plan: Plan, mistake: Mistake | None = None) -> tuple[float, int, Gradients]:
    """This rank's part of the first loss, the tokens that it counted itself, and every gradient, whole."""
    model = build_parallel(plan, rank)
    split, _ = data.read_corpus(plan.data)
    batches = data.step_batches(
        split, plan.data, seed=plan.seed, step=0, rank=rank.index, world=rank.world, device=rank.device
    )
    own = sum(int((batch.labels_BS != IGNORE).sum()) for batch in batches.micro)
    if mistake is not None:
        batches = mistake(model, batches, rank)
    part = loop.backward(model, batches)
    gradients: Gradients = {}
    for name, parameter in model.named_parameters():
        assert isinstance(parameter.grad, DTensor)
        gradients[name] = parameter.grad.full_tensor().numpy()
    return part, own, gradients


def train_and_save(rank: Rank, plan: Plan, checkpoint: Path) -> tuple[tuple[float, ...], float]:
    """Train as planned, measure the held-out loss, leave a checkpoint."""
    group = dist.group.WORLD
    assert group is not None
    model = build_parallel(plan, rank)
    optimiser = loop.make_adamw(model, plan.optimiser)
    split, held_out = data.read_corpus(plan.data)
    trained = loop.train_steps(model, optimiser, split, plan, rank, group)
    loss = loop.held_out_loss(model, held_out, plan, rank, group)
    state.save(model, optimiser, checkpoint, group)
    return trained.losses, loss
