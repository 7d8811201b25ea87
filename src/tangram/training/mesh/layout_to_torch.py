"""From layouts to what torch can run: the dim that FSDP2 cuts and the dims that model axes cut.

A layout is taken only by comparison: for every rank, the region that it says must be that of the part which the rank
will have (first the model axes cut, in the order of the mesh, then FSDP chunks what is left). A layout that means
something else is refused, never approximated. Where torch has no placement for a part over the model axes, as of three
heads over two ranks, it stands in the model as a plain tensor (`ParameterCuts.plain`).
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from math import gcd
from typing import cast

from torch import Tensor, nn

from tangram.errors import UserError
from tangram.layout import Layout, Mesh, Region, intervals, region
from tangram.layout.intervals import MAPS
from tangram.layout.locate import indices_of_rank
from tangram.layout.placements import to_placements
from tangram.planner.legality.check_plan import bound_layout
from tangram.schema.plan import Plan
from tangram.sharding.derive.layouts import sharded_dim
from tangram.sharding.derive.marking.marks import states
from tangram.sharding.derive.problem.states import State, chunked
from tangram.training.mesh.world import Axes, axes_of

MOST_COMPARED = 64  # ranks whose regions are compared one by one; of a larger mesh the first and last of every axis


MOST_MODEL_AXES = 2  # FSDP2 takes DTensors over a mesh of one or two dims


@dataclass(frozen=True)
class ParameterCuts:
    """The dims of a parameter that are cut."""

    shard: int | None
    """By FSDP; None: by none."""
    model: tuple[tuple[str, State], ...] = ()
    """The model axes that cut it, in the order of the mesh, and how it lies over each."""
    plain: bool = False
    """Whether what a rank has by these is a plain tensor."""


def cuts_of(model: nn.Module, plan: Plan) -> dict[nn.Parameter, ParameterCuts]:
    """How each parameter is cut. Raises UserError for a layout that this version cannot train."""
    found: dict[nn.Parameter, ParameterCuts] = {}
    for name, parameter in model.named_parameters():
        found[parameter] = cuts_of_one(name, tuple(parameter.shape), plan)
    return found


def cuts_of_one(name: str, shape: tuple[int, ...], plan: Plan) -> ParameterCuts:
    """How a parameter of this name and shape is cut. Raises UserError for a layout that this version cannot train."""
    layout = replace(bound_layout(plan, name, shape), at=())  # a rank that has it at all
    cuts = _cuts(layout, shape, Mesh.parse(plan.mesh), axes_of(plan))
    if isinstance(cuts, str):
        raise UserError(f'the layout "{plan.layout_of(name)}" of {name}, of shape {shape}, {cuts}')
    return cuts


@lru_cache(maxsize=4096)
def _cuts(layout: Layout, shape: tuple[int, ...], mesh: Mesh, axes: Axes) -> ParameterCuts | str:
    """The cuts that a bound layout means, or why it cannot be trained."""
    sizes = dict(mesh.views[0])
    ranks = _compared(mesh)
    wanted = [region(layout, mesh, rank) for rank in ranks]
    for cuts in _candidates(layout, shape, mesh, axes):
        if all(_part(shape, cuts, mesh, rank, axes) == box for rank, box in zip(ranks, wanted, strict=True)):
            break
    else:
        shards = sizes[axes.shard[0]] if axes.shard else 1
        over = f"cut one dim over the {shards} ranks of {axes.shard[0]}" if axes.shard else "be cut over no data axis"
        return f"is not one that this version can train: it must {over}, and at most one dim over each other axis"
    if len(cuts.model) > MOST_MODEL_AXES:
        names = ", ".join(axis for axis, _ in cuts.model)
        return f"is cut over {names}: FSDP2 takes parameters that at most {MOST_MODEL_AXES} such axes cut"
    if cuts.shard and _left(shape, cuts, mesh, ranks) % sizes[axes.shard[0]]:
        return f"cuts dim {cuts.shard} unevenly: FSDP2 takes an uneven cut of the first dim only"
    named = Mesh((tuple((axis, n) for axis, n in mesh.views[0] if axis in layout.axes) or (("one", 1),),))
    try:
        to_placements(layout, named)  # as torch has it in its checkpoints; of some uneven cuts it has no true word
    except UserError as error:
        return replace(cuts, plain=True) if cuts.model else f"cannot be said in torch's placements: {error}"
    return cuts


def _candidates(layout: Layout, shape: tuple[int, ...], mesh: Mesh, axes: Axes) -> Iterator[ParameterCuts]:
    """Of each axis one dim that names it, in chunks or else as the layout says; the data axis that may cut and names
    none, any."""
    dims, sizes = range(len(layout.dims)), dict(mesh.views[0])

    def naming(axis: str) -> list[int]:
        return [d for d in dims if axis in layout.dims[d].axes]

    cutting = [axis for axis in axes.model if naming(axis)]
    shards = (naming(axes.shard[0]) or dims) if axes.shard else (None,)
    for shard, *where in product(shards, *map(naming, cutting)):
        some = zip(cutting, cast("list[int]", where), strict=True)
        yield ParameterCuts(shard, tuple((axis, chunked(d, shape[d], sizes[axis])) for axis, d in some))
    if cutting:
        rest = replace(layout, dims=tuple(dim.over(cutting) for dim in layout.dims))
        try:
            own = states(rest, shape, Mesh((tuple((axis, n) for axis, n in mesh.views[0] if axis in cutting),)))
        except UserError:  # as one dim over two axes in parts of unlike sizes
            return
        yield from (ParameterCuts(shard, tuple((axis, own[axis]) for axis in cutting)) for shard in shards)


def _compared(mesh: Mesh) -> list[int]:
    """The ranks that are compared: all, or the corners of a large mesh (cuts are regular between them)."""
    if mesh.size <= MOST_COMPARED:
        return list(range(mesh.size))
    ends = [sorted({0, 1, n - 2, n - 1}) if n > 1 else [0] for _, n in mesh.views[0]]
    strides = [mesh.axes[axis][1] for axis, _ in mesh.views[0]]
    return [sum(at * stride for at, stride in zip(place, strides, strict=True)) for place in product(*ends)]


def _part(shape: tuple[int, ...], cuts: ParameterCuts, mesh: Mesh, rank: int, axes: Axes) -> Region:
    """What a rank will have: model axes cut first, FSDP chunks what is left."""
    at = mesh.coords(rank)
    sets = [over_model_axes(shape, cuts, mesh, at, d) for d in range(len(shape))]
    if cuts.shard is not None:
        n, axis = intervals.size(sets[cuts.shard]), axes.shard[0]
        sets[cuts.shard] = intervals.take(sets[cuts.shard], MAPS[""].holds(n, mesh.axes[axis][0], at[axis], ()))
    return Region.of([tuple(sets)])


def over_model_axes(
    shape: tuple[int, ...], cuts: ParameterCuts, mesh: Mesh, at: Mapping[str, int], dim: int
) -> intervals.IntSet:
    """What a rank has of a dim by the model axes alone."""
    own = [(axis, state) for axis, state in cuts.model if state.dim == dim]
    if sum(1 for _, state in own if state.parts) and len(own) > 1:
        return ()  # chunks of chunks of unlike sizes, which no state says
    return indices_of_rank(sharded_dim(shape[dim], own), mesh, dict(at)) if own else intervals.span(0, shape[dim])


def _left(shape: tuple[int, ...], cuts: ParameterCuts, mesh: Mesh, ranks: Iterable[int]) -> int:
    """What divides what ranks have of the dim that FSDP cuts, before it does."""
    assert cuts.shard is not None
    return gcd(*(intervals.size(over_model_axes(shape, cuts, mesh, mesh.coords(rank), cuts.shard)) for rank in ranks))


def named_modules(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Every module by name, the model itself first."""
    return list(cast("Iterable[tuple[str, nn.Module]]", model.named_modules()))


def is_meta(model: nn.Module) -> bool:
    """Whether a model has shapes only. Raises UserError for one that is half made."""
    buffers = cast("Iterable[Tensor]", model.buffers())
    tensors: list[Tensor] = [*model.parameters(), *buffers]
    kinds = {tensor.device.type == "meta" for tensor in tensors}
    if kinds == {True, False}:
        raise UserError(
            "some tensors of the model are on meta and some are not: make it under torch.device('meta') or not"
        )
    return kinds == {True}
