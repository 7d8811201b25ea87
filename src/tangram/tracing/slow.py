"""Who is slow, from how much time of its own a rank has in a step: outside of collectives, so that waiting is left out.

Peers are ranks that do the same work: those at one place of the pipeline axis. A rank is slow when it has taken more
than its peers' median, by a share and by an amount that noise does not reach, in most of the steps that all have; it
may have become so at some step, which is where its excess changes most.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from tangram.layout import Mesh
from tangram.tracing.files.format import COUNTED, Kind, Phase
from tangram.tracing.reading import RankTrace

SHARE, LEAST_US, MOST_OF = 0.2, 1000.0, 0.75
"""More than the peers' median by this share and so many microseconds, in this part of the steps."""
LEAST_SHARE, MANY = 0.03, 8
"""Of so many ranks or more their own spread says which share is noise: where peers are alike, so little is none."""
SIGMAS = 5.0
"""And by so many times what the median of these steps is uncertain by: with more ranks than cores any of them comes
short for some steps."""
COMPUTES = 0.1
"""Of what it takes longer: a rank that runs for so much more computes more, though on a machine that others use it is
short of CPU for the longer, too."""
IDLE = 2.0
"""A rank that does not compute more has been kept from it by so many times what its peers were: where all wait for CPU
by chance, nobody is to blame."""
LINK_SHARE = 1.0
"""Of the calls of a group over those of others."""
LINKS_COMPARED = 8
"""Other groups, whose calls are read one by one."""
FEWEST = 5
"""Steps below which nobody is called slow."""
FEWEST_SINCE = 8
"""And after which one has become so, for which the place is chosen that suits best."""
FEWEST_OF_LINKS = 10
"""And no link: of fewer steps on a machine that others use, some group's calls are always the longest."""


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
    cause: str = ""
    """A `Finding`'s."""
    cpu_ms: float = 0.0
    """Of its own time that for which it ran."""


@dataclass(frozen=True)
class Step:
    """How long a step takes, and how long it would, in ms."""

    now: float
    without: float


def slow_ranks(traces: Sequence[RankTrace]) -> list[Slow]:
    """The ranks that are slow, the slowest first."""
    every = [(peers, steps) for peers in peers_of(traces) if len(steps := shared_steps(peers)[1:-1]) >= FEWEST]
    own = [np.stack([own_times(t)[np.searchsorted(t.rows["step"], steps)] for t in peers]) for peers, steps in every]
    share = _noise_of(own)
    found = [
        one for (peers, steps), some in zip(every, own, strict=True) for one in _slow_of(peers, steps, some, share)
    ]
    return sorted(found, key=lambda one: one.peers_ms - one.own_ms)


def peers_of(traces: Sequence[RankTrace]) -> list[list[RankTrace]]:
    """Ranks with the same work, together. Without a mesh nobody knows of which who sends to single others is one."""
    places: dict[tuple[int, ...], list[RankTrace]] = {}
    for trace in traces:
        stages = trace.about.get("stages", ())
        place = coords_of(trace) if stages else {}
        alone = not trace.about.get("mesh") and any(site["op"] in ("send", "recv") for site in trace.sites.values())
        key = (-1, trace.rank) if alone else tuple(place.get(axis, 0) for axis in stages)
        places.setdefault(key, []).append(trace)
    return [some for some in places.values() if len(some) > 1]


def coords_of(trace: RankTrace) -> dict[str, int]:
    """The place of a rank in its mesh, by axis; nothing where it has none."""
    text = str(trace.about.get("mesh", ""))
    mesh = _mesh(text) if text else None
    return dict(mesh.coords(trace.rank)) if mesh is not None and trace.rank < mesh.size else {}


def mesh_axes(trace: RankTrace) -> list[tuple[str, int]]:
    """The axes of its mesh and their sizes."""
    mesh = str(trace.about.get("mesh", ""))
    return [*_mesh(mesh).views[0]] if mesh else []


@lru_cache(maxsize=64)
def _mesh(text: str) -> Mesh:
    return Mesh.parse(text)


def own_times(trace: RankTrace) -> npt.NDArray[np.float64]:
    """Microseconds of its own in each step, by the phases that count."""
    return trace.rows["own_us"][:, [*COUNTED]].astype(float)


def waits_over(trace: RankTrace, axes: str) -> npt.NDArray[np.float64]:
    """Microseconds in each step that it waited for calls of groups over these axes."""
    slots = {int(group["slot"]) for group in trace.groups.values() if group["axes"] == axes}
    return trace.rows["wait_us"][:, [*slots]].sum(1).astype(float)


def shared_steps(traces: Sequence[RankTrace]) -> npt.NDArray[np.uint32]:
    """The steps that all ranks have, ascending; at least one rank."""
    shared = traces[0].rows["step"]
    for trace in traces[1:]:
        if not np.array_equal(trace.rows["step"], shared):
            shared = np.intersect1d(shared, trace.rows["step"])
    return shared


def _slow_of(
    peers: Sequence[RankTrace], steps: npt.NDArray[np.uint32], every: npt.NDArray[np.float64], share: float
) -> list[Slow]:
    """`every`: by rank, step and phase. `share`: by which one may differ from its peers."""
    totals = every.sum(2)
    medians = median_of_others(totals)
    slower = totals - medians > np.maximum(share * medians, LEAST_US)
    found: list[Slow] = []
    for i in (int(one) for one in np.flatnonzero(slower.sum(1) >= MOST_OF * FEWEST)):
        trace, median = peers[i], medians[i]
        since = change(totals[i] - median)
        own, theirs = totals[i][since:], median[since:]
        if len(own) < FEWEST or slower[i, since:].mean() < MOST_OF or not stands_out(own - theirs):
            continue
        excess = np.median(every[i, since:] - np.median(every, 0)[since:], 0)
        phase = COUNTED[int(excess.argmax())]
        first = int(steps[since]) if since else 1
        axes = _waited_over(trace, peers)
        cause, cpu, others = _cause(peers, i, steps[since:], float(np.median(own - theirs)))
        usual, usually = float(np.median(own)), float(np.median(theirs))
        if cause not in ("", "computes") and usual - cpu < IDLE * (usually - others):
            continue
        found.append(Slow(trace.rank, usual / 1e3, usually / 1e3, first, phase, axes, cause, cpu / 1e3))
    return found


def _noise_of(every: Sequence[npt.NDArray[np.float64]]) -> float:
    """By what share the time of a rank may differ from its peers', as far as all ranks say; of each group's times."""
    totals = [some.sum(2) for some in every]
    usual = [np.median(some / np.maximum(median_of_others(some), 1.0), 1) for some in totals]
    ratios = np.concatenate(usual) if usual else np.ones(0)
    if len(ratios) < MANY:
        return SHARE
    sigma = 1.4826 * float(np.median(np.abs(ratios - np.median(ratios))))
    return min(max(SIGMAS * sigma, LEAST_SHARE), SHARE)


def _cause(
    peers: Sequence[RankTrace], at: int, steps: npt.NDArray[np.uint32], excess: float
) -> tuple[str, float, float]:
    """Why one of some ranks takes so many microseconds longer in these steps, and how long it and others ran in one.

    Nothing is known of traces of an older version, nor where an accelerator computes, whose calls are not recorded.
    """
    rows = [trace.rows[np.searchsorted(trace.rows["step"], steps)] for trace in peers]
    cpu, ready = (np.stack([some[name] for some in rows]).astype(float) for name in ("cpu_us", "ready_us"))
    if not cpu.all() or not all(trace.groups for trace in peers):
        return "", 0.0, 0.0
    more, waited = (float(np.median((some - median_of_others(some))[at])) for some in (cpu, ready))
    own, others = (float(np.median(some[at])) for some in (cpu, median_of_others(cpu)))
    least = max(COMPUTES * excess, SHARE * others)
    kind = "computes" if more > least else "starved" if waited > excess / 2 else "waits"
    return kind, own, others


def median_of_others(values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """For each of some ranks (the first dim) the median of all others'."""
    order = np.argsort(values, 0, kind="stable")
    place = np.argsort(order, 0, kind="stable")
    ranked: npt.NDArray[np.float64] = np.take_along_axis(values, order, 0)
    low, high = (len(values) - 2) // 2, (len(values) - 1) // 2
    last = len(values) - 1
    below: npt.NDArray[np.float64] = np.take_along_axis(ranked, low + (place <= low), 0)
    over: npt.NDArray[np.float64] = np.take_along_axis(ranked, np.minimum(high + (place <= high), last), 0)
    return (below + over) / 2


def change(excess: npt.NDArray[np.float64]) -> int:
    """Where a series rises for good: the cut whose two sides differ most, 0 where they do not by much."""
    best, at = 0.0, 0
    n = len(excess)
    for cut in range(2, n - FEWEST_SINCE + 1):
        left, right = excess[:cut], excess[cut:]
        spread = np.sqrt(left.var() / cut + right.var() / (n - cut)) + 1.0
        score = (right.mean() - left.mean()) / spread
        if score > best:
            best, at = float(score), cut
    left, right = excess[:at], excess[at:]
    return at if at and best > 5 and np.median(right) - np.median(left) > LEAST_US else 0


def stands_out(excess: npt.NDArray[np.float64]) -> bool:
    """Whether the median of a series is beyond its noise, which a few outliers do not make."""
    median = float(np.median(excess))
    sigma = 1.4826 * float(np.median(np.abs(excess - median)))
    return median > SIGMAS * 1.2533 * sigma / math.sqrt(len(excess))


def steps_without(traces: Sequence[RankTrace], groups: Sequence[Sequence[Slow]]) -> list[Step]:
    """A step as it would be, had these slow ranks and all those before them taken what their peers take.

    The ranks' own times are played again: all wait for the one that has most, so a step is shorter by what this has
    more than the next one. That holds for pipelines, too, whose fullest stage the others wait for; a stage that only
    became so is off by a micro-batch's share. It is about so: what keeps a rank from seeing that a
    call is over counts as its waiting, so of a process that is stopped again and again it gives back too little.
    """
    steps = shared_steps(traces)[1:-1] if traces else np.zeros(0, np.uint32)
    if len(steps) < FEWEST:
        return []
    at = [np.searchsorted(trace.rows["step"], steps) for trace in traces]
    own = np.stack([own_times(trace)[some].sum(1) for trace, some in zip(traces, at, strict=True)]) / 1e3
    took = np.median([trace.rows["nanoseconds"][some] for trace, some in zip(traces, at, strict=True)], 0) / 1e6
    most, index = own.max(0), {trace.rank: i for i, trace in enumerate(traces)}
    slow, since = {one.rank for group in groups for one in group}, 0
    others = [(peers, [index[one.rank] for one in peers if one.rank not in slow]) for peers in peers_of(traces)]
    sound = {trace.rank: rows for peers, rows in others for trace in peers}  # one list for all that are peers
    found: list[Step] = []
    for group in groups:
        for one in group:
            own[index[one.rank]] = np.median(own[sound[one.rank] or [index[one.rank]]], 0)
            since = max(since, one.since)
        some = slice(int(np.searchsorted(steps, since)), None)
        now = float(np.median(took[some]))
        found.append(Step(now, now - float(np.median((most - own.max(0))[some]))))
    return found


@dataclass(frozen=True)
class SlowLink:
    """A group whose calls take long, though nobody comes late to them."""

    ranks: Sequence[int]
    axes: str
    own_ms: float
    """What the last of its ranks waits in a step."""
    others_ms: float
    """The same of other groups over these axes."""


def slow_links(traces: Sequence[RankTrace]) -> list[SlowLink]:
    """Groups in which even the rank that comes last waits long, beside others over the same axes with the same work.

    Who waits least in a group is the one that the others wait for: what is left is the calls themselves.
    """
    by_rank = {trace.rank: trace for trace in traces}
    alike: dict[tuple[object, ...], dict[Sequence[int], int]] = {}
    for trace in traces:
        stages = trace.about.get("stages", ())
        for group in trace.groups.values():
            axes = str(group["axes"])
            if 1 < len(group["ranks"]) < trace.world:
                place = tuple(coords_of(trace).get(axis) for axis in stages if axis not in axes.split())
                alike.setdefault((axes, place), {})[group["ranks"]] = int(group["slot"])
    steps = shared_steps(traces)[1:-1] if traces else np.zeros(0, np.uint32)
    if len(steps) < FEWEST_OF_LINKS:
        return []
    at = {rank: np.searchsorted(trace.rows["step"], steps) for rank, trace in by_rank.items()}
    found: list[SlowLink] = []
    for (axes, _), groups in alike.items():
        whole = [ranks for ranks in groups if all(rank in by_rank for rank in ranks)]
        if len(whole) > 1:
            found += _slow_among(str(axes), [(ranks, groups[ranks]) for ranks in whole], by_rank, at)
    return found


def _slow_among(
    axes: str,
    groups: Sequence[tuple[Sequence[int], int]],
    by_rank: Mapping[int, RankTrace],
    at: Mapping[int, npt.NDArray[np.intp]],
) -> list[SlowLink]:
    def least(ranks: Sequence[int], slot: int) -> npt.NDArray[np.float64]:
        return np.min([by_rank[rank].rows["wait_us"][at[rank], slot] for rank in ranks], 0).astype(float)

    every = np.stack([least(ranks, slot) for ranks, slot in groups])
    others = median_of_others(every)
    long = every - others > np.maximum(LINK_SHARE * others, LEAST_US)
    found: list[SlowLink] = []
    for i in (int(one) for one in np.flatnonzero(long.sum(1) >= MOST_OF * FEWEST)):
        since = change(every[i] - others[i])
        lasts = len(every[i]) - since >= FEWEST and long[i, since:].mean() >= MOST_OF
        if (
            lasts
            and stands_out((every - others)[i, since:])
            and _confirmed(axes, i, [ranks for ranks, _ in groups], by_rank)
        ):
            own, usual = (float(np.median(some[i, since:])) / 1e3 for some in (every, others))
            # Who is short of CPU sees late that a call is over.
            ready = [np.median(by_rank[rank].rows["ready_us"][at[rank]][since:]) for rank in groups[i][0]]
            if own - usual > IDLE * float(np.median(ready)) / 1e3:
                found.append(SlowLink(groups[i][0], axes, own, usual))
    return found


def _confirmed(axes: str, at: int, groups: Sequence[Sequence[int]], by_rank: Mapping[int, RankTrace]) -> bool:
    """Whether single calls say so, too: where ranks come late in turn, the sums of all are long and no call is.

    Where rings have none of them, the sums of three groups or more have to do.
    """
    own = _least_of_calls(axes, groups[at], by_rank)
    others = [groups[i] for i in range(len(groups)) if i != at][:LINKS_COMPARED]
    found = [one for ranks in others if (one := _least_of_calls(axes, ranks, by_rank)) is not None]
    if own is None or not found:
        return len(groups) > 2
    return own > (1 + LINK_SHARE) * float(np.median(found))


def _least_of_calls(axes: str, ranks: Sequence[int], by_rank: Mapping[int, RankTrace]) -> float | None:
    """The mean over calls, as far as rings go back, of what the rank of a group waits that waits least; ns."""
    waits: dict[tuple[str, int], list[int]] = {}
    for rank in ranks:
        for turn, waited in _waits_of_calls(by_rank[rank], axes, ranks).items():
            waits.setdefault(turn, []).append(waited)
    least = [min(some) for some in waits.values() if len(some) == len(ranks)]
    return float(np.mean(least)) if len(least) >= FEWEST else None


def _waits_of_calls(trace: RankTrace, axes: str, ranks: Sequence[int]) -> dict[tuple[str, int], int]:
    """By the name of a call's group and its turn there how long the rank waited for it, ns."""
    names = {n: one["name"] for n, one in trace.groups.items() if one["axes"] == axes and one["ranks"] == ranks}
    events = trace.events
    events = events[np.isin(events["group"], [*names])]
    enters, exits = (events[events["kind"] == kind] for kind in (Kind.ENTER, Kind.EXIT))
    places = zip((names[one] for one in enters["group"].tolist()), enters["turn"].tolist(), strict=True)
    turns = dict(zip((enters["number"] & 0xFFFFFFFF).tolist(), places, strict=True))
    some = zip(exits["site"].tolist(), exits["size"].tolist(), strict=True)
    return {turns[call]: int(waited) for call, waited in some if call in turns}


def _waited_over(slow: RankTrace, peers: Sequence[RankTrace]) -> str:
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
