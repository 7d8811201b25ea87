"""Ranks that should be alike and are not: in what they call in a step, in the weights that they hold, in whose numbers
were the first that are not finite."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tangram.tracing.files.format import GRADIENT_NOT_FINITE, LOSS_NOT_FINITE, Kind
from tangram.tracing.files.stacks import rank_words
from tangram.tracing.finding import Finding
from tangram.tracing.reading import Call, Ranks, RankTrace
from tangram.tracing.sites import Site, size_words
from tangram.tracing.slow import coords_of

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
    return f"{site['op']} of {size_words(site['bytes'], site['dtype'])}"


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


def not_finite(traces: Sequence[RankTrace]) -> list[Finding]:
    """The first step with a part that is not finite, and whose: of losses first, as gradients are summed.

    Ranks of a model axis have one loss: then that one, or where it is known the call to which one of them was the
    first to give what is not finite.
    """
    for flag, what in ((LOSS_NOT_FINITE, "loss"), (GRADIENT_NOT_FINITE, "gradient")):
        steps = {t.rank: int(s[0]) for t in traces if len(s := t.rows["step"][(t.rows["flags"] & flag) > 0])}
        if steps:
            step = min(steps.values())
            ranks = sorted(rank for rank, one in steps.items() if one == step)
            by_rank = {trace.rank: trace for trace in traces}
            first = _first_to_give(by_rank, step, ranks, alone=flag == LOSS_NOT_FINITE)
            nowhere = dict[str, Any]()
            began = next((t.first_not_finite[step] for t in traces if step in t.first_not_finite), nowhere)
            layer, where = str(began.get("layer", "")), f"; {began['first_not_finite']}" if began else ""
            if first:
                call = _first_call(by_rank[first[0]], step)
                text = f"{rank_words(first)} gave what is not finite to {call} in step {step}, before any other did"
                text += f": the {what} is not finite on {rank_words(ranks)}{where}"
                return [
                    Finding("not finite", (*first,), text, step, call.axes, layer or call.site.layer, call.site.line)
                ]
            text = f"{rank_words(ranks)}: the own part of the {what} of step {step} is not finite"
            if len(ranks) == len(traces) > 1:
                text = f"the {what} of step {step} is not finite on any rank"
            return [Finding("not finite", (*ranks,), text + where, step, layer=layer)]
    return []


def _first_call(trace: RankTrace, step: int) -> Call:
    one = trace.not_finite[step]
    site, group = trace.sites.get(int(one["site_of"]), {}), trace.groups[int(one["group_of"])]
    words = Site(*(str(site.get(part, "")) for part in ("what", "layer", "line")))
    where = int(one["group_of"]), str(group["name"]), str(group["axes"]), group["ranks"], int(one["turn"])
    return Call(str(site.get("op", "a call")), *where, int(site.get("bytes", 0)), str(site.get("dtype", "")), words)


def _first_to_give(by_rank: Mapping[int, RankTrace], step: int, ranks: Sequence[int], *, alone: bool) -> list[int]:
    """Of ranks with a loss or gradient that is not finite, and of those that they have it from, the first.

    `alone`: one that has given nothing such, and has it from nobody, has it of itself. Empty where nothing says more.
    """
    bad = [rank for rank, trace in by_rank.items() if step in trace.not_finite]
    candidates, more = dict.fromkeys(ranks), [*ranks]
    sources: dict[int, list[int]] = {}
    while more:
        rank = more.pop()
        sources[rank] = [one for one in bad if one != rank and _has_from(by_rank[one], by_rank[rank], step)]
        fresh = [one for one in sources[rank] if one not in candidates]
        candidates |= dict.fromkeys(fresh)
        more += fresh
    first = sorted(rank for rank in candidates if not sources[rank] and (alone or rank in bad))
    return first if {*first} & {*bad} and first != [*ranks] else []


def _has_from(one: RankTrace, other: RankTrace, step: int) -> bool:
    """Whether the second had what the first gave before it gave something that is not finite itself."""
    call, given = _first_call(one, step), other.not_finite.get(step)
    if other.rank not in call.ranks:
        return False
    events = other.events
    enters = events[(events["kind"] == Kind.ENTER) & (events["group"] == other.same_group(call))]
    if call.op == "send":
        enters = _of_peer(other, enters, "recv", call.ranks.index(one.rank), step)
        sent = one.events[(one.events["kind"] == Kind.ENTER) & (one.events["group"] == call.group)]
        sent = _of_peer(one, sent, "send", call.ranks.index(other.rank), step)
        at = int((sent["number"] <= one.not_finite[step]["event"]).sum()) - 1
        enters = enters[at : at + 1] if at >= 0 and sent["number"][at] == one.not_finite[step]["event"] else enters[:0]
    else:
        enters = enters[enters["turn"] == call.turn]
    return len(enters) > 0 and (given is None or int(enters["number"][0]) < int(given["event"]))


def _of_peer(trace: RankTrace, enters: Any, op: str, peer: int, step: int) -> Any:
    sites = [n for n, site in trace.sites.items() if site["op"] == op and site["peer"] == peer]
    return enters[np.isin(enters["site"], sites) & (enters["step"] == step)]
