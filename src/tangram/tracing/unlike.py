"""Ranks that should be alike and are not: in what they call in a step, and in the weights that they hold."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tangram.tracing.finding import Finding
from tangram.tracing.reading import Ranks, RankTrace
from tangram.tracing.slow import coords_of
from tangram.tracing.stacks import rank_words

ALIKE = ("all-reduce", "all-gather", "reduce-scatter", "broadcast", "barrier", "all-to-all")
"""Calls that all ranks of a group make alike."""


def unlike_calls(traces: Sequence[RankTrace]) -> list[Finding]:
    """Groups whose ranks have called different collectives in a step that was learned from, the first step of each."""
    found: list[Finding] = []
    done: set[tuple[Ranks, str]] = set()
    by_rank = {trace.rank: trace for trace in traces}
    for trace in traces:
        for group in trace.groups.values():
            known: tuple[Ranks, str] = group["ranks"], str(group["axes"])
            if known in done or len(known[0]) < 2 or any(rank not in by_rank for rank in known[0]):
                continue
            done.add(known)
            steps = [step for step in sorted(trace.sequences) if all(step in by_rank[r].sequences for r in known[0])]
            found += next((some for step in steps if (some := _unlike_in(*known, step, by_rank))), list[Finding]())
    return found


def _unlike_in(ranks: Ranks, axes: str, step: int, by_rank: Mapping[int, RankTrace]) -> list[Finding]:
    sequences = {rank: _of_group(by_rank[rank], ranks, axes, step) for rank in ranks}
    shared = {rank: tuple(_shared(site) for site in own) for rank, own in sequences.items()}
    counts = [*shared.values()]
    if len(set(counts)) == 1:
        return []
    # Two ranks have no majority: then those of other groups over these axes say what is usual.
    elsewhere = [tuple(map(_shared, own)) for own in _elsewhere(axes, step, by_rank)]
    usual = max(set(counts), key=lambda some: (counts.count(some), elsewhere.count(some), some == counts[0]))
    odd = [rank for rank in ranks if shared[rank] != usual]
    alike = next(rank for rank in ranks if shared[rank] == usual)
    one, other = sequences[odd[0]], sequences[alike]
    pairs = zip(shared[odd[0]], usual, strict=False)
    at = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))
    site = (one if at < len(one) else other)[at]
    text = (
        f"{rank_words(odd)} and {rank_words({*ranks} - {*odd})} called unlike collectives over {axes} in step {step}: "
        f"as its call {at + 1} rank {odd[0]} called {_sized(one, at)}, rank {alike} {_sized(other, at)}"
    )
    return [Finding("unlike", tuple(odd), text, step, axes, str(site["layer"]), str(site["line"]))]


def _elsewhere(axes: str, step: int, by_rank: Mapping[int, RankTrace]) -> list[list[Mapping[str, Any]]]:
    """The calls of every rank in its own group over some axes."""
    return [
        _of_group(trace, group["ranks"], axes, step)
        for trace in by_rank.values()
        for group in trace.groups.values()
        if group["axes"] == axes and step in trace.sequences
    ]


def _sized(sites: Sequence[Mapping[str, Any]], at: int) -> str:
    if at >= len(sites):
        return "nothing more"
    site = sites[at]
    return f"{site['op']} of {site['bytes']:,} bytes of {site['dtype']}"


def _shared(site: Mapping[str, Any]) -> tuple[object, ...]:
    """What calls of the ranks of a group have in common."""
    return (site["op"],) if site["op"] == "all-to-all" else (site["op"], site["bytes"], site["dtype"])


def _of_group(trace: RankTrace, ranks: Ranks, axes: str, step: int) -> list[Mapping[str, Any]]:
    """The sites of a step's calls in one group; sends and what only one rank gives are not alike on all of them."""
    groups = {number for number, one in trace.groups.items() if one["ranks"] == ranks and one["axes"] == axes}
    known = {n: site for n, site in trace.sites.items() if int(site["group"]) in groups and site["op"] in ALIKE}
    return [known[number] for number in trace.sequences[step] if number in known]


def unlike_replicas(traces: Sequence[RankTrace]) -> list[Finding]:
    """Ranks whose weights are not those of others that hold the same part, at the first step where it is so.

    What a rank has found wrong with its own weights before needs no second word.
    """
    if any(one["kind"] == "corrupted" for trace in traces for one in trace.deviations):
        return []
    for step in sorted({step for trace in traces for step in trace.sums}):
        alike: dict[tuple[object, ...], dict[int, list[int]]] = {}
        for trace in traces:
            at = coords_of(trace)
            for (layer, axes), total in zip(trace.layers, trace.sums.get(step, ()), strict=False):
                place = layer, *(at.get(axis, 0) for axis in axes)
                alike.setdefault(place, {}).setdefault(total, []).append(trace.rank)
        for (layer, *_), by_sum in alike.items():
            if len(by_sum) > 1:
                usual = max(by_sum.values(), key=len)
                odd = sorted(rank for ranks in by_sum.values() if ranks is not usual for rank in ranks)
                if sum(len(ranks) == len(usual) for ranks in by_sum.values()) > 1:
                    odd = sorted(rank for ranks in by_sum.values() for rank in ranks)
                who = f"{rank_words(odd)} {'has' if len(odd) == 1 else 'have'} other weights in {layer}"
                than = (
                    f"than {rank_words(usual)}"
                    if usual[0] not in odd
                    else "than each other, and which is right is open"
                )
                text = f"{who} after step {step} {than}, though they hold the same part"
                return [Finding("replicas", tuple(odd), text, step, "", str(layer))]
    return []
