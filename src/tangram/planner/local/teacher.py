"""The plan by which a teacher is run beside its student: on the same mesh, cut as its own sizes ask for.

Data axes cut it as they cut the student; over tensor and context axes, and into as many stages of a pipeline, it is cut
as a plan of its own would be.
"""

from __future__ import annotations

from tangram.errors import UserError
from tangram.layout import Layout, Mesh
from tangram.models.outlines.costs import OUTSIDE
from tangram.planner.local.derived_layouts import ModelAxis
from tangram.planner.local.estimate import TeacherCosts
from tangram.planner.local.model_costs import Counted
from tangram.planner.local.peak_memory import BYTES, is_plain_ddp, largest_parts, unit_numbers
from tangram.planner.local.strategies import PIPELINE, Strategy, layouts_of
from tangram.schema.plan import Plan


def teacher_plan(plan: Plan, teacher: Counted) -> Plan:
    """What the teacher is asked for, with its student's strategy. Raises UserError where it cannot be cut so."""
    try:
        return _cut(plan, teacher)
    except UserError as error:
        raise UserError(f"distill.teacher, on the mesh of its student: {error}") from None


def _cut(plan: Plan, teacher: Counted) -> Plan:
    if plan.axes.expert:
        raise UserError("a teacher is not cut over expert axes: take a mesh without them")
    sizes = Mesh.parse(plan.mesh).axes
    cutting = {axis for text in plan.layouts.parameters.values() for axis in Layout.parse(text).axes}
    shard = next((axis for axis in plan.axes.data if axis in cutting), None)
    way = "ring" if plan.context.keys == "ring" else "gathered"
    axes = tuple(
        ModelAxis(axis, "tensor") if axis in plan.axes.tensor else ModelAxis(axis, "context", way)
        for axis in plan.model_axes
        if sizes[axis][0] > 1
    )
    lies = layouts_of(Strategy("the teacher", plan.mesh, plan.axes.data, axes, shard), teacher)
    parameters = {**(lies.parameters if lies else {}), "*": f"_/{shard} ..." if shard else "..."}
    layouts = plan.layouts.model_copy(update={"parameters": parameters, "marks": dict(lies.marks) if lies else {}})
    pipeline = plan.pipeline
    if pipeline is not None and (its := teacher.pipeline(len(pipeline.stages), PIPELINE)):
        pipeline = pipeline.model_copy(update={"stages": its.stages, "tied": its.tied})
    return plan.of_teacher().model_copy(update={"layouts": layouts, "pipeline": pipeline})


def teacher_costs(plan: Plan, student: Counted) -> TeacherCosts | None:
    """Beside a student; None for one that has no teacher. Raises UserError as `teacher_plan`."""
    teacher = student.teacher
    if teacher is None:
        return None
    own, costs = teacher_plan(plan, teacher), teacher.costs(1)
    held = largest_parts(own, costs.parameters)
    of_place = [0.0 for _ in range(plan.stage_ranks)]
    for one in costs.parameters:
        for place in own.places_of(one.name):
            of_place[place] += held[one.name] * BYTES[own.precision.parameters]
    forwards, nbytes = costs.forward.flops / student.costs(1).forward.flops, BYTES[own.precision.compute]
    flow = own.data.micro_batch * max((part.input_bytes for part in costs.blocks), default=0.0)
    if is_plain_ddp(own) or own.shard_ranks == 1:
        return TeacherCosts(max(of_place), forwards, flow=flow)
    units = {name: nbytes * size for name, size in unit_numbers(own, costs.parameters, held).items() if size}
    most = max((size for name, size in units.items() if name != OUTSIDE), default=0.0)
    whole = sum(units.values()) if own.pipeline is not None else units.get(OUTSIDE, 0.0) + 2 * most
    return TeacherCosts(max(of_place), forwards, whole, (*units.values(),), own.shard_ranks, flow)
