"""Who is slow, from how much time of its own a rank has in a step: outside of collectives, so that waiting is left out.

Peers are ranks that do the same work: those at one place of the pipeline axis. A rank is slow when it has taken more
than its peers' median, by a share and by an amount that noise does not reach, in most of the steps that all have; it
may have become so at some step, which is where its excess changes most.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tangram.layout import Mesh
from tangram.tracing.format import COUNTED, Phase
from tangram.tracing.reading import RankTrace

SHARE, LEAST_US, MOST_OF = 0.2, 1000.0, 0.75
"""More than the peers' median by this share and so many microseconds, in this part of the steps."""
FEWEST = 5
"""Steps below which nobody is called slow."""


@dataclass(frozen=True)
class Slow:
    """A rank that is slow."""

    rank: int
    own_ms: float
    peers_ms: float
    since: int
    """The step."""
    phase: Phase
    """Where it takes longer."""
    axes: str
    """Over which its peers wait for it, most of all: "tp", "dp and tp"."""


def slow_ranks(traces: Sequence[RankTrace]) -> list[Slow]:
    """The ranks that are slow, the slowest first."""
    found: list[Slow] = []
    for peers in peers_of(traces):
        found += _slow_of(peers)
    return sorted(found, key=lambda one: one.peers_ms - one.own_ms)


def peers_of(traces: Sequence[RankTrace]) -> list[list[RankTrace]]:
    """Ranks with the same work, together."""
    places: dict[tuple[int, ...], list[RankTrace]] = {}
    for trace in traces:
        mesh, stages = str(trace.about.get("mesh", "")), trace.about.get("stages", ())
        place = Mesh.parse(mesh).coords(trace.rank) if mesh and stages else {}
        places.setdefault(tuple(place[axis] for axis in stages), []).append(trace)
    return [some for some in places.values() if len(some) > 1]


def own_times(trace: RankTrace) -> npt.NDArray[np.float64]:
    """Microseconds of its own in each step, by the phases that count."""
    return trace.rows["own_us"][:, [*COUNTED]].astype(float)


def _slow_of(peers: list[RankTrace]) -> list[Slow]:
    shared = peers[0].rows["step"]
    for trace in peers[1:]:
        shared = np.intersect1d(shared, trace.rows["step"])
    steps = shared[1:-1]
    if len(steps) < FEWEST:
        return []
    every = np.stack([own_times(t)[np.searchsorted(t.rows["step"], steps)] for t in peers])  # rank, step, phase
    totals = every.sum(2)
    found: list[Slow] = []
    for i, trace in enumerate(peers):
        others = np.delete(every, i, 0)
        median = np.median(others.sum(2), 0)
        since = change(totals[i] - median)
        own, theirs = totals[i][since:], median[since:]
        slower = own - theirs > np.maximum(SHARE * theirs, LEAST_US)
        if len(own) < FEWEST or slower.mean() < MOST_OF:
            continue
        excess = np.median(every[i, since:] - np.median(others, 0)[since:], 0)
        phase = COUNTED[int(excess.argmax())]
        first = int(steps[since]) if since else 1
        axes = _waited_over(trace, peers)
        found.append(Slow(trace.rank, float(np.median(own)) / 1e3, float(np.median(theirs)) / 1e3, first, phase, axes))
    return found


def change(excess: npt.NDArray[np.float64]) -> int:
    """Where a series rises for good: the cut whose two sides differ most, 0 where they do not by much."""
    best, at = 0.0, 0
    n = len(excess)
    for cut in range(2, n - FEWEST + 1):
        left, right = excess[:cut], excess[cut:]
        spread = np.sqrt(left.var() / cut + right.var() / (n - cut)) + 1.0
        score = (right.mean() - left.mean()) / spread
        if score > best:
            best, at = float(score), cut
    left, right = excess[:at], excess[at:]
    return at if at and best > 5 and np.median(right) - np.median(left) > LEAST_US else 0


def _waited_over(slow: RankTrace, peers: list[RankTrace]) -> str:
    """The axes over which the others wait longer than the slow rank, by the most, and by half of that."""
    waits: dict[str, list[float]] = {}
    for trace in peers:
        for group in trace.groups.values():
            if slow.rank in group["ranks"] and len(group["ranks"]) > 1:
                mean = float(trace.rows["wait_us"][1:, int(group["slot"])].mean())
                waits.setdefault(str(group["axes"]), []).append(mean if trace is not slow else -mean)
    best = {axes: max(own) + min(own) for axes, own in waits.items()}
    most = max(best.values(), default=0.0)
    return " and ".join(sorted((axes for axes in best if best[axes] > most / 2), key=lambda axes: -best[axes]))
