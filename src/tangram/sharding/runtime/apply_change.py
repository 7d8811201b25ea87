"""Tensors brought as a change says, on the ranks of real groups, and their gradients back by the duals.

A route of rows that ranks sort for themselves is known from when rows are sorted until the same operator sorts others:
the next layer's of its kind, or the same layer's when it is recomputed. What is sent in between is of these rows, in
whatever order modules run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor

from tangram.relayout.collectives import run_sequence
from tangram.relayout.collectives.grouped_rows import RowRoute
from tangram.relayout.collectives.one_collective import move
from tangram.sharding.derive.problem.states import OWN, OWN_IDS, SENT, SENT_IDS, SORTED, Routed
from tangram.sharding.derive.transitions import Change, Joint


class RankRoutes:
    """Those of one model on one rank. `groups`: by axis."""

    def __init__(self, groups: Mapping[str, dist.ProcessGroup]) -> None:
        self._groups = groups
        self._now: dict[tuple[str, int], RowRoute] = {}

    def brought(self, x: Tensor, axis: str, source: Routed, target: Routed) -> Tensor:
        """What comes of a tensor of a region over an axis. Collective but for `sorted`."""
        key, pair = (axis, source.region), (source.kind, target.kind)
        if pair == (SORTED, OWN_IDS):
            self._now[key] = RowRoute(x, source.groups, self._groups[axis])
            return x
        route = self._now[key]
        if pair == (OWN, SENT):
            return route.sent(x)
        if pair == (SENT, OWN):
            return route.back(x)
        return route.sent_ids() if pair == (OWN_IDS, SENT_IDS) else route.sent_ends(x.dtype)


GroupOf = Callable[[tuple[str, ...]], dist.ProcessGroup]
"""The group of this rank over some axes, whose ranks are in the order of the mesh."""


def brought(
    x: Tensor, change: Change, group_of: GroupOf, routes: RankRoutes | None = None, *, differentiable: bool = True
) -> Tensor:
    """What this rank has of a tensor after a change, given what it has before. Collective.

    `routes`: of rows that ranks sort for themselves, where there are such. With `differentiable` false the result has
    no gradient. Raises RelayoutError where `x` has not the shape that the change is for.
    """
    for one in change:
        if isinstance(one, Joint):
            x = _at_once(x, one, group_of, differentiable)
            continue
        axis, source, target = one
        if isinstance(source, Routed) and isinstance(target, Routed):
            assert routes is not None, "rows are sorted by who has routes"
            x = routes.brought(x, axis, source, target)
        else:
            x = move(x, source, target, group_of((axis,)), differentiable=differentiable)
    return x


def _over_axes(x: Tensor, joint: Joint, group_of: GroupOf, differentiable: bool) -> Tensor:
    groups = {step.axes: group_of(step.axes) for step in (*joint.there, *(joint.back or ()))}
    if differentiable and joint.back is not None:
        return run_sequence.relayout(x, joint.there, joint.back, groups)
    return run_sequence.run(joint.there, x.detach(), groups)


# Groups are made when they are first needed, and parts are found by number: nothing for a compiler to trace.
_at_once = cast("Callable[[Tensor, Joint, GroupOf, bool], Tensor]", torch.compiler.disable(_over_axes))
