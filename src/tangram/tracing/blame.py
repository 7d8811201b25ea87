"""What is wrong in the traces of a run, and whose fault it is, most certain first.

a rank that died, or stands still      its heart has stopped while those of others beat
a call that was not the one due        the rank said so itself, when it happened
ranks that learned unlike sequences    of one group, compared call by call
ranks that have not joined             the others of their group wait in a call that these have not begun
replicas that differ                   in the bits of weights that they both hold
a part that is not finite              of a rank's own loss or gradient
a slow rank                            more time of its own than its peers, in the same steps
a slow link                            a group whose calls take long, though nobody comes late
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tangram.tracing.format import (
    GRADIENT_NOT_FINITE,
    LOSS_NOT_FINITE,
    End,
    Kind,
)
from tangram.tracing.reading import Call, Ranks, RankTrace
from tangram.tracing.slow import coords_of, peers_of, slow_links, slow_ranks
from tangram.tracing.stacks import Stack, grouped, ranks_said

DEVIATIONS = ("skipped", "extra", "reordered", "mis-sized", "corrupted")
"""Kinds of findings that a rank has noted itself."""
ALIKE = ("all-reduce", "all-gather", "reduce-scatter", "broadcast", "barrier", "all-to-all")
"""Calls that all ranks of a group make alike."""
MOST_COMPARED = 64
"""Ranks that each rank is compared with."""
STILL_SECONDS = 3.0
"""A heart that has not beaten for so long while another has: its process does not run."""


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong."""

    kind: str
    """died, stopped, skipped, extra, reordered, mis-sized, corrupted, unlike, absent, replicas, not finite, slow, slow
    link."""
    ranks: tuple[int, ...]
    """Whose fault it is."""
    text: str
    """One sentence."""
    step: int = 0
    axes: str = ""
    """Of the mesh, of the group that it happened in."""
    layer: str = ""
    line: str = ""
    details: tuple[str, ...] = ()

    def as_json(self) -> dict[str, object]:
        """For a file."""
        lists = {"ranks": [*self.ranks], "details": [*self.details]}
        return {**vars(self), **lists}

    @staticmethod
    def of_json(words: Mapping[str, Any]) -> Finding:
        """The inverse. Raises KeyError or TypeError for what is no finding."""
        lists: dict[str, Any] = {"ranks": (*words["ranks"],), "details": (*words["details"],)}
        return Finding(**{**words, **lists})


@dataclass(frozen=True)
class Outside:
    """What is known of the ranks from outside of their traces."""

    now: int | None = None
    """Monotonic ns of the machine, while the run goes on; None: it has ended."""
    gone: frozenset[int] = frozenset()
    """Ranks whose process is not there any more, and that have not said that they end."""
    stopped: frozenset[int] = frozenset()
    """Ranks whose process a signal has stopped."""
    stacks: Mapping[int, Stack] = field(default_factory=dict[int, Stack])
    still_ns: float = STILL_SECONDS * 1e9
    """A wait that has lasted for so long is no matter of a step."""


def findings(traces: Sequence[RankTrace], outside: Outside = Outside()) -> list[Finding]:
    """All that is wrong; nothing where all is well."""
    last = max((trace.live.step for trace in traces), default=0)
    strayed = _deviations(traces)
    now, before = [one for one in strayed if one.step == last], [one for one in strayed if one.step != last]
    still = _lifeless(traces, outside)
    absent = [] if still or now else _absent(traces, outside)
    odd = _odd(traces) if (still or absent) and not now else []
    found = [*now, *odd, *still, *before, *([] if odd else [*_unlike(traces), *absent])]
    return [*found, *_unlike_replicas(traces), *_not_finite(traces), *slow_ranks_found(traces)]


def _where(trace: RankTrace) -> str:
    """What a rank does, in words."""
    step = f" of step {trace.live.step}" if trace.live.step else ""
    if trace.waiting is not None:
        return f"waits in {trace.waiting}{step}"
    return f"is in {trace.live.phase.word}{step}"


def _others(traces: Sequence[RankTrace], but: set[int]) -> tuple[str, ...]:
    """What the other ranks do, those who do the same together."""
    doing: dict[str, list[int]] = {}
    for trace in traces:
        if trace.rank not in but and trace.live.end is End.RUNNING:
            doing.setdefault(_where(trace), []).append(trace.rank)
    return tuple(f"{ranks_said(ranks)} {what}" for what, ranks in sorted(doing.items(), key=lambda item: len(item[1])))


def lifeless(traces: Sequence[RankTrace], outside: Outside) -> dict[int, str]:
    """Ranks that do not run, and since when their hearts are silent: "died" or "stopped"."""
    running = [trace for trace in traces if trace.live.end is End.RUNNING]
    if not traces:
        return {}
    found = dict.fromkeys(outside.gone, "died") | dict.fromkeys(outside.stopped, "stopped")
    latest: dict[str, int] = {}
    for trace in traces:
        latest[trace.host] = max(latest.get(trace.host, 0), trace.live.beat)
    if outside.now is not None and len(latest) == 1:
        latest = {host: max(outside.now, beat) for host, beat in latest.items()}
    for trace in running:
        if latest[trace.host] - trace.live.beat > STILL_SECONDS * 1e9:
            found.setdefault(trace.rank, "stopped")
    return found


def _lifeless(traces: Sequence[RankTrace], outside: Outside) -> list[Finding]:
    found = lifeless(traces, outside)
    if not found or len(found) == len(traces) > 1:
        return []
    result: list[Finding] = []
    for trace in traces:
        if trace.rank in found:
            what = found[trace.rank]
            said = "has died without a word" if what == "died" else "stands still: its process is stopped"
            call = _awaited(traces, {*found})
            text = f"rank {trace.rank} {said}; it {_was(trace)}"
            text += f", and others wait for it in {call}" if call else ""
            axes, layer, line = (call.axes, call.site.layer, call.site.line) if call else ("", "", "")
            others = _others(traces, {*found})
            result.append(Finding(what, (trace.rank,), text, trace.live.step, axes, layer, line, others))
    return result


def _was(trace: RankTrace) -> str:
    return _where(trace).replace("waits", "waited", 1).replace("is in", "was in", 1)


def _awaited(traces: Sequence[RankTrace], absent: set[int]) -> Call | None:
    """A call that others wait in for one of these ranks."""
    for trace in traces:
        call = trace.waiting
        if trace.rank not in absent and call is not None and absent.intersection(call.ranks):
            return call
    return None


def _deviations(traces: Sequence[RankTrace]) -> list[Finding]:
    """What ranks have noted themselves, the first of each rank and step, in order of steps.

    What several have noted alike is one finding: they agree on something other than the plan.
    """
    found: dict[tuple[object, ...], Finding] = {}
    for trace in traces:
        steps: set[int] = set()
        for one in sorted(trace.deviations, key=lambda d: (d["step"], d["kind"] != "reordered", d["deviation"])):
            if one["step"] in steps:
                continue
            steps.add(one["step"])
            axes = str(trace.groups.get(one["group"], {}).get("axes", ""))
            key = one["kind"], one["text"], axes
            ranks = (*found[key].ranks, trace.rank) if key in found else (trace.rank,)
            text = f"{ranks_said(ranks)} {one['text']}"
            found[key] = Finding(one["kind"], ranks, text, one["step"], axes, one["layer"], one["line"])
    return sorted(found.values(), key=lambda one: one.step)


def _unlike(traces: Sequence[RankTrace]) -> list[Finding]:
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
        f"{ranks_said(odd)} and {ranks_said({*ranks} - {*odd})} called unlike collectives over {axes} in step {step}: "
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


def _absent(traces: Sequence[RankTrace], outside: Outside) -> list[Finding]:
    """Ranks that others of their group have waited for, for some seconds, and that have not begun the call."""
    by_rank = {trace.rank: trace for trace in traces}
    waiting = [trace for trace in traces if trace.waiting is not None]
    calls: dict[tuple[Ranks, str], Call] = {}
    """Of each group the last call that somebody waits in."""
    for trace in waiting:
        call = trace.waiting
        assert call is not None
        known = calls.get((call.ranks, call.axes))
        if (known is None or known.turn < call.turn) and _waits_long(trace, traces, outside):
            calls[call.ranks, call.axes] = call
    late: dict[int, Call] = {}
    for call in calls.values():
        for rank in call.ranks:
            other = by_rank.get(rank)
            if other is not None and other.turns(call.ranks, call.axes) < call.turn:
                late.setdefault(rank, call)
    # Who waits for another absent rank is late for that reason.
    culprits = {rank: call for rank, call in late.items() if not _waits_for(by_rank[rank], late)} or late
    result: list[Finding] = []
    for rank, call in sorted(culprits.items()):
        trace = by_rank[rank]
        stack = outside.stacks.get(rank)
        at = f" at {stack.lines[0]}" if stack and stack.lines else ""
        text = f"rank {rank} has not joined the others in {call}: it {_where(trace)}{at}"
        others = (*_others(traces, {rank}), *stack_lines(outside.stacks))
        place = call.axes, call.site.layer, call.site.line
        result.append(Finding("absent", (rank,), text, trace.live.step, *place, others))
    return result


def _odd(traces: Sequence[RankTrace]) -> list[Finding]:
    """The rank whose calls of the step that hangs are not those of its peers, as far as these have come."""
    for peers in peers_of(traces):
        last = max(trace.live.step for trace in peers)
        calls = {trace.rank: calls_of_step(trace, last) for trace in peers}
        if not all(
            calls.values()
        ):  # rings that do not go back to the begin of the step: nothing says which call is which
            continue
        some = [*calls.values()][:MOST_COMPARED]
        alike = {rank: sum(_agree(own, other) for other in some) for rank, own in calls.items()}
        odd = min(alike, key=lambda rank: alike[rank])
        if alike[odd] < len(some) and sum(count == alike[odd] for count in alike.values()) == 1:
            trace = next(one for one in peers if one.rank == odd)
            other = next(rank for rank in calls if not _agree(calls[odd], calls[rank]))
            here, there = calls[odd], calls[other]
            at = next(i for i, (a, b) in enumerate(zip(here, there, strict=False)) if a[0] != b[0])
            call = there[at][1]
            text = (
                f"rank {odd} called {here[at][1]} as call {at + 1} of step {last}, where rank {other} called {call}; "
                f"it {_where(trace)}"
            )
            details = _others(traces, {odd})
            return [Finding("unlike", (odd,), text, last, call.axes, call.site.layer, call.site.line, details)]
    return []


def _agree(some: Sequence[tuple[object, Call]], others: Sequence[tuple[object, Call]]) -> bool:
    """Whether the one goes on as the other, as far as both go."""
    return all(a[0] == b[0] for a, b in zip(some, others, strict=False))


def calls_of_step(trace: RankTrace, step: int) -> list[tuple[object, Call]] | None:
    """The collectives of a step, with what peers have in common of each; None where the ring has lost its begin."""
    events = trace.events
    if not ((events["kind"] == Kind.STEP) & (events["step"] == step)).any():
        return None
    some = events[(events["step"] == step) & (events["kind"] == Kind.ENTER)]
    calls = [trace.in_words(event) for event in some]
    return [((call.op, call.axes, call.nbytes, call.dtype), call) for call in calls]


def _waits_long(trace: RankTrace, traces: Sequence[RankTrace], outside: Outside) -> bool:
    """Whether a rank has waited for so long that it is no matter of a step; where the run ended, until then."""
    event = trace.event(trace.live.waiting)
    until = outside.now or max(one.live.beat for one in traces if one.host == trace.host)
    return event is not None and trace.live.end is not End.FINISHED and until - int(event["time"]) > outside.still_ns


def _waits_for(trace: RankTrace, late: Mapping[int, Call]) -> bool:
    call = trace.waiting
    return call is not None and any(rank in late and rank != trace.rank for rank in call.ranks)


def stack_lines(stacks: Mapping[int, Stack]) -> tuple[str, ...]:
    """Where ranks stand, outliers first."""
    found: list[str] = []
    for ranks, stack in grouped(stacks):
        found += [f"{ranks_said(ranks)}:", *(f"  {line}" for line in stack.lines)]
    return tuple(found)


def _unlike_replicas(traces: Sequence[RankTrace]) -> list[Finding]:
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
                who = f"{ranks_said(odd)} {'has' if len(odd) == 1 else 'have'} other weights in {layer}"
                than = (
                    f"than {ranks_said(usual)}"
                    if usual[0] not in odd
                    else "than each other, and which is right is open"
                )
                text = f"{who} after step {step} {than}, though they hold the same part"
                return [Finding("replicas", tuple(odd), text, step, "", str(layer))]
    return []


def _not_finite(traces: Sequence[RankTrace]) -> list[Finding]:
    """The first step with a part that is not finite, and whose: of losses first, as gradients are summed."""
    for flag, what in ((LOSS_NOT_FINITE, "loss"), (GRADIENT_NOT_FINITE, "gradient")):
        steps = {t.rank: int(s[0]) for t in traces if len(s := t.rows["step"][(t.rows["flags"] & flag) > 0])}
        if steps:
            first = min(steps.values())
            ranks = tuple(sorted(rank for rank, step in steps.items() if step == first))
            text = f"{ranks_said(ranks)}: the own part of the {what} of step {first} is not finite"
            if len(ranks) == len(traces) > 1:
                text = f"the {what} of step {first} is not finite on any rank"
            return [Finding("not finite", ranks, text, first)]
    return []


def slow_ranks_found(traces: Sequence[RankTrace]) -> list[Finding]:
    """Ranks with more time of their own than their peers."""
    result: list[Finding] = []
    for one in slow_ranks(traces):
        since = f" since step {one.since}" if one.since > 1 else ""
        where = f", for it they wait over {one.axes}" if one.axes else ""
        text = (
            f"rank {one.rank} is slow{since}: {one.own_ms:.1f} ms a step of its own where its peers take "
            f"{one.peers_ms:.1f}, most of it in {one.phase.word}{where}"
        )
        result.append(Finding("slow", (one.rank,), text, one.since, one.axes))
    for link in slow_links(traces):
        text = (
            f"calls over {link.axes} take long among {ranks_said(link.ranks)}, though none of them comes late: "
            f"{link.own_ms:.1f} ms a step at least where other groups take {link.others_ms:.1f}"
        )
        result.append(Finding("slow link", (*link.ranks,), text, 0, link.axes))
    return result
