"""Which plans there are for a job on this machine, and which is best: all are made, checked, estimated and sorted.

The space is small and searched whole: FSDP, copies, both (HSDP), tensor parallelism where the model has rules for it,
tensor parallelism inside FSDP; each with every micro-batch that divides a rank's share of the batch. The answer depends
on nothing but the job, the model and the rates.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from math import isqrt, prod

from pydantic import ValidationError
from transformers import PreTrainedConfig

from tangram.errors import UserError
from tangram.hardware.measuring.rates import Rates
from tangram.layout import Mesh
from tangram.planner.cost.history import Likely
from tangram.planner.legality.check_plan import legal
from tangram.planner.local.estimate import Estimate, estimate, megabytes
from tangram.planner.local.model_costs import Counted
from tangram.planner.local.strategies import (
    PIPELINE,
    TENSOR,
    Strategy,
    fitting_micro_batch,
    judge,
    layouts_of,
    make_plan,
)
from tangram.planner.local.teacher import teacher_costs
from tangram.planner.space.schedule_formulas import SCHEDULES
from tangram.schema.files import mistakes
from tangram.schema.job import Job
from tangram.schema.plan import Plan
from tangram.schema.schedules import MAKERS, micros_unlike

MOST_PROCESSES = 64
SEARCHED = tuple(one.name for one in SCHEDULES)
"""Schedules of pipelines that are ranked where none is asked for."""
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
    likely: Likely | None = None
    """Seconds of a step with what was measured before; None where nobody has asked."""

    @property
    def step(self) -> float:
        """Seconds, as far as anything is known; infinite for no plan."""
        if self.likely is not None:
            return self.likely.step
        return self.estimate.seconds.total if self.estimate else math.inf

    @property
    def tokens_per_second(self) -> float:
        """Over all ranks; 0 for no plan."""
        return self.estimate.tokens / self.step if self.estimate else 0.0

    @property
    def fits(self) -> bool:
        """Whether it can be run here."""
        return not self.why_not

    @property
    def chosen_plan(self) -> Plan:
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
            "likely": asdict(self.likely) if self.likely else None,
            "why_not": self.why_not or None,
        }


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
    processes says; where the schedule leaves it open, a rank of the pipeline has two of them. 0: with and without
    pipelines, by all schedules that are searched.
    `rates` are those of one of so many processes. `counted` saves counting the same model twice. Raises UserError where
    the job cannot be planned at all.
    """
    if not 1 <= processes <= MOST_PROCESSES:
        raise UserError(f"{processes} processes cannot be planned for: give 1 to {MOST_PROCESSES}")
    ways = _ways(processes) if stages == 0 else [(stages, _stage_ranks(stages, schedule), schedule)]
    if processes % ways[0][1]:
        raise UserError(f"{processes} processes are no multiple of {stages} stages: give a multiple as --processes")
    counted = counted or Counted(job, config)
    some = [_staged(one, cut, ranks, by) for cut, ranks, by in ways for one in _strategies(processes // ranks)]
    found = [ranked for one in some for ranked in _ranked(one, job, counted, rates)]
    return in_order(found)


def in_order(found: Iterable[Ranked]) -> tuple[Ranked, ...]:
    """Those that fit, the most tokens a second first, then the others."""
    return tuple(sorted(found, key=_order))


def predict(plan: Plan, rates: Rates, config: PreTrainedConfig, counted: Counted | None = None) -> Estimate:
    """What a plan that somebody else made is predicted to need. Raises UserError where it is not legal.

    `counted` saves counting the same model twice.
    """
    counted = counted or Counted(plan, config)
    legal(plan, counted.model, counted.graph if plan.pipeline is not None else None)
    axes = Mesh.parse(plan.mesh).axes
    tensor = prod(axes[axis][0] for axis in plan.axes.tensor)
    found = counted.tensor((plan.axes.tensor[0], tensor), None) if plan.axes.tensor else None
    lies = None if isinstance(found, str) else found
    samples = plan.data.micro_batch / (plan.model_ranks // tensor)  # ranks of other axes have a part of each
    axis = (plan.axes.tensor[0] if plan.axes.tensor else "", tensor)
    local, timed = (one.local_costs(lies, axis, samples) for one in (counted, counted.timed))
    moves = counted.communication(plan) if plan.model_ranks > 1 else ()
    whole = counted.costs(plan.data.micro_batch)
    return estimate(plan, whole, local, rates, moves, timed, teacher_costs(plan, counted))


def _strategies(processes: int) -> Iterator[Strategy]:
    if processes == 1:
        yield Strategy("one process", "dp=1", ("dp",), shard="dp")
        return
    yield Strategy("FSDP", f"dp={processes}", ("dp",), shard="dp")
    yield Strategy("DDP", f"dp={processes}", ("dp",))
    for size in range(2, processes):
        if processes % size == 0:
            yield Strategy("HSDP", f"dp={processes // size} fsdp={size}", ("dp", "fsdp"), shard="fsdp")
    for size in range(2, processes):
        if processes % size == 0:
            yield Strategy("FSDP x TP", f"dp={processes // size} tp={size}", ("dp",), (TENSOR,), "dp")
    yield Strategy("TP", f"tp={processes}", (), (TENSOR,))


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


def _ways(processes: int) -> list[tuple[int, int, str]]:
    """Stages, ranks of the pipeline and its schedule, for every number of stages."""
    found = [(1, 1, PIPELINE)]
    for ranks in range(2, processes + 1):
        if processes % ranks == 0:
            found += [(ranks * (MAKERS[name].own or 2), ranks, name) for name in SEARCHED]
    return found


def _staged(one: Strategy, stages: int, ranks: int, schedule: str) -> Strategy:
    if stages == 1:
        return one
    name = f"{stages} stages" if schedule == PIPELINE else f"{stages} stages by {schedule}"
    name = name if one.mesh == "dp=1" else f"{name} x {one.name}"
    return replace(one, name=name, mesh=f"pp={ranks} {one.mesh}", stages=stages, schedule=schedule)


def _ranked(one: Strategy, job: Job, counted: Counted, rates: Rates) -> Iterator[Ranked]:
    try:
        lies = layouts_of(one, counted)
        size = Mesh.parse(one.mesh).axes[TENSOR.name][0] if one.model else 1
        moves = lies.communication if lies else ()
        pipeline = counted.pipeline(one.stages, one.schedule)
        plan = make_plan(one, job, lies, fitting_micro_batch(one, job, 1), pipeline)
        judge(plan, counted)
        teacher = teacher_costs(plan, counted)
        for micro_batch in _micro_batches(plan):
            plan = make_plan(one, job, lies, micro_batch, pipeline)
            whole, axis = counted.costs(micro_batch), (TENSOR.name, size)
            local, timed = (at.local_costs(lies, axis, micro_batch) for at in (counted, counted.timed))
            needs = estimate(plan, whole, local, rates, moves, timed, teacher)
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


def _micro_batches(plan: Plan) -> list[int]:
    share = -(-plan.data.global_batch // plan.data_ranks)
    if plan.optimiser.in_backward:
        return [share]
    low = [size for size in range(1, isqrt(share) + 1) if share % size == 0]
    found = sorted({*low, *(share // size for size in low)})
    if plan.pipeline is None:
        return found
    return [size for size in found if not micros_unlike(plan.pipeline.schedule, plan.stage_ranks, share // size)]


def _order(one: Ranked) -> tuple[bool, float, str, str, int]:
    return (not one.fits, -one.tokens_per_second, one.name, one.mesh, one.micro_batch)
