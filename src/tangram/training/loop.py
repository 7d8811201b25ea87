"""The training loop of one rank.

The loss of a step is the sum over the counted tokens of the global batch divided by their number; every micro-batch of
every rank adds its sum over that one number. A mean of the ranks' means is another loss as soon as ranks count
different numbers of tokens. One all-reduce a step carries the loss for the report, and rank 0's word on whether time is
up.
"""

# ruff: noqa: N806  a tensor carries its dims in its name

import math
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.optim import AdamW

from tangram.training.data import IGNORE, Batch, RankBatches, Split, held_out_batches, step_batches
from tangram.training.launch import Rank
from tangram.training.plan import OptimiserPlan, Plan
from tangram.training.progress import StepDone


@dataclass(frozen=True)
class Trained:
    """What training did: one loss per step, and how long it took."""

    losses: tuple[float, ...]
    tokens: int
    seconds: float


def train_steps(
    model: nn.Module, optimiser: AdamW, split: Split, plan: Plan, rank: Rank, group: dist.ProcessGroup
) -> Trained:
    """Train until the plan's steps or its time are used up, whichever comes first."""
    model.train()
    started = time.monotonic()
    losses: list[float] = []
    tokens = 0
    for step in range(plan.run.steps):
        batches = step_batches(
            split, plan.data, seed=plan.seed, step=step, rank=rank.index, world=rank.world, device=rank.device
        )
        optimiser.zero_grad()
        part = backward(model, batches)
        norm = whole_value(nn.utils.clip_grad_norm_(model.parameters(), plan.optimiser.clip_norm))
        set_lr(optimiser, lr_at(step, plan))
        optimiser.step()  # may spread what is not finite; nothing is kept of it, as the checks below end the run

        time_is_up = rank.index == 0 and time.monotonic() - started >= plan.run.max_seconds
        loss, stop = sum_over(group, torch.tensor([part, float(time_is_up)], dtype=torch.float64, device=rank.device))
        losses.append(loss)
        tokens += batches.counted
        must_be_finite(f"the loss of step {step + 1}", loss)
        must_be_finite(f"the gradient norm of step {step + 1}", norm)
        if rank.index == 0:
            seconds = time.monotonic() - started
            rank.emit(StepDone(step + 1, plan.run.steps, loss, norm, batches.counted, seconds, plan.run.max_seconds))
        if stop:
            break
    return Trained(tuple(losses), tokens, time.monotonic() - started)


def must_be_finite(what: str, number: float) -> None:
    """FloatingPointError for a number that says that training has gone astray; it is the same on every rank."""
    if not math.isfinite(number):
        raise FloatingPointError(f"{what} is {number}: a smaller optimiser.lr may help")


def backward(model: nn.Module, batches: RankBatches) -> float:
    """Add the gradients of this rank's micro-batches; its part of the global batch's loss."""
    part = 0.0
    for batch in batches.micro:
        loss = loss_sum(model, batch) / batches.counted
        loss.backward()
        part += loss.item()
    return part


def loss_sum(model: nn.Module, batch: Batch) -> Tensor:
    """The cross-entropy in nats, summed over the tokens that count."""
    logits_BSV = model(input_ids=batch.inputs_BS, use_cache=False).logits
    return F.cross_entropy(
        logits_BSV.flatten(0, 1).float(), batch.labels_BS.flatten(), ignore_index=IGNORE, reduction="sum"
    )


@torch.no_grad()
def evaluate(
    model: nn.Module, batches: Iterable[Batch], device: torch.device, group: dist.ProcessGroup | None
) -> float:
    """The mean loss per counted token over all ranks' batches; without a group, over these alone."""
    model.eval()
    totals = torch.zeros(2, dtype=torch.float64, device=device)
    for batch in batches:
        totals[0] += loss_sum(model, batch).double()
        totals[1] += (batch.labels_BS != IGNORE).sum()
    total, counted = sum_over(group, totals)
    return total / counted


def held_out_loss(model: nn.Module, split: Split, plan: Plan, rank: Rank, group: dist.ProcessGroup) -> float:
    """The held-out loss, measured by all ranks together."""
    batches = held_out_batches(split, plan.data, rank=rank.index, world=rank.world, device=rank.device)
    loss = evaluate(model, batches, rank.device, group)
    if isinstance(model, FSDPModule):
        model.reshard()  # without a backward, FSDP leaves the root's parameters whole, where the optimiser has no state
    must_be_finite("the held-out loss", loss)
    return loss


def sum_over(group: dist.ProcessGroup | None, values: Tensor) -> list[float]:
    """Each value summed over the ranks of a group, which get the same numbers."""
    if group is not None:
        dist.all_reduce(values, group=group)
    return cast(list[float], values.tolist())


def whole_value(value: Tensor) -> float:
    """The number in a scalar tensor, which FSDP may keep as a part of a sum."""
    return float((value.full_tensor() if isinstance(value, DTensor) else value).item())


def make_adamw(model: nn.Module, plan: OptimiserPlan) -> AdamW:
    """AdamW over all parameters, with weight decay on matrices only."""
    matrices = [parameter for parameter in model.parameters() if parameter.ndim >= 2]
    others = [parameter for parameter in model.parameters() if parameter.ndim < 2]
    groups = [{"params": matrices, "weight_decay": plan.weight_decay}, {"params": others, "weight_decay": 0.0}]
    return AdamW([group for group in groups if group["params"]], lr=plan.lr, betas=(0.9, 0.95))


def lr_at(step: int, plan: Plan) -> float:
    """Linear warm-up, then half a cosine from `lr` to a tenth of it at the last step."""
    warmup = plan.optimiser.warmup_steps
    if step < warmup:
        return plan.optimiser.lr * (step + 1) / warmup
    done = (step - warmup) / max(1, plan.run.steps - 1 - warmup)
    return plan.optimiser.lr * (0.55 + 0.45 * math.cos(math.pi * done))


def set_lr(optimiser: AdamW, lr: float) -> None:
    """Use this learning rate from now on."""
    for group in optimiser.param_groups:
        group["lr"] = lr
