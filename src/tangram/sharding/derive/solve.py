"""The cheapest choice for every variable where costs are of one variable or of two: exact, by elimination.

A variable is taken out together with all costs that name it: what is left is a table over its neighbours, of the least
that it costs for each of their choices. The order is that of the smallest table first. The trade-off: time and memory
are exponential in the width of the graph, which is small for models (a residual stream with branches); `LIMIT` says
where it gives up.

Source: R. Dechter, Bucket elimination: a unifying framework for reasoning, Artificial Intelligence 113 (1999).
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from tangram.errors import UserError

LIMIT = 1 << 24
"""Entries of the largest table."""
Name = Hashable
Table = tuple[tuple[Name, ...], NDArray[np.float64]]


class TooWideError(UserError):
    """The graph of the costs is too wide to be solved exactly."""


@dataclass
class Costs:
    """What is to be made small."""

    sizes: dict[Name, int] = field(default_factory=dict[Name, int])
    """Of each variable, how many choices it has."""
    tables: dict[tuple[Name, ...], NDArray[np.float64]] = field(
        default_factory=dict[tuple[Name, ...], NDArray[np.float64]]
    )

    def variable(self, name: Name, own: Sequence[float]) -> None:
        """A variable, with what each of its choices costs by itself."""
        self.sizes[name] = len(own)
        self._add((name,), np.asarray(own, dtype=np.float64))

    def pair(self, one: Name, other: Name, table: NDArray[np.float64]) -> None:
        """What each pair of choices of two variables costs."""
        if one == other:
            self._add((one,), np.diagonal(table).copy())
        elif (other, one) in self.tables:
            self._add((other, one), table.T)
        else:
            self._add((one, other), table)

    def _add(self, names: tuple[Name, ...], table: NDArray[np.float64]) -> None:
        self.tables[names] = self.tables[names] + table if names in self.tables else table

    def of(self, choice: Mapping[Name, int]) -> float:
        """What a choice costs."""
        return float(sum(table[tuple(choice[name] for name in names)] for names, table in self.tables.items()))


def least(costs: Costs) -> dict[Name, int]:
    """The choice of least cost; of several the first. Raises TooWideError."""
    order: dict[Name, int] = {name: i for i, name in enumerate(costs.sizes)}
    tables: dict[Name, list[Table]] = {name: [] for name in costs.sizes}
    near: dict[Name, set[Name]] = {name: set() for name in costs.sizes}
    for names, table in costs.tables.items():
        for name in names:
            tables[name].append((names, table))
            near[name].update(names)
    for name, others in near.items():
        others.discard(name)
    size = {name: _room(name, near, costs.sizes) for name in costs.sizes}
    solved: list[tuple[Name, tuple[Name, ...], NDArray[np.intp]]] = []
    while size:
        name = min(size, key=lambda one: (size[one], order[one]))
        if size[name] > LIMIT:
            raise TooWideError(
                f"an exact choice would need a table of {size[name]:.0e} entries: mark more of the tensors"
            )
        del size[name]
        others = tuple(sorted(near.pop(name), key=order.__getitem__))
        total = _sum(tables.pop(name), (name, *others), costs.sizes)
        solved.append((name, others, np.argmin(total, axis=0)))
        left = (others, np.min(total, axis=0))
        for other in others:
            tables[other] = [one for one in tables[other] if name not in one[0]]
            tables[other].append(left)
            near[other].discard(name)
            near[other].update(o for o in others if o != other)
        for other in others:
            size[other] = _room(other, near, costs.sizes)
    found: dict[Name, int] = {}
    for name, others, best in reversed(solved):
        found[name] = int(best[tuple(found[o] for o in others)])
    return found


def _room(name: Name, near: Mapping[Name, set[Name]], sizes: Mapping[Name, int]) -> int:
    return math.prod(sizes[o] for o in near[name]) * sizes[name]


def _sum(tables: Sequence[Table], names: tuple[Name, ...], sizes: Mapping[Name, int]) -> NDArray[np.float64]:
    """Tables over some of the names as one over all."""
    total = np.zeros([sizes[n] for n in names])
    place = {name: i for i, name in enumerate(names)}
    for own, table in tables:
        order = sorted(range(len(own)), key=lambda i: place[own[i]])
        shape = [1] * len(names)
        for i, name in enumerate(own):
            shape[place[name]] = table.shape[i]
        total += table.transpose(order).reshape(shape)
    return total
