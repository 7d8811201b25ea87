"""Runs a sequence of collectives (`sequences`) on plain local tensors, over groups that are given.

A step is in three parts, of which only the middle one talks: `pack` what this member of the group sends, the
collective, `unpack` what has come. So the same code runs on `torch.distributed` and, in the tests, on all ranks of one
process. Parts of even cuts are views of digits; only an exchange in which cuts overlap takes elements by number.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor

from tangram.layout import Mesh
from tangram.relayout.collectives.digits import WAITING, DigitSpot
from tangram.relayout.collectives.one_collective import (
    ALL_GATHER,
    ALL_REDUCE,
    REDUCE_SCATTER,
    SLICE,
    ZERO,
    gathered,
    summed,
    summed_parts,
    swapped_flat,
)
from tangram.relayout.collectives.sequences import CollectiveStep
from tangram.relayout.mapping.errors import RelayoutError

Groups = Mapping[tuple[str, ...], dist.ProcessGroup]
"""By the axes of a step the group of this rank, whose ranks are in the order of the mesh."""


def members(step: CollectiveStep, mesh: Mesh) -> list[list[int]]:
    """The ranks of the mesh that talk with each other in a step: each list is to be a group, in this order."""
    found: dict[int, list[int]] = {}
    for rank in range(mesh.size):
        base = rank - sum(rank // stride % k * stride for stride, k in step.digits)
        found.setdefault(base, []).append(rank)
    return list(found.values())


def run(steps: Sequence[CollectiveStep], x: Tensor, groups: Groups) -> Tensor:
    """What this rank has of a tensor after all steps, given what it has before. No gradient passes.

    All ranks of the mesh call it with the same steps. Raises RelayoutError where a group is missing or of another size,
    or `x` has not the shape that the first step expects.
    """
    with torch.no_grad():
        for step in steps:
            x = _run(step, x, groups)
    return x


def relayout(x: Tensor, there: Sequence[CollectiveStep], back: Sequence[CollectiveStep], groups: Groups) -> Tensor:
    """`run`, and on the way back what `back` does with the gradient: steps from the target's gradient to the source's.

    A gradient lies as its tensor, but whole where a sum is pending.
    """
    return cast(Tensor, _Relayout.apply(x, there, back, groups))


class _Relayout(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, there: Sequence[CollectiveStep], back: Sequence[CollectiveStep], groups: Groups
    ) -> Tensor:
        ctx.turned = back, there, groups
        return run(there, x, groups) if there else x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (gradient,) = gradients
        return _Relayout.apply(gradient, *ctx.turned), None, None, None


def _run(step: CollectiveStep, x: Tensor, groups: Groups) -> Tensor:
    if step.collective in (SLICE, ZERO):
        at = _at(step, groups)
        return unpack(step, at, pack(step, at, x))
    at, group = _at(step, groups), groups[step.axes]
    sent = pack(step, at, x)
    if step.collective == ALL_GATHER:
        return unpack(step, at, gathered(sent, group))
    if step.collective == REDUCE_SCATTER:
        return unpack(step, at, summed_parts(sent, group))
    if step.collective == ALL_REDUCE:
        return unpack(step, at, summed(sent, group))
    return unpack(step, at, swapped_flat(sent, *sizes(step, at), group))


def _at(step: CollectiveStep, groups: Groups) -> int:
    group = groups.get(step.axes)
    size = math.prod(k for _, k in step.digits)
    if group is None:
        raise RelayoutError(
            f"there is no group for {step.collective} over {' '.join(step.axes)}; make one of `members`"
        )
    if dist.get_world_size(group) != size:
        raise RelayoutError(
            f"the group over {' '.join(step.axes)} has {dist.get_world_size(group)} ranks, and not {size}"
        )
    return dist.get_rank(group)


# ---------------------------------------------------------------- a step within its group


class _Place(NamedTuple):
    """A digit of the group's ranks in the tensor that the group has together."""

    dim: int
    outer: int
    k: int


class _Local(NamedTuple):
    """A step as its group sees it."""

    shape: tuple[int, ...]
    """Of what the group has together."""
    ks: tuple[int, ...]
    source: tuple[_Place | None, ...]
    target: tuple[_Place | None, ...]
    apart: bool
    """Whether source and target cut other digits, so that parts are of one size."""


@lru_cache(1 << 12)
def _local(step: CollectiveStep) -> _Local:
    rows = list(zip(step.of.digits, step.source, step.target, strict=True))
    rest = [(spot, digit.k) for digit, spot, _ in rows if digit not in step.digits and spot and spot != WAITING]
    shape = list(step.of.shape)
    for spot, k in rest:
        shape[spot.dim] //= k

    def inside(spot: DigitSpot | None, k: int) -> _Place | None:
        if spot is None or spot == WAITING:
            return None
        before = math.prod(m for other, m in rest if other.dim == spot.dim and other.outer < spot.outer)
        return _Place(spot.dim, spot.outer // before, k)

    own = [(digit.k, a, b) for digit, a, b in rows if digit in step.digits]
    source = tuple(inside(a, k) for k, a, _ in own)
    target = tuple(inside(b, k) for k, _, b in own)
    return _Local(tuple(shape), tuple(k for k, _, _ in own), source, target, _apart(source, target))


def _apart(source: Sequence[_Place | None], target: Sequence[_Place | None]) -> bool:
    if None in source or None in target:
        return False
    places = sorted(place for place in (*source, *target) if place is not None)
    return all(a.dim != b.dim or (b.outer % (a.outer * a.k) == 0 and a != b) for a, b in itertools.pairwise(places))


def _after(places: Sequence[_Place | None], cut: Sequence[_Place | None]) -> list[_Place]:
    """Places in what is left of the tensor where `cut` has been cut."""
    found: list[_Place] = []
    for place in places:
        if place is not None:
            before = math.prod(c.k for c in cut if c and c.dim == place.dim and c.outer < place.outer)
            found.append(place._replace(outer=place.outer // before))
    return found


def _part_shape(local: _Local, places: Sequence[_Place | None]) -> tuple[int, ...]:
    shape = list(local.shape)
    for place in places:
        if place is not None:
            shape[place.dim] //= place.k
    return tuple(shape)


def pack(step: CollectiveStep, at: int, x: Tensor) -> Tensor:
    """What member `at` of the group gives to the collective: its tensor, its parts for all, or a flat row of them."""
    local = _local(step)
    if tuple(x.shape) != _part_shape(local, local.source):
        raise RelayoutError(
            f"{step} takes a tensor of shape {_part_shape(local, local.source)}, and not {tuple(x.shape)}"
        )
    if step.collective in (ALL_GATHER, ALL_REDUCE, ZERO):
        return x
    if step.collective == SLICE:
        return parts(x, _after(local.target, ()))[at].clone(memory_format=torch.contiguous_format)
    if step.collective == REDUCE_SCATTER:
        return parts(x, _after(local.target, ()))
    if local.apart:
        return parts(x, _after(local.target, local.source)).reshape(-1)
    wanted = [_picked(x, where) for where in _sends(step, at) if where is not None]
    return torch.cat(wanted) if wanted else x.new_empty(0)


def unpack(step: CollectiveStep, member: int, got: Tensor) -> Tensor:
    """What a member has after the collective has given it `got`. What it had itself comes that way, too."""
    local = _local(step)
    if step.collective in (ALL_REDUCE, REDUCE_SCATTER, SLICE):
        return got
    if step.collective == ALL_GATHER:
        return join_parts(got, _after(local.source, ()))
    if step.collective == ZERO:
        return _zeroed(local, member, got)
    shape = _part_shape(local, local.target)
    if local.apart:
        k = math.prod(local.ks)
        cut = _part_shape(local, (*local.source, *local.target))
        return join_parts(got.reshape(k, *cut), _after(local.source, local.target))
    out = got.new_empty(shape)
    places = [where for where in _receives(step, member) if where is not None]
    lengths = [math.prod(len(some) for some in where) for where in places]
    at = 0
    for where, n in zip(places, lengths, strict=True):
        part = got.narrow(0, at, n).view(*[len(some) for some in where])
        _plain(out)[_grid(where, out)] = _plain(part)
        at += n
    return out


def sizes(step: CollectiveStep, at: int) -> tuple[list[int], list[int]]:
    """Of an exchange: the elements that member `at` sends to each member, and those that it receives."""
    local = _local(step)
    if local.apart:
        n = math.prod(_part_shape(local, (*local.source, *local.target)))
        return [n] * math.prod(local.ks), [n] * math.prod(local.ks)
    counts = [
        [0 if where is None else math.prod(len(some) for some in where) for where in side]
        for side in (_sends(step, at), _receives(step, at))
    ]
    return counts[0], counts[1]


def _zeroed(local: _Local, at: int, x: Tensor) -> Tensor:
    digits = _digits(local.ks, at)
    if any(digit and place is None for digit, place in zip(digits, local.source, strict=True)):
        return x.new_zeros(local.shape)
    places = [place for place in local.source if place is not None]
    if not places:
        return x
    row = x.new_zeros(math.prod(place.k for place in places), *x.shape)
    row[_number([digit for digit, place in zip(digits, local.source, strict=True) if place], places)] = x
    return join_parts(row, places)


# ---------------------------------------------------------------- parts as views of digits


def parts(x: Tensor, places: Sequence[_Place]) -> Tensor:
    """All parts of a tensor, stacked in the order of the group: a view where it can be one."""
    split, front, rest = _order(tuple(x.shape), tuple(places))
    stacked = x.reshape(split).permute(*front, *rest)
    shape = list(x.shape)
    for place in places:
        shape[place.dim] //= place.k
    return stacked.reshape(math.prod(place.k for place in places), *shape)


def join_parts(stack: Tensor, places: Sequence[_Place]) -> Tensor:
    """The inverse of `parts`; contiguous."""
    shape = list(stack.shape[1:])
    for place in places:
        shape[place.dim] *= place.k
    split, front, rest = _order(tuple(shape), tuple(places))
    order = (*front, *rest)
    inverse = sorted(range(len(order)), key=lambda i: order[i])
    return stack.reshape([split[i] for i in order]).permute(inverse).reshape(shape).contiguous()


@lru_cache(1 << 12)
def _order(shape: tuple[int, ...], places: tuple[_Place, ...]) -> tuple[list[int], list[int], list[int]]:
    """The dims of a tensor as digits: their sizes, which are the group's, in its order, and which are not."""
    split, rest = list[int](), list[int]()
    where: dict[_Place, int] = {}
    for d, n in enumerate(shape):
        at = 1
        for place in sorted(p for p in places if p.dim == d):
            rest.append(len(split))
            where[place] = len(split) + 1
            split += [place.outer // at, place.k]
            at = place.outer * place.k
        rest.append(len(split))
        split.append(n // at)
    return split, [where[place] for place in places], rest


# ---------------------------------------------------------------- exchanges in which cuts overlap

_Where = tuple[list[int], ...]
"""Elements of a tensor: numbers along each dim."""


def _digits(ks: Sequence[int], at: int) -> list[int]:
    found: list[int] = []
    for k in reversed(ks):
        found.append(at % k)
        at //= k
    return found[::-1]


def _number(digits: Sequence[int], places: Sequence[_Place]) -> int:
    at = 0
    for digit, place in zip(digits, places, strict=True):
        at = at * place.k + digit
    return at


def _along(n: int, d: int, places: Sequence[_Place | None], digits: Sequence[int]) -> list[int]:
    """What a rank holds of a dim."""
    own = [(n // (p.outer * p.k), p.k, i) for p, i in zip(places, digits, strict=True) if p and p.dim == d]
    return [e for e in range(n) if all(e // inner % k == i for inner, k, i in own)]


def _from(local: _Local, to: int, by: Sequence[int]) -> int | None:
    """The member that gives member `to` what those have whose digits of the source are `by`; None: it has it itself.

    Of those that have the same each gives to others: where they are many, and so are those that want it.
    """
    mine = _digits(local.ks, to)
    rows = list(zip(local.ks, mine, by, local.source, local.target, strict=True))
    if all(a is None or i == j for _, i, j, a, _ in rows):
        return None
    turn = 0
    for k, i, _, _, b in rows:
        turn = turn * k + i if b is None else turn
    free = [(k, i) for k, i, _, a, _ in rows if a is None]
    own = 0
    for k, i in free:
        own = own * k + i
    chosen = iter(_digits([k for k, _ in free], (own + turn) % math.prod(k for k, _ in free)))
    at = 0
    for k, _, j, a, _ in rows:
        at = at * k + (next(chosen) if a is None else j)
    return at


@lru_cache(1 << 12)
def _received_from(step: CollectiveStep, to: int) -> dict[int, tuple[_Where, _Where]]:
    """By member: the elements that member `to` has from it, numbered in the giver's tensor and in the taker's."""
    local = _local(step)
    target = [_along(n, d, local.target, _digits(local.ks, to)) for d, n in enumerate(local.shape)]
    found: dict[int, tuple[_Where, _Where]] = {}
    choices = [range(k) if a is not None else range(1) for k, a in zip(local.ks, local.source, strict=True)]
    for by in itertools.product(*choices):
        giver = _from(local, to, by)
        source = [_along(n, d, local.source, by) for d, n in enumerate(local.shape)]
        there, here = list[list[int]](), list[list[int]]()
        for a, b in zip(source, target, strict=True):
            at_a, at_b = {e: i for i, e in enumerate(a)}, {e: i for i, e in enumerate(b)}
            both = [e for e in a if e in at_b]
            there.append([at_a[e] for e in both])
            here.append([at_b[e] for e in both])
        if all(there):
            found[to if giver is None else giver] = tuple(there), tuple(here)
    return found


def _sends(step: CollectiveStep, at: int) -> list[_Where | None]:
    every = [_received_from(step, to).get(at) for to in range(math.prod(_local(step).ks))]
    return [None if found is None else found[0] for found in every]


def _receives(step: CollectiveStep, at: int) -> list[_Where | None]:
    own = _received_from(step, at)
    return [own[giver][1] if giver in own else None for giver in range(math.prod(_local(step).ks))]


def _picked(x: Tensor, where: _Where) -> Tensor:
    return _plain(x)[_grid(where, x)].reshape(-1).view(x.dtype)


def _grid(where: _Where, x: Tensor) -> tuple[Tensor, ...]:
    """Index tensors of a product of numbers."""
    return tuple(
        torch.tensor(some, device=x.device).view(*[-1 if i == d else 1 for i in range(len(where))])
        for d, some in enumerate(where)
    )


_SIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}


def _plain(x: Tensor) -> Tensor:
    """The same memory as a dtype that torch indexes."""
    return x.view(_SIGNED.get(x.dtype, x.dtype))
