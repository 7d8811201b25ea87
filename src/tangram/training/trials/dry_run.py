"""One step of a plan without its machines: `tangram train PLAN --dry-run`.

    check      text, tokenizer, model, layouts, stages, schedule, as a real start would
    a rank     of each kind of stage: its process groups are fake ones and its tensors have no memory, else all is the
               code that trains (`apply`, the optimiser, `loop.backward`), so what would be raised there is raised here
    counted    bytes in use at the highest moment, by what they are; collectives with what a rank receives (`tally`)

Two steps of few micro-batches are run, which differ by one; what a micro-batch adds is their difference, and a step
has as many as the plan says. So that a pipeline's stage is at its fullest, it keeps one micro-batch at a time in the
first and two in the second; by how many its schedule keeps, what one adds is multiplied. Ranks of a stage differ in
data alone and in what is left where a cut is uneven: the first rank of a stage has the most (of listed sizes, another).

Left out: what torch.compile would change, fragments that an allocator cannot use, what kernels and communication
libraries hold, the computation itself. Attention is counted as on a CPU, where some shapes have all scores in memory.
Tokens are taken to spread evenly over experts.
"""

# ruff: noqa: N806  a tensor carries its dims in its name

from __future__ import annotations

import math
import re
import traceback
from collections import Counter, defaultdict
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode
from torch.distributed.tensor.debug import _clear_sharding_prop_cache  # pyright: ignore[reportPrivateUsage]
from torch.optim import Optimizer
from torch.testing._internal.distributed.fake_pg import FakeStore

from tangram.errors import UserError
from tangram.layout import Layout, Mesh
from tangram.models.building.build import Source, build_on_meta
from tangram.planner.legality.check_plan import legal
from tangram.planner.local.peak_memory import fullest
from tangram.relayout.exchange.peers import Peers
from tangram.schema.plan import Plan
from tangram.schema.schedule_table import Action, Kind, Schedule, kept
from tangram.training.data import Batch, RankBatches, list_files, tokens_of
from tangram.training.mesh.local_parts import local
from tangram.training.mesh.world import make_world
from tangram.training.objective.cached_teacher import TopLogits, sizes_of_cache
from tangram.training.parallel.apply import apply, freeze, give_storage
from tangram.training.parallel.model import ParallelModel, Reference
from tangram.training.state.build_model import source_of
from tangram.training.state.teacher import bare_teacher
from tangram.training.step import loop
from tangram.training.step.backward import early_updates
from tangram.training.step.optimiser_step import clip, local_gradients, make_optimiser, norms_of, round_for, square_sum
from tangram.training.trials.dry_run_counts import Tally

_NUMBER = re.compile(r"\d+")
KINDS = ("parameters", "gradients", "optimiser", "gathered", "activations")
"""What bytes are: this rank's parts of parameters (and buffers), of their gradients and of the optimiser's states;
parameters that FSDP has put together, with its buffers; all else, which is activations for the most part."""


@dataclass(frozen=True)
class RankTraffic:
    """Collectives of one kind over one axis that a rank takes part in, in a step."""

    axis: str
    kind: str
    times: int
    nbytes: float
    """What the rank receives (of sends: sends) in all of them, by the usual rings."""


@dataclass(frozen=True)
class Needs:
    """What a step takes of one rank."""

    rank: int
    place: int
    """On the pipeline axis; 0 without one."""
    memory: Mapping[str, float]
    """Bytes at the highest moment, by `KINDS`."""
    kept: float
    """Micro-batches whose activations it keeps at a time, at most."""
    traffic: tuple[RankTraffic, ...]

    @property
    def peak(self) -> float:
        """Bytes in use at the highest moment."""
        return sum(self.memory.values())


@dataclass(frozen=True)
class CountedRun:
    """A step that is counted: so many micro-batches, of which a stage of a pipeline keeps so many at a time."""

    micros: int
    kept: int


@dataclass(frozen=True)
class CountedStep:
    """What one such step took."""

    run: CountedRun
    memory: Mapping[str, int]
    times: Mapping[tuple[str, str], int]
    nbytes: Mapping[tuple[str, str], float]
    """Of collectives, by axis and kind."""


def dry_run(plan: Plan, tell: Callable[[str], None] = lambda text: None) -> tuple[Needs, ...]:
    """What the first rank of each place on the pipeline axis needs; of a plan without one, the first rank.

    Raises UserError for what a start of the plan would be refused for. `tell` is given words on what goes on. There
    must be no default process group: one of fakes takes its place.
    """
    if dist.is_initialized():
        raise RuntimeError("a dry run makes a process group of its own, and there is one already")
    if plan.run.stream_layers:
        raise UserError(
            "a dry run counts parameters as if memory had them all: `tangram plan` predicts what streamed layers take"
        )
    plan = plan.model_copy(update={"run": plan.run.model_copy(update={"compile": False})})
    tell("reading model and text")
    for one in plan.data.sources:
        list_files(one)
    source = source_of(plan, tokens_of(plan))
    model = build_on_meta(source.config)
    freeze(model, plan)
    legal(plan, model)
    known: dict[object, list[CountedStep]] = {}
    found: list[Needs] = []
    for place, alive in enumerate(_kept(plan)):
        rank, kind = _first_rank(plan, place), _kind(plan, model, place)
        if kind not in known:
            tell(f"a step of rank {rank} of {plan.ranks}, without memory")
            known[kind] = counted_alone(plan, source, rank)
        found.append(_needs(plan, known[kind], rank, place, alive))
    return tuple(found)


def _first_rank(plan: Plan, place: int) -> int:
    """The lowest rank at a place on the pipeline axis, of those that have most."""
    at = fullest(Layout.parse(text) for text in plan.layouts.parameters.values())
    return Mesh.parse(plan.mesh).rank({**at, **dict.fromkeys(plan.axes.pipeline, place)})


def _kept(plan: Plan) -> list[float]:
    """For each place on the pipeline axis, how many micro-batches' activations are kept at a time, at most."""
    if plan.pipeline is None:
        return [1.0]
    table = plan.actions()
    return kept(table, [table.ranks / table.stages] * table.stages)


def _kind(plan: Plan, model: nn.Module, place: int) -> object:
    """What of two places is alike where they take as much: parameters and where they lie, whether they are ends."""
    own = sorted(
        (_NUMBER.sub("*", name), tuple(p.shape), p.requires_grad, plan.layout_of(name))
        for name, p in model.named_parameters()
        if plan.pipeline is None or place in plan.places_of(name)
    )
    return place == 0, place == plan.stage_ranks - 1, tuple(own), plan.runs_teacher and place  # of the teacher


def _needs(plan: Plan, counted: Sequence[CountedStep], rank: int, place: int, alive: float) -> Needs:
    """Of a whole step, from two that differ by a micro-batch; from one where there is but one."""
    first, last = counted[0], counted[-1]
    more = (plan.micro_steps - first.run.micros) / max(1, last.run.micros - first.run.micros)
    full = (alive - first.run.kept) / (last.run.kept - first.run.kept) if last.run.kept > first.run.kept else 1.0
    traffic = [
        RankTraffic(*key, round(before + more * (times - before)), nbytes + more * (last.nbytes[key] - nbytes))
        for key, times in last.times.items()
        for before, nbytes in [(first.times.get(key, 0), first.nbytes.get(key, 0.0))]
    ]
    memory = {kind: first.memory[kind] + full * (last.memory[kind] - first.memory[kind]) for kind in KINDS}
    return Needs(rank, place, memory, alive, tuple(sorted(traffic, key=lambda one: -one.nbytes)))


def _runs(plan: Plan) -> tuple[CountedRun, ...]:
    if plan.pipeline is not None:
        return CountedRun(2, 1), CountedRun(3, 2)
    return (CountedRun(1, 1), CountedRun(2, 1)) if plan.micro_steps > 1 else (CountedRun(1, 1),)


def counted_alone(plan: Plan, source: Source, rank: int) -> list[CountedStep]:
    """The steps of one rank, of which there is no other and nothing has memory."""
    cpu = torch.device("cpu")
    with _fake_ranks(plan.ranks, rank) as group:
        world = make_world(plan, rank, cpu, group, Peers())
        model = apply(build_on_meta(source.config), plan, world)
        if plan.distill is not None:
            model = replace(model, teacher=bare_teacher(plan, tokens_of(plan), world), cached_teacher=_top_logits(plan))
        with FakeTensorMode(allow_non_fake_inputs=True), refusing_values():
            give_storage(model.module, cpu)
            if model.teacher is not None:
                give_storage(model.teacher.module, cpu)
            return counted_steps(model)


def _top_logits(plan: Plan) -> Callable[[Batch], TopLogits] | None:
    """What a teacher that is not run says, without values."""
    if plan.runs_teacher:
        return None
    top, shared = sizes_of_cache(plan)

    def top_logits(batch: Batch) -> TopLogits:
        classes_BSK = torch.zeros(*batch.labels_BS.shape, top, dtype=torch.long)
        return TopLogits(classes_BSK, torch.zeros(*batch.labels_BS.shape, top + 1), shared)

    return top_logits


def counted_steps(model: ParallelModel) -> list[CountedStep]:
    """The steps of a rank whose model has storage, of whatever kind. Collective."""
    plan, module = model.plan, model.module
    optimiser = make_optimiser(model)
    module.train()
    if plan.has_reference:
        model = replace(model, reference=Reference(module))
    kept = [] if model.reference is None else model.reference.kept
    if model.teacher is not None:
        kept = [*kept, *_local([*model.teacher.module.parameters()])]
    with Tally() as tally:
        tally.watch(_local([*module.parameters(), *module.buffers()]) + kept)
        for parameter in module.parameters():
            parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
        round_for(optimiser, model.plan.seed, 0)
        optimiser.step()  # makes its states
        optimiser.zero_grad()
        found: list[CountedStep] = []
        for run in _runs(plan):
            if model.pipeline is not None:
                model.pipeline.actions = partial(in_turn, plan.rank_of_stage, run.kept)
            tally.begin()
            gradients = _step(model, optimiser, run.micros, tally)
            optimiser.zero_grad()
            states = [x for state in optimiser.state.values() for x in state.values() if isinstance(x, Tensor)]
            lasting = {  # asked after the step: FSDP changes where parameters lie at its first one
                "parameters": tally.watch(_local([*module.parameters(), *module.buffers()]) + kept),
                "gradients": gradients,
                "optimiser": tally.watch(_local(states)),
            }
            found.append(_sorted_out(run, tally, lasting, _axes_of_groups(model)))
    return found


def _step(model: ParallelModel, optimiser: Optimizer, micros: int, tally: Tally) -> list[int]:
    """As `loop.train_step`, but for what reads a value; the numbers of the gradients' storages."""
    plan, world = model.plan, model.world
    rows, length = plan.data.micro_batch * plan.rows_per_sample, plan.data.sequence
    ids_BS = torch.zeros(rows, length, dtype=torch.long)
    batch = Batch(ids_BS, ids_BS.clone(), None if plan.data.packing == "single" else ids_BS.clone())
    if plan.task == "kto":
        batch = replace(batch, bad_B=torch.zeros(rows, dtype=torch.bool), others=batch)
    batches = RankBatches((batch,) * micros, rows * length, tuple(range(micros)))
    with early_updates(model, optimiser, 0) as used:
        part = loop.backward(model, batches).loss
    model.sum_gradients()
    gradients = local_gradients(model.module, model.plain, used, model.counted_elsewhere)
    sums = torch.stack([part, square_sum(norms_of(gradients), gradients, world.size // world.stages)])
    dist.all_reduce(sums, group=world.group)
    clip(gradients, math.inf, plan.optimiser.clip_norm)
    numbers = tally.watch([one.part for one in gradients])
    round_for(optimiser, plan.seed, 0)
    optimiser.step()
    return numbers


def _sorted_out(
    run: CountedRun, tally: Tally, known: Mapping[str, Sequence[int]], axes: Mapping[str, str]
) -> CountedStep:
    """Bytes at the peak by what they were, collectives by axis."""
    kinds = {number: kind for kind, numbers in {"gathered": [*tally.gathered], **known}.items() for number in numbers}
    memory: dict[str, int] = dict.fromkeys(KINDS, 0)
    for number, nbytes in tally.step.alive.items():
        memory[kinds.get(number, "activations")] += nbytes
    times: Counter[tuple[str, str]] = Counter()
    moved: dict[tuple[str, str], float] = defaultdict(float)
    for one, count in tally.step.times.items():
        key = axes.get(one.group, "other ranks"), one.kind
        times[key] += count
        moved[key] += tally.step.nbytes[one]
    return CountedStep(run, memory, times, moved)


def _local(found: Sequence[Tensor]) -> list[Tensor]:
    return [local(x) for x in found]


def _axes_of_groups(model: ParallelModel) -> dict[str, str]:
    """What the groups of a world are called in its mesh, and those that a derived model has made over several axes."""
    world = model.world
    dims = zip(world.devices.mesh_dim_names or (), world.axes.in_order, strict=True)
    names = {dim: " x ".join(own) for dim, own in dims}
    found = {world.devices.get_group(dim).group_name: name for dim, name in names.items()}
    several = [part.derived.together for part in model.parts if part.derived is not None]
    found |= {group.group_name: " x ".join(axes) for own in several for axes, group in own.items()}
    name = " x ".join(axis for own in world.axes.in_order[1:] for axis in own)
    watching = [watch for part in model.parts for watch in (part.routers, part.capacity)]
    stage = {watch.group.group_name: name for watch in watching if watch is not None}
    # An axis over all of them has the world's own group, and that of a stage may be an axis's.
    return {**stage, world.group.group_name: "all ranks", **found}


def in_turn(rank_of: tuple[int, ...], kept: int, micros: int) -> Schedule:
    """A table in which each stage keeps `kept` micro-batches before the first goes back, and one comes for one gone."""
    order: list[tuple[Kind, int]] = [("F", micro) for micro in range(min(kept, micros))]
    for micro in range(micros):
        order.append(("B", micro))
        if micro + kept < micros:
            order.append(("F", micro + kept))
    rows: list[list[Action]] = [[] for _ in range(max(rank_of) + 1)]
    for kind, micro in order:
        stages = range(len(rank_of)) if kind == "F" else reversed(range(len(rank_of)))
        for stage in stages:
            rows[rank_of[stage]].append(Action(stage, kind, micro))
    return Schedule(tuple(map(tuple, rows)), rank_of, micros)


@contextmanager
def _fake_ranks(count: int, rank: int) -> Generator[dist.ProcessGroup]:
    """A default process group in which this process is a rank of many and nobody else is there."""
    dist.init_process_group("fake", rank=rank, world_size=count, store=FakeStore())
    try:
        group = dist.group.WORLD
        assert group is not None
        yield group
    finally:
        dist.destroy_process_group()
        _clear_sharding_prop_cache()  # which holds meshes, and takes one of the same ranks for the same groups


@contextmanager
def refusing_values() -> Generator[None]:
    """A UserError where something reads a tensor's value, which is not there."""
    try:
        yield
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        own = Path(torch.__file__).parent, Path(__file__).parents[2]
        frames = traceback.extract_tb(error.__traceback__)
        outside = [frame for frame in frames if not any(Path(frame.filename).is_relative_to(x) for x in own)]
        where = (outside or [*frames])[-1]
        raise UserError(
            f"line {where.lineno} of {where.filename} reads values of tensors ({error.func}), of which a dry run has "
            "none: this model has to be tried on its ranks"
        ) from error
