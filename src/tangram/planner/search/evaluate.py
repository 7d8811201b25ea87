"""Configurations as they are taken: with as many layers recomputed as need be, and what they then need and take.

Of each the least share that fits is taken (`planner.space.recompute`). More computation may cover more of what ranks
send, but no more than it takes: where corrections that are learned make of that some thousandths of a percent, they say
nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from tangram.models.outlines.outline import Outline
from tangram.planner.cost.memory import needs
from tangram.planner.cost.step_time import Scales, scaled, seconds
from tangram.planner.legality.engine import facts_of, holding
from tangram.planner.legality.enumerate import Able
from tangram.planner.space.grid import Array, Grid
from tangram.planner.space.layers_per_stage import filled
from tangram.planner.space.recompute import Ladder, fitted, is_free
from tangram.planner.space.setting import Setting

__all__ = ["CutRequest", "some_blocks"]


@dataclass(frozen=True)
class CutRequest:
    """What cuts are chosen for."""

    outline: Outline
    setting: Setting
    limit: float
    """Bytes of a device."""
    scales: Scales
    able: Able

    @property
    def most(self) -> int:
        """Blocks fewer of the first and the last virtual stage that are tried at most."""
        return self.able.uneven

    def evaluated(self, g: Grid) -> tuple[Grid, Array, Array]:
        """With as few layers recomputed as fit; seconds of a step, infinite where none fits or a virtual stage has no
        block, and bytes."""
        g, need = fitted(self.outline, g, self.able.ladder, self.limit, self.needs)
        return g, self.steps(g, need), need

    def tried(self, g: Grid) -> tuple[Grid, Array, Array]:
        """The same, by trying one share of layers after the other."""
        need = self.needs(g)
        if (ladder := self.able.ladder) is None:
            return g, self.steps(g, need), need
        most = ladder.last(self.outline, g)
        for at in range(1, int(most.max(initial=0)) + 1):
            open_ = np.flatnonzero(is_free(g) & (need > self.limit) & (at <= most))
            rows = ladder.with_shares(self.outline, g.take(open_), np.full(len(open_), at))
            need[open_] = self.needs(rows)
            g = replace(g, recompute=g.recompute.copy(), recomputed=g.recomputed.copy())
            g.recompute[open_], g.recomputed[open_] = rows.recompute, rows.recomputed
        return g, self.steps(g, need), need

    def needs(self, g: Grid) -> Array:
        """Bytes, infinite where a virtual stage has no block, or a rule does not hold."""
        need, some = np.full(len(g), np.inf), some_blocks(self.outline, g)
        some = some & holding(facts_of(self.outline), g, self.able.rules)
        if some.any():
            need[some] = needs(self.outline, g.take(some), self.setting)
        return need

    def steps(self, g: Grid, need: Array) -> Array:
        """Seconds, infinite where so many bytes do not fit."""
        step = np.full(len(g), np.inf)
        if (fits := need <= self.limit).any():
            step[fits] = scaled(seconds(self.outline, g.take(fits), self.setting), self.scales)
        return step

    def most_again(self, g: Grid) -> Array:
        """Where layers are recomputed that need not be where more memory is."""
        return is_free(g) & (g.recompute > 0) if self.able.ladder else np.zeros(len(g), dtype=bool)

    def least_again(self, g: Grid) -> Grid:
        """With the least share of layers recomputed."""
        return self._share(g, lambda ladder: np.zeros(len(g), dtype=np.int64))

    def all_again(self, g: Grid) -> Grid:
        """With the greatest."""
        return self._share(g, lambda ladder: ladder.last(self.outline, g))

    def _share(self, g: Grid, at: Callable[[Ladder], Array]) -> Grid:
        if (ladder := self.able.ladder) is None:
            return g
        rows, free = ladder.with_shares(self.outline, g, at(ladder)), is_free(g)
        return replace(
            g,
            recompute=np.where(free, rows.recompute, g.recompute),
            recomputed=np.where(free, rows.recomputed, g.recomputed),
        )


def some_blocks(outline: Outline, g: Grid) -> Array:
    """Where each virtual stage has a block, or the embedding or the head alone."""
    return filled(outline.layers, g)
