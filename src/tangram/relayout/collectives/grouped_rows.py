"""Rows that lie sorted by a group on every rank, sent to the ranks that have their groups, and back.

    noted      a rank says of which group each of its rows is: what is sent where follows from that
    sent       each rank has the rows of its own groups, from all ranks: by group, those of a group by their rank
    back       each rank has what has become of its own rows, in their order; of rows of no group nothing (zeros)

The groups of a rank are a range, as many on each. How many rows there are is exchanged once, when the first tensor is
sent: the sizes of what is sent must be known to the host, so that is the one point of a region where it waits for the
device. The gradient of what is sent comes back as what is sent back, and the other way round.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from tangram.relayout.collectives.one_collective import swapped, swapped_flat


@dataclass(frozen=True)
class Sizes:
    """How many rows go where."""

    to: list[int]
    """From this rank, by rank."""
    of: list[int]
    """To this rank, by rank."""
    order: Tensor
    """Where in what came, rank by rank, each row stands that is sorted by its group."""
    back: Tensor
    """The inverse."""
    ends: Tensor
    """Where each of this rank's groups ends."""


@dataclass(frozen=True)
class RowRoute:
    """Of rows that were sorted by `ids`, numbers from 0 up to `groups`, over the ranks of `group`.

    What its methods do is collective; all ranks call them in one order. Without memory (fake tensors) as many rows go
    to each rank.
    """

    ids: Tensor
    groups: int
    group: dist.ProcessGroup

    @property
    def own(self) -> int:
        """How many groups a rank has."""
        return self.groups // dist.get_world_size(self.group)

    @cached_property
    def sizes(self) -> Sizes:
        """How many rows go where; what does not depend on a gradient."""
        with torch.no_grad():
            return self._counted()

    def _counted(self) -> Sizes:
        k, ids = dist.get_world_size(self.group), self.ids
        borders = torch.arange(self.groups + 1, device=ids.device, dtype=ids.dtype)
        at = torch.searchsorted(ids, borders)
        mine = (at[1:] - at[:-1]).view(k, self.own)
        theirs = swapped(mine, self.group)
        if isinstance(ids, FakeTensor):  # no values: as many rows to each
            borders = [ids.shape[0] * i // k for i in range(k + 1)]
            to = of = [b - a for a, b in itertools.pairwise(borders)]
        else:
            to, of = cast("list[list[int]]", torch.stack([mine.sum(1), theirs.sum(1)]).tolist())
        # what came lies by rank, then by group
        number = torch.arange(k * self.own, device=ids.device) % self.own
        groups = number.repeat_interleave(theirs.flatten(), output_size=sum(of))
        order = torch.sort(groups, stable=True)[1]
        back = torch.empty_like(order).scatter_(0, order, torch.arange(sum(of), device=ids.device))
        return Sizes(to, of, order, back, theirs.sum(0).cumsum(0))

    def sent(self, x: Tensor) -> Tensor:
        """The rows of this rank's groups, of what ranks have of `x`."""
        return cast(Tensor, _Sent.apply(x, self, True))

    def back(self, x: Tensor) -> Tensor:
        """What has become of this rank's rows, of what ranks have made of those that were sent to them."""
        return cast(Tensor, _Sent.apply(x, self, False))

    def sent_ids(self) -> Tensor:
        """The groups of the rows that this rank has been sent, counted among its own."""
        lengths = torch.diff(self.sizes.ends, prepend=self.sizes.ends.new_zeros(1))
        own = torch.arange(self.own, device=self.ids.device, dtype=self.ids.dtype)
        return own.repeat_interleave(lengths, output_size=sum(self.sizes.of))

    def sent_ends(self, dtype: torch.dtype) -> Tensor:
        """Where each of this rank's groups ends among them."""
        return self.sizes.ends.to(dtype)


class _Sent(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, route: RowRoute, there: bool) -> Tensor:
        ctx.route, ctx.there = route, there
        return _sent(x, route) if there else _back(x, route)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (gradient,) = gradients
        return _Sent.apply(gradient, ctx.route, not ctx.there), None, None


def _sent(x: Tensor, route: RowRoute) -> Tensor:
    sizes = route.sizes
    return _swapped_rows(x[: sum(sizes.to)], sizes.to, sizes.of, route.group).index_select(0, sizes.order)


def _back(x: Tensor, route: RowRoute) -> Tensor:
    sizes = route.sizes
    found = _swapped_rows(x.index_select(0, sizes.back), sizes.of, sizes.to, route.group)
    rest = route.ids.shape[0] - found.shape[0]
    return found if not rest else torch.cat([found, found.new_zeros(rest, *found.shape[1:])])


def _swapped_rows(x: Tensor, to: list[int], of: list[int], group: dist.ProcessGroup) -> Tensor:
    width = math.prod(x.shape[1:])
    found = swapped_flat(x.reshape(-1), [n * width for n in to], [n * width for n in of], group)
    # No view: what a custom function gives is not to be changed in place where it is one, and models do that.
    return cast(Any, torch.ops.aten)._unsafe_view(found, [sum(of), *x.shape[1:]])
