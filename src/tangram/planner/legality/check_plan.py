"""Whether a plan can be what it says, judged on the model itself: the one check of every plan, whoever makes it.

The search and the trainer's own plans, a plan's file before its ranks start, a dry run, the sharding choice that is
written as a plan, a plan for other ranks: all are asked here. First the tables of legality, of the plan's own numbers
(`planner.legality.plan_as_grid`); then what no number says: the ranks have to have all of each parameter, once, and
model axes to divide samples, tokens and experts. Time is that of the different layouts and of the ranks along the axes
that each names, not of the mesh: thousands of ranks are checked in a second.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import cast

from torch import nn

from tangram.errors import UserError
from tangram.layout import Layout, LayoutError, Mesh, validate
from tangram.layout.blocks import in_blocks, refuse_cut_blocks
from tangram.layout.locate import partitions
from tangram.models.building.named import token_inputs
from tangram.models.capturing.attention import refuse_unable
from tangram.models.capturing.capture import capture
from tangram.models.capturing.graph import Graph
from tangram.models.capturing.stages import refuse_unlike_chain, refuse_unlike_modules
from tangram.models.lora.base_layers import base_layers
from tangram.models.outlines.costs import block_names
from tangram.planner.legality.engine import nearest, uneven
from tangram.planner.legality.plan_as_grid import marks_on, refused
from tangram.relayout.mapping.states import ADAM_8BIT
from tangram.schema.plan import Plan
from tangram.schema.tuning import COLUMNS, packed
from tangram.sharding.derive.marking.marks import Mark, matched

MOST_RANKS = 1_000_000
CHECKED = 8  # tokens of the sample on which stages are checked


def legal(plan: Plan, model: nn.Module, graph: Graph | None = None) -> None:
    """Raise UserError with the reason where the plan cannot be run on the model (on meta or not).

    `graph`: a capture of one sample, where there is one already.
    """
    if plan.run.by_tokens:
        refuse_unable(model)
    if plan.pipeline is not None:
        refuse_unlike_modules(model, plan.pipeline.stages)
        graph = graph or capture(model, token_inputs(1, CHECKED))
        refuse_unlike_chain(graph, plan.pipeline.stages)
        _refuse_marks(plan, graph)
    if found := refused(plan, model):
        raise UserError(str(found[0]))
    mesh = Mesh.parse(plan.mesh)
    if mesh.size > MOST_RANKS:
        raise UserError(f"the mesh {plan.mesh} has {mesh.size:,} ranks; plans of up to {MOST_RANKS:,} are checked")
    data = set(plan.axes.data)
    cutting: set[str] = set()
    for name, parameter in model.named_parameters():
        layout = bound_layout(plan, name, tuple(parameter.shape))
        if layout.pending or layout.flat:
            raise UserError(f'the layout "{layout}" of {name} leaves a sum or a rank out: give each rank its cut')
        cutting |= layout.axes & data
        _covers(layout, name, mesh)
        if parameter.requires_grad and plan.optimiser.has_codes(name, parameter.shape):
            _refuse_cut_codes(plan, layout, name, tuple(parameter.shape))
    if plan.lora is not None and plan.lora.base == "nf4":
        for name, layer in base_layers(model, plan.lora.base_skip).items():
            rows, columns = cast(nn.Parameter, layer.weight).shape
            for end, count in COLUMNS.items():
                bound_layout(plan, f"{name}.weight{end}", (rows, columns // count))
    if len(cutting) > 1:
        raise UserError(f"parameters are cut over the data axes {', '.join(sorted(cutting))}: one of them may")
    _refuse_uneven(plan, model, mesh)


@dataclass(frozen=True)
class Divided:
    """A number of which each rank of some axes gets an equal part."""

    what: str
    """In words, with the key that changes it."""
    count: int
    axes: tuple[str, ...]


def _flowing(plan: Plan, model: nn.Module) -> Iterator[Divided]:
    """Samples and tokens, where marks cut what layers give, of shape (batch, sequence, hidden)."""
    axes: dict[int, set[str]] = {0: set(), 1: set()}
    blocks = set(block_names(model))
    for names, layout in marks_on(plan, model):
        if len(layout.dims) == 3 and names & blocks:
            for dim, own in axes.items():
                own |= layout.dims[dim].axes
    yield Divided("samples of a micro-batch (data.micro_batch)", plan.data.micro_batch, _of(plan, axes[0]))
    yield Divided("tokens of a sample (data.sequence)", plan.data.sequence, _of(plan, axes[1]))


def _experts(plan: Plan, model: nn.Module) -> Iterator[Divided]:
    """Experts that are stacked, and dims that several axes cut: of which of them parts are unlike, no state says."""
    known: set[tuple[str, tuple[int, ...]]] = set()
    for name, parameter in model.named_parameters():
        shape, text = tuple(parameter.shape), plan.layout_of(name)
        if (text, shape) in known:
            continue
        known.add((text, shape))
        for i, dim in enumerate(bound_layout(plan, name, shape).dims):
            axes = _of(plan, dim.axes)
            if i == 0 and len(shape) > 1 and ".experts." in name and dim.axes & set(plan.axes.expert):
                yield Divided("experts", shape[i], axes)
            elif len(axes) > 1:
                yield Divided(f"places of dim {i} of {name}", shape[i], axes)


EVEN: tuple[Callable[[Plan, nn.Module], Iterator[Divided]], ...] = (_flowing, _experts)
"""What model axes have to divide, where they cut it. Of other dims of parameters ranks may have more and less."""


def _of(plan: Plan, axes: Iterable[str]) -> tuple[str, ...]:
    some = set(axes)
    return tuple(axis for axis in plan.model_axes if axis in some)


def _refuse_uneven(plan: Plan, model: nn.Module, mesh: Mesh) -> None:
    for one in (divided for find in EVEN for divided in find(plan, model)):
        size = math.prod(mesh.axes[axis][0] for axis in one.axes)
        named = " x ".join(one.axes)
        if one.count % size:
            mend = nearest(one.count, size, lambda n, named=named: f"{named}={n}")
            raise UserError(f"{uneven(one.count, one.what, f'{named}={size}')}: {mend}")


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
    text, columns = plan.layout_of(name), packed(name)[1] if plan.lora is not None else 1
    try:
        whole = (*shape[:-1], shape[-1] * columns) if columns > 1 else shape
        layout = _bound(text, whole, tuple(sorted(plan.layouts.sizes.items())))
        if columns > 1:
            layout = in_blocks(layout, columns, Mesh.parse(plan.mesh))
        if layout.at:  # of plans that did not go through their checks; who has it, the stages say
            raise UserError(f'the layout "{layout}" of {name} leaves a sum or a rank out: give each rank its cut')
        return replace(layout, at=plan.stages_of(name))
    except LayoutError as error:
        raise UserError(f'the layout "{text}" does not fit {name} of shape {shape}: {error}') from None


def _refuse_cut_codes(plan: Plan, layout: Layout, name: str, shape: tuple[int, ...]) -> None:
    try:
        refuse_cut_blocks(layout, shape, ADAM_8BIT["absmax1"].block, Mesh.parse(plan.mesh))
    except LayoutError as error:
        raise UserError(
            f'the layout "{plan.layout_of(name)}" of {name} {list(shape)} does not fit its moments of 8 bits: {error}; '
            "name it in optimiser.moments_skip"
        ) from None


@lru_cache(maxsize=4096)
def _bound(text: str, shape: tuple[int, ...], sizes: tuple[tuple[str, int], ...]) -> Layout:
    return Layout.parse(text).bind(shape, **dict(sizes))


def _covers(layout: Layout, name: str, mesh: Mesh) -> None:
    validate(layout, mesh)
    if not partitions(replace(layout, at=()), mesh):  # where stages are disjoint, one has all
        raise UserError(f'the layout "{layout}" of {name} does not give every element to exactly one place of {mesh}')
