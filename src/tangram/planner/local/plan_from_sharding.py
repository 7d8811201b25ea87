"""A chosen sharding as a plan of a job: which axes cut the batch for a run, and which are cut by marks.

    data axes     only samples are cut over them and no parameter is used in parts: the loader cuts the batch, and FSDP
                  keeps the parameters in parts where the choice does
    model axes    all others: marks say how tensors lie over them, those from which the choice follows

A run has one axis that FSDP cuts over. Where the choice keeps parameters in parts over several data axes that stand
side by side in the mesh, they are one axis of the plan. FSDP cuts every parameter, also those that the choice keeps
whole; in which dim, the choice says, and the first where it says nothing.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from pydantic import ValidationError
from torch import nn

from tangram.errors import UserError
from tangram.hardware.catalogue.cluster import Cluster
from tangram.layout import Mesh
from tangram.models.capturing.graph import Graph
from tangram.planner.legality.check_plan import legal
from tangram.planner.local.derived_layouts import by_pattern, dims_of
from tangram.schema.files import mistakes
from tangram.schema.job import Job
from tangram.schema.parallelism import AxesPlan, LayoutsPlan
from tangram.schema.plan import Plan
from tangram.sharding.choose.costs import Training
from tangram.sharding.choose.export_marks import as_marks
from tangram.sharding.derive.derive import Derived
from tangram.sharding.derive.layouts import input_states, moved, needed, used
from tangram.sharding.derive.marking.marks import Mark
from tangram.sharding.derive.problem.folding import fold
from tangram.sharding.derive.problem.states import SAME, State, cut


@dataclass(frozen=True)
class Roles:
    """What each axis of a choice is to a run, in the order of the mesh; those of one rank are left out."""

    data: tuple[str, ...]
    model: tuple[str, ...]
    shards: tuple[str, ...]
    """The data axes over which parameters are kept in parts."""


def plan_of_choice(
    job: Job,
    chosen: Derived,
    samples: int,
    captured: Callable[[int], Graph],
    cluster: Cluster,
    model: nn.Module,
    *,
    memory_limit: float | None = None,
    training: Training | None = None,
) -> Plan:
    """The job with a chosen sharding, which was chosen for `samples` at once over the whole mesh.

    `captured`: the graph of the same model for so many samples: those of one rank of the data axes are what a run
    derives with. `model`: the job's, on meta or not, on which the plan is judged (`planner.legality.check_plan`).
    Raises UserError where no plan says the same, or the job's model cannot be trained by it.
    """
    _refuse_other_model(chosen, model)
    roles = roles_of(chosen)
    sizes = {axis: chosen.mesh.axes[axis][0] for axis in (*roles.data, *roles.model)}
    share = samples // math.prod(sizes[axis] for axis in roles.data)
    marks: tuple[Mark, ...] = ()
    found = chosen
    if roles.model:
        own = over_axes(chosen, roles.model, captured(share))
        marked = as_marks(own, cluster, memory_limit=memory_limit, training=training)
        marks, found = marked.marks, marked.plan
    mesh, shard = _one_shard(chosen.mesh, roles)
    parameters = {**_layouts(chosen, found, roles, shard), "*": f"_/{shard} ..." if shard else "..."}
    merged = {axis for axis in roles.shards if axis != shard}
    tables = {name: getattr(job, name) for name in Job.model_fields if name != "data"}
    try:
        plan = Plan(
            **tables,
            data=job.data.model_copy(update={"micro_batch": share}),
            mesh=str(mesh),
            axes=AxesPlan(data=tuple(axis for axis in roles.data if axis not in merged), tensor=roles.model),
            layouts=LayoutsPlan(
                parameters=parameters,
                marks={mark.pattern: str(mark).removeprefix(f"{mark.pattern}: ") for mark in marks},
            ),
        )
    except ValidationError as error:
        raise UserError(mistakes(error)) from None
    legal(plan, model)
    return plan


def _refuse_other_model(chosen: Derived, model: nn.Module) -> None:
    chosen_for = {value.name for _, value in chosen.folded.graph.of_kind("parameter")}
    trained = {name for name, _ in model.named_parameters()}
    if other := next(iter(sorted(chosen_for - trained)), None):
        raise UserError(f"the choice is for a model with {other}, and the job's model has no such parameter")
    if other := next(iter(sorted(trained - chosen_for)), None):
        raise UserError(f"the job's model has {other}, and the choice is for a model without")


def roles_of(chosen: Derived) -> Roles:
    """What each axis is. Raises UserError for an axis over which nothing is cut."""
    axes = [over.axis for over in chosen.axes]
    data = tuple(axis for axis in axes if _cuts_samples_alone(chosen, axis))
    kept = [
        input_states(chosen, v) for v, _ in chosen.folded.graph.of_kind("parameter") if chosen.folded.classes[v] == v
    ]
    for over in chosen.axes:
        if over.axis not in data and not any(move.label for move in over.communication.values()):
            raise UserError(
                f"over {over.axis} nothing is cut by the chosen plan, so its ranks would all compute the same: choose "
                f"over a mesh without it"
            )
    shards = tuple(axis for axis in data if any(own[axis].kind == "cut" for own in kept))
    return Roles(data, tuple(axis for axis in axes if axis not in data), shards)


def _cuts_samples_alone(chosen: Derived, axis: str) -> bool:
    """Whether each rank of an axis does with its samples what one process would do with them: nothing else moves."""
    folded = chosen.folded
    if any(used(chosen, v)[axis].kind == "cut" for v in folded.standing if v in chosen.axes[0].used):
        return False
    if any(one.nbytes and one.value not in folded.standing for one in moved(chosen) if axis in one.axes):
        return False
    results = {folded.classes[v] for v in folded.graph.outputs.values()} & folded.differentiable
    given = {v for v, _ in folded.graph.of_kind("input")}
    taken = [
        needed(chosen, step, place)[axis]
        for step in folded.steps
        for place, v in enumerate(step.inputs)
        if v in given and any(w in folded.differentiable for w in step.outputs)
    ]
    return all(state == cut(0) for state in (*taken, *(used(chosen, v)[axis] for v in results)))


def over_axes(chosen: Derived, axes: Sequence[str], graph: Graph) -> Derived:
    """What was chosen over some of the axes, for a graph of the same model on fewer samples. Raises UserError."""
    folded = fold(graph)
    before = [node.operator.name() for node in chosen.folded.graph.nodes]
    if before != [node.operator.name() for node in graph.nodes] or folded.classes != chosen.folded.classes:
        raise UserError(
            "the model runs other operators on the samples of one rank of the data axes than on all: choose over a "
            "mesh of model axes alone"
        )
    mesh = Mesh((tuple((axis, chosen.mesh.axes[axis][0]) for axis in axes),))
    return replace(chosen, folded=folded, mesh=mesh, axes=tuple(over for over in chosen.axes if over.axis in axes))


def _one_shard(mesh: Mesh, roles: Roles) -> tuple[Mesh, str | None]:
    """The plan's mesh, and the axis of it that FSDP cuts over. Raises UserError for several that cannot be one."""
    names = (*roles.data, *roles.model)
    order = [(axis, n) for axis, (n, _) in mesh.axes.items() if axis in names]
    places = [i for i, (axis, _) in enumerate(order) if axis in roles.shards]
    if not places:
        return Mesh((tuple(order),)), None
    first, last = places[0], places[-1]
    if last - first >= len(places):
        raise UserError(
            f"the chosen plan keeps parameters in parts over {' and '.join(roles.shards)}, which do not stand side by "
            "side in the mesh: put them next to each other, so that FSDP can cut over both as one"
        )
    size = math.prod(n for _, n in order[first : last + 1])
    return Mesh(((*order[:first], (roles.shards[0], size), *order[last + 1 :]),)), roles.shards[0]


def _layouts(chosen: Derived, found: Derived, roles: Roles, shard: str | None) -> Mapping[str, str]:
    """By pattern, the layouts of the parameters that are cut otherwise than the first dim over the shards."""
    graph = chosen.folded.graph
    texts: dict[str, str | None] = {}
    for v, value in graph.of_kind("parameter"):
        lies, kept = input_states(found, chosen.folded.classes[v]), input_states(chosen, chosen.folded.classes[v])
        texts[value.name] = _text(value.name, value.shape, {a: lies[a] for a in roles.model}, kept, roles, shard)
    return dict(by_pattern(texts))


def _text(
    name: str,
    shape: Sequence[int],
    lies: Mapping[str, State],
    kept: Mapping[str, State],
    roles: Roles,
    shard: str | None,
) -> str | None:
    """A layout as a plan has it; None for one that only FSDP cuts, in the first dim."""
    wanted = [kept[axis] for axis in roles.shards if kept[axis] != SAME]
    if any(state.kind == "cut" and state.outer > 1 for state in wanted):
        raise UserError(f"{name} would be cut in several layers, which this version cannot train: mark how it lies")
    dims = dims_of(shape, lies)
    at = next((state.dim for state in wanted), 0)
    if shard is not None and shape:
        dims[at] += f"/{shard}"
    plain = all(dim == "_" for dim in itertools.chain(dims[:at], dims[at + 1 :])) and at == 0
    return None if plain and dims[:1] in (["_"], [f"_/{shard}"]) else " ".join(dims)
