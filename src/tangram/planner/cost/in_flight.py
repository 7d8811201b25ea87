"""How many micro-batches a rank of a pipeline has kept at its peak, and of which of its virtual stages.

Of one virtual stage it is 1F1B's; of several that are dealt in turn forwards go to each virtual stage for as many
micro-batches as there are ranks, backwards the same from the last one down (Narayanan et al. 2021; Megatron-LM,
schedules.py); where they are split, their second halves do (Qi et al. 2024). Once a rank has so many in flight each
forward is followed by a backward: which virtual stages they are of repeats, and between two changes bytes only grow or
only shrink. So the peak is at one of these changes: exact where virtual stages are not alike, but of split backwards
up to 7 % too much, since their loss may be at any moment.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache

import numpy as np

from tangram.models.outlines.outline import Outline
from tangram.planner.space.grid import Array, Grid, unlike
from tangram.planner.space.layers_per_stage import counts_of, cut
from tangram.planner.space.schedule_formulas import beyond, folded, splits
from tangram.planner.space.setting import Setting


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
    for some in _slices(g):
        few = g.take(some)
        flying, ends, counts = _moments(few, place[some])
        held = (counts * kept[None, : counts.shape[1], some]).sum(axis=1)
        last = few.virtual - 1
        works = (_turn(ends - 1, few) == last) | (_turn(ends - flying, few) == 0) | splits(few.schedule)
        found[some], late[some] = held.max(axis=0), np.where(works, held, 0.0).max(axis=0)
    return found, late


def least_of(g: Grid, place: Array) -> Array:
    """So many micro-batches each of a rank's virtual stages has at one moment or more: when it has as many in flight as
    ever for the first time; of configurations that are `in_turn`."""
    return np.clip(in_flight(g, place) - (g.virtual - 1) * g.pipeline, 0.0, g.pipeline)


ROUNDS = 6.0
"""Of as many micro-batches as there are ranks, after which a pipeline's peak has been."""


def unlike_chunks(outline: Outline, g: Grid, setting: Setting) -> Array:
    """Where a rank's virtual stages keep unlike bytes, and each is a whole time in flight."""
    uneven = (outline.layers + g.ahead + g.behind) % (g.pipeline * g.virtual) > 0
    others = len(outline.runs) > 1 or outline.predictors > 0 or setting.framework.dropout
    return in_turn(g) & (uneven | (g.ahead + g.behind > 0) | others)


def kept_by_chunks(
    outline: Outline, g: Grid, place: Array, left: Sequence[Array], embedded: Array
) -> tuple[Array, Array]:
    """Bytes that a rank has kept at its peak, by what each of its virtual stages keeps of a micro-batch; and while its
    last one works. As multiples of what a layer leaves many configurations are alike."""
    one = np.maximum(left[0], 1.0)
    rounds = np.minimum(g.micros, ROUNDS * g.pipeline)
    parts = [np.round(each / one, 9) for each in (*left, embedded)]
    columns = [g.pipeline, g.virtual, g.schedule, g.ahead, g.behind, place, rounds, *parts]
    first, which = unlike(columns)
    known = _known_peaks(outline.layers, tuple(count for _, count in outline.runs), outline.predictors)
    keys = list(zip(*(column[first].tolist() for column in columns), strict=True))
    if missing := [at for at, key in enumerate(keys) if key not in known]:
        rows = first[missing]
        few = replace(g.take(rows), batch=rounds[rows], data=np.ones(len(rows)), micro=np.ones(len(rows)))
        found = _peaks(outline, few, place[rows], [part[rows] for part in parts])
        known.update(
            zip((keys[at] for at in missing), zip(*(each.tolist() for each in found), strict=True), strict=True)
        )
    ever, late = np.array([known[key] for key in keys]).T
    return ever[which] * one, late[which] * one


@cache
def _known_peaks(layers: int, runs: tuple[int, ...], predictors: int) -> dict[tuple[float, ...], tuple[float, float]]:
    """Of a model's shape what has been worked out: a search asks the same of many layouts."""
    del layers, runs, predictors
    return {}


def _peaks(outline: Outline, g: Grid, place: Array, parts: Sequence[Array]) -> tuple[Array, Array]:
    """In multiples of what a layer leaves."""
    each, more = cut(outline.layers, g)
    found: list[Array] = []
    for at in range(int(g.virtual.max())):
        chunk = at * g.pipeline + place
        start = chunk * each + np.minimum(chunk, more) - g.ahead
        counts = counts_of(outline, np.maximum(start, 0.0), start + each + (chunk < more))
        last = (chunk == g.pipeline * g.virtual - 1) * 1.0
        counts = [*counts, last * outline.predictors] if outline.predictors else counts
        kinds = outline.predicting.by_kind(counts)
        kept = sum((count * one for (_, count), one in zip(kinds, parts[:-1], strict=True)), np.zeros(len(g)))
        found.append(np.where(at < g.virtual, kept + (chunk == 0) * parts[-1], 0.0))
    return peaks_of(g, place, np.array(found))


AT_ONCE = 1_000_000
"""Numbers that are looked at together."""


def _slices(g: Grid) -> Iterator[Array]:
    """Places of a grid, with as many virtual stages each."""
    for own in np.unique(g.virtual):
        places = np.flatnonzero(g.virtual == own)
        size = max(int(AT_ONCE / (4 * (own + 1) * own)), 1)
        yield from (places[start : start + size] for start in range(0, len(places), size))


def _moments(g: Grid, place: Array) -> tuple[Array, Array, Array]:
    """Of a grid of as many virtual stages each: how many micro-batches are in flight; how many forwards there have been
    at each change of a period and beside it, shape (moments, grid); and of each virtual stage how many of those in
    flight are its own then, shape (moments, virtual stages, grid)."""
    own, flying = int(g.virtual[0]), in_flight(g, place)
    ahead = np.arange(own + 1)[:, None] * g.pipeline
    before = np.floor(flying / g.pipeline) * g.pipeline + ahead
    changes = np.concatenate([flying + ahead, flying + ahead - 1, before + g.pipeline, before + 1])
    ends = np.clip(changes, flying, g.micros * g.virtual)
    turns = np.arange(own)[None, :, None]
    done, freed = _done(ends[:, None], turns, g), _done((ends - flying)[:, None], own - 1 - turns, g)
    return flying, ends, done - freed


def _turn(action: Array, g: Grid) -> Array:
    """Whose turn an action of a kind is, counted from 0."""
    return np.floor(action / g.pipeline) % g.virtual


def _done(actions: Array, turn: Array, g: Grid) -> Array:
    """Of so many actions those of the virtual stage whose turn is the so many-eth of each round."""
    rounds = np.floor(actions / (g.pipeline * g.virtual))
    rest = actions - rounds * (g.pipeline * g.virtual)
    return rounds * g.pipeline + np.clip(rest - turn * g.pipeline, 0.0, g.pipeline)
