"""Configurations as they are taken: with as many layers recomputed as need be, and what they then need and take.

Of each the least share that fits is taken (`planner.space.recompute`), and from it on the next as long as that is
quicker: more computation may cover more of what ranks send, and with learned corrections cover more than it takes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tangram.models.outlines.outline import Outline
from tangram.planner.cost.memory import needs
from tangram.planner.cost.step_time import COVERED, Scales, multiplied, scaled, seconds
from tangram.planner.legality.engine import facts_of, holding
from tangram.planner.legality.enumerate import Able
from tangram.planner.space.grid import Grid
from tangram.planner.space.layers_per_stage import ends
from tangram.planner.space.recompute import Ladder, fitted, is_free
from tangram.planner.space.setting import Setting

__all__ = ["CutRequest", "some_blocks"]

Array = NDArray[Any]


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

    def evaluated(self, g: Grid, last: float = np.inf) -> tuple[Grid, Array, Array]:
        """With as few layers recomputed as fit, or more where that is quicker; seconds of a step, infinite where
        none fits or a virtual stage has no block, and bytes. `last`: seconds from which on it does not matter."""
        g, need = fitted(self.outline, g, self.able.ladder, self.limit, self.needs)
        return self.quickest(g, need, last)

    def tried(self, g: Grid) -> tuple[Grid, Array, Array]:
        """The same, by trying one share of layers after the other."""
        need = self.needs(g)
        if (ladder := self.able.ladder) is None:
            return g, self.steps(g, need)[0], need
        most = ladder.last(self.outline, g)
        for at in range(1, int(most.max(initial=0)) + 1):
            open_ = np.flatnonzero(is_free(g) & (need > self.limit) & (at <= most))
            rows = ladder.with_shares(self.outline, g.take(open_), np.full(len(open_), at))
            need[open_] = self.needs(rows)
            g = replace(g, recompute=g.recompute.copy(), recomputed=g.recomputed.copy())
            g.recompute[open_], g.recomputed[open_] = rows.recompute, rows.recomputed
        return self.quickest(g, need, np.inf)

    def quickest(self, g: Grid, need: Array, last: float) -> tuple[Grid, Array, Array]:
        """Bytes as they are needed, with one more block recomputed as long as that is quicker and fits; what is not
        as quick as `last` by then is left as it is."""
        step, least = self.steps(g, need)
        if (ladder := self.able.ladder) is None:
            return g, step, need
        open_ = np.flatnonzero(is_free(g) & (least < step) & (least <= last))
        g = replace(g, recompute=g.recompute.copy(), recomputed=g.recomputed.copy())
        width = 1  # so many shares are tried at once: few get far, and those by few at a time would take long
        while len(open_):
            rows = g.take(open_)
            numbers, steps, needs = self._next(rows, step[open_], width)
            count = np.isfinite(needs).sum(axis=1)
            some = count > 0
            where, at = open_[some], (np.flatnonzero(some), count[some] - 1)
            taken = ladder.with_shares(self.outline, rows.take(some), numbers[at])
            step[where], need[where] = steps[at], needs[at]
            g.recompute[where], g.recomputed[where] = taken.recompute, taken.recomputed
            open_, width = open_[count == width], 2 * width
        return g, step, need

    def _next(self, rows: Grid, step: Array, width: int) -> tuple[Array, Array, Array]:
        """Of rows the numbers of the next shares, seconds and bytes; bytes are infinite from the first on that is not
        quicker than the one before, or does not fit."""
        ladder = self.able.ladder
        assert ladder is not None
        numbers = ladder.at(self.outline, rows)[:, None] + 1 + np.arange(width)
        last = ladder.last(self.outline, rows)[:, None]
        tiled = rows.take(np.repeat(np.arange(len(rows)), width))
        tiled = ladder.with_shares(self.outline, tiled, np.minimum(numbers, last).ravel())
        steps = scaled(seconds(self.outline, tiled, self.setting), self.scales).reshape(numbers.shape)
        quicker = steps < np.concatenate([step[:, None], steps[:, :-1]], axis=1)
        quicker = np.logical_and.accumulate((numbers <= last) & quicker, axis=1).ravel()
        needs = np.full(len(tiled), np.inf)
        needs[quicker] = self.needs(tiled.take(quicker))
        needs = needs.reshape(numbers.shape)
        fits = np.logical_and.accumulate(needs <= self.limit, axis=1)
        return numbers, steps, np.where(fits, needs, np.inf)

    def needs(self, g: Grid) -> Array:
        """Bytes, infinite where a virtual stage has no block, or a rule does not hold."""
        need, some = np.full(len(g), np.inf), some_blocks(self.outline, g)
        some = some & holding(facts_of(self.outline), g, self.able.rules)
        if some.any():
            need[some] = needs(self.outline, g.take(some), self.setting)
        return need

    def steps(self, g: Grid, need: Array) -> tuple[Array, Array]:
        """Seconds, infinite where so many bytes do not fit; and without what more computation could cover."""
        step, least = np.full(len(g), np.inf), np.full(len(g), np.inf)
        if (fits := need <= self.limit).any():
            found = seconds(self.outline, g.take(fits), self.setting)
            step[fits] = scaled(found, self.scales)
            least[fits] = sum(multiplied(found, self.scales, COVERED).values(), np.zeros(()))
        return step, least

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
    """Where each virtual stage has a block."""
    first, last = ends(outline.layers, g)
    return (first >= 1) & (last >= 1)
