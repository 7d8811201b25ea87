"""How layers are cut into virtual stages, chosen for each configuration: the quickest cut that fits.

Cuts are tried in which the first virtual stage has `ahead` layers fewer and the last one `behind`
(`planner.space.layers_per_stage`), from the even one on, one block more at a time. With every such block no rank but
the first or the last gets fewer, so what is left out cannot be the best:

    fits, and the rank with the head is not the slowest     nothing after it is quicker
    fits, and that rank is the slowest                      what is quicker takes one more from its last virtual stage
    does not fit on a rank between                          nor does anything after it, where that rank's layers are
                                                            of one kind in all cuts
    does not fit on the first or the last alone             what fits takes one more from it, where all are of one kind
    fits only with layers recomputed                    one more from either may need fewer of them
    no cut at all would be as quick as what is wanted       none is tried

Otherwise both ways are gone. "Fits" is: with as few layers recomputed as fit (`planner.space.recompute`). Tests
compare with trying all cuts, and plant a mistake.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from tangram.models.outlines.outline import Outline
from tangram.planner.cost.memory import at_rank, floor_of, takes_of
from tangram.planner.cost.step_time import Seconds, loads, scaled, seconds
from tangram.planner.search.evaluate import CutRequest, some_blocks
from tangram.planner.space.grid import Array, Grid, joined
from tangram.planner.space.schedule_formulas import folded

__all__ = ["Best", "all_cuts", "best_cuts", "hopeless"]

CACHED = 16384
"""Configurations that are looked at together: so many stay in a processor's caches."""


@dataclass
class Best:
    """Of each configuration the quickest cut that fits so far."""

    grid: Grid
    step: Array
    """Seconds; infinite where none fits."""
    need: Array
    """Bytes of the rank that needs most, as the device sees them."""
    looked: int = 0
    """Further configurations that were evaluated."""

    def take(self, at: Array, found: Grid, step: Array, need: Array) -> None:
        """Cuts of the configurations at these places, several of one maybe."""
        self.looked += len(at)
        order = np.argsort(-step, kind="stable")  # of one configuration the quickest last, which stays
        order = order[step[order] < self.step[at[order]]]
        own = at[order]
        self.step[own], self.need[own] = step[order], need[order]
        for name in INNER:
            getattr(self.grid, name)[own] = getattr(found, name)[order]


def all_cuts(wanted: CutRequest, g: Grid, step: Array, need: Array) -> Best:
    """By trying every cut; `step`, `need`: of the even ones, seconds infinite where they do not fit."""
    best = _even(g, step, need)
    at = np.flatnonzero(g.pipeline > 1)
    for ahead in range(wanted.most + 1):
        for behind in range(wanted.most + 1):
            found = _cut(g.take(at), np.full(len(at), ahead), np.full(len(at), behind))
            best.take(at, *wanted.tried(wanted.least_again(found)))
    return best


def best_cuts(wanted: CutRequest, g: Grid, step: Array, need: Array, last: float = np.inf) -> Best:
    """The same, without what cannot be the best, or is not quicker than `last`."""
    best = _even(g, step, need)
    at = np.flatnonzero(g.pipeline > 1) if wanted.most else np.zeros(0, dtype=np.int64)
    fits = need[at] <= wanted.limit
    if (~fits).any():
        at, fits = _dropped(~fits, _never(wanted, g.take(at[~fits])), at, fits)
    rows = wanted.least_again(g.take(at))
    parts = seconds(wanted.outline, rows, wanted.setting, least=True)
    least = scaled(parts, wanted.scales)
    hopes = (least <= last) & (least < step[at])
    paces = _Paces.of(wanted.outline, parts, rows, hopes, at[hopes], len(g))
    at, fits = at[hopes], fits[hopes]
    found = g.take(at)
    while len(at):
        hopes = paces.hopes(found, best, at) | wanted.most_again(best.grid.take(at))
        fewer = _further(wanted, at, found, fits, paces.slow(found, at), hopes)
        at, found = _children(wanted, at, found, *fewer)
        found, steps, needs = wanted.evaluated(wanted.least_again(found))
        fits = needs <= wanted.limit
        best.take(at, found, steps, needs)
    return best


def hopeless(wanted: CutRequest, g: Grid) -> Array:
    """Where nothing fits, however layers are cut and however many of them are recomputed: by one rank."""
    found = [_full(wanted, g.take(slice(start, start + CACHED))) for start in range(0, len(g), CACHED)]
    return np.concatenate(found) if found else np.zeros(0, dtype=bool)


def _full(wanted: CutRequest, g: Grid) -> Array:
    rows, alone = wanted.all_again(g), g.pipeline == 1
    found = _over(wanted, rows, alone, np.zeros(len(g)), least=True)
    found[~alone] = _never(wanted, rows.take(~alone), least=True)
    return found | (floor_of(wanted.outline, rows, wanted.setting, wanted.most) > wanted.limit)


def _even(g: Grid, step: Array, need: Array) -> Best:
    return Best(replace(g, **{name: getattr(g, name).copy() for name in INNER}), step.copy(), need.copy())


def _cut(g: Grid, ahead: Array, behind: Array) -> Grid:
    return replace(g, ahead=ahead.astype(float), behind=behind.astype(float))


def _dropped(of: Array, drop: Array, *arrays: Array) -> list[Array]:
    """Arrays without those of `of` that are dropped."""
    keep = np.ones(len(of), dtype=bool)
    keep[of] = ~drop
    return [array[keep] for array in arrays]


def _never(wanted: CutRequest, g: Grid, *, least: bool = False) -> Array:
    """Where no cut with more layers of nothing fits: by layers of the last kind that a rank has in all of them.
    `least`: nor with fewer layers recomputed.

    Such are those of virtual stages, but the last one, before which all layers of other kinds are: of a rank that has
    no other virtual stages all that it has now, and of the first rank the least that these have. Where virtual stages
    turn at the last rank, it has all that it has now but those of other kinds.
    """
    outline, ranks = wanted.outline, g.pipeline
    others = outline.layers - outline.runs[-1][1]
    fewest = np.maximum(np.floor(outline.layers / (ranks * g.virtual)), 1.0)
    place = 1.0 + np.maximum(np.ceil((others - 1) / fewest), 0.0)
    turns = folded(g.schedule)
    found = _over(wanted, g, place <= np.where(turns, ranks - 1, ranks - 2), place, least=least)
    chunks = g.virtual - np.maximum(np.ceil(place / ranks), 1.0)
    blocks = np.maximum(np.where(turns, 2 * fewest - others, chunks * fewest), 0.0)
    return found | _over(wanted, g, ~found & (blocks > 0), np.where(turns, ranks - 1, 0.0), blocks, least=least)


def _over(
    wanted: CutRequest, g: Grid, some: Array, place: Array, blocks: Array | None = None, *, least: bool = False
) -> Array:
    """Where a rank needs too much, looked at for some; `blocks`: if it had so many of the last kind."""
    found, few = np.zeros(len(g), dtype=bool), g.take(some)
    counts = [np.zeros(len(few))] * (len(wanted.outline.runs) - 1)
    counts = None if blocks is None else [*counts, blocks[some]]
    takes = takes_of(wanted.outline, few, wanted.setting, least=least)
    found[some] = at_rank(wanted.outline, few, wanted.setting, place[some], counts, takes) > wanted.limit
    return found


@dataclass(frozen=True)
class _Paces:
    """Seconds of a micro-batch, of configurations by their places."""

    outline: Outline
    each: Array
    """Of a block."""
    head: Array

    @classmethod
    def of(cls, outline: Outline, parts: Seconds, g: Grid, some: Array, at: Array, count: int) -> _Paces:
        """`some`: which of the grid are at the places `at`, of so many."""
        times = g.pipeline / g.micros
        whole = sum((getattr(parts, name) for name in BLOCKS), np.zeros(len(g))) * times
        found = [np.zeros(count), np.zeros(count)]
        for array, values in zip(found, (whole / outline.layers, parts.head * times), strict=True):
            array[at] = values[some]
        return cls(outline, *found)

    def slow(self, found: Grid, at: Array) -> Array:
        """Where the rank with the head is the slowest."""
        most, last = loads(self.outline, found)
        return last * self.each[at] + self.head[at] > most * self.each[at]

    def hopes(self, found: Grid, best: Best, at: Array) -> Array:
        """Where more layers of nothing may be quicker than the best: by what the ranks without the head take."""
        most, _ = loads(self.outline, found)
        head, own = loads(self.outline, best.grid.take(at))
        pace = np.maximum(head * self.each[at], own * self.each[at] + self.head[at])
        return ~np.isfinite(best.step[at]) | (most * self.each[at] < pace)


INNER = ("ahead", "behind", "recompute", "recomputed")
"""Of a configuration what is chosen here."""
BLOCKS = ("products", "attention", "streams", "launch", "tensor", "expert", "context")
"""Parts of a step that layers take."""


def _further(wanted: CutRequest, at: Array, found: Grid, fits: Array, slow: Array, hopes: Array) -> tuple[Array, Array]:
    """Of which cuts one is tried with a block fewer in the first virtual stage, and of which in the last one."""
    turns, some = folded(found.schedule), some_blocks(wanted.outline, found)
    first, last = ~fits, ~fits
    if len(wanted.outline.runs) == 1 and (known := ~fits & some).any():
        g = found.take(known)
        few, many = (
            at_rank(wanted.outline, g, wanted.setting, place) > wanted.limit
            for place in (np.zeros(len(g)), g.pipeline - 1)
        )
        both = folded(g.schedule) & few
        first, last = first.copy(), last.copy()
        first[known], last[known] = few, both | (many & ~few & ~folded(g.schedule))
    if (known := ~fits & some).any():
        never = np.zeros(len(found), dtype=bool)
        never[known] = _never(wanted, found.take(known))
        hopes = hopes & ~never
    again = fits & wanted.most_again(found)
    return hopes & (first | again | (fits & slow & turns)), hopes & (last | again | (fits & slow))


def _children(wanted: CutRequest, at: Array, found: Grid, first: Array, last: Array) -> tuple[Array, Grid]:
    """Cuts with one block fewer, each once, as far as any with as many fewer can have layers in all virtual stages
    between."""
    places = np.concatenate([at[first], at[last]])
    g = joined((found.take(first), found.take(last)))
    ahead = g.ahead + (np.arange(len(g)) < first.sum())
    behind = g.behind + (np.arange(len(g)) >= first.sum())
    most = np.floor((wanted.outline.layers + 2 * wanted.most) / (g.pipeline * g.virtual))
    keep = (np.maximum(ahead, behind) <= wanted.most) & (ahead <= most + 1) & (behind <= most)
    keep &= (g.pipeline * g.virtual > 2) | (ahead * behind == 0)  # of two chunks one of each more is the same cut
    names = (places * (wanted.most + 1) + ahead) * (wanted.most + 1) + behind
    _, once = np.unique(np.where(keep, names, -1), return_index=True)
    once = once[keep[once]]
    return places[once], _cut(g.take(once), ahead[once], behind[once])
