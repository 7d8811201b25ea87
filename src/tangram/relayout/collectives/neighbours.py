"""Elements of a cut dim that other ranks have, as windows read them: sent by one all-to-all, and their gradients back.

What each rank has of a dim and what it wants of it are index sets of the whole dim, which all ranks know of all, so
nothing is asked beforehand. An element may be wanted by several ranks: their gradients are added up.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor

from tangram.layout.intervals import IntSet, elements, intersect, rank, size
from tangram.relayout.collectives.one_collective import swapped_flat
from tangram.relayout.mapping.errors import RelayoutError


class _Plan(NamedTuple):
    """What one rank does: numbers of its own elements, those for the first rank first; and of what it wants."""

    sent: tuple[int, ...]
    to: tuple[int, ...]
    """How many for each rank."""
    got: tuple[int, ...]
    of: tuple[int, ...]

    @property
    def back(self) -> _Plan:
        """The way of the gradients."""
        return _Plan(self.got, self.of, self.sent, self.to)


def fetched(x: Tensor, dim: int, have: Sequence[IntSet], want: Sequence[IntSet], group: dist.ProcessGroup) -> Tensor:
    """The elements `want[me]` of a dim, in ascending order, of which `x` is what this rank has: `have[me]`.

    By rank of the group. Collective. Differentiable. Raises RelayoutError where `x` is not of that size, or what is
    wanted is nowhere.
    """
    me = dist.get_rank(group)
    if x.shape[dim] != size(have[me]):
        raise RelayoutError(f"this rank has {x.shape[dim]} elements of dim {dim}, and says it has {size(have[me])}")
    plan = _plan(tuple(have), tuple(want), me)
    if len(plan.got) != size(want[me]):
        raise RelayoutError(f"of {size(want[me])} elements of dim {dim} that a rank wants, {len(plan.got)} are sent")
    return cast(Tensor, _Fetch.apply(x, dim, size(want[me]), plan, group))


@lru_cache(1 << 10)
def _plan(have: tuple[IntSet, ...], want: tuple[IntSet, ...], me: int) -> _Plan:
    to, of = [intersect(have[me], one) for one in want], [intersect(one, want[me]) for one in have]
    return _Plan(
        tuple(i for one in to for i in elements(rank(have[me], one))), tuple(map(size, to)),
        tuple(i for one in of for i in elements(rank(want[me], one))), tuple(map(size, of)),
    )  # fmt: skip


class _Fetch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, n: int, plan: _Plan, group: dist.ProcessGroup) -> Tensor:
        ctx.back = dim, x.shape[dim], plan.back, group
        return _sent(x, dim, n, plan, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (gradient,) = gradients
        return _Fetch.apply(gradient, *ctx.back), None, None, None, None


def _sent(x: Tensor, dim: int, n: int, plan: _Plan, group: dist.ProcessGroup) -> Tensor:
    """What comes, added up where several ranks send to one place of `n`."""
    rows = x.movedim(dim, 0)
    sent = rows[torch.tensor(plan.sent, dtype=torch.int64, device=x.device)].contiguous()
    width = math.prod(sent.shape[1:])
    found = swapped_flat(sent.view(-1), [m * width for m in plan.to], [m * width for m in plan.of], group)
    out = x.new_zeros(n, *sent.shape[1:])
    at = torch.tensor(plan.got, dtype=torch.int64, device=x.device)
    return out.index_add(0, at, found.view(-1, *sent.shape[1:])).movedim(0, dim).contiguous()
