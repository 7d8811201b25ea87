"""The cheapest sequence of collectives between two layouts of one tensor.

A* over layouts (`digits.State`), with the costs of links. Where several axes change in one way they are one flattened
group, so peers that would gather first have one all-to-all. Between layouts without a pending sum one exchange receives
exactly what a rank lacks, which nothing can beat in bytes; more steps than that are taken where they spare slow links.
A sum is scattered where its target is cut; ranks that have the same share the work of reducing where that is cheaper.

Trade-off: of the places where a tensor may lie on the way, only those of the source and the target, whole, and one
place of each axis's own are looked at, and the search ends after `EXPANDED` layouts: with one and two axes that is as
cheap as any sequence (the tests try all), with more it is never dearer than what one axis after the other would cost.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from tangram.hardware.catalogue.cluster import AxisLink
from tangram.layout import Layout, Mesh
from tangram.relayout.collectives.digits import (
    WAITING,
    DigitProblem,
    DigitSpot,
    RankDigit,
    State,
    fits,
    in_common,
    layout_of,
    problem,
)
from tangram.relayout.collectives.one_collective import ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, REDUCE_SCATTER, SLICE, ZERO

PERMUTE = "permute"
Link = AxisLink
"""What an axis is linked by: `tangram.hardware.catalogue.cluster.axis_links` gives them for a mesh."""

EXPANDED = 40
"""So many layouts are looked at from."""


@dataclass(frozen=True)
class CollectiveStep:
    """One collective, and how the tensor lies before and after it."""

    collective: str
    """all-gather, reduce-scatter, all-reduce, all-to-all, permute (an all-to-all in which each hears of one other);
    slice and zero, which send nothing."""
    axes: tuple[str, ...]
    """The axes of its group, flattened in the order of the mesh; `dp.0` is a digit of an axis that is several."""
    digits: tuple[RankDigit, ...]
    """The same as digits of the rank."""
    source: State
    target: State
    received: float
    """Bytes that a rank receives, on average."""
    seconds: float
    """By the links that were given; without links: bytes."""
    layout: Layout
    """After it."""
    of: DigitProblem

    @property
    def dims(self) -> tuple[tuple[DigitSpot | None, DigitSpot | None], ...]:
        """Of each of its axes, the dim and the blocks before it where it stood and where it stands then."""
        return tuple(
            (a, b) for digit, a, b in zip(self.of.digits, self.source, self.target, strict=True) if digit in self.digits
        )

    def __str__(self) -> str:
        return f"{self.collective} over {' '.join(self.axes)} -> {self.layout} ({self.received:,.0f} B)"


@lru_cache(1 << 14)
def sequence(
    shape: tuple[int, ...],
    source: Layout,
    target: Layout,
    mesh: Mesh,
    itemsize: int = 1,
    links: tuple[tuple[str, Link], ...] | None = None,
) -> tuple[CollectiveStep, ...]:
    """The cheapest steps from one layout to another; none where they hold the same. Cached.

    `links`: for every axis of the mesh its link, `tuple(mapping.items())`; None: bytes count, and the fewest
    collectives of equally many. Raises RelayoutError for a layout that is not even (`digits`), LayoutError for one that
    does not fit.
    """
    wanted = problem(shape, source, target, mesh, idle=links is not None)
    return cheapest(wanted, itemsize, dict(links) if links is not None else None)


def cheapest(
    wanted: DigitProblem, itemsize: int = 1, links: Mapping[str, Link] | None = None
) -> tuple[CollectiveStep, ...]:
    """`sequence` of layouts that are digits already; not cached."""
    return _Search(wanted, itemsize, links).steps()


def received(steps: Sequence[CollectiveStep]) -> float:
    """Bytes that a rank receives in all steps, on average."""
    return sum(step.received for step in steps)


class _Reached(NamedTuple):
    collective: str
    changed: tuple[int, ...]
    target: State
    received: float
    seconds: float


class _Search:
    """The search for one problem."""

    def __init__(self, wanted: DigitProblem, itemsize: int, links: Mapping[str, Link] | None) -> None:
        self.of, self.itemsize = wanted, itemsize
        self.ks = [digit.k for digit in wanted.digits]
        self.ranks, self.total = math.prod(self.ks), math.prod(wanted.shape)
        self.even = links is None
        tie = 1e-9 * max(1, self.total * itemsize)
        self.links = [links[axis] if links is not None else Link(tie, 1.0) for axis in wanted.axes]
        self.fastest = max((link.rate for link in self.links), default=1.0)
        self.local = 1e-3 * min((link.latency for link in self.links), default=0.0)
        self.sizes: dict[State, int] = {}
        self.fit: dict[State, bool] = {}
        self.sums = WAITING in (*wanted.source, *wanted.target)
        self.ends = self._ends()
        self.options = [self._options(i) for i in range(len(self.ks))]

    # ------------------------------------------------------------ where a digit may stand on the way

    def _options(self, i: int) -> tuple[DigitSpot | None, ...]:
        """Beside its place in the source: each the goal of one kind of edge; the target first."""
        a, b = self.of.source[i], self.of.target[i]
        own: list[DigitSpot | None] = []
        if b != WAITING:
            own.append(b)
        elif a is not None and a != b:  # whole, then all but the first rank forget theirs
            own.append(None)
        idle = a is None and b is None
        if WAITING in (a, b) or (idle and (self.sums or not self.even)):
            places = self._own_places(i)
            own += places
            if a == WAITING != b and b is not None and not places:
                own.append(None)
        return tuple(own)

    def _own_places(self, i: int) -> list[DigitSpot]:
        """Where no other digit stands in the source, the target, or at its own place; of two digits all that differ."""
        k, before = self.ks[i], math.prod(self.ks[:i])
        free = [
            DigitSpot(d, end * before) for d, end in enumerate(self.ends) if self.of.shape[d] % (end * before * k) == 0
        ]
        if len(self.ks) > 2 and free:
            return free[:1]
        some = free[:1]
        for d, n in enumerate(self.of.shape):
            if self.ends[d] > 1 or n % math.prod(self.ks) or not free or d == free[0].dim:
                border = self.ends[d] * math.prod(self.ks)
                some += [DigitSpot(d, o) for o in range(1, border + 1) if border % o == 0 and n % (o * k) == 0]
        return list(dict.fromkeys(some if len(self.ks) <= 2 else some[:1]))

    def _ends(self) -> list[int]:
        """Of each dim, so many blocks that every digit of the source and the target is one of theirs."""
        own: list[list[int]] = [[1] for _ in self.of.shape]
        for state in (self.of.source, self.of.target):
            for k, spot in zip(self.ks, state, strict=True):
                if spot is not None and spot != WAITING:
                    own[spot.dim].append(spot.outer * k)
        return [math.lcm(*some) for some in own]

    # ------------------------------------------------------------ the search

    def steps(self) -> tuple[CollectiveStep, ...]:
        """A* from the source; a layout whose bound is no better than what was found is not looked at."""
        start, goal = self.of.source, self.of.target
        best: dict[State, float] = {start: 0.0}
        came: dict[State, tuple[State, _Reached]] = {}
        queue: list[tuple[float, int, State]] = [(0.0, 0, start)]
        count, done, expanded = itertools.count(1), set[State](), 0
        while queue:
            _, _, state = heapq.heappop(queue)
            if state == goal:
                break
            if state in done:
                continue
            done.add(state)
            expanded += 1
            if expanded > EXPANDED and goal in best and len(self.ks) > 2:
                break
            for edge in self._edges(state, done):
                cost = best[state] + edge.seconds
                after = edge.target
                if cost < best.get(after, math.inf):
                    bound = cost + self._left(after)
                    if bound >= best.get(goal, math.inf) and after != goal:
                        continue
                    best[after] = cost
                    came[after] = state, edge
                    heapq.heappush(queue, (bound, next(count), after))
        return tuple(self._path(came, goal))

    def _path(self, came: Mapping[State, tuple[State, _Reached]], goal: State) -> list[CollectiveStep]:
        found: list[CollectiveStep] = []
        state = goal
        while state != self.of.source:
            before, edge = came[state]
            found.append(self._step(before, edge))
            state = before
        return found[::-1]

    def _step(self, before: State, edge: _Reached) -> CollectiveStep:
        names = tuple(self.of.names[i] for i in edge.changed)
        digits = tuple(self.of.digits[i] for i in edge.changed)
        layout = layout_of(self.of, edge.target)
        return CollectiveStep(
            edge.collective, names, digits, before, edge.target, edge.received, edge.seconds, layout, self.of
        )

    def _left(self, state: State) -> float:
        """Less than what is left to do costs, by the fastest link.

        What a rank lacks; of a sum of K summands each element is to be received K - 1 times until one rank has it, and
        once more by each other rank that wants it.
        """
        target = self.of.target
        pairs = zip(self.ks, state, target, strict=True)
        summands = math.prod(k for k, a, b in pairs if a == WAITING != b)
        if WAITING in target:
            lacks = (summands - 1) * self.total / self.ranks
        elif summands > 1:
            lacks = (summands - 2) * self.total / self.ranks + self._elements(target)
        else:
            lacks = self._elements(target) - self._common(state, target)
        return lacks * (1 - 1e-9) * self.itemsize / self.fastest

    # ------------------------------------------------------------ edges

    def _edges(self, state: State, done: Collection[State]) -> Iterator[_Reached]:
        waits = [i for i, spot in enumerate(state) if spot == WAITING and self.options[i]]
        rest = [i for i, spot in enumerate(state) if spot != WAITING]
        for some, after in self._together(state, waits):
            goals = [after[i] for i in some]
            if (None not in goals or not any(goals)) and after not in done and self._fits(after):
                yield self._reduced(state, after, some)
        for some, after in self._together(state, [i for i in rest if self.options[i]]):
            if after not in done and self._fits(after):
                yield self._exchanged(state, after, some)
        for some in _subsets(tuple(i for i in rest if self.of.target[i] == WAITING)):
            yield _Reached(ZERO, some, self._put(state, some, [WAITING] * len(some)), 0.0, self.local)

    def _together(self, state: State, some: Sequence[int]) -> Iterator[tuple[tuple[int, ...], State]]:
        """Which may go where in one step, and the state then: to the target, to be whole, to places of their own."""
        seen: set[State] = {state}
        if len(self.ks) <= 2:
            choices = [(state[i], *self.options[i]) for i in some]
            goals: Iterator[Sequence[DigitSpot | None]] = itertools.product(*choices)
            groups = ((some, own) for own in goals)
        else:
            groups = self._kinds(state, some)
        for group, own in groups:
            after = self._put(state, group, own)
            if after not in seen:
                seen.add(after)
                yield tuple([i for i in group if after[i] != state[i]]), after

    def _kinds(self, state: State, some: Sequence[int]) -> Iterator[tuple[Sequence[int], Sequence[DigitSpot | None]]]:
        """Of each kind of goal, any of those that it would change."""
        for kind in range(max((len(self.options[i]) for i in some), default=0)):
            goals = {i: self.options[i][min(kind, len(self.options[i]) - 1)] for i in some}
            for group in _subsets(tuple(i for i, goal in goals.items() if goal != state[i])):
                yield group, [goals[i] for i in group]

    def _put(self, state: State, some: Sequence[int], goals: Sequence[DigitSpot | None]) -> State:
        after = list(state)
        for i, goal in zip(some, goals, strict=True):
            after[i] = goal
        return tuple(after)

    def _fits(self, state: State) -> bool:
        known = self.fit.get(state)
        if known is None:
            known = self.fit[state] = fits(self.of, state)
        return known

    def _reduced(self, before: State, after: State, some: Sequence[int]) -> _Reached:
        k = math.prod(self.ks[i] for i in some)
        whole = after[some[0]] is None
        nbytes = self._elements(before) * self.itemsize * (k - 1) / k * (2 if whole else 1)
        seconds = self._ring(some, nbytes)
        return _Reached(ALL_REDUCE if whole else REDUCE_SCATTER, tuple(some), after, nbytes, seconds)

    def _exchanged(self, before: State, after: State, some: tuple[int, ...]) -> _Reached:
        lacks = self._elements(after) - self._common(before, after)
        if lacks <= 1e-9:
            return _Reached(SLICE, some, after, 0.0, self.local)
        old = {before[i] for i in some if before[i] is not None}
        new = {after[i] for i in some if after[i] is not None}
        what = ALL_GATHER if not new else PERMUTE if old == new else ALL_TO_ALL
        nbytes = lacks * self.itemsize
        ring = what == ALL_GATHER
        seconds = self._ring(some, nbytes) if ring else self._apart(before, after, some, nbytes)
        return _Reached(what, some, after, nbytes, seconds)

    def _ring(self, some: Sequence[int], nbytes: float) -> float:
        """All of it passes the slowest link."""
        return self._latency(some) + nbytes / min(self.links[i].rate for i in some)

    def _latency(self, some: Sequence[int]) -> float:
        """Of the slowest; a little more for more axes, so that those which have nothing to say stay out."""
        return max(self.links[i].latency for i in some) * (1 + 0.01 * len(some))

    def _apart(self, before: State, after: State, some: Sequence[int], nbytes: float) -> float:
        """Each part passes the slowest of the links that lead to who has it."""
        rates = {self.links[i].rate for i in some}
        if len(rates) == 1:
            return self._ring(some, nbytes)
        time, passed, elements = self._latency(some), 0.0, self._elements(after)
        for rate in sorted(rates):
            faster = [i for i in some if self.links[i].rate > rate]
            near = self._put(before, faster, [None] * len(faster))  # what those have that no slower link leads to
            far = max((elements - self._common(near, after)) * self.itemsize, passed)
            time += (far - passed) / rate
            passed = far
        return time

    def _elements(self, state: State) -> float:
        known = self.sizes.get(state)
        if known is None:
            known = self.total
            for k, spot in zip(self.ks, state, strict=True):
                if spot is not None and spot[1]:
                    known //= k
            self.sizes[state] = known
        return known

    def _common(self, a: State, b: State) -> float:
        return self.total * in_common(self.of, a, b)


@lru_cache(1 << 10)
def _subsets(some: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    return tuple(group for n in range(len(some), 0, -1) for group in itertools.combinations(some, n))
