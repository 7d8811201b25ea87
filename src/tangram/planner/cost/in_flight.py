"""How many micro-batches a rank of a pipeline has kept at its peak, and of which of its virtual stages.

Of one virtual stage it is 1F1B's; of several that are dealt in turn forwards go to each virtual stage for as many
micro-batches as there are ranks, backwards the same from the last one down (Narayanan et al. 2021; Megatron-LM,
schedules.py); where they are split, their second halves do (Qi et al. 2024). Once a rank has so many in flight each
forward is followed by a backward: which virtual stages they are of repeats, and between two changes bytes only grow or
only shrink. So the peak is at one of these changes: exact where virtual stages are not alike, but of split backwards
up to 7 % too much, since their loss may be at any moment.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from tangram.planner.space.grid import Array, Grid
from tangram.planner.space.schedule_formulas import beyond, folded, splits


def in_flight(g: Grid, place: Array) -> Array:
    """Virtual stages' micro-batches that a PP rank has kept at its peak."""
    all_of_them = g.micros * g.virtual
    place = np.where(splits(g.schedule), 0.0, place)  # all ranks keep as much as the first
    plain = np.minimum(g.pipeline - place, g.micros)
    hops = np.where(splits(g.schedule), 1, 2)  # forwards that a rank begins with more than the next one
    chunks = hops * (g.pipeline - place - 1) + (g.virtual - 1) * g.pipeline + 1 + beyond(g.schedule)
    chunks = np.minimum(chunks, all_of_them)
    return np.where(g.virtual > 1, chunks, plain)


def in_turn(g: Grid) -> Array:
    """Where ranks have several virtual stages, dealt to them in turn."""
    return np.asarray((g.virtual > 1) & ~folded(g.schedule), dtype=bool)


def peaks_of(g: Grid, place: Array, kept: Array) -> tuple[Array, Array]:
    """Bytes at the peak of a rank whose virtual stages keep `kept` of a micro-batch, shape (virtual stages, grid), and
    of the moments in which its last virtual stage works; of configurations that are `in_turn`. Where the backward is
    split that may be at any moment."""
    found, late = np.zeros(len(g)), np.zeros(len(g))
    last, split = g.virtual - 1, splits(g.schedule)
    for end, counts in _moments(g, place, len(kept)):
        held = (counts * kept).sum(axis=0)
        forward, backward = _turn(end - 1, g), last - _turn(end - in_flight(g, place), g)
        works = split | (forward == last) | (backward == last)
        found, late = np.maximum(found, held), np.maximum(late, np.where(works, held, 0.0))
    return found, late


def least_of(g: Grid, place: Array) -> Array:
    """So many micro-batches each of a rank's virtual stages has at one moment or more; of configurations that are
    `in_turn`."""
    found, most = np.zeros(len(g)), int(g.virtual.max())
    own = np.arange(most)[:, None] < g.virtual
    for _, counts in _moments(g, place, most):
        found = np.maximum(found, np.where(own, counts, np.inf).min(axis=0))
    return found


def _moments(g: Grid, place: Array, most: int) -> Iterator[tuple[Array, Array]]:
    """How many forwards there have been, and micro-batches in flight of each virtual stage, shape (virtual stages,
    grid), at each change of a period and beside it."""
    flying, total = in_flight(g, place), g.micros * g.virtual
    before = np.floor(flying / g.pipeline) * g.pipeline
    at = np.arange(most)[:, None]
    for turn in range(most + 1):
        ahead = turn * g.pipeline
        for change in (flying + ahead, flying + ahead - 1, before + ahead + g.pipeline, before + ahead + 1):
            end = np.clip(change, flying, total)
            yield end, _done(end, at, g) - _done(end - flying, g.virtual - 1 - at, g)


def _turn(action: Array, g: Grid) -> Array:
    """Whose turn an action of a kind is, counted from 0."""
    return np.floor(action / g.pipeline) % g.virtual


def _done(actions: Array, turn: Array, g: Grid) -> Array:
    """Of so many actions those of the virtual stage whose turn is the so many-eth of each round."""
    rounds = np.floor(actions / (g.pipeline * g.virtual))
    rest = actions - rounds * g.pipeline * g.virtual
    done = rounds * g.pipeline + np.clip(rest - turn * g.pipeline, 0.0, g.pipeline)
    return np.where((turn >= 0) & (turn < g.virtual), done, 0.0)
