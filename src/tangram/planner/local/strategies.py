"""A strategy, and the plan that comes of it for a job: the same for every model.

A strategy says what the axes of a mesh are for. How a model lies over them is found for the model at hand: marks and
what follows from them (`planner.local.derived_layouts`), stages cut by work (`planner.local.stage_shares`). The plan is
judged on the model (`planner.legality.check_plan`) before anybody gets it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod

from pydantic import ValidationError

from tangram.errors import UserError
from tangram.layout import Mesh
from tangram.planner.legality.check_plan import legal, refused_heads
from tangram.planner.local.derived_layouts import ModelAxis, TensorLayouts, axes_layouts, beside_transposed
from tangram.planner.local.model_costs import Counted
from tangram.schema.files import mistakes
from tangram.schema.job import Job
from tangram.schema.parallelism import AxesPlan, ContextPlan, LayoutsPlan, PipelinePlan
from tangram.schema.plan import Plan
from tangram.schema.schedules import nearest_micro_batch

PIPELINE = "1F1B"
"""The schedule where none is asked for."""
TENSOR = ModelAxis("tp", "tensor")
"""The tensor axis of most strategies."""

ROLES = ("tensor", "context", "expert")


@dataclass(frozen=True)
class Strategy:
    """What each axis of a mesh is for. The axis of a pipeline is "pp"."""

    name: str
    mesh: str
    data: tuple[str, ...] = ()
    model: tuple[ModelAxis, ...] = ()
    """Tensor, context and expert axes, in the order of the mesh."""
    shard: str | None = None
    """The data axis that cuts parameters, too (FSDP)."""
    stages: int = 1
    schedule: str = PIPELINE

    @property
    def ranks(self) -> int:
        """How many ranks the mesh has."""
        return Mesh.parse(self.mesh).size


def plan_of(one: Strategy, job: Job, counted: Counted, micro_batch: int | None = None) -> Plan:
    """The job with a strategy: legal, or a UserError that says in one sentence why it is not.

    `micro_batch`: about how many samples a rank takes at once, the job's by default; a schedule gets the nearest number
    that it takes.
    """
    try:
        lies = layouts_of(one, counted)
        pipeline = counted.pipeline(one.stages, one.schedule)
        plan = make_plan(one, job, lies, fitting_micro_batch(one, job, micro_batch or job.data.micro_batch), pipeline)
    except ValidationError as error:
        raise UserError(mistakes(error)) from None
    judge(plan, counted)
    return plan


def judge(plan: Plan, counted: Counted) -> None:
    """Raise UserError where the plan cannot be run on the model."""
    legal(plan, counted.model, counted.graph if plan.pipeline is not None else None)


def layouts_of(one: Strategy, counted: Counted) -> TensorLayouts | None:
    """How everything lies over the model axes; None where there are none. Raises UserError where it cannot."""
    if not one.model:
        return None
    sizes = Mesh.parse(one.mesh).axes
    found: TensorLayouts | str | None
    if one.model == (TENSOR,):
        found = counted.tensor((TENSOR.name, sizes[TENSOR.name][0]), one.shard)
    else:
        own = {
            "tensor": [(axis.name, sizes[axis.name][0]) for axis in one.model if axis.role == "tensor"],
            "ulysses": [(axis.name, sizes[axis.name][0]) for axis in one.model if axis.way == "heads"],
        }
        if any(own.values()) and (why := refused_heads(counted.config, **own)):
            raise UserError(str(why[0]))
        mesh = Mesh((tuple((axis.name, sizes[axis.name][0]) for axis in one.model),))
        found = axes_layouts(counted.config, counted.plain, counted.graph, mesh, one.model, one.shard)
    if found is None:
        roles = " and ".join(dict.fromkeys(axis.role for axis in one.model))
        raise UserError(f"no marks are known for a {counted.config.model_type} model over {roles} axes")
    if isinstance(found, str):
        raise UserError(found)
    beside = beside_transposed(counted.model, found.parameters, one.data)
    return replace(found, parameters={**beside, **found.parameters}) if beside else found


def make_plan(
    one: Strategy, job: Job, lies: TensorLayouts | None, micro_batch: int, pipeline: PipelinePlan | None = None
) -> Plan:
    """The job with a strategy. Raises ValueError (pydantic's) where the two do not go together."""
    rest = {"*": f"_/{one.shard} ..." if one.shard else "..."}
    tables = {name: getattr(job, name) for name in Job.model_fields if name != "data"}
    context = ContextPlan()
    if any((axis.role, axis.way) == ("context", "ring") for axis in one.model):
        context = ContextPlan(keys="ring", order="balanced")
        tables["run"] = job.run.model_copy(update={"attention": "tokens"})
    roles = {role: tuple(axis.name for axis in one.model if axis.role == role) for role in ROLES}
    return Plan(
        **tables,
        data=job.data.model_copy(update={"micro_batch": micro_batch}),
        mesh=one.mesh,
        axes=AxesPlan(
            data=one.data,
            **roles,
            pipeline=("pp",) if pipeline else (),
        ),
        pipeline=pipeline,
        context=context,
        layouts=LayoutsPlan(
            parameters={**(lies.parameters if lies else {}), **rest},
            marks=dict(lies.marks) if lies else {},
        ),
    )


def fitting_micro_batch(one: Strategy, job: Job, about: int) -> int:
    """The size of micro-batches nearest to `about` that the schedule takes; `about` where it takes none. Updates in the
    backward take one micro-batch."""
    sizes = Mesh.parse(one.mesh).axes
    share = -(-job.data.global_batch // prod(sizes[axis][0] for axis in one.data))
    if job.optimiser.in_backward and one.stages == 1:  # with stages it is refused
        return share
    return nearest_micro_batch(one.schedule, sizes["pp"][0], about, share) or about if one.stages > 1 else about
