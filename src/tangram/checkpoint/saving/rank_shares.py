"""What one rank writes of a state: of what several hold, one writes each element.

Ranks that hold the same take turns. Where the parts of a tensor overlap without being equal, as they do where there are
fewer key heads than ranks that cut them, each writes what no lower rank holds; that is cut out of its part as views.
"""

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import replace

from torch import Tensor

from tangram.checkpoint.state.entries import StateEntry
from tangram.layout import IntSet, Region, intervals
from tangram.layout.region import Box, stretch


def mine(entries: Iterable[StateEntry], index: int) -> list[StateEntry]:
    """The entries that the rank at this place writes: of what several hold, one writes each, balanced by bytes.

    The ranks that hold the same agree without a word: they share the list of what they hold alike, and give each in
    turn, largest first, to the one with the least so far.
    """
    entries = list(entries)
    groups: dict[tuple[int, ...], list[StateEntry]] = {}
    for entry in entries:
        if entry.region and entry.uneven_share is None:
            groups.setdefault(entry.replicas, []).append(entry)
    own: set[int] = set()
    for replicas, alike in groups.items():
        load = dict.fromkeys(replicas, 0)
        for entry in sorted(alike, key=lambda e: (-e.nbytes, e.name)):
            writer = min(replicas, key=lambda rank: (load[rank], rank))
            load[writer] += entry.nbytes
            if writer == index:
                own.add(id(entry))
    found: list[StateEntry] = []
    for entry in entries:
        if entry.uneven_share is not None:
            found += cut_out(entry, entry.uneven_share)
        elif id(entry) in own:
            found.append(entry)
    return found


def cut_out(entry: StateEntry, share: Region) -> list[StateEntry]:
    """Entries of a part of a part, which share its memory: one for each block of it without gaps in memory."""
    if share == entry.region:
        return [replace(entry, uneven_share=None)]
    take = _of_grid if entry.region.local_shape is not None else _of_runs
    return [
        replace(entry, region=Region((box,)), local=local, uneven_share=None, replicas=())
        for box, local in take(entry, share)
    ]


def _of_grid(entry: StateEntry, share: Region) -> Iterator[tuple[Box, Tensor]]:
    held = entry.region.boxes[0]
    for box in share.boxes:
        blocks = [list(_together(have, want)) for have, want in zip(held, box, strict=True)]
        for block in itertools.product(*blocks):
            local = entry.local
            for dim, (_, start, stop) in enumerate(block):
                local = local.narrow(dim, start, stop - start)
            yield tuple(indices for indices, _, _ in block), local


def _together(held: IntSet, wanted: IntSet) -> Iterator[tuple[IntSet, int, int]]:
    """Wanted indices by where they stand among those held: each interval of places, and the indices there."""
    for start, stop in intervals.rank(held, wanted):
        yield intervals.take(held, ((start, stop),)), start, stop


def _of_runs(entry: StateEntry, share: Region) -> Iterator[tuple[Box, Tensor]]:
    """The same of a part that is no grid, whose buffer has one dim."""
    shape = entry.spec.shape
    flat, whole = entry.local.reshape(-1), tuple(intervals.span(0, n) for n in shape)
    held = entry.region.runs(shape)
    for first, last in share.runs(shape):
        ((start, _),) = intervals.rank(held, ((first, last),))
        for box in stretch(whole, first, last):
            size = Region((box,)).size
            yield box, flat.narrow(0, start, size).view([intervals.size(s) for s in box])
            start += size
