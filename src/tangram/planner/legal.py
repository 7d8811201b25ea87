"""Whether a plan can be what it says, judged on the model itself: an independent check of every plan that is made.

It knows nothing of how a plan was found. Each parameter's regions are laid out for every rank and have to cover it;
each rule of activations has to name a module and to fit what flows through it.
"""

from dataclasses import replace
from fnmatch import fnmatchcase

from torch import nn

from tangram.errors import UserError
from tangram.layout import Coverage, Layout, LayoutError, Mesh, Region, coverage, region
from tangram.models.capture import capture
from tangram.models.graph import Graph
from tangram.models.named import token_inputs
from tangram.models.stages import refuse_unlike_chain, refuse_unlike_modules
from tangram.models.twin import Shapes, module_shapes
from tangram.planner.plan import Plan, first_match, flow
from tangram.sharding.derive.marks import Mark, matched

MOST_RANKS = 256  # a region is made for each rank
CHECKED = 8  # tokens of the sample on which stages are checked


def legal(plan: Plan, model: nn.Module, shapes: Shapes | None = None, graph: Graph | None = None) -> None:
    """Raise UserError with the reason where the plan cannot be run on the model (on meta or not).

    `shapes`, `graph`: what `module_shapes` and a capture of one sample found, where they are known already.
    """
    if plan.pipeline is not None:
        refuse_unlike_modules(model, plan.pipeline.stages)
        graph = graph or capture(model, token_inputs(1, CHECKED))
        refuse_unlike_chain(graph, plan.pipeline.stages)
        _refuse_marks(plan, graph)
    mesh = Mesh.parse(plan.mesh)
    if mesh.size > MOST_RANKS:
        raise UserError(f"the mesh {plan.mesh} has {mesh.size} ranks; plans of up to {MOST_RANKS} are checked")
    data = set(plan.axes.data)
    cutting: set[str] = set()
    for name, parameter in model.named_parameters():
        layout = bound_layout(plan, name, tuple(parameter.shape))
        if layout.pending or layout.flat:
            raise UserError(f'the layout "{layout}" of {name} leaves a sum or a rank out: give each rank its cut')
        cutting |= layout.axes & data
        _covers(layout, name, mesh)
        if (
            layout.axes & set(plan.axes.tensor)
            and not plan.layouts.marks
            and not _has_rule(plan, name.rpartition(".")[0])
        ):
            raise UserError(f"{name} is cut over a tensor axis, but no rule in [layouts.activations] fits its module")
    if len(cutting) > 1:
        raise UserError(f"parameters are cut over the data axes {', '.join(sorted(cutting))}: one of them may")
    if plan.axes.tensor and not plan.layouts.marks:
        _flows(plan, shapes or module_shapes(model, 2, 7), mesh)


def _refuse_marks(plan: Plan, graph: Graph) -> None:
    """A stage passes over marks of what it lacks, so of the whole model each has to name something that a stage has."""
    for pattern, text in plan.layouts.marks.items():
        named = matched(graph, Mark.parse(f"{pattern}: {text}"))
        if result := next((name for name in named if name in graph.outputs), None):
            raise UserError(
                f"layouts.marks names {result}, a result of the model: in a pipeline mark the module that gives it"
            )


def bound_layout(plan: Plan, name: str, shape: tuple[int, ...]) -> Layout:
    """The layout of a parameter with every size known. Raises UserError where it does not fit the shape."""
    text = plan.layout_of(name)
    try:
        layout = Layout.parse(text).bind(shape, **plan.layouts.sizes)
        if layout.at:  # of plans that did not go through their checks; who has it, the stages say
            raise UserError(f'the layout "{layout}" of {name} leaves a sum or a rank out: give each rank its cut')
        return replace(layout, at=plan.held_at(name))
    except LayoutError as error:
        raise UserError(f'the layout "{text}" does not fit {name} of shape {shape}: {error}') from None


def _covers(layout: Layout, name: str, mesh: Mesh) -> None:
    parts: dict[Region, None] = dict.fromkeys(region(layout, mesh, rank) for rank in range(mesh.size))
    found: Coverage = coverage(Region.full(layout.shape), [part for part in parts if part])
    if not found.exact:
        raise UserError(f'the layout "{layout}" of {name} does not give every element to exactly one place of {mesh}')


def _has_rule(plan: Plan, module: str) -> bool:
    return any(fnmatchcase(module, pattern) for pattern in plan.layouts.activations)


def _flows(plan: Plan, shapes: Shapes, mesh: Mesh) -> None:
    used: set[str] = set()
    for name, sides in shapes.items():
        if not _has_rule(plan, name):
            continue
        text = first_match(plan.layouts.activations, name, "layouts.activations", '"*.q_proj" = "b s h -> b s h"')
        used.add(text)
        for side, shape in zip(flow(text), sides, strict=True):
            try:
                layout = side.bind(shape, **_named(plan, side))
                parts = {region(layout, mesh, rank).local_shape for rank in range(mesh.size)}
            except LayoutError as error:
                raise UserError(
                    f'"{side}" of "{name}" does not fit what flows there, of shape {shape}: {error}'
                ) from None
            if len(parts) > 1:
                raise UserError(f'"{side}" of "{name}" gives the ranks of {mesh} unequal parts of the shape {shape}')
    for pattern, text in plan.layouts.activations.items():
        if not any(fnmatchcase(name, pattern) for name in shapes):
            raise UserError(f'the rule "{pattern}" = "{text}" names no module of the model that maps a tensor to one')


def _named(plan: Plan, layout: Layout) -> dict[str, int]:
    """The sizes of the plan that the layout speaks of."""
    words = set(str(layout).replace("(", " ").replace(")", " ").replace("/", " ").split())
    return {name: size for name, size in plan.layouts.sizes.items() if name in words}
