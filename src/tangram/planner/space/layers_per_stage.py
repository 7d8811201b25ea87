"""Which layers of a model the ranks of a pipeline have, for every configuration of a grid at once.

Blocks are cut into virtual stages as evenly as they go, the first virtual stages with one more, as if there were
`ahead` layers of nothing before the first and `behind` after the last one: so many fewer the first and the last virtual
stage have. (Arguments of Megatron-LM that account for the embedding and the loss are one each; torchtitan's layers that
the first and the last stage have less are these numbers.) Chunks are dealt to ranks in turn, or go down the ranks and
up again.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from tangram.models.outlines.outline import Outline
from tangram.planner.space.grid import Array, Grid, unlike
from tangram.planner.space.schedule_formulas import folded


def sizes(blocks: int, chunks: int, ahead: int, behind: int) -> list[int]:
    """Blocks of each virtual stage, in the model's order; below 0 where the cut is none."""
    each, more = divmod(blocks + ahead + behind, chunks)
    found = [each + (place < more) for place in range(chunks)]
    found[0] -= ahead
    found[-1] -= behind
    return found


def fewer(found: list[int]) -> tuple[int, int] | None:
    """`ahead` and `behind` of virtual stages of these sizes, the smallest; None where no such cut makes them."""
    blocks, chunks = sum(found), len(found)
    ways = ((ahead, total - ahead) for total in range(2 * max(found) + 1) for ahead in range(total + 1))
    return next((way for way in ways if sizes(blocks, chunks, *way) == found), None)


def cut(layers: int, g: Grid) -> tuple[Array, Array]:
    """Blocks of each virtual stage of so many with those of nothing, and how many of the first virtual stages have one
    more.

    Of a model with fewer layers than virtual stages one each, as far as they go.
    """
    chunks = g.pipeline * g.virtual
    blocks = layers + g.ahead + g.behind
    each = np.floor(blocks / chunks)
    return np.maximum(each, 1.0), np.where(each < 1, 0.0, blocks - each * chunks)


def ends(layers: int, g: Grid) -> tuple[Array, Array]:
    """Blocks of the first virtual stage, and of the last one; below 0 where the cut is none."""
    each, more = cut(layers, g)
    alone = g.pipeline * g.virtual == 1
    first = each + (more > 0) - g.ahead - np.where(alone, g.behind, 0.0)
    return first, np.where(alone, first, each - g.behind)


def filled(layers: int, g: Grid) -> Array:
    """Where each virtual stage has a block; but the first may have the embedding alone, and the last the head, of those
    that have fewer layers."""
    first, last = ends(layers, g)
    alone = g.pipeline > 1
    return (first >= 1 - alone * (g.ahead > 0)) & (last >= 1 - alone * (g.behind > 0))


def chunk_of(outline: Outline, g: Grid, block: int) -> tuple[Array, Array]:
    """The virtual stage that has a block of the model, and how many of its layers (of nothing, too) lie before that
    one."""
    each, more = cut(outline.layers, g)
    place = block + g.ahead
    beyond_them = place - more * (each + 1)
    chunk = np.where(beyond_them < 0, np.floor(place / (each + 1)), more + np.floor(beyond_them / each))
    return chunk, place - chunk * each - np.minimum(chunk, more)


OF_CUTS = ("pipeline", "virtual", "schedule", "ahead", "behind")
"""Columns that a cut depends on."""
FEW_RUNS = 3
"""So many runs are counted for each configuration sooner than those that are cut alike are looked for."""


def dealt(outline: Outline, g: Grid, place: Array) -> list[Array]:
    """How many layers of each run the virtual stages of a PP rank have."""
    if len(outline.runs) > FEW_RUNS and len(g) > 1:
        first, which = unlike([*(getattr(g, name) for name in OF_CUTS), place])
        if len(first) < len(g):
            return [count.take(which) for count in dealt(outline, g.take(first), place[first])]
    bounds: list[int] = np.cumsum([count for _, count in outline.runs]).tolist()
    turns = folded(g.schedule)
    many = turns.any()

    def before(at: int) -> Array:
        found = _before(outline, g, place, at)
        return np.where(turns, _before_folded(outline, g, place, at), found) if many else found

    start = before(0) if g.ahead.any() else np.zeros(len(g))
    return [end - start for start, end in pairwise([start, *map(before, bounds)])]


def _before(outline: Outline, g: Grid, place: Array, block: int) -> Array:
    """Blocks of a rank (of nothing, too) before a block of the model, where virtual stages are dealt out in turn."""
    each, more = cut(outline.layers, g)
    chunk, into = chunk_of(outline, g, block)
    turns = (chunk - place) / g.pipeline
    up = np.ceil(turns)
    whole = np.maximum(up, 0.0)
    larger = np.maximum(np.ceil((more - place) / g.pipeline), 0.0)
    there = (turns >= 0) & (up == turns)
    return whole * each + np.minimum(whole, larger) + np.where(there, into, 0.0)


def _before_folded(outline: Outline, g: Grid, place: Array, block: int) -> Array:
    """The same where two virtual stages of each rank go down the ranks and up again."""
    each, more = cut(outline.layers, g)
    found = np.zeros(len(g))
    for chunk in (place, 2 * g.pipeline - 1 - place):
        start = chunk * each + np.minimum(chunk, more)
        found = found + np.clip(block + g.ahead - start, 0.0, each + (chunk < more))
    return found


def counts_of(outline: Outline, start: Array, end: Array) -> list[Array]:
    """How many layers of each run lie from `start` to `end`."""
    found: list[Array] = []
    at = 0
    for _, count in outline.runs:
        found.append(np.maximum(np.minimum(end, at + count) - np.maximum(start, at), 0.0))
        at += count
    return found
