"""One collective that brings a tensor from one way to lie over the ranks of a group to another, and its gradient back.

    same      every rank has all of it, and all compute the same with it: the gradient is whole on every rank
    several   every rank has all of it, and each computes something of its own: gradients are to be summed
    sum       each rank has a summand; the gradient of a sum is `several`
    cut       each rank has a part of a dim, and that part's gradient

`several` and `sum` are duals, the others their own: the backward of a step from a to b is the step from b's dual to
a's. So the table has one column, a backward is a `move` like any other, and gradients of gradients need nothing more.

Tensors are plain local ones, groups are given, and nothing is asked of the other ranks beforehand: all call it alike,
with their parts of one tensor. A cut that is not in even chunks says what each rank has (`RankPlacement.parts`): what
backends send only in one size is padded to the largest part, which is the trade-off.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor

from tangram.layout.intervals import IntSet, size
from tangram.relayout.collectives import uneven
from tangram.relayout.mapping.errors import RelayoutError

ALL_TO_ALL, ALL_GATHER, ALL_REDUCE = "all-to-all", "all-gather", "all-reduce"
REDUCE_SCATTER, SLICE, ZERO = "reduce-scatter", "slice", "zero"


class RankPlacement(NamedTuple):
    """How a tensor lies over the ranks of a group. Any tuple of this form is taken for one."""

    kind: str
    """"same", "several", "sum" or "cut"."""
    dim: int = -1
    """Of a cut: the dim, from 0."""
    outer: int = 1
    """Of a cut: how many blocks of the dim, as it lies on these ranks, are cut each by itself; 1: the dim itself."""
    parts: tuple[IntSet, ...] = ()
    """Of a cut that is not in even chunks: what each rank has of a block, by its places. (): even chunks."""

    def __str__(self) -> str:
        if self.kind != "cut":
            return self.kind
        sizes = " as " + "+".join(str(size(part)) for part in self.parts) if self.parts else ""
        return f"cut {self.dim}" + (f" in {self.outer}" if self.outer > 1 else "") + sizes

    @property
    def block(self) -> int:
        """Of a cut with `parts`: the elements of a block."""
        return sum(map(size, self.parts))


AnyPlace = tuple[Any, ...]
"""A place, or a tuple of its first three or all four fields."""


DUALS = {"same": "same", "several": "sum", "sum": "several", "cut": "cut"}
"""How the gradient lies of what lies so."""

WAYS: dict[tuple[str, str], str] = {
    ("same", "several"): "",
    ("same", "cut"): SLICE,
    ("same", "sum"): ZERO,
    ("several", "same"): "",
    ("several", "cut"): SLICE,
    ("several", "sum"): ZERO,
    ("cut", "same"): ALL_GATHER,
    ("cut", "several"): ALL_GATHER,
    ("cut", "cut"): ALL_TO_ALL,
    ("cut", "sum"): ZERO,
    ("sum", "same"): ALL_REDUCE,
    ("sum", "several"): ALL_REDUCE,
    ("sum", "cut"): REDUCE_SCATTER,
}
"""From one kind to another: what is done with the tensor. `zero`: the first rank keeps it, the others have zeros; of a
cut every rank keeps its part among zeros."""


def dual(place: AnyPlace) -> RankPlacement:
    """How the gradient lies of a tensor that lies so."""
    kind, *where = place
    return RankPlacement(DUALS[kind], *where)


def way(source: AnyPlace, target: AnyPlace) -> tuple[str, str]:
    """What `move` does with a tensor, and with its gradient on the way back; "" where nothing is sent or changed."""
    if tuple(source) == tuple(target):
        return "", ""
    return WAYS[source[0], target[0]], WAYS[DUALS[target[0]], DUALS[source[0]]]


def move(
    x: Tensor,
    source: AnyPlace,
    target: AnyPlace,
    group: dist.ProcessGroup,
    *,
    differentiable: bool = True,
) -> Tensor:
    """What this rank has of `x` where it lies as `target`, given what it has where it lies as `source`.

    All ranks of the group call it; parts of cuts are in the order of its ranks. A part has storage of its own, however
    small, so that it keeps no whole tensor alive; where nothing changes the result is `x` or a view of it (and may then
    not be changed in place while it has a gradient). With `differentiable` false the result has no gradient.

    Sums of booleans are "or"; those of other dtypes are taken in the dtype of `x`.

    Raises RelayoutError for a cut into parts that are not even, of a dim that `x` lacks, or an unknown kind.
    """
    k = dist.get_world_size(group)
    source, target = RankPlacement(*source), RankPlacement(*target)
    shape = _joined_shape(x, source, k)
    _refuse(shape, source, k)
    _refuse(shape, target, k)
    if source == target or k == 1:
        return x
    if not differentiable:
        with torch.no_grad():
            return _moved(x.detach(), source, target, group)
    return cast(Tensor, _Move.apply(x, source, target, group))


class _Move(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, source: RankPlacement, target: RankPlacement, group: dist.ProcessGroup) -> Tensor:
        ctx.back = dual(target), dual(source), group
        found = _moved(x, source, target, group)
        # What is made here is no view for autograd, whatever it was put together of: code may write into it.
        return x.view_as(x) if found is x else found.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (gradient,) = gradients
        return _Move.apply(gradient, *ctx.back), None, None, None


def _moved(x: Tensor, source: RankPlacement, target: RankPlacement, group: dist.ProcessGroup) -> Tensor:
    k, me = dist.get_world_size(group), dist.get_rank(group)
    what = WAYS[source.kind, target.kind]
    if source.parts or target.parts:
        return _moved_uneven(x, what, source, target, group)
    if what == ALL_GATHER:
        return joined(gathered(x, group), source.dim, source.outer)
    if what == SLICE:
        return parted(x, target.dim, target.outer, k)[me].clone(memory_format=torch.contiguous_format)
    if what == ALL_REDUCE:
        return summed(x, group)
    if what == REDUCE_SCATTER:
        return summed_parts(parted(x, target.dim, target.outer, k), group)
    if what == ALL_TO_ALL:
        if source.dim == target.dim:
            return _recut(x, source, target.outer, group)
        return joined(swapped(parted(x, target.dim, target.outer, k), group), source.dim, source.outer)
    if what == ZERO:
        if source.kind == "cut":
            parts = x.new_zeros(k, *x.shape)
            parts[me] = x
            return joined(parts, source.dim, source.outer)
        return x if me == 0 else torch.zeros_like(x)
    return x


def _moved_uneven(
    x: Tensor, what: str, source: RankPlacement, target: RankPlacement, group: dist.ProcessGroup
) -> Tensor:
    """`_moved` where what ranks have of a cut dim are no even chunks."""
    k, me = dist.get_world_size(group), dist.get_rank(group)
    whole = _joined_shape(x, source, k)
    have, want = _indices(source, whole, k), _indices(target, whole, k)
    if what == ALL_GATHER:
        every = gathered(uneven.padded(x, source.dim, max(map(len, have))), group)
        return uneven.joined(
            [p.narrow(source.dim, 0, len(at)) for p, at in zip(every, have, strict=True)], source.dim, have
        )
    if what == SLICE:
        return uneven.picked(x, target.dim, want[me])
    if what == REDUCE_SCATTER:
        most = max(map(len, want))
        parts = [uneven.padded(uneven.picked(x, target.dim, at), target.dim, most) for at in want]
        return summed_parts(torch.stack(parts), group).narrow(target.dim, 0, len(want[me])).contiguous()
    if what == ALL_TO_ALL and source.dim == target.dim:
        mine = [uneven.places(have[me], at) for at in want]
        theirs = [uneven.places(want[me], at) for at in have]
        return _exchanged(x, [uneven.picked(x, source.dim, at) for at in mine], source.dim, theirs, group)
    if what == ALL_TO_ALL:
        return _exchanged(
            x, [uneven.picked(x, target.dim, at) for at in want], source.dim, have, group, len(want[me]), target.dim
        )
    out = x.new_zeros(whole)  # ZERO
    return out.index_copy_(source.dim, torch.tensor(have[me].tolist(), dtype=torch.int64, device=x.device), x)


def _indices(place: RankPlacement, whole: Sequence[int], k: int) -> tuple[uneven.Places, ...]:
    """Of each rank, the places of what it has of a dim that is cut; of another place none."""
    return uneven.indices(place.outer, whole[place.dim], k, place.parts) if place.kind == "cut" else ()


def _exchanged(
    x: Tensor,
    sent: Sequence[Tensor],
    dim: int,
    places: Sequence[uneven.Places],
    group: dist.ProcessGroup,
    n: int | None = None,
    other: int = -1,
) -> Tensor:
    """What all ranks send this one, joined along `dim` at `places`; of another dim there are `n` elements then."""
    shape = [*x.shape]
    if n is not None:
        shape[other] = n
    width = math.prod(m for d, m in enumerate(shape) if d != dim)
    to, of = [part.numel() for part in sent], [len(at) * width for at in places]
    found = swapped_flat(torch.cat([part.reshape(-1) for part in sent]), to, of, group)
    parts = [
        flat.view(*shape[:dim], len(at), *shape[dim + 1 :])
        for flat, at in zip(cast("Sequence[Tensor]", found.split(of)), places, strict=True)
    ]
    return uneven.joined(parts, dim, places)


# ---------------------------------------------------------------- parts


def parted(x: Tensor, dim: int, outer: int, k: int) -> Tensor:
    """The k parts of a dim, stacked in front: a view if it can be one. Of each of `outer` blocks a part has as much."""
    before, after = x.shape[:dim], x.shape[dim + 1 :]
    inner = x.shape[dim] // (outer * k)
    blocks = x.reshape(*before, outer, k, inner, *after).movedim(dim + 1, 0)
    return blocks.reshape(k, *before, outer * inner, *after) if outer > 1 else blocks.select(dim + 1, 0)


def joined(parts: Tensor, dim: int, outer: int) -> Tensor:
    """The inverse of `parted`; contiguous."""
    k, n = parts.shape[0], parts.shape[dim + 1]
    before, after = parts.shape[1 : dim + 1], parts.shape[dim + 2 :]
    blocks = parts.reshape(k, *before, outer, n // outer, *after).movedim(0, dim + 1)
    return blocks.reshape(*before, k * n, *after).contiguous()


def _recut(x: Tensor, source: RankPlacement, outer: int, group: dist.ProcessGroup) -> Tensor:
    """From parts of `source.outer` blocks of a dim to parts of `outer` blocks of it: what two ranks share is uneven."""
    dim, k, me = source.dim, dist.get_world_size(group), dist.get_rank(group)
    n = x.shape[dim]
    mine = _shared(n * k, source.outer, outer, k, me)
    theirs = _shared(n * k, outer, source.outer, k, me)
    rows = x.movedim(dim, 0)
    sent = rows[torch.cat(mine).to(x.device)].contiguous()
    width = math.prod(sent.shape[1:])
    sizes = [[len(own) * width for own in side] for side in (mine, theirs)]
    found = swapped_flat(sent.view(-1), sizes[0], sizes[1], group).view(sent.shape)
    return found[torch.cat(theirs).argsort().to(x.device)].movedim(0, dim).contiguous()


@cache
def _shared(n: int, held: int, wanted: int, k: int, me: int) -> list[Tensor]:
    """What rank `me` has where `held` blocks are cut, by who has it where `wanted` blocks are; numbers of its own."""
    at = torch.arange(n).view(held, k, -1)[:, me].flatten()
    inner = n // (wanted * k)
    return [(at // inner % k == other).nonzero().flatten() for other in range(k)]


# ---------------------------------------------------------------- what is sent

_ADDED = {torch.int16: torch.int32, torch.uint16: torch.int32, torch.bool: torch.uint8}
"""What dtypes are added as that gloo does not add, or not as we do."""
_SENT = frozenset(
    {torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.int8, torch.uint8}
)
"""The dtypes that every backend sends as they are; others go as bytes."""


# torch 2.13 gave them other names, and warns of these.
_NAMES = ("all_gather_single", "reduce_scatter_single")
_OLD = ("all_gather_into_tensor", "reduce_scatter_tensor")
_all_gather, _reduce_scatter = [getattr(dist, name) for name in (_NAMES if hasattr(dist, _NAMES[0]) else _OLD)]


def gathered(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """What all ranks have, stacked in their order."""
    x = x.contiguous()
    out = x.new_empty(dist.get_world_size(group), *x.shape)
    _all_gather(_wire(out), _wire(x), group=group)
    return out


def swapped(parts: Tensor, group: dist.ProcessGroup) -> Tensor:
    """What all ranks have for this one, given what this one has for all, stacked in their order."""
    parts = parts.contiguous()
    out = torch.empty_like(parts)
    dist.all_to_all_single(_wire(out), _wire(parts), group=group)
    return out


def swapped_flat(sent: Tensor, to: Sequence[int], of: Sequence[int], group: dist.ProcessGroup) -> Tensor:
    """What all ranks have for this one, in one row: `to` and `of` say how many elements it sends to and has of each."""
    wide = 1 if sent.dtype in _SENT else sent.dtype.itemsize
    out = sent.new_empty(sum(of))
    lengths = [n * wide for n in of], [n * wide for n in to]
    dist.all_to_all_single(_wire(out), _wire(sent.contiguous()), *lengths, group=group)
    return out


def summed(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The sum of what all ranks have."""
    out = x.to(_ADDED.get(x.dtype, x.dtype)).clone(memory_format=torch.contiguous_format)
    dist.all_reduce(out, _sum(x.dtype), group=group)
    return out.to(x.dtype)


def largest(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The largest of what all ranks have, element by element."""
    out = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(out, dist.ReduceOp.MAX, group=group)
    return out


def summed_parts(parts: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The sum of what all ranks have for this one, given what this one has for all, stacked in their order."""
    added = parts.to(_ADDED.get(parts.dtype, parts.dtype)).contiguous()
    out = torch.empty_like(added[0])
    _reduce_scatter(out.view(-1), added.view(-1), _sum(parts.dtype), group=group)
    return out.to(parts.dtype)


def _sum(dtype: torch.dtype) -> Any:
    # of 256 true bytes the sum would be false
    return dist.ReduceOp.MAX if dtype == torch.bool else dist.ReduceOp.SUM


def _wire(x: Tensor) -> Tensor:
    """The same memory, flat and as backends take it. `x` is contiguous."""
    return x.view(-1) if x.dtype in _SENT else x.view(-1).view(torch.uint8)


# ---------------------------------------------------------------- refusals


def _joined_shape(x: Tensor, source: RankPlacement, k: int) -> tuple[int, ...]:
    """The shape of what the ranks have together."""
    shape = list(x.shape)
    if source.kind == "cut" and 0 <= source.dim < x.dim():
        shape[source.dim] = source.outer * source.block if source.parts else shape[source.dim] * k
    return tuple(shape)


def _refuse(shape: tuple[int, ...], place: RankPlacement, k: int) -> None:
    if place.kind not in DUALS:
        raise RelayoutError(f"a tensor lies as same, several, sum or cut, and not as {place.kind!r}")
    if place.kind != "cut":
        return
    if not 0 <= place.dim < len(shape):
        raise RelayoutError(f"a tensor of shape {shape} has no dim {place.dim} to cut")
    parts = place.outer * k
    if place.outer < 1:
        raise RelayoutError(f"a dim is cut in one block or in several, and not in {place.outer}")
    if place.parts:
        if len(place.parts) != k or place.outer * place.block != shape[place.dim]:
            raise RelayoutError(f"{place} over {k} ranks is no cut of dim {place.dim} of {shape}")
        return
    if shape[place.dim] % parts:
        blocks = f"{place.outer} blocks of " if place.outer > 1 else ""
        even = f"{blocks}dim {place.dim} of {shape} cannot be cut into {k} even parts"
        raise RelayoutError(f"{even}; pad the dim to a multiple of {parts}")
