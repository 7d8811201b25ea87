"""The training loop of one rank.

The loss of a step is the sum over the counted tokens of the global batch divided by their number; every micro-batch of
every rank adds its sum over that one number. A mean of the ranks' means is another loss as soon as ranks count
different numbers of tokens. One all-reduce a step carries the loss, the squared norm of the gradient, and whether
somebody wants to stop, so all ranks clip alike and stop at the same step.

Nothing random is carried from step to step: what is drawn is a function of seed, step and sample
(`training.mesh.drawing`), so the state of a job is model, optimiser and three counters, and a run that resumes goes on
bit for bit.
"""

# ruff: noqa: N803  a tensor carries its dims in its name

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import AdamW

from tangram.errors import UserError
from tangram.hardware.machine import resident_mb
from tangram.schema.plan import Plan
from tangram.training.data import IGNORE, Batch, Corpus, RankBatches, held_out_batches, step_batches
from tangram.training.mesh import buffers
from tangram.training.mesh.check_replicas import refuse_unlike_gradients
from tangram.training.mesh.drawing import Draws, drawing, drawn_apart
from tangram.training.mesh.tensor_parallel import Lies, derived_of
from tangram.training.mesh.world import World
from tangram.training.objective.expert_capacity import capacity_of
from tangram.training.objective.expert_loads import Loads
from tangram.training.objective.loss import leaving, lies_of, token_loss
from tangram.training.objective.model_inputs import given
from tangram.training.objective.router_loss import routers_of
from tangram.training.objective.step_guard import AstrayError, Guard, guard_for, must_be_finite
from tangram.training.observe.events import Evaluated, Note, Skipped, StepDone
from tangram.training.parallel.fsdp import resharded, step_shards_of
from tangram.training.parallel.pipeline import Pipeline, parts_of, pipeline_of
from tangram.training.state.checkpointer import Checkpointer, JobState, Progress
from tangram.training.step.bad_steps import told_of, write_samples
from tangram.training.step.optimiser_step import clip, local_gradients, lr_at, set_lr, square_sum

LossSum = Callable[[nn.Module, Batch], Tensor]
"""The loss of a batch, summed over its counted tokens."""


@dataclass(frozen=True)
class Costs:
    """What a step computes and what the devices could, for the progress line; 0 is unknown."""

    flops_per_sample: float = 0.0
    peak_flops: float = 0.0


@dataclass(frozen=True)
class Hooks:
    """What the loop tells and asks: where events go, whether to stop, what happens around a step."""

    emit: Callable[[object], None]
    stop_asked: Callable[[], bool]
    after_step: Callable[[], None] = lambda: None
    folder: Path | None = None
    """Of the run: where it is written what a step was trained on that has gone astray."""


@dataclass(frozen=True)
class Trained:
    """What training did in this process group."""

    losses: tuple[float, ...]
    tokens: int
    seconds: float
    stopped: str | None
    """Why it ended before the last step: "time" or "signal"."""


def train_steps(
    state: JobState,
    corpus: Corpus,
    plan: Plan,
    world: World,
    checkpointer: Checkpointer,
    hooks: Hooks,
    costs: Costs = Costs(),
) -> Trained:
    """Train from where `state` stands until the plan's steps or its time are used up, or somebody asks to stop."""
    model, optimiser = state.model, state.optimiser
    if optimiser is None:
        raise ValueError("a state without an optimiser cannot be trained")
    model.train()
    started = time.monotonic()
    first, before = state.progress.step, state.progress.seconds
    losses: list[float] = []
    stopped: str | None = None
    tokens = 0
    loads = Loads(parts_of(model), world.device, plan.run.count_experts)
    guard = Guard(plan, state.progress.scale, state.progress.good, state.progress.skipped)
    while state.progress.step < plan.run.steps and stopped is None:
        step = state.progress.step
        batches = step_batches(
            corpus,
            plan.data,
            seed=plan.seed,
            first_sample=state.progress.samples,
            index=world.data_index,
            size=world.data_size,
            micro_steps=plan.micro_steps,
            device=world.device,
        )
        late = world.index == 0 and time.monotonic() - started >= plan.run.max_seconds
        lr = lr_at(step, plan.run.steps, plan.optimiser)
        asks = (late, hooks.stop_asked())
        try:
            done = train_step(
                model, optimiser, batches, plan, world, lr=lr, asks=asks, check=step == first, guard=guard
            )
        except AstrayError as error:
            raise told_of(error, hooks.folder, corpus, plan, world, state.progress) from error
        losses.append(done.loss)
        tokens += batches.counted
        seconds = time.monotonic() - started
        state.progress = replace(
            state.progress,
            step=step + 1,
            samples=state.progress.samples + plan.data.global_batch,
            tokens=state.progress.tokens + batches.counted,
            seconds=before + seconds,
            scale=guard.scale.value if guard.scaled else 0.0,
            good=guard.scale.good,
            skipped=guard.skipped,
        )
        if world.index == 0:
            if done.skipped is not None:
                hooks.emit(skipped_event(done, hooks.folder, corpus, plan, state.progress, guard))
            else:
                hooks.emit(_told(plan, costs, done, step + 1, first + 1, lr, batches.counted, seconds, guard))
        loads.after(step + 1, batches.micro, world, hooks.emit)
        for words in drawn_apart(parts_of(model)) if world.index == 0 else ():
            hooks.emit(Note(words))
        stopped = "signal" if done.asked[1] else "time" if done.asked[0] else None
        last = stopped is not None or step + 1 == plan.run.steps
        if done.skipped is None:
            state.metrics["loss"] = done.loss
        if not last and plan.data.held_out and _due(step + 1, plan.run.evaluate_every):
            loss = state.metrics["held_out_loss"] = held_out_loss(model, corpus, plan, world)
            if world.index == 0:
                hooks.emit(Evaluated(step + 1, loss, time.monotonic() - started))
            model.train()
        if not last and _due(step + 1, plan.checkpoint.every_steps):
            checkpointer.save(state)
        for event in checkpointer.poll():
            hooks.emit(event)
        hooks.after_step()
    loads.close()
    return Trained(tuple(losses), tokens, time.monotonic() - started, stopped)


def _told(
    plan: Plan,
    costs: Costs,
    done: "StepResult",
    step: int,
    first: int,
    lr: float,
    tokens: int,
    seconds: float,
    guard: Guard,
) -> StepDone:
    """A step as the progress line and the logs are told of it."""
    return StepDone(
        step=step,
        steps=plan.run.steps,
        loss=done.loss,
        gradient_norm=done.norm,
        router_loss=done.router_loss,
        dropped=done.dropped,
        lr=lr,
        tokens=tokens,
        seconds=seconds,
        first=first,
        limit=plan.run.max_seconds,
        flops=costs.flops_per_sample * plan.data.global_batch,
        peak_flops=costs.peak_flops,
        rss_mb=resident_mb(),
        skipped=guard.skipped,
        scale=guard.scale.value,
    )


def skipped_event(
    done: "StepResult", folder: Path | None, corpus: Corpus, plan: Plan, progress: Progress, guard: Guard
) -> Skipped:
    """A step that was not applied, and where its samples are written; those of an overflow are not.

    `progress`: as it is after the step. Samples that cannot be written stop nothing: the event says why.
    """
    reason, path = f"{done.skipped}", ""
    if done.astray and folder is not None:
        first = progress.samples - plan.data.global_batch
        try:
            path = str(write_samples(folder, corpus, plan, progress.step - 1, first, reason))
        except (OSError, UserError) as failure:
            reason = f"{reason}; its samples could not be written: {failure}"
    return Skipped(progress.step, reason, guard.skipped, path)


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


@dataclass(frozen=True)
class StepResult:
    """The same on every rank."""

    loss: float
    norm: float
    asked: tuple[bool, ...]
    skipped: str | None = None
    """Why the step was not applied; None: it was."""
    astray: bool = False
    """Whether it was skipped for another reason than an overflow that lowers the loss scale."""
    router_loss: float = 0.0
    """What the loss of routers adds to what is trained on, `run.router_loss` times it; `loss` is without it."""
    dropped: float = 0.0
    """The share of tokens' choices that experts had no room for (`run.expert_capacity`)."""


def train_step(
    model: nn.Module,
    optimiser: AdamW,
    batches: RankBatches,
    plan: Plan,
    world: World,
    *,
    lr: float,
    loss_sum: LossSum | None = None,
    asks: tuple[bool, ...] = (),
    check: bool = False,
    guard: Guard | None = None,
) -> StepResult:
    """One step on a global batch; `loss_sum` is next-token prediction unless said otherwise.

    `asks` are wishes of single ranks, of which all ranks learn. `check` compares the gradients that tensor-parallel
    ranks should have in common. `guard` judges whether the step is applied; in float16, where it scales the loss, one
    has to be given to all steps. Raises AstrayError, a FloatingPointError, where the plan stops at a loss or a norm
    that is not finite or has diverged, before anything is updated.
    """
    guard = guard_for(plan, guard)
    scale = guard.scale.value
    optimiser.zero_grad()
    parts = parts_of(model)
    before = buffers.before_step(parts)
    part = backward(model, batches, loss_sum or next_token_loss, plan.seed, scale)
    for some in parts:
        if (derived := derived_of(some)) is not None:
            derived.sum_gradients()
    buffers.synchronise(parts, before, world)
    if check and world.model_size > 1:
        refuse_unlike_gradients(model, world)
    gradients = local_gradients(model)
    sums = torch.zeros(4 + len(asks), dtype=torch.float64, device=world.device)
    sums[0] = part / world.model_size  # the ranks of model axes have all computed the same part
    sums[1] = square_sum(gradients, world.size // world.stages)
    for some in parts:
        if (routers := routers_of(some)) is not None:
            sums[2] += routers.taken()
        if (capacity := capacity_of(some)) is not None:
            sums[3] += capacity.taken() * world.stages / world.size  # all ranks of a stage have the same
    sums[4:] = torch.tensor(asks, dtype=torch.float64, device=world.device)
    loss, square, of_routers, dropped, *asked = sum_over(world.group, sums)
    norm = math.sqrt(square) / scale if square >= 0 else math.nan
    asked = tuple(wish > 0 for wish in asked)
    strayed = guard.astray
    if (reason := guard.judge(loss, norm)) is not None:
        buffers.undo(parts, before)
        return StepResult(loss, norm, asked, reason, guard.astray > strayed, of_routers, dropped)
    clip(gradients, norm, plan.optimiser.clip_norm, scale)
    set_lr(optimiser, lr)
    optimiser.step()
    return StepResult(loss, norm, asked, router_loss=of_routers, dropped=dropped)


def backward(model: nn.Module, batches: RankBatches, loss_sum: LossSum, seed: int, scale: float = 1.0) -> Tensor:
    """Add the gradients of this rank's micro-batches; its part of the global batch's loss, a float64 scalar.

    The gradients are `scale` times as large; a power of two rounds nothing.
    """
    pipeline = pipeline_of(model)
    with drawing(parts_of(model), seed, batches) as draws:
        if pipeline is not None:
            return _backward_of_stage(pipeline, batches, loss_sum, draws, scale)
        return _backward_of_model(model, batches, loss_sum, draws, scale)


def _backward_of_model(model: nn.Module, batches: RankBatches, loss_sum: LossSum, draws: Draws, scale: float) -> Tensor:
    parts: list[Tensor] = []
    shards, routers, capacity = step_shards_of(model), routers_of(model), capacity_of(model)
    for micro, batch in enumerate(batches.micro):
        draws.begin(model, micro)
        if shards is not None:
            shards.before(last=micro + 1 == len(batches.micro))
        if capacity is not None:
            capacity.before(given(model, batch))
        loss = whole = loss_sum(model, batch) / max(1, batches.counted)
        if routers is not None:
            whole = loss + routers.loss(routers.sums(given(model, batch).batch.labels_BS), batches.counted)
        (whole * scale if scale != 1 else whole).backward()
        if routers is not None:
            routers.forget()
        parts.append(loss.detach())
    return _summed(parts, batches.micro[0].inputs_BS.device)


def _backward_of_stage(
    pipeline: Pipeline, batches: RankBatches, loss_sum: LossSum, draws: Draws, scale: float
) -> Tensor:
    """The same for a stage; its part of the loss is nothing but on the last."""
    if loss_sum is not next_token_loss:
        raise UserError("stages of a pipeline are trained on the next token: this version takes no loss of one's own")

    def loss(logits_BSV: Tensor, labels_BS: Tensor, lies: Lies | None) -> Tensor:
        return token_loss(logits_BSV, labels_BS, lies) * (scale / max(1, batches.counted))

    losses = pipeline.backward(batches.micro, loss, draws, lambda r, sums: r.loss(sums, batches.counted) * scale)
    return _summed(losses, batches.micro[0].inputs_BS.device) / scale


def _summed(parts: Sequence[Tensor], device: torch.device) -> Tensor:
    return torch.stack([*parts]).double().sum() if parts else torch.zeros((), dtype=torch.float64, device=device)


def next_token_loss(model: nn.Module, batch: Batch) -> Tensor:
    """The cross-entropy in nats of the next token, summed over the tokens that count.

    Of a derived model the logits stay in parts (`training.objective.loss`).
    """
    seen = given(model, batch)
    with leaving(model):
        logits: Tensor = model(input_ids=seen.batch.inputs_BS, use_cache=False, **seen.told).logits
    return token_loss(logits, seen.batch.labels_BS, lies_of(model))


def logits_of(model: nn.Module, batch: Batch) -> Tensor:
    """A Hugging Face model's logits, whole and in the order of the batch.

    Of a stage of a pipeline without gradients, and on every stage.
    """
    if (pipeline := pipeline_of(model)) is not None:
        return pipeline.logits(batch)
    seen = given(model, batch)
    return seen.in_order(model(input_ids=seen.batch.inputs_BS, use_cache=False, **seen.told).logits)


@torch.no_grad()
def evaluate(model: nn.Module, batches: Iterable[Batch], world: World | None, loss_sum: LossSum | None = None) -> float:
    """The mean loss per counted token over all DP ranks' batches; without a world, over these alone."""
    model.eval()
    totals: Tensor | None = None
    for batch in batches:
        loss = _loss_of(model, batch, loss_sum).double()
        counted = (batch.labels_BS != IGNORE).sum().double()
        if (pipeline := pipeline_of(model)) is not None and not pipeline.is_last:
            counted = torch.zeros_like(counted)
        pair = torch.stack([loss, counted])
        totals = pair if totals is None else totals + pair
    if totals is None:
        raise ValueError("there is no batch to evaluate")
    total, counted = sum_over(world.group if world else None, totals)  # of tensor-parallel ranks both are multiples
    return total / counted


def _loss_of(model: nn.Module, batch: Batch, loss_sum: LossSum | None) -> Tensor:
    """The summed loss of a batch; of a stage that is not the last, 0."""
    if (pipeline := pipeline_of(model)) is not None:
        losses = pipeline.losses([batch], token_loss)
        return losses[0] if losses else torch.zeros((), device=batch.inputs_BS.device)
    return (loss_sum or next_token_loss)(model, batch)


def held_out_loss(model: nn.Module, corpus: Corpus, plan: Plan, world: World) -> float:
    """The held-out loss, measured by all ranks together."""
    batches = held_out_batches(corpus, plan.data, index=world.data_index, size=world.data_size, device=world.device)
    with resharded(model):
        loss = evaluate(model, batches, world)
    must_be_finite("the held-out loss", loss)
    return loss


def sum_over(group: dist.ProcessGroup | None, values: Tensor) -> list[float]:
    """Each value summed over the ranks of a group, which get the same numbers."""
    if group is not None:
        dist.all_reduce(values, group=group)
    return cast("list[float]", values.tolist())
