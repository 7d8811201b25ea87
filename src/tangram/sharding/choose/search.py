"""The search: the least seconds of all choices that fit in so many bytes, and how far from it at most.

    price of a byte   what is cheapest in seconds and bytes at a price is found exactly (`derive.solve`); at any price
                      it says what no choice can beat, and the price at which choices just fit says most
    branches          where the two choices next to the limit differ, one is split off; what cannot beat the best
                      choice known is left out. Given time this ends at the least, with a gap of 0
    neighbours        where a table is too large to be exact, the best known choice is made better over some axes while
                      it stays as it is over the others

Both are usual: H. Everett, Generalized Lagrange multiplier method, Operations Research 11 (1963); branch and bound.
"""

from __future__ import annotations

import heapq
import itertools
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from tangram.sharding.choose.costs import Both
from tangram.sharding.derive.solve.bounded import Kept, all_of, reduced, restricted
from tangram.sharding.derive.solve.solve import Name, Solution, SolverCosts, Table, eliminated, marginals

Choice = Mapping[Name, int]
Nearby = Callable[[Choice], Iterable[Kept]]
"""Of a choice, sets of choices around it that are small enough to be searched."""
ENTRIES, SMALLEST = 1 << 24, 1 << 16
"""Of the largest table; where looks that are not exact take too long, down to so many."""
CLOSE = 1e-9
"""A gap that is none."""


@dataclass(frozen=True)
class SearchPoint:
    """A choice, and what it costs."""

    choice: Choice
    seconds: float
    nbytes: float


@dataclass(frozen=True)
class Searched:
    """What was found."""

    best: SearchPoint | None
    """None: nothing fits, or nothing that does was found."""
    bound: float
    """Seconds that no choice that fits can beat."""
    smallest: float
    """The bytes of the choice that has the fewest, of those that were seen."""
    branches: int


@dataclass(frozen=True)
class _Looked:
    """What is known of some of the choices."""

    bound: float
    fits: SearchPoint | None
    """The quickest seen that fits, at the best price."""
    bursts: SearchPoint | None
    """The one beside it that does not."""
    few: SearchPoint | None
    """The one of the fewest bytes, where that was asked."""
    price: float
    parted: tuple[Name, ...]


@dataclass
class _Sides:
    """The choices next to the limit, one on each side, as prices of a byte are tried; and the best bound."""

    fits: SearchPoint | None
    bursts: SearchPoint | None
    bound: float
    price: float
    parted: tuple[Name, ...]

    def even(self) -> float:
        """The price at which both sides cost the same; 0: there is none."""
        if self.fits is None or self.bursts is None or self.bursts.nbytes <= self.fits.nbytes:
            return 0.0
        return (self.fits.seconds - self.bursts.seconds) / (self.bursts.nbytes - self.fits.nbytes)

    def take(self, one: SearchPoint | None, bound: float, price: float, parted: tuple[Name, ...], limit: float) -> bool:
        """What was found at a price. Whether it is cheaper there than both sides."""
        self.parted = self.parted or parted
        if bound > self.bound:
            self.bound, self.price = bound, price
        if one is None:
            return False
        known = [p.seconds + price * p.nbytes for p in (self.fits, self.bursts) if p is not None]
        if known and one.seconds + price * one.nbytes >= min(known) * (1 - 1e-12):
            return False
        if one.nbytes <= limit:
            self.fits = one
        else:
            self.bursts = one
        return True


@dataclass(order=True)
class _Branch:
    bound: float
    number: int
    kept: Kept = field(compare=False)
    looked: _Looked = field(compare=False)


class Search:
    """A search. `stop`: when to end, by `time.monotonic`."""

    def __init__(
        self,
        both: Both,
        limit: float | None,
        stop: float,
        nearby: Nearby | None = None,
        gap: float = 0.0,
        starts: Sequence[Choice] = (),
    ) -> None:
        self.starts, self.entries, self.time = starts, ENTRIES, stop - time.monotonic()
        self.both, self.stop, self.nearby, self.gap = both, stop, nearby, max(gap, CLOSE)
        self.limit = float("inf") if limit is None else limit
        self.best: SearchPoint | None = None
        self.smallest = float("inf")
        self.longest = 0.0
        """Seconds of the clock that a look has taken at most: none is begun that would not end in time."""

    def run(self) -> Searched:
        """Search."""
        for choice in self.starts:
            self._point(self.both.seconds, self.both.nbytes, choice, all_of(self.both.seconds))
            if self.nearby is not None:
                self._improve(choice)
        if self.best is not None and self._late():
            floor = float(sum(table.min() for table in self.both.seconds.tables.values()))  # no choice costs less
            return Searched(self.best, min(floor, self.best.seconds), self.smallest, 0)
        now = time.monotonic()
        # What is worse in both costs is left out first: each look is quicker for it. Not for more than a part of the
        # time, for the search itself is what finds something.
        kept = reduced([self.both.seconds, self.both.nbytes], now + 0.4 * max(self.stop - now, 0.0))
        looked = self._look(kept, 0.0, rounds=8)
        if looked.parted and self.nearby is not None and self.best is not None:
            self._improve(self.best.choice)
        for _ in range(3):
            if self.best is None or looked.parted or self._beaten(looked.bound) or self._late():
                break
            self._mix(looked)
            if self._late(4.0):
                break
            kept = self._promising(kept, looked.price)
            seen = self._look(kept, looked.price, rounds=16)
            looked = replace(seen, bound=max(seen.bound, looked.bound))
        bound, branches = self.branch(kept, looked)
        if self.best is not None:
            bound = min(bound, self.best.seconds)
        return Searched(self.best, bound, self.smallest, branches)

    def _late(self, times: float = 1.0) -> bool:
        """Whether there is no time for so many looks."""
        return time.monotonic() + times * self.longest > self.stop

    def _eliminated(self, costs: SolverCosts, buckets: list[Table] | None = None) -> Solution:
        start = time.monotonic()
        found = eliminated(costs, self.entries, buckets=buckets, stop=self.stop, late=SMALLEST)
        took = time.monotonic() - start
        if found.parted and took > 0.1 * self.time:  # not exact in any case: sooner, and with a lower bound
            self.entries = max(self.entries >> 4, SMALLEST)
            took /= 16
        self.longest = max(self.longest, took)
        return found

    def _beaten(self, bound: float) -> bool:
        """Whether nothing with this bound is better than what is known."""
        if bound == float("inf"):
            return True
        return self.best is not None and bound * (1 + self.gap) >= self.best.seconds

    # ------------------------------------------------------------ the price of a byte

    def _look(self, kept: Kept, price: float, rounds: int) -> _Looked:
        """The bound of some choices: at no price, at the one given, and at those at which two choices cost the same."""
        seconds, nbytes = restricted(self.both.seconds, kept), restricted(self.both.nbytes, kept)
        if price:  # most branches end here
            found, least, parted = self._at(seconds, nbytes, price, kept)
            if self._beaten(least - price * self.limit) or self._late():
                return _Looked(least - price * self.limit, None, found, None, price, parted)
        free, bound, parted = self._at(seconds, nbytes, 0.0, kept)
        if not np.isfinite(bound):
            return _Looked(float("inf"), None, None, None, 0.0, ())
        if free is not None and free.nbytes <= self.limit:
            return _Looked(bound, free, None, None, 0.0, parted)
        # Prices are tried between two sides: the quickest choice is on one, the smallest on the other.
        fits, few = self._fewest(seconds, nbytes, kept)
        if few > self.limit * (1 + CLOSE):
            return _Looked(float("inf"), None, free, fits, 0.0, ())
        sides = _Sides(fits, free, bound, 0.0, parted)
        for turn in range(rounds):
            now = price if turn == 0 and price else sides.even()
            if now <= 0 or (turn and self._late()):
                break
            found, least, shared = self._at(seconds, nbytes, now, kept)
            if not sides.take(found, least - now * self.limit, now, shared, self.limit) and turn:
                break
        return _Looked(sides.bound, sides.fits, sides.bursts, fits, sides.price, sides.parted)

    def _at(
        self, seconds: SolverCosts, nbytes: SolverCosts, price: float, kept: Kept
    ) -> tuple[SearchPoint | None, float, tuple[Name, ...]]:
        """At a price of a byte: a choice, what no choice costs less than, and where tables were too large."""
        found = self._eliminated(priced(seconds, nbytes, price))
        return self._point(seconds, nbytes, found.choice, kept), found.bound, found.parted

    def _point(self, seconds: SolverCosts, nbytes: SolverCosts, choice: Choice, kept: Kept) -> SearchPoint | None:
        own = seconds.of(choice)
        if not np.isfinite(own):
            return None
        point = SearchPoint({name: int(kept[name][i]) for name, i in choice.items()}, own, nbytes.of(choice))
        self.smallest = min(self.smallest, point.nbytes)
        if point.nbytes <= self.limit and (self.best is None or own < self.best.seconds):
            self.best = point
        return point

    def _fewest(self, seconds: SolverCosts, nbytes: SolverCosts, kept: Kept) -> tuple[SearchPoint | None, float]:
        """The choice of the fewest bytes, of all that can be, and how many none has less than."""
        barred = {
            names: np.where(np.isinf(table), np.inf, 0.0) + nbytes.tables.get(names, 0.0)
            for names, table in seconds.tables.items()
        }
        more = {names: table for names, table in nbytes.tables.items() if names not in barred}
        found = self._eliminated(SolverCosts(seconds.sizes, {**barred, **more}))
        return self._point(seconds, nbytes, found.choice, kept), found.bound

    def _promising(self, kept: Kept, price: float) -> Kept:
        """The choices with which, at a price of a byte, something can be better than the best that is known."""
        assert self.best is not None
        buckets: list[Table] = []
        costs = priced(restricted(self.both.seconds, kept), restricted(self.both.nbytes, kept), price)
        found = self._eliminated(costs, buckets)
        room = self.best.seconds - (found.bound - price * self.limit if price else found.bound)
        if found.parted:
            return kept
        self.longest = 0.0  # looks at what is left are shorter
        return {
            name: kept[name][more <= max(room, 0.0) * (1 + CLOSE) + 1e-12 * abs(found.bound)]
            for name, more in marginals(buckets).items()
        }

    def _mix(self, looked: _Looked) -> None:
        """Choices of which each part is that of one side of the limit or of the other."""
        one, other = looked.fits, looked.bursts
        if one is None or other is None:
            return
        kept = {name: np.unique([one.choice[name], other.choice[name]]) for name in one.choice}
        inner = Search(self.both, self.limit, min(self.stop, time.monotonic() + 1.0))
        inner.best = self.best
        inner.branch(kept, inner._look(kept, looked.price, rounds=8))
        self.best = inner.best or self.best

    # ------------------------------------------------------------ branches

    def branch(self, kept: Kept, looked: _Looked) -> tuple[float, int]:
        """Split until nothing can be better than the best, or time is up: the bound, and the number of branches."""
        numbers = itertools.count()
        todo = [_Branch(looked.bound, next(numbers), kept, looked)]
        bound = looked.bound
        while todo:
            bound = todo[0].bound
            if self._beaten(bound) or self._late():
                return bound, next(numbers) - 1
            one = heapq.heappop(todo)
            for part in self._split(one):
                if self._late():
                    return bound, next(numbers) - 1
                seen = self._look(part, one.looked.price, rounds=3)
                seen = replace(seen, bound=max(seen.bound, one.bound))
                if not self._beaten(seen.bound):
                    heapq.heappush(todo, _Branch(seen.bound, next(numbers), part, seen))
        return (self.best.seconds if self.best is not None else float("inf")), next(numbers) - 1

    def _split(self, branch: _Branch) -> list[Kept]:
        """The choices of a branch in two."""
        kept, looked = branch.kept, branch.looked
        name, some = self._where(kept, looked)
        if name is None:
            return []
        rest = np.setdiff1d(kept[name], some)
        return [{**kept, name: part} for part in (some, rest) if len(part)]

    def _where(self, kept: Kept, looked: _Looked) -> tuple[Name | None, NDArray[np.intp]]:
        """A variable of which the choices next to the limit differ, most in bytes; and those on the smaller side."""
        one, other = looked.fits, looked.bursts
        differ: list[tuple[float, int, Name]] = []
        if one is not None and other is not None:
            for i, name in enumerate(kept):
                a, b = one.choice[name], other.choice[name]
                if a != b:
                    own = self.both.nbytes.tables[name,]
                    differ.append((-abs(float(own[a] - own[b])), i, name))
        if differ:
            name = min(differ)[2]
            a, b = (point.choice[name] for point in (one, other) if point is not None)
            own = self.both.nbytes.tables[name,][kept[name]]
            small, large = sorted(float(self.both.nbytes.tables[name,][x]) for x in (a, b))
            some = kept[name][own <= (small + large) / 2]
            if 0 < len(some) < len(kept[name]):
                return name, some
            return name, np.array([a])
        open_names = [name for name in (looked.parted or kept) if len(kept[name]) > 1]
        if not open_names:
            return None, np.empty(0, dtype=np.intp)
        point = one or other
        name = max(open_names, key=lambda n: len(kept[n])) if looked.parted else open_names[0]
        first = point.choice[name] if point is not None else int(kept[name][0])
        return name, np.array([first])

    # ------------------------------------------------------------ neighbours

    def _improve(self, start: Choice) -> None:
        """Make a choice better around itself, until it stays: seconds if it fits, else first bytes."""
        assert self.nearby is not None
        every = all_of(self.both.seconds)
        now = self._point(self.both.seconds, self.both.nbytes, start, every)
        price, better = 0.0, now is not None
        while better and now is not None:
            better = False
            for kept in self.nearby(now.choice):
                if self._late():
                    return
                looked = self._look(kept, price, rounds=4)
                price = looked.price or price
                for other in (looked.fits, looked.few, looked.bursts):
                    if other is not None and self._before(other, now):
                        now, better = other, True

    def _before(self, one: SearchPoint, other: SearchPoint) -> bool:
        """Whether a choice is clearly better than another: what fits first, then seconds, of what does not, bytes."""
        if max(one.nbytes, other.nbytes) <= self.limit:
            return one.seconds < other.seconds * (1 - 1e-6)
        return one.nbytes < other.nbytes * (1 - 1e-6)


def priced(seconds: SolverCosts, nbytes: SolverCosts, price: float) -> SolverCosts:
    """Seconds and bytes together."""
    if not price:
        return seconds
    costs = SolverCosts(seconds.sizes, {**seconds.tables})
    for names, table in nbytes.tables.items():
        costs.tables[names] = costs.tables[names] + price * table if names in costs.tables else price * table
    return costs


def search(
    both: Both,
    limit: float | None,
    seconds: float,
    nearby: Nearby | None = None,
    gap: float = 0.0,
    starts: Sequence[Choice] = (),
) -> Searched:
    """The least seconds within a limit of bytes (None: none), looked for so long (seconds of the clock).

    It ends where the least is at most `gap` below what was found, as a part of it. `starts`: choices that are known;
    what is found is never worse than one of them that fits.

    One look, some seconds of the clock for the largest models, is taken however little time there is, but where one of
    the `starts` fits.
    """
    return Search(both, limit, time.monotonic() + seconds, nearby, gap, starts).run()
