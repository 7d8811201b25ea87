"""Which plans there are for a job on this machine, and which is best: all are made, checked, estimated and sorted.

The space is small and searched whole: FSDP, copies, both (HSDP), tensor parallelism where the model has rules for it,
tensor parallelism inside FSDP; each with every micro-batch that divides a rank's share of the batch. The answer depends
on nothing but the job, the model and the rates.
"""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import cache
from math import isqrt, prod

import torch
from pydantic import ValidationError
from torch import nn
from transformers import PreTrainedConfig

from tangram.errors import UserError
from tangram.hardware.rates import Rates
from tangram.layout import Mesh
from tangram.models.build import build_on_meta
from tangram.models.costs import ModelCosts, at_micro_batch, costs
from tangram.models.graph import Graph
from tangram.models.tensor_rules import TensorRules, rules_for, undivided_heads
from tangram.models.twin import Shapes, module_shapes
from tangram.planner.derived import Moves, TensorLayouts, plan_moves, sample_graph, tensor_layouts
from tangram.planner.estimate import Estimate, estimate, megabytes
from tangram.planner.job import Job
from tangram.planner.legal import legal
from tangram.planner.plan import AxesPlan, LayoutsPlan, PipelinePlan, Plan, matches
from tangram.planner.read import mistakes
from tangram.planner.schedules import MAKERS, micros_unlike, nearest_micro_batch
from tangram.planner.staged import cut_into_stages

MOST_PROCESSES = 64
Stages = tuple[tuple[str, ...], ...]
FILLED = 0.9  # of the memory there is: estimates are rough, and the machine does other things too


@dataclass(frozen=True)
class Ranked:
    """A plan and what it is predicted to need, or the reason why it is none."""

    name: str
    mesh: str
    micro_batch: int
    """0 where no plan came about."""
    plan: Plan | None = None
    estimate: Estimate | None = None
    why_not: str = ""

    @property
    def fits(self) -> bool:
        """Whether it can be run here."""
        return not self.why_not

    @property
    def taken(self) -> Plan:
        """The plan. Raises UserError where there is none."""
        if self.plan is None:
            raise UserError(f"{self.name} is no plan here: {self.why_not}")
        return self.plan

    def as_json(self) -> dict[str, object]:
        """As one row of `tangram plan --json`."""
        return {
            "name": self.name,
            "mesh": self.mesh,
            "micro_batch": self.micro_batch,
            "predicted": self.estimate.as_json() if self.estimate else None,
            "why_not": self.why_not or None,
        }


PIPELINE = "1F1B"
"""The schedule where none is asked for."""


@dataclass(frozen=True)
class _Strategy:
    name: str
    mesh: str
    data: tuple[str, ...]
    tensor: tuple[tuple[str, int], ...] = ()
    shard: str | None = None
    stages: int = 1
    schedule: str = PIPELINE


def rank(
    job: Job,
    processes: int,
    rates: Rates,
    config: PreTrainedConfig,
    counted: Counted | None = None,
    stages: int = 1,
    schedule: str = PIPELINE,
) -> tuple[Ranked, ...]:
    """Every plan for the job on so many processes: those that fit, the most tokens a second first, then the others.

    With `stages` each is of a pipeline of so many stages by this schedule, whose ranks lie as the plan of so many fewer
    processes says; where the schedule leaves it open, a rank of the pipeline has two of them.
    `rates` are those of one of so many processes. `counted` saves counting the same model twice. Raises UserError where
    the job cannot be planned at all.
    """
    if not 1 <= processes <= MOST_PROCESSES:
        raise UserError(f"{processes} processes cannot be planned for: give 1 to {MOST_PROCESSES}")
    ranks = _stage_ranks(stages, schedule)
    if processes % ranks:
        raise UserError(f"{processes} processes cannot be dealt to {stages} stages: give a divisor")
    counted = counted or Counted(job, config)
    some = [_staged(one, stages, ranks, schedule) for one in _strategies(processes // ranks)]
    found = [ranked for one in some for ranked in _ranked(one, job, counted, rates)]
    return tuple(sorted(found, key=_order))


def frozen(model: nn.Module, job: Job) -> nn.Module:
    """The model with the parameters frozen that the job freezes."""
    for name, parameter in model.named_parameters():
        if matches(job.model.freeze, name):
            parameter.requires_grad_(False)
    return model


def predict(plan: Plan, rates: Rates, config: PreTrainedConfig) -> Estimate:
    """What a plan that somebody else made is predicted to need. Raises UserError where it is not legal."""
    counted = Counted(plan, config)
    legal(plan, counted.model)
    axes = Mesh.parse(plan.mesh).axes
    tensor = prod(axes[axis][0] for axis in plan.axes.tensor)
    found = counted.tensor((plan.axes.tensor[0], tensor), None) if plan.axes.tensor else None
    lies = None if isinstance(found, str) else found
    samples = plan.data.micro_batch / (plan.model_ranks // tensor)  # ranks of other axes have a part of each
    local = counted.costs(tensor if lies else 1, lies is not None and lies.vocabulary, samples)
    moves = counted.moves(plan) if plan.layouts.marks else None
    return estimate(plan, counted.costs(1, False, plan.data.micro_batch), local, rates, moves)


class Counted:
    """A job's model on meta and what it costs, counted once for each number of tensor ranks."""

    def __init__(self, job: Job, config: PreTrainedConfig) -> None:
        self.job, self.config = job, config
        self.model = frozen(build_on_meta(config), job)
        self._pair = cache(self._count)
        self._shapes = cache(lambda: module_shapes(self.model, 2, 7))
        dtype = getattr(torch, job.precision.compute)
        self._graph = cache(lambda: sample_graph(self.model, job.data.sequence, dtype))

    def moves(self, plan: Plan) -> tuple[Moves, ...] | None:
        """What moves over a plan's model axes for one sample; None where that is not known."""
        try:
            return plan_moves(plan, self._graph())
        except UserError:  # which is told when it is run
            return None

    def costs(self, tensor: int, vocabulary: bool, micro_batch: float) -> ModelCosts:
        """Of one of so many tensor ranks, for one micro-batch."""
        return at_micro_batch(*self._pair(tensor, vocabulary), micro_batch)

    def tensor(self, axis: tuple[str, int], shard: str | None) -> TensorLayouts | TensorRules | str:
        """How everything lies over a tensor axis: derived where marks are known, else by rules of names."""
        if reason := undivided_heads(self.config, axis):
            return reason
        try:
            graph = self._graph()
        except UserError as error:
            return " ".join(str(error).split())
        found = tensor_layouts(self.config, self.model, graph, axis, shard)
        return found or rules_for(self.config, self.model, axis, shard)

    def stages(self, count: int) -> Stages:
        """The modules of each of so many stages of a pipeline. Raises UserError where it cannot be cut so."""
        return cut_into_stages(self._graph(), self.costs(1, False, 1), count)

    @property
    def graph(self) -> Graph:
        """What the model runs for one sample. Raises UserError where it cannot be captured."""
        return self._graph()

    @property
    def shapes(self) -> Shapes:
        """What flows through the modules."""
        return self._shapes()

    def _count(self, tensor: int, vocabulary: bool) -> tuple[ModelCosts, ModelCosts]:
        model = self.model if tensor == 1 else build_on_meta(_one_of(self.config, tensor, vocabulary))
        dtype = getattr(torch, self.job.precision.compute)
        one, two = (costs(model, self.job.data.sequence, batch, dtype) for batch in (1, 2))
        return one, two


def _one_of(config: PreTrainedConfig, tensor: int, vocabulary: bool) -> PreTrainedConfig:
    """The model that one of so many tensor ranks computes: fewer heads, a narrower inside."""
    config = deepcopy(config)
    text = config.get_text_config()
    text.head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    text.num_key_value_heads = (getattr(text, "num_key_value_heads", None) or text.num_attention_heads) // tensor
    text.num_attention_heads //= tensor
    text.intermediate_size //= tensor
    if vocabulary:
        text.vocab_size //= tensor
        for token in ("bos_token_id", "eos_token_id", "pad_token_id"):
            setattr(text, token, None)
    return config


def _strategies(processes: int) -> Iterator[_Strategy]:
    if processes == 1:
        yield _Strategy("one process", "dp=1", ("dp",), shard="dp")
        return
    yield _Strategy("FSDP", f"dp={processes}", ("dp",), shard="dp")
    yield _Strategy("copies", f"dp={processes}", ("dp",))
    for size in range(2, processes):
        if processes % size == 0:
            yield _Strategy("HSDP", f"dp={processes // size} fsdp={size}", ("dp", "fsdp"), shard="fsdp")
    for size in range(2, processes):
        if processes % size == 0:
            yield _Strategy("FSDP x tensor", f"dp={processes // size} tp={size}", ("dp",), (("tp", size),), "dp")
    yield _Strategy("tensor", f"tp={processes}", (), (("tp", processes),))


def _stage_ranks(stages: int, schedule: str) -> int:
    """How many ranks the pipeline axis has for so many stages; one stage is no pipeline."""
    if schedule not in MAKERS:
        raise UserError(f'there is no schedule "{schedule}": give one of {", ".join(MAKERS)}')
    own = MAKERS[schedule].own or 2
    if stages == 1 and schedule == PIPELINE:
        return 1
    if stages < max(2, own) or stages % own:
        each = "one stage" if own == 1 else "two stages"
        raise UserError(f'{stages} stages by the schedule "{schedule}", of which each rank has {each}: give {2 * own}')
    return stages // own


def _staged(one: _Strategy, stages: int, ranks: int, schedule: str) -> _Strategy:
    if stages == 1:
        return one
    name = f"{stages} stages" if schedule == PIPELINE else f"{stages} stages by {schedule}"
    name = name if one.mesh == "dp=1" else f"{name} x {one.name}"
    return replace(one, name=name, mesh=f"pp={ranks} {one.mesh}", stages=stages, schedule=schedule)


def _ranked(one: _Strategy, job: Job, counted: Counted, rates: Rates) -> Iterator[Ranked]:
    lies: TensorLayouts | TensorRules | None = None
    if one.tensor:
        found = counted.tensor(one.tensor[0], one.shard)
        if isinstance(found, str):
            yield Ranked(one.name, one.mesh, 0, why_not=found)
            return
        lies = found
    size = one.tensor[0][1] if one.tensor else 1
    vocabulary = lies is not None and lies.vocabulary
    moves = lies.moves if isinstance(lies, TensorLayouts) else None
    try:
        stages = counted.stages(one.stages) if one.stages > 1 else ()
        plan = _plan(one, job, lies, _first(one, job), stages)
        shapes = counted.shapes if isinstance(lies, TensorRules) else None
        legal(plan, counted.model, shapes, counted.graph if stages else None)
        for micro_batch in _micro_batches(plan):
            plan = _plan(one, job, lies, micro_batch, stages)
            whole, local = counted.costs(1, False, micro_batch), counted.costs(size, vocabulary, micro_batch)
            needs = estimate(plan, whole, local, rates, moves)
            most = FILLED * rates.memory
            short = (
                f"needs {megabytes(needs.memory.total)} a rank, and there are {megabytes(most)}"
                if needs.memory.total > most
                else ""
            )
            yield Ranked(one.name, one.mesh, micro_batch, plan, needs, short)
    except ValidationError as error:
        yield Ranked(one.name, one.mesh, 0, why_not=mistakes(error))
    except (UserError, ValueError) as error:
        yield Ranked(one.name, one.mesh, 0, why_not=" ".join(str(error).split()))


def _plan(
    one: _Strategy, job: Job, lies: TensorLayouts | TensorRules | None, micro_batch: int, stages: Stages = ()
) -> Plan:
    """The job with a strategy. Raises ValueError (pydantic's) where the two do not go together."""
    rest = {"*": f"_/{one.shard} ..." if one.shard else "..."}
    tables = {name: getattr(job, name) for name in Job.model_fields if name != "data"}
    return Plan(
        **tables,
        data=job.data.model_copy(update={"micro_batch": micro_batch}),
        mesh=one.mesh,
        axes=AxesPlan(data=one.data, tensor=tuple(axis for axis, _ in one.tensor), pipeline=("pp",) if stages else ()),
        pipeline=PipelinePlan(schedule=one.schedule, stages=stages) if stages else None,
        layouts=LayoutsPlan(
            parameters={**(lies.parameters if lies else {}), **rest},
            activations=dict(lies.activations) if isinstance(lies, TensorRules) else {},
            marks=dict(lies.marks) if isinstance(lies, TensorLayouts) else {},
            sizes=dict(lies.sizes) if isinstance(lies, TensorRules) else {},
        ),
    )


def _first(one: _Strategy, job: Job) -> int:
    """A size of micro-batches that the schedule takes, 1 where there is one at all."""
    sizes = Mesh.parse(one.mesh).axes
    share = -(-job.data.global_batch // prod(sizes[axis][0] for axis in one.data))
    return nearest_micro_batch(one.schedule, sizes["pp"][0], 1, share) or 1 if one.stages > 1 else 1


def _micro_batches(plan: Plan) -> list[int]:
    share = -(-plan.data.global_batch // plan.data_ranks)
    low = [size for size in range(1, isqrt(share) + 1) if share % size == 0]
    found = sorted({*low, *(share // size for size in low)})
    if plan.pipeline is None:
        return found
    return [size for size in found if not micros_unlike(plan.pipeline.schedule, plan.stage_ranks, share // size)]


def _order(one: Ranked) -> tuple[bool, float, str, str, int]:
    speed = one.estimate.tokens_per_second if one.estimate else 0.0
    return (not one.fits, -speed, one.name, one.mesh, one.micro_batch)
