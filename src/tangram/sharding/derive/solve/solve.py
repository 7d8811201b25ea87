"""The cheapest choice for every variable where costs are of one variable or of two: exact, by elimination.

A variable is taken out together with all costs that name it: what is left is a table over its neighbours, of the least
that it costs for each of their choices. The order is that of the smallest table first. The trade-off: time and memory
are exponential in the width of the graph, which is small for models (a residual stream with branches); `LIMIT` says
where it gives up.

Source: R. Dechter, Bucket elimination: a unifying framework for reasoning, Artificial Intelligence 113 (1999).
"""

from __future__ import annotations

import heapq
import math
import time
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from tangram.errors import UserError

LIMIT = 1 << 24
"""Entries of the largest table."""
Name = Hashable
Table = tuple[tuple[Name, ...], NDArray[np.float64]]
_Solved = tuple[Name, tuple[Name, ...], NDArray[np.int32] | None, list[Table]]


class TooWideError(UserError):
    """The graph of the costs is too wide to be solved exactly."""


@dataclass
class SolverCosts:
    """What is to be made small."""

    sizes: dict[Name, int] = field(default_factory=dict[Name, int])
    """Of each variable, how many choices it has."""
    tables: dict[tuple[Name, ...], NDArray[np.float64]] = field(
        default_factory=dict[tuple[Name, ...], NDArray[np.float64]]
    )

    def variable(self, name: Name, own: Sequence[float] | NDArray[np.float64]) -> None:
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


@dataclass(frozen=True)
class Solution:
    """A choice for every variable."""

    choice: Mapping[Name, int]
    bound: float
    """No choice costs less. What this one costs, where no table was too large."""
    parted: tuple[Name, ...] = ()
    """The variables whose table would have been too large, and those that it would have been over. None: exact."""


def least(costs: SolverCosts) -> dict[Name, int]:
    """The choice of least cost; of several the first. Raises TooWideError."""
    found = eliminated(costs, LIMIT, exact=True)
    return dict(found.choice)


def eliminated(
    costs: SolverCosts,
    limit: int,
    *,
    exact: bool = False,
    buckets: list[Table] | None = None,
    stop: float = math.inf,
    late: int = 0,
) -> Solution:
    """A choice, the least where no table of more than `limit` entries is needed, and below what none can cost.

    A variable whose table would be larger is taken out of its costs in several parts, each with its own least, which
    together cost no more than any choice; the choice then takes what is best given those made before it. Source of the
    parts: R. Dechter, I. Rish, Mini-buckets: a general scheme for bounded inference, JACM 50 (2003). `buckets` gets the
    table of each variable as it is taken out, its own choices first, for `marginals`. After `stop` by the clock
    (`time.monotonic`) tables have `late` entries at most.

    Raises TooWideError where that would be needed with `exact`.
    """
    order: dict[Name, int] = {name: i for i, name in enumerate(costs.sizes)}
    tables, near = _by_variable(costs)
    size = {name: _room(name, near, costs.sizes) for name in costs.sizes}
    solved: list[_Solved] = []
    bound = 0.0
    parted: dict[Name, None] = {}
    queue = [(room, order[name], name) for name, room in size.items()]
    heapq.heapify(queue)
    while (name := _smallest(queue, size)) is not None:
        if time.monotonic() > stop:
            limit = min(limit, late)
        if exact and size[name] > limit:
            raise TooWideError(
                f"an exact choice would need a table of {size[name]:.0e} entries: mark more of the tensors"
            )
        del size[name]
        own, others = tables.pop(name), near.pop(name)
        parts = [own] if math.prod(costs.sizes[o] for o in others) * costs.sizes[name] <= limit else []
        parts = parts or _parts(name, own, costs.sizes, limit)
        if len(parts) > 1:
            parted.update(dict.fromkeys((*sorted(others, key=order.__getitem__), name)))
        sums = [_together(part, name, order, costs.sizes) for part in parts]
        if buckets is not None:
            buckets.extend(sums)
        best = np.argmin(sums[0][1], axis=0).astype(np.int32) if len(sums) == 1 else None
        solved.append((name, sums[0][0][1:], best, [] if best is not None else sums))
        for other in others:
            tables[other] = [one for one in tables[other] if name not in one[0]]
            near[other].discard(name)
        for names, total in sums:
            left = (names[1:], total.min(axis=0))
            bound += 0.0 if names[1:] else float(left[1])
            for other in names[1:]:
                tables[other].append(left)
        for other in others:
            near[other] = {o for names, _ in tables[other] for o in names if o != other}
            size[other] = _room(other, near, costs.sizes)
            heapq.heappush(queue, (size[other], order[other], other))
    return Solution(_read_back(solved), bound, tuple(parted))


def _smallest(queue: list[tuple[int, int, Name]], size: Mapping[Name, int]) -> Name | None:
    """The variable of the smallest table, of several the first.

    A table that has changed leaves its old entry in the queue, which is passed over: to look at all variables each time
    would be quadratic in the length of a model.
    """
    while queue:
        room, _, name = heapq.heappop(queue)
        if size.get(name) == room:
            return name
    return None


def _by_variable(costs: SolverCosts) -> tuple[dict[Name, list[Table]], dict[Name, set[Name]]]:
    """Of each variable the tables that name it, and the variables that they name beside."""
    tables: dict[Name, list[Table]] = {name: [] for name in costs.sizes}
    near: dict[Name, set[Name]] = {name: set() for name in costs.sizes}
    for names, table in costs.tables.items():
        for name in names:
            tables[name].append((names, table))
            near[name].update(names)
    for name, others in near.items():
        others.discard(name)
    return tables, near


def _read_back(solved: Sequence[_Solved]) -> dict[Name, int]:
    """The choices, the last variable that was taken out first."""
    found: dict[Name, int] = {}
    for name, others, best, sums in reversed(solved):
        if best is not None:
            found[name] = int(best[tuple(found[o] for o in others)])
        else:
            own_costs = [total[(slice(None), *(found[o] for o in names[1:]))] for names, total in sums]
            found[name] = int(np.argmin(np.sum(own_costs, axis=0)))
    return found


def marginals(buckets: Sequence[Table]) -> dict[Name, NDArray[np.float64]]:
    """For each choice of each variable the least cost of all with it, above the least of all.

    From the tables of an exact elimination, which are changed.
    """
    place = {names[0]: i for i, (names, _) in enumerate(buckets)}
    found: dict[Name, NDArray[np.float64]] = {}
    for names, table in reversed(buckets):
        others = names[1:]
        if others:
            parent, above = buckets[min(place[o] for o in others)]
            rest = above.min(axis=tuple(i for i, o in enumerate(parent) if o not in others))
            kept = [o for o in parent if o in others]
            rest = rest.transpose([kept.index(o) for o in others])
            own = table.min(axis=0)
            table += np.subtract(rest, own, out=np.zeros_like(own), where=np.isfinite(own))
        each = table.min(axis=tuple(range(1, table.ndim)))
        found[names[0]] = each - each.min()
    return found


def _parts(name: Name, own: Sequence[Table], sizes: Mapping[Name, int], limit: int) -> list[list[Table]]:
    """The costs of a variable in parts, each over so few others that its table fits."""
    parts: list[tuple[set[Name], list[Table]]] = []
    for one in sorted(own, key=lambda table: -table[1].size):
        names = {*one[0], name}
        for there, some in parts:
            if math.prod(sizes[o] for o in there | names) <= limit:
                there.update(names)
                some.append(one)
                break
        else:
            parts.append((names, [one]))
    return [some for _, some in parts]


def _together(
    part: Sequence[Table], name: Name, order: Mapping[Name, int], sizes: Mapping[Name, int]
) -> tuple[tuple[Name, ...], NDArray[np.float64]]:
    # a variable of one choice needs no dim of a table, of which NumPy knows 64
    others = sorted({o for names, _ in part for o in names if o != name and sizes[o] > 1}, key=order.__getitem__)
    names = (name, *others)
    return names, _sum(part, names, sizes)


def _room(name: Name, near: Mapping[Name, set[Name]], sizes: Mapping[Name, int]) -> int:
    return math.prod(sizes[o] for o in near[name]) * sizes[name]


def _sum(tables: Sequence[Table], names: tuple[Name, ...], sizes: Mapping[Name, int]) -> NDArray[np.float64]:
    """Tables over some of the names, or over others of one choice, as one over all."""
    total = np.zeros([sizes[n] for n in names])
    place = {name: i for i, name in enumerate(names)}
    for own, table in tables:
        order = sorted(range(len(own)), key=lambda i: place.get(own[i], -1))
        shape = [1] * len(names)
        for i, name in enumerate(own):
            if name in place:
                shape[place[name]] = table.shape[i]
        total += table.transpose(order).reshape(shape)
    return total
