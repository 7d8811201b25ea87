"""From layouts to what torch can run: the dim that FSDP2 cuts and the dims that model axes cut.

A layout is taken only by comparison: for every rank, the region that it says must be the region of the chunk that
torch will give that rank (first the model axes cut, in the order of the mesh, then FSDP what is left). Of the notation
nothing is read here but which dim an axis stands in, and a layout that means something else is refused, never
approximated.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from typing import cast

from torch import Tensor, nn

from tangram.errors import UserError
from tangram.layout import Layout, Mesh, Region, region
from tangram.layout.placements import to_placements
from tangram.planner.legality.check_plan import bound_layout
from tangram.schema.plan import Plan
from tangram.training.mesh.world import Axes, axes_of

MOST_COMPARED = 64  # ranks whose regions are compared one by one; of a larger mesh the first and last of every axis


MOST_MODEL_AXES = 2  # FSDP2 takes DTensors over a mesh of one or two dims


@dataclass(frozen=True)
class ParameterCuts:
    """The dims of a parameter that are cut."""

    shard: int | None
    """By FSDP; None: by none."""
    model: tuple[tuple[str, int], ...] = ()
    """The model axes that cut it, in the order of the mesh, and the dim that each cuts."""


def cuts_of(model: nn.Module, plan: Plan) -> dict[nn.Parameter, ParameterCuts]:
    """How each parameter is cut. Raises UserError for a layout that this version cannot train."""
    mesh, axes = Mesh.parse(plan.mesh), axes_of(plan)
    found: dict[nn.Parameter, ParameterCuts] = {}
    for name, parameter in model.named_parameters():
        shape = tuple(parameter.shape)
        layout = replace(bound_layout(plan, name, shape), at=())  # a rank that has it at all
        cuts = _cuts(layout, shape, mesh, axes)
        if isinstance(cuts, str):
            raise UserError(f'the layout "{plan.layout_of(name)}" of {name}, of shape {shape}, {cuts}')
        found[parameter] = cuts
    return found


@lru_cache(maxsize=4096)
def _cuts(layout: Layout, shape: tuple[int, ...], mesh: Mesh, axes: Axes) -> ParameterCuts | str:
    """The cuts that a bound layout means, or why it cannot be trained."""
    sizes = dict(mesh.views[0])
    ranks = _compared(mesh)
    wanted = [region(layout, mesh, rank) for rank in ranks]
    for cuts in _candidates(layout, axes):
        if all(_chunk(shape, cuts, mesh, rank, axes) == box for rank, box in zip(ranks, wanted, strict=True)):
            break
    else:
        shards = sizes[axes.shard[0]] if axes.shard else 1
        over = f"cut one dim over the {shards} ranks of {axes.shard[0]}" if axes.shard else "be cut over no data axis"
        return f"is not one that this version can train: it must {over}, and at most one dim over each other axis"
    if len(cuts.model) > MOST_MODEL_AXES:
        names = ", ".join(axis for axis, _ in cuts.model)
        return f"is cut over {names}: FSDP2 takes parameters that at most {MOST_MODEL_AXES} such axes cut"
    before = math.prod(sizes[axis] for axis, dim in cuts.model if dim == cuts.shard)
    if cuts.shard and (shape[cuts.shard] // before) % sizes[axes.shard[0]]:
        return f"cuts dim {cuts.shard} unevenly: FSDP2 takes an uneven cut of the first dim only"
    named = Mesh((tuple((axis, n) for axis, n in mesh.views[0] if axis in layout.axes) or (("one", 1),),))
    try:
        to_placements(layout, named)  # as torch has it in its checkpoints; of some uneven cuts it has no true word
    except UserError as error:
        return f"cannot be said in torch's placements: {error}"
    return cuts


def _candidates(layout: Layout, axes: Axes) -> Iterator[ParameterCuts]:
    """Of each axis one dim that names it; the data axis that may cut and names none, any."""
    dims = range(len(layout.dims))

    def naming(axis: str) -> list[int]:
        return [d for d in dims if axis in layout.dims[d].axes]

    cutting = [axis for axis in axes.model if naming(axis)]
    shards = (naming(axes.shard[0]) or dims) if axes.shard else (None,)
    for shard, *where in product(shards, *map(naming, cutting)):
        yield ParameterCuts(shard, tuple(zip(cutting, cast("list[int]", where), strict=True)))


def _compared(mesh: Mesh) -> list[int]:
    """The ranks that are compared: all, or the corners of a large mesh (cuts are regular between them)."""
    if mesh.size <= MOST_COMPARED:
        return list(range(mesh.size))
    ends = [sorted({0, 1, n - 2, n - 1}) if n > 1 else [0] for _, n in mesh.views[0]]
    strides = [mesh.axes[axis][1] for axis, _ in mesh.views[0]]
    return [sum(at * stride for at, stride in zip(place, strides, strict=True)) for place in product(*ends)]


def _chunk(shape: tuple[int, ...], cuts: ParameterCuts, mesh: Mesh, rank: int, axes: Axes) -> Region:
    """What torch gives a rank: model axes cut first, FSDP cuts what is left, each as torch.chunk does."""
    at = mesh.coords(rank)
    starts, stops = [0] * len(shape), list(shape)
    last = () if cuts.shard is None else ((axes.shard[0], cuts.shard),)
    for axis, dim in (*cuts.model, *last):
        n = mesh.axes[axis][0]
        chunk = -(-(stops[dim] - starts[dim]) // n)
        first = min(starts[dim] + at[axis] * chunk, stops[dim])
        starts[dim], stops[dim] = first, min(first + chunk, stops[dim])
    return Region.box(starts, [stop - start for start, stop in zip(starts, stops, strict=True)])


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
