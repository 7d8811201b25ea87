"""Operators whose parts need each other, on one rank: what windows read comes first, totals of scans come behind.

The same as `local.run_all` does for ranks that are all in one process, with collectives.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch.distributed as dist
from torch import Tensor

from tangram.relayout.collectives.neighbours import fetched
from tangram.relayout.collectives.one_collective import move
from tangram.sharding.derive.problem.states import SEVERAL, cut
from tangram.sharding.ops.bind import BoundOp
from tangram.sharding.ops.cut_trees import axes_of
from tangram.sharding.ops.rank_part import RankPart, stands
from tangram.sharding.propagation import scan
from tangram.sharding.propagation.halo import needed

Along = Callable[[str], Sequence[RankPart]]
"""The parts of the ranks of an axis, in their order."""


class Linked:
    """What passes between the ranks of some axes. `groups`: by axis."""

    def __init__(self, groups: Mapping[str, dist.ProcessGroup]) -> None:
        self._groups = groups

    def with_halos(
        self, bound: BoundOp, part: RankPart, along: Along, local: Sequence[Tensor | None]
    ) -> list[Tensor | None]:
        """The tensors with what windows read of other ranks', one dim after the other. Collective."""
        found = list(local)
        for factor, window in bound.windows.items():
            if factor in part.indices:
                (axis,) = axes_of(part.cuts[factor])
                have = [stands(one, factor, window.n) for one in along(axis)]
                want = [needed(bound, one, factor) for one in along(axis)]
                x = cast(Tensor, found[window.place])
                found[window.place] = fetched(x, window.dim, have, want, self._groups[axis])
        return found

    def with_totals(self, bound: BoundOp, part: RankPart, along: Along, results: tuple[Any, ...]) -> tuple[Any, ...]:
        """The results with what is before each stretch. Collective."""
        for factor, op in bound.scans.items():
            if factor in part.indices:
                (axis,) = axes_of(part.cuts[factor])
                dim = bound.outputs[0].index((factor,))

                def exchange(x: Tensor, axis: str = axis, dim: int = dim) -> Tensor:
                    return move(x, cut(dim), SEVERAL, self._groups[axis], differentiable=x.is_floating_point())

                every = [one.indices[factor] for one in along(axis)]
                results = scan.with_others(op, results, dim, part.indices[factor], every, exchange)
        return results
