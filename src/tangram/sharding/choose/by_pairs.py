"""A choice over so many axes that not all pairs of ways to lie fit into memory: over two axes at a time.

It begins with choices that are known, and makes each better over two axes while it stays as it is over the others, with
tables of these choices alone. Where nothing fits into the memory yet, bytes are made fewer first. What no choice can
cost less is the work of all operators, cut as far as each can be by itself: a weak bound, but one.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from tangram.hardware.catalogue.cluster import Cluster
from tangram.sharding.choose.costs import Both, Training, costs, work
from tangram.sharding.choose.options import Options
from tangram.sharding.choose.search import Choice, SearchPoint, search
from tangram.sharding.derive.solve.solve import Name

Kept = Mapping[Name, NDArray[np.intp]]


@dataclass(frozen=True)
class Paired:
    """What was found."""

    best: SearchPoint | None
    """Choices of all options; None: nothing fits."""
    both: Both | None
    """The costs around it, in which it is `own`."""
    own: Choice
    bound: float
    smallest: float


def entries(some: Options) -> int:
    """Of all tables of what pairs of choices cost."""
    return sum(
        len(some.used[v]) * len(some.communication[step.number])
        for step in some.folded.steps
        for v in (*step.inputs, *step.outputs)
        if v is not None
    )


def alike(some: Options, choice: Choice, axes: Sequence[int]) -> Kept:
    """The choices that are as one is over some axes (by place)."""

    def places(own: Sequence[Sequence[object]], chosen: int) -> NDArray[np.intp]:
        wanted = [own[chosen][i] for i in axes]
        return np.array([n for n, one in enumerate(own) if [one[i] for i in axes] == wanted])

    kinds = (("lies", some.states), ("used", some.used), ("move", some.communication))
    return {(kind, n): places(own, choice[kind, n]) for kind, table in kinds for n, own in table.items()}


def by_pairs(
    some: Options,
    cluster: Cluster,
    training: Training,
    limit: float | None,
    starts: Sequence[Choice],
    stop: float,
    largest: int,
) -> Paired:
    """The best that is found by the clock's `stop`, one round of each start at least. `largest`: entries of tables."""
    found = Paired(None, None, {}, work(some, cluster), math.inf)
    for start in starts:
        now, better, rounds = start, True, 0
        while better:
            better, rounds = False, rounds + 1
            for free in _free(some, now, largest):
                if time.monotonic() > stop and (_fits(found, limit) or rounds > 1):
                    return found if _fits(found, limit) else replace(found, best=None)
                kept = alike(some, now, [i for i in range(len(some.axes)) if i not in free])
                seen = _around(some, cluster, training, limit, now, kept, stop)
                if seen.best is not None and _before(seen, found, limit):
                    found, better = replace(seen, bound=found.bound, smallest=min(seen.smallest, found.smallest)), True
                if seen.best is not None:
                    now = seen.best.choice
    return found if _fits(found, limit) else replace(found, best=None)


def _fits(found: Paired, limit: float | None) -> bool:
    return found.best is not None and (limit is None or found.best.nbytes <= limit)


def _free(some: Options, choice: Choice, largest: int) -> list[tuple[int, ...]]:
    """Two axes (by place) at a time, or one where two are too many."""
    count = len(some.axes)
    found: list[tuple[int, ...]] = []
    for two in itertools.combinations(range(count), 2):
        kept = alike(some, choice, [i for i in range(count) if i not in two])
        found += [two] if entries(restricted(some, kept)) <= largest else [(axis,) for axis in two]
    return list(dict.fromkeys(found))


def restricted(some: Options, kept: Kept) -> Options:
    """The options that are left."""
    return replace(
        some,
        states={v: [own[i] for i in kept["lies", v]] for v, own in some.states.items()},
        used={v: [own[i] for i in kept["used", v]] for v, own in some.used.items()},
        communication={n: [own[i] for i in kept["move", n]] for n, own in some.communication.items()},
    )


def _around(
    some: Options,
    cluster: Cluster,
    training: Training,
    limit: float | None,
    now: Choice,
    kept: Kept,
    stop: float,
) -> Paired:
    """The best of the choices around one; where none fits, that of the fewest bytes."""
    both = costs(restricted(some, kept), cluster, training)
    start = {name: int(np.flatnonzero(own == now[name])[0]) for name, own in kept.items()}
    left = max(stop - time.monotonic(), 0.0) / 3
    seen = search(both, limit, left, None, 1e-4, [start])
    if seen.best is None and np.isfinite(seen.smallest):
        seen = search(both, seen.smallest * (1 + 1e-9), left, None, 1e-4, [start])
    if seen.best is None:
        return Paired(None, None, {}, 0.0, seen.smallest)
    choice = {name: int(kept[name][i]) for name, i in seen.best.choice.items()}
    return Paired(replace(seen.best, choice=choice), both, seen.best.choice, 0.0, seen.smallest)


def _before(one: Paired, other: Paired, limit: float | None) -> bool:
    """Whether one is clearly better: what fits first, then seconds, of what does not fit bytes."""
    if one.best is None or other.best is None:
        return other.best is None
    most = math.inf if limit is None else limit
    if max(one.best.nbytes, other.best.nbytes) <= most:
        return one.best.seconds < other.best.seconds * (1 - 1e-6)
    return one.best.nbytes < other.best.nbytes * (1 - 1e-6)
