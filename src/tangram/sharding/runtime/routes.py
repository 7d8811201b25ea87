"""Rows that ranks sort for themselves, and send each other: what a program's steps between such states do.

A route is known from when rows are sorted until the same operator sorts others: the next layer's of its kind, or the
same layer's when it is recomputed. What is sent in between is of these rows, in whatever order modules run.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch.distributed as dist
from torch import Tensor

from tangram.relayout.collectives.grouped_rows import RowRoute
from tangram.sharding.derive.problem.states import OWN, OWN_IDS, SENT, SENT_IDS, SORTED, Routed


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
