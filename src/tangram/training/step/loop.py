"""The training loop of one rank.

The loss of a step is the sum over the counted tokens of the global batch divided by their number; every micro-batch of
every rank adds its sum over that one number. A mean of the ranks' means is another loss as soon as ranks count
different numbers of tokens. One all-reduce a step carries the loss, the squared norm of the gradient, and whether
somebody wants to stop, so all ranks clip alike and stop at the same step.

Nothing random is carried from step to step: what is drawn is a function of seed, step and sample
(`training.mesh.drawing`), so the state of a job is model, optimiser and three counters, and a run that resumes goes on
bit for bit.
"""

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import cast

import torch
from torch.optim import Optimizer

from tangram.errors import UserError
from tangram.hardware.host.machine import resident_mb
from tangram.schema.plan import Plan
from tangram.tracing.files.format import GRADIENT_NOT_FINITE, LOSS_NOT_FINITE, Phase
from tangram.tracing.spikes import StepNumbers
from tangram.tracing.trace import UNTRACED
from tangram.training.data import Corpus, RankBatches, step_batches, step_length
from tangram.training.mesh import buffers
from tangram.training.mesh.buffers import refuse_unlike_gradients
from tangram.training.mesh.drawing import drawn_apart
from tangram.training.mesh.world import World
from tangram.training.objective.expert_loads import Loads
from tangram.training.objective.step_guard import AstrayError, Guard, guard_for
from tangram.training.observe.events import Evaluated, ExpertLoads, Note, StepDone
from tangram.training.parallel.due_calls import WISHES
from tangram.training.parallel.model import ParallelModel
from tangram.training.state.checkpointer import Checkpointer, JobState, Progress
from tangram.training.step.backward import backward, early_updates
from tangram.training.step.bad_steps import located, rank_samples, skipped_event
from tangram.training.step.evaluate import held_out, sum_over
from tangram.training.step.layer_peaks import looking
from tangram.training.step.objectives import LossSum, count_of, objective_of
from tangram.training.step.optimiser_step import clip, local_gradients, lr_at, norms_of, round_for, set_lr, square_sum

BEST, SINCE = "best_held_out_loss", "measured_since_best"
"""Metrics of a run that stops early."""


@dataclass(frozen=True)
class StepCosts:
    """What a step computes and what the devices could, for the progress line; 0 is unknown."""

    flops_per_sample: float = 0.0
    peak_flops: float = 0.0


@dataclass(frozen=True)
class Hooks:
    """What the loop tells and asks: where events go, whether to stop, what happens around a step."""

    emit: Callable[[object], None]
    stop_requested: Callable[[], bool]
    after_step: Callable[[], None] = lambda: None
    folder: Path | None = None
    """Of the run: where it is written what a step was trained on that has gone astray."""
    save_every: int | None = None
    """Steps from one save to the next, 0 for none; None: as the plan says."""
    spent: float = 0.0
    """Seconds of `run.max_seconds` that are over, as where a run goes on after a failure."""
    reached: int = 0
    """The steps that were told of by then: those that are done again are done whatever the time."""


@dataclass(frozen=True)
class Trained:
    """What training did in this process group."""

    losses: tuple[float, ...]
    tokens: int
    seconds: float
    stopped: str | None
    """Why it ended before the last step: "time", "signal" or "patience"."""


def _tell_draws(model: ParallelModel, hooks: Hooks, *, all_ranks: bool) -> None:
    """`all_ranks`: what stages of other ranks have drawn, too; collective."""
    world = model.world
    if all_ranks or world.index == 0:
        for sentence in drawn_apart(model.named_draw_sources, world.peers if all_ranks else None):
            if world.index == 0:
                hooks.emit(Note(sentence))


def train_steps(
    model: ParallelModel,
    state: JobState,
    corpus: Corpus,
    checkpointer: Checkpointer,
    hooks: Hooks,
    costs: StepCosts = StepCosts(),
) -> Trained:
    """Train from where the module's `state` is until the plan's steps or time are used up, or somebody asks to stop."""
    plan, world, optimiser = model.plan, model.world, state.optimiser
    if optimiser is None or state.model is not model.module:
        raise ValueError("a state without an optimiser, or of another model, cannot be trained")
    model.module.train()
    if model.reference is not None:
        model.reference.before_write = checkpointer.fence  # its forward comes before the optimiser, which waits, too
    started, losses, tokens = time.monotonic(), list[float](), 0
    begun, first = state.progress, state.progress.step
    stopped = _stopped_before(model, state, corpus, hooks)
    loads = Loads([part.module for part in model.parts], world.device, plan.run.count_experts, state.experts())
    state.experts = partial(loads.carried, world)
    save_every = plan.checkpoint.every_steps if hooks.save_every is None else hooks.save_every
    guard = Guard(plan, begun.scale, begun.good, begun.skipped, begun.judged)
    while state.progress.step < plan.run.steps and stopped is None:
        step, trace = state.progress.step, model.trace
        length = _begin(model, corpus, state.progress)
        batches = _batches(corpus, state.progress, plan, world, length)
        late = _late(model, hooks, step + 1, time.monotonic() - started)
        lr = lr_at(step, plan.run.steps, plan.optimiser)
        stops = (late, hooks.stop_requested(), checkpointer.due())
        assert len(stops) == WISHES  # what a trace expects with the norm
        try:
            with looking(model, step + 1):
                done = train_step(
                    model, optimiser, batches, lr=lr, stop_requests=stops, check=step == first, guard=guard
                )
        except AstrayError as error:
            raise located(error, model, batches, hooks.emit, hooks.folder, corpus, state.progress) from error
        trace.phase(Phase.OTHER)
        losses.append(done.loss)
        tokens += batches.counted
        seconds = time.monotonic() - started
        state.progress = _advanced(state.progress, batches.counted, plan, guard, begun.seconds + seconds)
        if world.index == 0:
            hooks.emit(
                skipped_event((done.skipped, done.astray), hooks.folder, corpus, plan, state.progress, guard)
                if done.skipped is not None
                else _event_of(plan, costs, done, step + 1, first + 1, batches, seconds, guard)
            )
        _tell_loads(model, hooks, loads.after(step + 1, batches.micro, world))
        stopped = "signal" if done.stop_requests[1] else "time" if done.stop_requests[0] else None
        last = stopped is not None or step + 1 == plan.run.steps
        _tell_draws(model, hooks, all_ranks=world.stages > 1 and (step == first or last))
        if done.skipped is None:
            state.metrics.update({"loss": done.loss, **done.figures})
        if not last and _due(step + 1, _evaluations(plan)):
            stopped = _evaluate(model, state, corpus, hooks, time.monotonic() - started)
        due = _due(step + 1, save_every) or done.stop_requests[2]
        _end_step(model, state, checkpointer, hooks, save=due and not (last or stopped))
    loads.close()
    return Trained(tuple(losses), tokens, time.monotonic() - started, stopped)


def _evaluate(model: ParallelModel, state: JobState, corpus: Corpus, hooks: Hooks, seconds: float) -> str | None:
    """Measure the held-out loss, so many seconds after training began. "patience" where it falls no more: alike on all
    ranks, which have the same sums, and counted on by a run that goes on."""
    model.trace.phase(Phase.EVALUATION)
    found, metrics = held_out(model, corpus), state.metrics
    metrics.update({"held_out_loss": found.loss, **{f"held_out_{key}": x for key, x in found.figures.items()}})
    state.progress = replace(state.progress, measured=state.progress.step)
    if model.plan.run.patience:
        fell = found.loss < metrics.get(BEST, math.inf)
        metrics.update({BEST: found.loss, SINCE: 0.0} if fell else {SINCE: metrics.get(SINCE, 0.0) + 1})
    if model.world.index == 0:
        hooks.emit(Evaluated(state.progress.step, found.loss, seconds, found.figures))
    model.module.train()
    return _used_up(state, model.plan)


def _stopped_before(model: ParallelModel, state: JobState, corpus: Corpus, hooks: Hooks) -> str | None:
    """Why a run that goes on has nothing more to train; the first rank says so. What was to be measured where it was
    stopped is measured now."""
    stopped = _used_up(state, model.plan)
    if stopped and model.world.index == 0:
        hooks.emit(Note("the held-out loss had fallen no further before: to go on, raise run.patience"))
    if not stopped and hooks.reached and not math.isinf(model.plan.run.max_seconds):
        late = torch.tensor([float(_late(model, hooks, state.progress.step, 0.0))], device=model.world.device)
        stopped = "time" if sum_over(model.world.group, late) == [1.0] else None
    step = state.progress.step
    if not stopped and state.progress.measured < step < model.plan.run.steps and _due(step, _evaluations(model.plan)):
        return _evaluate(model, state, corpus, hooks, 0.0)
    return stopped


def _late(model: ParallelModel, hooks: Hooks, step: int, seconds: float) -> bool:
    """Whether this step is the last for its time, so many seconds after training began; the first rank's clock says
    so."""
    spent = hooks.spent + seconds
    return model.world.index == 0 and step >= hooks.reached and spent >= model.plan.run.max_seconds


def _used_up(state: JobState, plan: Plan) -> str | None:
    """Why a run trains no further by the held-out losses that were measured; None: it does."""
    patience = plan.run.patience
    return "patience" if patience and state.metrics.get(SINCE, 0.0) >= patience else None


def _tell_loads(model: ParallelModel, hooks: Hooks, counted: ExpertLoads | None) -> None:
    if counted is not None:
        model.trace.experts(counted.layers)
        if model.world.index == 0:
            hooks.emit(counted)


def _end_step(model: ParallelModel, state: JobState, checkpointer: Checkpointer, hooks: Hooks, *, save: bool) -> None:
    """After a step: save where that is due, and say what came of saves; say once that nothing is traced any more."""
    if save:
        model.trace.phase(Phase.CHECKPOINT)
        checkpointer.save(state)
    for event in checkpointer.poll():
        hooks.emit(event)
    if failure := model.trace.failure():
        hooks.emit(Note(f"rank {model.world.index}: {failure}"))
    hooks.after_step()


def _begin(model: ParallelModel, corpus: Corpus, progress: Progress) -> int:
    """A step begins: how long its rows are. Where each length would be compiled they keep the plan's."""
    plan, world, length = model.plan, model.world, model.plan.data.sequence
    if not plan.run.compile:
        length = step_length(corpus, plan.data, plan.seed, progress.samples, plan.model_ranks)
    sized = world.model_size * world.stages > 1  # calls of model axes and of stages are as large as rows are long
    model.trace.step(progress.step + 1, length if sized else 0)
    return length


def _batches(corpus: Corpus, progress: Progress, plan: Plan, world: World, length: int) -> RankBatches:
    """This rank's micro-batches of the next step. Raises UserError where no token of all of them is in the loss."""
    batches = step_batches(
        corpus,
        plan.data,
        seed=plan.seed,
        first_sample=progress.samples,
        index=world.data_index,
        size=world.data_size,
        micro_steps=plan.micro_steps,
        device=world.device,
    ).cut(length)
    if not batches.counted:
        raise UserError(
            f"step {progress.step + 1} has no token in its loss, so it would train nothing: look at its samples with "
            "`tangram data show`"
        )
    return batches


def _advanced(progress: Progress, counted: int, plan: Plan, guard: Guard, seconds: float) -> Progress:
    """By a step that has counted so many tokens. `seconds`: over all runs."""
    return replace(
        progress,
        step=progress.step + 1,
        samples=progress.samples + plan.data.global_batch,
        tokens=progress.tokens + counted,
        seconds=seconds,
        scale=guard.scale.value if guard.scaled else 0.0,
        good=guard.scale.good,
        skipped=guard.skipped,
        judged=guard.judged,
    )


def _event_of(
    plan: Plan,
    costs: StepCosts,
    done: "StepResult",
    step: int,
    first: int,
    batches: RankBatches,
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
        lr=lr_at(step - 1, plan.run.steps, plan.optimiser),
        tokens=batches.counted,
        seconds=seconds,
        first=first,
        limit=plan.run.max_seconds,
        flops=costs.flops_per_sample * plan.data.global_batch * batches.length / plan.data.sequence,
        peak_flops=costs.peak_flops,
        rss_mb=resident_mb(),
        skipped=guard.skipped,
        scale=guard.scale.value,
        figures=done.figures,
    )


def _evaluations(plan: Plan) -> int:
    """Steps from one to the next; 0 for none."""
    return plan.run.evaluate_every if plan.data.measured else 0


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


@dataclass(frozen=True)
class StepResult:
    """The same on every rank."""

    loss: float
    norm: float
    stop_requests: tuple[bool, ...]
    skipped: str | None = None
    """Why the step was not applied; None: it was."""
    astray: bool = False
    """Whether it was skipped for another reason than an overflow that lowers the loss scale."""
    router_loss: float = 0.0
    """What the loss of routers adds to what is trained on, `run.router_loss` times it; `loss` is without it."""
    dropped: float = 0.0
    """The share of tokens' choices that experts had no room for (`run.expert_capacity`)."""
    figures: Mapping[str, float] = field(default_factory=dict[str, float])
    """What the task tells beside the loss: means over the global batch's samples."""


def train_step(
    model: ParallelModel,
    optimiser: Optimizer,
    batches: RankBatches,
    *,
    lr: float,
    loss_sum: LossSum | None = None,
    stop_requests: tuple[bool, ...] = (),
    check: bool = False,
    guard: Guard | None = None,
) -> StepResult:
    """One step on a global batch; `loss_sum` is next-token prediction unless said otherwise.

    `stop_requests` are those of single ranks, of which all ranks learn. `check` compares the gradients that
    tensor-parallel ranks should have in common. `guard` judges whether the step is applied; in float16, where it
    scales the loss, one has to be given to all steps. Raises AstrayError, a FloatingPointError, where the plan stops
    at a loss or a norm that is not finite or has diverged, before anything is updated.
    """
    plan, world = model.plan, model.world
    guard = guard_for(plan, guard)
    scale = guard.scale.value
    optimiser.zero_grad()
    modules = [part.module for part in model.parts]
    before = buffers.before_step(modules)
    set_lr(optimiser, lr, plan.optimiser.lr)
    with early_updates(model, optimiser, batches.begin) as used:
        found = backward(model, batches, loss_sum, scale)
    model.trace.phase(Phase.OPTIMISER)
    model.sum_gradients()
    buffers.synchronise(modules, before, world)
    if check and world.model_size > 1:
        refuse_unlike_gradients(model.module, world, model.plain)
    gradients = local_gradients(model.module, model.plain, used, model.counted_elsewhere)
    told, objective = 4 + len(found.figures), objective_of(plan, loss_sum)
    sums = torch.zeros(told + len(stop_requests), dtype=torch.float64, device=world.device)  # one all-reduce
    sums[0] = found.loss / world.model_size  # the ranks of model axes have all computed the same part
    norms = norms_of(gradients)
    sums[1] = square_sum(norms, gradients, world.size // world.stages)
    for part in model.parts:
        if part.routers is not None:
            sums[2] += part.routers.pop_loss()
        if part.capacity is not None:
            sums[3] += part.capacity.pop_dropped() * world.stages / world.size  # all ranks of a stage have the same
    sums[4:told] = found.figures / (world.model_size * count_of(batches, objective.figures_over))
    sums[told:] = torch.tensor(stop_requests, dtype=torch.float64, device=world.device)
    own = sums[:2].clone()  # before the others' are added
    loss, square, of_routers, dropped, *others = sum_over(world.group, sums)
    norm = math.sqrt(square) / scale if square >= 0 else math.nan
    stops = tuple(wish > 0 for wish in others[len(found.figures) :])
    figures = dict(zip(objective.figures, others, strict=False))  # behind them are the wishes to stop
    if model.trace is not UNTRACED:
        _tell_trace(model, batches, math.isfinite(loss + norm), loss, own, norms / scale)
    strayed = guard.astray
    if (reason := guard.judge(loss, norm)) is not None:
        buffers.undo(modules, before)
        return StepResult(loss, norm, stops, reason, guard.astray > strayed, of_routers, dropped, figures)
    clip(gradients, norm, plan.optimiser.clip_norm, scale)
    round_for(optimiser, plan.seed, batches.begin)
    optimiser.step()
    return StepResult(loss, norm, stops, router_loss=of_routers, dropped=dropped, figures=figures)


def _tell_trace(
    model: ParallelModel, batches: RankBatches, finite: bool, loss: float, own: torch.Tensor, norms: torch.Tensor
) -> None:
    """`own`: this rank's part of the loss and of the squared norm; `norms`: of each of its gradients."""
    if finite:
        where = partial(rank_samples, model.plan, model.world, batches)
        model.trace.numbers(StepNumbers(loss, float(own[0]), cast("list[float]", norms.tolist()), where))
    else:
        of_loss, of_gradient = cast("list[bool]", own.isfinite().tolist())
        model.trace.not_finite((not of_loss) * LOSS_NOT_FINITE | (not of_gradient) * GRADIENT_NOT_FINITE)
