"""What is recomputed in the backward: its names, and how many of the layers that need be.

Sets of operators are recomputed in all layers. Whole layers are so in as few as memory asks for: of a configuration
the least share that fits is taken (`fitted`). Shares are whole numbers of a virtual stage's layers, or those that a
framework has.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from fractions import Fraction

import numpy as np

from tangram.errors import UserError
from tangram.models.outlines.outline import Group, Outline
from tangram.planner.space.grid import Array, Grid, joined
from tangram.planner.space.optimisers_and_offload import away

NOTHING, SOME, ALL_BLOCKS = "none", "some layers", "full"
WHOLE = (NOTHING, SOME, ALL_BLOCKS)
"""Of layers as a whole what may be recomputed."""
SETS: dict[str, Group] = {"norms and activations": Group.NORM | Group.ACTIVATION}
"""Of all layers."""
BY_OPERATOR = Group.NORM | Group.ACTIVATION | Group.ALTERNATE
"""torchtitan's selective recompute by operator: every second matmul, and what is no matmul, attention or collective;
grouped matmuls of experts are none of those that it keeps."""
EXPLAINED: dict[str, Group] = {
    **SETS,
    "selective": Group.SCORES,
    "every second matmul": BY_OPERATOR,
    "latent up-projections": Group.LATENT,
}
"""And what else is explained where a strategy is given, as other projects have it, but not searched: Megatron-LM's
selective recompute of the attention core, torchtitan's of every second matmul, Megatron-core's of what latent attention
makes of its low ranks."""
FORMER = {
    "nothing": NOTHING,
    "all blocks": ALL_BLOCKS,
    "attention": "selective",
    "every second product": "every second matmul",
}
"""Names of earlier versions, which are read as well."""
QUARTERS = (0.25, 0.5, 0.75)
"""Of layers, where each share is a configuration of its own."""
MOST_BLOCKS = 4096
STRAIGHT = 4
"""So many guesses are by straight lines first: bytes are nearly linear in the share."""


def known() -> str:
    """The names, for people."""
    return ", ".join((NOTHING, "3 of 8 layers (or other numbers)", ALL_BLOCKS, *EXPLAINED))


def again_name(groups: int, share: float) -> str:
    """In words, of the groups (`models.outlines.outline.Group`) that are recomputed in a share of the layers."""
    if groups == Group.NONE or (groups == Group.BLOCK and share == 0):
        return NOTHING
    if groups == Group.BLOCK:
        of = Fraction(share).limit_denominator(MOST_BLOCKS)
        return ALL_BLOCKS if of == 1 else f"{of.numerator} of {of.denominator} layers"
    return next(name for name, group in EXPLAINED.items() if group == groups)


def again_of(name: str) -> tuple[Group, float]:
    """The groups, and in which share of the layers. Raises UserError for a name that is none."""
    name = FORMER.get(name, name)
    if name in EXPLAINED:
        return EXPLAINED[name], 1.0
    if name in (NOTHING, ALL_BLOCKS):
        return (Group.NONE if name == NOTHING else Group.BLOCK), 1.0
    found = re.fullmatch(r"(\d+) of (\d+) (?:layers|blocks)", name)
    if found is None or not 0 < int(found[1]) <= int(found[2]) <= MOST_BLOCKS:
        raise UserError(f'nothing is known of "{name}": what is recomputed is one of {known()}')
    return Group.BLOCK, int(found[1]) / int(found[2])


def spread(blocks: int, share: float) -> list[int]:
    """Which of so many layers a share is, evenly: of any n in a row share x n, where that is whole."""
    of = Fraction(share).limit_denominator(MOST_BLOCKS)
    return [at for at in range(blocks) if math.ceil((at + 1) * of) > math.ceil(at * of)]


@dataclass(frozen=True)
class Ladder:
    """Shares of layers, ascending: by their number 0, 1, ..."""

    steps: tuple[float, ...] | None = None
    """None: each number of a virtual stage's layers, from none to all."""
    with_all: bool = True
    """Of None: with all."""

    @classmethod
    def of(cls, again: tuple[str, ...], shares: tuple[float, ...] | None) -> Ladder | None:
        """By names of what may be recomputed, and shares of layers that may be; None where no name is of layers."""
        if not set(again) & set(WHOLE):
            return None
        if SOME in again and NOTHING in again and shares is None:
            return cls(None, ALL_BLOCKS in again)
        between = (shares or ()) if SOME in again else ()
        ends = ((0.0,) if NOTHING in again else ()), ((1.0,) if ALL_BLOCKS in again else ())
        return cls((*ends[0], *sorted(between), *ends[1]))

    def last(self, outline: Outline, g: Grid) -> Array:
        """Of each configuration the number of the greatest."""
        if self.steps is not None:
            return np.full(len(g), len(self.steps) - 1)
        return _blocks(outline, g) - (0 if self.with_all else 1)

    def share(self, outline: Outline, g: Grid, at: Array) -> Array:
        """The shares of these numbers."""
        return at / _blocks(outline, g) if self.steps is None else np.array(self.steps)[at]

    def with_shares(self, outline: Outline, g: Grid, at: Array) -> Grid:
        """Configurations with the shares of these numbers."""
        share = self.share(outline, g, at)
        recompute = np.where(share > 0, int(Group.BLOCK), int(Group.NONE))
        return replace(g, recompute=recompute, recomputed=np.where(share > 0, share, 1.0))

    def at(self, outline: Outline, g: Grid) -> Array:
        """The number of the share that each configuration has."""
        share = np.where(g.recompute > 0, g.recomputed, 0.0)
        if self.steps is None:
            return np.rint(share * _blocks(outline, g)).astype(np.int64)
        return np.searchsorted(np.array(self.steps), share)

    @property
    def coarse(self) -> Ladder:
        """With quarters in the place of each number of layers."""
        return Ladder((0.0, *QUARTERS, *([1.0] if self.with_all else []))) if self.steps is None else self

    def all_of(self, outline: Outline, g: Grid, free: Array) -> Grid:
        """Some of the configurations with each of their shares, the others as they are."""
        some, most = g.take(free), self.last(outline, g.take(free))
        rows: list[Grid] = []
        for at in range(int(most.max(initial=-1)) + 1):
            few = some.take(most >= at)
            rows.append(self.with_shares(outline, few, np.full(len(few), at)))
        return joined([g.take(~free), *rows])


def _blocks(outline: Outline, g: Grid) -> Array:
    """Of a virtual stage, of even cuts the largest."""
    return np.ceil(outline.layers / (g.pipeline * g.virtual)).astype(np.int64)


def is_free(g: Grid) -> Array:
    """Where whole layers are recomputed or nothing is, and as few as fit are best.

    Of activations that are offloaded to the host fewer move where more layers are recomputed, so that it may be
    quicker: such shares are configurations of their own.
    """
    whole = (g.recompute == int(Group.NONE)) | (g.recompute == int(Group.BLOCK))
    return whole & ~away(g.offload)[2]


def fitted(
    outline: Outline, g: Grid, ladder: Ladder | None, limit: float, needs: Callable[[Grid], Array]
) -> tuple[Grid, Array]:
    """Configurations with the least share of layers recomputed that needs at most `limit`, and bytes of each.

    `needs`: bytes, which more layers recomputed never make more. Where none fits, the greatest share.
    """
    free = np.flatnonzero(is_free(g)) if ladder is not None else np.zeros(0, dtype=np.int64)
    need, share = needs(g), np.zeros(len(g), dtype=np.int64)
    if ladder is None:
        return g, need
    tight = free[need[free] > limit]
    tight = tight[ladder.last(outline, g.take(tight)) > 0]
    if len(tight):
        some = g.take(tight)
        share[tight], need[tight] = _least(outline, some, ladder, limit, needs, need[tight])
        rows = ladder.with_shares(outline, some, share[tight])
        g = replace(g, recompute=g.recompute.copy(), recomputed=g.recomputed.copy())
        g.recompute[tight], g.recomputed[tight] = rows.recompute, rows.recomputed
    return g, need


def _least(
    outline: Outline, g: Grid, ladder: Ladder, limit: float, needs: Callable[[Grid], Array], none: Array
) -> tuple[Array, Array]:
    """Of configurations that do not fit with the first share (`none` bytes) the number of the least that does, else of
    the last, and bytes; between a share that fits and one that does not the next is where a straight line says, after
    some turns in every second half way."""
    low, high = np.zeros(len(g), dtype=np.int64), ladder.last(outline, g)
    below, need = none.copy(), needs(ladder.with_shares(outline, g, high))
    for turn in range(2 * math.ceil(math.log2(MOST_BLOCKS))):
        open_ = np.flatnonzero((high - low > 1) & (need <= limit))
        if not len(open_):
            break
        bottom, top = low[open_], high[open_]
        part = (below[open_] - limit) / np.maximum(below[open_] - need[open_], 1e-30)
        guess = np.ceil(bottom + part * (top - bottom)) if turn < STRAIGHT or turn % 2 == 0 else (bottom + top) // 2
        at = np.clip(np.nan_to_num(guess, posinf=0.0), bottom + 1, top - 1).astype(np.int64)
        found = needs(ladder.with_shares(outline, g.take(open_), at))
        fits = found <= limit
        high[open_[fits]], need[open_[fits]] = at[fits], found[fits]
        low[open_[~fits]], below[open_[~fits]] = at[~fits], found[~fits]
    return high, need
