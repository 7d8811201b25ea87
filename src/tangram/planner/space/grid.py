"""Many configurations at once: one array for each number of a strategy, a place in all of them is one configuration.

The models of memory and time (`planner.cost.memory`, `planner.cost.step_time`) take a grid and answer with arrays;
nothing in them loops over configurations. What is not a number (device, framework, types) is a `Setting`: one a grid.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from tangram.errors import UserError

Array = NDArray[Any]


@dataclass(frozen=True)
class Grid:
    """Configurations of a training step; all arrays of one dim and one length."""

    tensor: Array
    sequence_parallel: Array
    """0 or 1: whether TP ranks divide the tokens of what they do not divide otherwise."""
    pipeline: Array
    virtual: Array
    """Chunks of layers that each PP rank has; 1: no interleaving."""
    schedule: Array
    """Of the pipeline, a code (`planner.space.schedule_formulas`)."""
    ahead: Array
    """How many layers fewer the first virtual stage has than an even cut gives it
    (`planner.space.layers_per_stage`)."""
    behind: Array
    """The same of the last virtual stage."""
    context: Array
    """Ranks that cut a sequence."""
    ulysses: Array
    """Of the CP ranks those that exchange heads for tokens while attention works; the others send keys around."""
    expert: Array
    expert_tensor: Array
    """TP ranks of the experts."""
    inner: Array
    """Whether PP ranks lie within DP ranks, which are then farthest apart: 0 or 1; 0: the other way around."""
    data: Array
    """Ranks that take different samples: of all ranks what TP, PP and CP ranks leave."""
    zero: Array
    """What DP ranks divide: 0 nothing, 1 the optimiser's states, 2 gradients too, 3 parameters too."""
    shard: Array
    """Over how many of the data (and context) ranks they are divided; copies beyond it."""
    micro: Array
    """Samples of a micro-batch."""
    batch: Array
    """Samples of a step over all ranks."""
    sequence: Array
    """Tokens of a sample."""
    recompute: Array
    """Which groups (`models.outlines.outline.Group`) are recomputed in the backward, as bits."""
    recomputed: Array
    """In which share of the layers: 0 to 1."""
    optimiser: Array
    """A code (`planner.space.optimisers_and_offload`)."""
    offload: Array
    """What waits in the host's memory (`means.Offload`), as bits."""

    @property
    def ranks(self) -> Array:
        """All devices."""
        return self.tensor * self.pipeline * self.context * self.data

    @cached_property
    def micros(self) -> Array:
        """Micro-batches of a step on each rank, at least one."""
        return np.maximum(np.ceil(self.batch / (self.data * self.micro)), 1.0)

    @cached_property
    def tokens(self) -> Array:
        """Of a micro-batch on one rank."""
        return self.micro * self.sequence / self.context

    def of_rows(self, rows: float) -> Grid:
        """As a block sees it that has so many rows for each token."""
        return self if rows == 1.0 else replace(self, sequence=self.sequence * rows)

    def columns(self) -> dict[str, Array]:
        """Its arrays, by name."""
        return {one.name: getattr(self, one.name) for one in fields(self)}

    def __len__(self) -> int:
        return len(self.tensor)

    def take(self, index: Any) -> Grid:
        """Some of the configurations, by a mask or places."""
        if isinstance(index, np.ndarray) and cast(Array, index).dtype == np.bool_:
            index = np.flatnonzero(cast(Array, index))  # once, not for each column
        if isinstance(index, slice):
            return Grid(**{name: values[index] for name, values in self.columns().items()})
        places = cast(Array, index)  # `take` is quicker than an index
        return Grid(**{name: values.take(places) for name, values in self.columns().items()})


OF_BLOCKS = (
    "tensor", "sequence_parallel", "context", "ulysses", "expert", "expert_tensor", "micro", "sequence", "recompute",
    "recomputed",
)  # fmt: skip
"""Columns that what a block needs and how long it takes depend on, as far as nothing else is said."""


def distinct(g: Grid, names: Sequence[str]) -> tuple[Grid, Array]:
    """A configuration for each combination of some columns, and for each configuration of the grid the place of its
    own: what depends on these columns alone need not be computed again for those that differ in others."""
    first, place = unlike([getattr(g, name) for name in names])
    return g.take(first), place


def unlike(columns: Sequence[Array]) -> tuple[Array, Array]:
    """Places of one configuration for each combination of columns, and for each configuration which of them it is."""
    count = len(columns[0])
    columns = [column for column in columns if (column != column[:1]).any()]
    if not columns:
        return np.zeros(min(count, 1), dtype=np.int64), np.zeros(count, dtype=np.int64)
    order = np.lexsort(columns)
    other = np.zeros(count, dtype=bool)
    for column in columns:
        along = column[order]
        other[1:] |= along[1:] != along[:-1]
    place = np.empty(count, dtype=np.int64)
    place[order] = np.cumsum(other)
    other[:1] = True
    return order[other], place


_CODES = ("recompute", "schedule", "optimiser", "offload")
_ONES = ("tensor", "pipeline", "virtual", "context", "ulysses", "expert", "data", "micro")


def grid(*, batch: Any, sequence: Any, **given: Any) -> Grid:
    """A grid of numbers and arrays that go together; what is not given is 1, or off.

    `shard` is all DP and CP ranks by default, `expert_tensor` 1, `recomputed` 1. Raises UserError for numbers
    that cannot be (ranks, samples, tokens below 1).
    """
    known = {one.name for one in fields(Grid)}
    if unknown := sorted(set(given) - known):
        raise UserError(f"a grid has no {', '.join(unknown)}: it has {', '.join(sorted(known))}")
    values: dict[str, Any] = dict.fromkeys((*_ONES, "expert_tensor", "recomputed"), 1.0)
    values |= dict.fromkeys(
        ("sequence_parallel", "zero", "recompute", "optimiser", "offload", "ahead", "behind", "inner"), 0
    )
    values |= {"batch": batch, "sequence": sequence} | given
    values.setdefault("schedule", np.where(np.asarray(values["virtual"]) > 1, 1, 0))  # as chunks go by custom
    values.setdefault("shard", np.asarray(values["data"]) * np.asarray(values["context"]))
    arrays = {name: np.atleast_1d(value) for name, value in values.items()}
    several = {len(array) for array in arrays.values()} - {1}
    if len(several) > 1:
        raise ValueError(f"arrays of {', '.join(map(str, sorted(several)))} numbers do not go together")
    size = several.pop() if several else 1
    types = {name: np.int64 if name in _CODES else np.float64 for name in arrays}
    found = {  # a number is filled in, which is many times quicker than broadcasting
        name: np.full(size, array[0], types[name]) if len(array) == 1 else array.astype(types[name])
        for name, array in arrays.items()
    }
    for name in (*_ONES, "expert_tensor", "shard", "batch", "sequence"):
        if not (found[name] >= 1).all():
            raise UserError(f"{name} is {found[name].min():g} in a configuration: it is at least 1")
    for name in ("ahead", "behind"):
        if not (found[name] >= 0).all():
            raise UserError(f"{name} is {found[name].min():g} in a configuration: it is at least 0")
    return Grid(**found)


def joined(grids: Sequence[Grid]) -> Grid:
    """One after the other."""
    return Grid(**{one.name: np.concatenate([getattr(g, one.name) for g in grids]) for one in fields(Grid)})
