"""The tensors of a job's state as entries: each with the part of it that this rank holds, and who else holds the same.

Of what several hold, one writes each element. Ranks that hold the same take turns. Where the parts of a tensor overlap
without being equal, as they do where there are fewer key heads than ranks that cut them, each writes what no lower rank
holds; that is cut out of its part as views.

Values alone: processes that only write files read this module, and pay for no import of DTensors (`describe` does).
"""

import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import numpy as np
from torch import Tensor

from tangram.layout import IntSet, Layout, Mesh, Region, intervals, owners, ranks_of, region
from tangram.layout.region import Box, stretch
from tangram.relayout import TensorSpec

State = Mapping[str, Any]
"""Sections by their names."""


@dataclass(frozen=True)
class LocalPart:
    """A part of a tensor, with where it lies said in the notation: for who cuts by hand."""

    local: Tensor | np.ndarray[Any, Any]
    shape: tuple[int, ...]
    """Of the whole tensor."""
    layout: str
    mesh: str
    rank: int
    """This rank's place in the mesh."""


@dataclass(frozen=True, eq=False)
class StateEntry:
    """One tensor of the state, as it lies on this rank."""

    name: str
    """With its section in front."""
    spec: TensorSpec
    """Of the whole tensor."""
    region: Region
    """What this rank holds of it, perhaps nothing."""
    local: Tensor
    """The memory that it is in; of the region's local shape."""
    replicas: tuple[int, ...] = ()
    """The places, in the group that saves, of all ranks that hold this region, this one's included."""
    layout: str = ""
    """For people."""
    uneven_share: Region | None = None
    """What of it this rank writes, where others hold only some of it; None where its replicas take turns."""
    frozen: bool = False
    """Whether training leaves it as it is, and not all of its module."""

    @property
    def nbytes(self) -> int:
        return self.local.nbytes


@dataclass(frozen=True)
class Described:
    """A state as entries, and the rest of it."""

    entries: tuple[StateEntry, ...]
    objects: Mapping[str, Any]
    """What is no tensor, by section and name, as `state.values` has it in JSON."""
    in_values: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """The tensors that `objects` refer to, by name, as the state has them."""


@lru_cache(1 << 12)
def replicas(
    mesh: Mesh, cut: frozenset[str], rank: int, held: tuple[tuple[str, tuple[int, ...]], ...] = ()
) -> tuple[int, ...]:
    """The ranks of a mesh that differ from one in no axis that cuts, that one included.

    `held`: the coordinates of the ranks that hold the tensor at all, as a layout's `at` has them; empty: all do.
    """
    own = mesh.coords(rank)
    alike = mesh.ranks(tuple((axis, own[axis]) for axis in sorted(cut)))
    return tuple(r for r in alike if all(mesh.coords(r)[axis] in where for axis, where in held))


@lru_cache(1 << 12)
def uneven_share(layout: Layout, mesh: Mesh, rank: int) -> Region | None:
    """What a rank writes of what it holds, where other ranks hold some of that and not the rest: what no lower one has.

    So with `(g/kv (r/rep + 1 + 1) d) h`, where the query heads of a group are cut and its key and value are not. None
    where whoever holds any of it holds all of it: then the replicas take turns.
    """
    here = region(layout, mesh, rank)
    if len(layout.axes) < 2 or not here:
        return None
    holders = [(tuple(sorted(ranks_of(layout, mesh, owner))), owner.boxes) for owner in owners(layout, mesh, here)]
    if all(ranks == holders[0][0] for ranks, _ in holders):
        return None
    return here - Region.of([box for ranks, boxes in holders if ranks[0] < rank for box in boxes])


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
