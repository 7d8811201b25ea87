"""What the ranks do: train the cases by Tangram's own path, with a planted mistake or without, and keep a trace."""

import contextlib
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tangram.layout import Layout, Mesh, region
from tangram.schema.plan import Plan
from tangram.training.data import BYTES, Batch, RankBatches, Stream
from tangram.training.data.samples import collate
from tangram.training.mesh.world import World, axes_of, dim_of, make_world
from tangram.training.observe.events import SaveFailed, StepDone
from tangram.training.parallel import apply
from tangram.training.parallel.model import ParallelModel
from tangram.training.run.launch import Rank
from tangram.training.state import build_model
from tangram.training.state import checkpointer as checkpoints
from tangram.training.state.checkpointer import Checkpointer, JobState, Progress
from tangram.training.step import loop, optimiser_step
from tests.training.oracle.cases import Case
from tests.training.oracle.own import Own, own_loss_sum, own_model
from tests.training.oracle.plain import corpus_of
from tests.training.oracle.trace import CAPTURED, Tensors, Trace


@dataclass
class Setting:
    """What a planted mistake may change of a run, besides patching Tangram's own functions."""

    plan: Plan
    world: World
    built: list[Callable[[nn.Module], None]] = field(default_factory=list[Callable[[nn.Module], None]])
    """Called with the model before its first step."""
    stepped: list[Callable[[nn.Module], None]] = field(default_factory=list[Callable[[nn.Module], None]])
    """Called after every step, before anything is kept."""
    resumed: list[Callable[[JobState], None]] = field(default_factory=list[Callable[[JobState], None]])
    """Called after a checkpoint is loaded."""


@dataclass(frozen=True)
class Mistake:
    """A mistake that one could make in Tangram, and where it is planted."""

    case: str
    plant: Callable[[Setting], contextlib.AbstractContextManager[None]]
    until: int = 1
    """The step after which it has shown."""


@dataclass
class Keeper:
    """Fills a trace step by step."""

    model: nn.Module = field(default_factory=nn.Module)
    plain: Callable[[str, Any], Any] = lambda _, part: part
    """What a rank has of a parameter, as all of it, where no DTensor says how."""
    step: int = 0
    losses: list[float] = field(default_factory=list[float])
    norms: list[float] = field(default_factory=list[float])
    routers: list[float] = field(default_factory=list[float])
    dropped: list[float] = field(default_factory=list[float])
    gradients: dict[int, Tensors] = field(default_factory=dict[int, Tensors])
    values: dict[int, Tensors] = field(default_factory=dict[int, Tensors])
    seen: list[list[tuple[int, ...]]] = field(default_factory=list[list[tuple[int, ...]]])
    empty: tuple[str, ...] = ()
    _now: list[tuple[int, ...]] = field(default_factory=list[tuple[int, ...]])

    def watch(self, parallel: ParallelModel) -> None:
        """Keep what goes into this model."""
        self.model = model = parallel.module
        self.plain = partial(put_together, parallel)
        locals_of = {name: p.to_local() if isinstance(p, DTensor) else p for name, p in model.named_parameters()}
        self.empty = tuple(name for name, local in locals_of.items() if not local.numel())
        for part in parallel.parts:
            part.module.register_forward_pre_hook(self._look, with_kwargs=True)

    def _look(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        inputs_BS: Tensor = kwargs["input_ids"] if "input_ids" in kwargs else args[0]  # noqa: N806
        if not inputs_BS.is_floating_point():  # as what a stage of a pipeline takes from another
            self._now += [tuple(row) for row in inputs_BS.tolist()]

    def emit(self, event: object) -> None:
        if isinstance(event, StepDone):
            self.norms.append(event.gradient_norm)
            self.routers.append(event.router_loss)
            self.dropped.append(event.dropped)

    def after_step(self) -> None:
        self.step += 1
        self.seen.append(self._now)
        self._now = []
        if self.step in CAPTURED:
            trained = {name: p for name, p in self.model.named_parameters() if p.grad is not None}
            self.gradients[self.step] = {name: self.plain(name, whole(p.grad)) for name, p in trained.items()}
            self.values[self.step] = {name: self.plain(name, whole(p)) for name, p in self.model.named_parameters()}

    def trace(self) -> Trace:
        return Trace(
            losses=tuple(self.losses),
            norms=tuple(self.norms),
            gradients=self.gradients,
            values=self.values,
            seen=tuple(map(tuple, self.seen)),
            empty=self.empty,
            routers=tuple(self.routers),
            dropped=tuple(self.dropped),
        )


def whole(tensor: Tensor | None) -> Any:
    """A tensor as this rank and those it is cut over hold it."""
    assert tensor is not None
    full: Tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return full.detach().float().clone().numpy()  # numpy knows no bfloat16


def put_together(parallel: ParallelModel, name: str, part: Any) -> Any:
    """All of a parameter of which the ranks of a tensor axis have plain parts, by the plan's layout alone."""
    if name not in parallel.plain:
        return part
    ((axis, group),) = ((a, parallel.world.devices.get_group(dim_of(a))) for a in parallel.plan.axes.tensor)
    parts: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(parts, part, group=group)
    text = re.sub(r"/(?!tp\b)\w+", "", parallel.plan.layout_of(name))  # FSDP's parts are together already
    shape = parallel.plain[name].shape
    full = np.full(shape, np.nan, dtype=part.dtype)
    for rank, own in enumerate(parts):
        (box,) = region(Layout.parse(text).bind(shape), Mesh(((("tp", len(parts)),),)), rank).boxes
        at = [np.concatenate([np.arange(*run) for run in runs]) for runs in box]
        full[np.ix_(*at)] = own
    assert axis == "tp"
    return full


_worlds: dict[tuple[str, Any], World] = {}


def world_of(plan: Plan, rank: Rank) -> World:
    """Plans of one mesh whose axes have one meaning share the groups, of which making each takes a while."""
    key = (plan.mesh, axes_of(plan))
    if key not in _worlds:
        group = dist.group.WORLD
        assert group is not None
        _worlds[key] = make_world(plan, rank.index, rank.device, group)
    return _worlds[key]


def run_case(rank: Rank, case: Case, folder: Path, mistake: Mistake | None = None) -> Trace:
    """Train a case, with a mistake planted or without."""
    setting = Setting(case.plan, world_of(case.plan, rank))
    with contextlib.nullcontext() if mistake is None else mistake.plant(setting), dealt(case):
        until = case.until if mistake is None else mistake.until
        leg = Leg(case, None, case.resume_at or until, until)
        place = folder / "".join(c if c.isalnum() else "-" for c in f"{case.name} {mistake and mistake.plant.__name__}")
        return run_leg(rank, leg, place, setting)


@dataclass(frozen=True)
class Leg:
    """A part of a run: from a checkpoint (else the begin) to `save_at`, where one is made, and on to `until`."""

    case: Case
    start: Path | None
    save_at: int
    until: int
    """Later than `save_at`: the rest is trained by a new model and optimiser, into which the checkpoint is loaded."""


def run_leg(rank: Rank, leg: Leg, folder: Path, setting: Setting | None = None) -> Trace:
    """Train it; the folder gets its checkpoints."""
    case = leg.case
    setting = setting or Setting(case.plan, world_of(case.plan, rank))
    keeper = Keeper()
    start, saves = leg.start, leg.save_at < leg.until or leg.start is not None
    checkpointer = Checkpointer(folder, setting.plan if saves else _without_writer(setting.plan), setting.world)
    for until in dict.fromkeys((leg.save_at, leg.until)):
        model, state = built(case, setting, case.plan.seed + (start is not None))  # loading replaces every value
        keeper.watch(model)
        if start is not None:
            checkpoints.load(start, state, setting.plan, setting.world)
            keeper.step = state.progress.step
            for tell in setting.resumed:
                tell(state)
        train(case, model, state, setting, keeper, checkpointer, until, rank)
        if saves:
            checkpointer.save(state, wait=True)
            start = folder / f"step-{until:08}"
    failed = [event for event in checkpointer.close() if isinstance(event, SaveFailed)]
    assert not failed, failed
    return keeper.trace()


def _without_writer(plan: Plan) -> Plan:
    """Of a run that saves nothing: its writers' imports took most of the time of all cases."""
    return plan.model_copy(update={"checkpoint": plan.checkpoint.model_copy(update={"asynchronous": False})})


def built(case: Case, setting: Setting, seed: int) -> tuple[ParallelModel, JobState]:
    """The model and optimiser of a rank, by the path that `tangram train` takes."""
    plan = setting.plan.model_copy(update={"seed": seed})
    if case.own:
        model = own_built(case.own, plan, setting.world)
    else:
        model = build_model.build(plan, build_model.source_of(plan, BYTES), setting.world, values=True)
    module, plan = model.module, setting.plan
    if plan.optimiser.name == "adamw":
        optimiser = optimiser_step.make_adamw(module, plan.optimiser, plan.precision.masters, model.plain)
    else:
        optimiser = optimiser_step.make_optimiser(replace(model, plan=plan))
    state = JobState(module, optimiser, plain=model.plain)
    for tell in setting.built:
        tell(module)
    return replace(model, plan=plan), state


def own_built(kind: str, plan: Plan, world: World) -> ParallelModel:
    """A module of one's own: with values that every rank has made alike, or on meta and filled afterwards."""
    if kind == "values":
        return apply.apply(own_model(plan.seed), plan, world)
    with torch.device("meta"):
        model = Own()
    parallel = apply.apply(model, plan, world)
    source = own_model(plan.seed)
    apply.materialise(model, world.device, [*source.named_parameters(), *source.named_buffers()])
    return parallel


def train(
    case: Case,
    model: ParallelModel,
    state: JobState,
    setting: Setting,
    keeper: Keeper,
    checkpointer: Checkpointer,
    until: int,
    rank: Rank,
) -> None:
    """Train up to a step, and stop there as on a signal, which one rank alone has got."""

    def after_step() -> None:
        for tell in setting.stepped:
            tell(state.model)
        keeper.after_step()

    last = rank.world - 1

    def asked() -> bool:
        return rank.index == last and keeper.step + 1 == until

    if case.own:
        keeper.losses += own_loop(model, state, keeper, after_step, until)
        return
    hooks = loop.Hooks(keeper.emit, asked, after_step)
    trained = loop.train_steps(model, state, corpus_of(setting.plan.data), checkpointer, hooks)
    keeper.losses += trained.losses


def own_loop(
    model: ParallelModel, state: JobState, keeper: Keeper, after_step: Callable[[], None], until: int
) -> Iterator[float]:
    """A loop of one's own around a module and a loss of one's own, as docs/training.md has it."""
    plan, world = model.plan, model.world
    stream = Stream(corpus_of(plan.data), plan.data, seed=plan.seed, index=world.data_index, size=world.data_size)
    assert state.optimiser is not None
    for step in range(until):
        batches = next(stream)
        lr = optimiser_step.lr_at(step, plan.run.steps, plan.optimiser)
        done = loop.train_step(model, state.optimiser, batches, lr=lr, loss_sum=own_loss_sum)
        keeper.norms.append(done.norm)
        state.progress = Progress(step + 1, stream.position)
        after_step()
        yield done.loss


@contextlib.contextmanager
def swapped(place: object, name: str, value: object) -> Iterator[None]:
    """Another value of an attribute for a while."""
    before = getattr(place, name)
    setattr(place, name, value)
    try:
        yield
    finally:
        setattr(place, name, before)


@contextlib.contextmanager
def dealt(case: Case) -> Iterator[None]:
    """Deal the global batch out by hand where the case says so; the rows are those of the stream."""
    if not case.shares:
        yield
        return
    plan, real = case.plan.data, loop.step_batches

    def by_hand(corpus: Any, data: Any, **told: Any) -> RankBatches:
        size = plan.global_batch
        everything = real(corpus, data, **{**told, "index": 0, "size": 1, "micro_steps": size})
        rows = [row for batch in everything.micro for row in _rows(batch)][:size]
        index = told["index"]
        mine = rows[sum(case.shares[:index]) : sum(case.shares[: index + 1])]
        longest = -(-max(case.shares) // plan.micro_batch) * plan.micro_batch
        empty = collate([None], plan.sequence, corpus.fill, told["device"])
        mine += [empty] * (longest - len(mine))
        micro = tuple(_joined(mine[at : at + plan.micro_batch]) for at in range(0, longest, plan.micro_batch))
        return replace(everything, micro=micro, firsts=tuple(range(len(micro))))

    with swapped(loop, "step_batches", by_hand):
        yield


def _rows(batch: Batch) -> list[Batch]:
    rows = (x_BS.split(1) for x_BS in (batch.inputs_BS, batch.labels_BS, batch.positions_BS))
    return [Batch(*row) for row in zip(*rows, strict=True)]


def _joined(rows: list[Batch]) -> Batch:
    return Batch(*(torch.cat([getattr(row, x) for row in rows]) for x in ("inputs_BS", "labels_BS", "positions_BS")))
