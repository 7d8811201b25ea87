"""The tensors of a job's state as entries: each with the part of it that this rank holds, and who else holds the same.

Values alone: processes that only write files read this module, and pay for no import of DTensors (`describe` does).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
from torch import Tensor

from tangram.layout import Layout, Mesh, Region, owners, ranks_of, region
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
        """Of the part here."""
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
