"""What is wrong in the traces of a run, and whose fault it is, most certain first.

a rank that died, or stands still      its heart has stopped while those of others beat
a call that was not the one due        the rank said so itself, when it happened
ranks that learned unlike sequences    of one group, compared call by call
ranks that have not joined             the others of their group wait in a call that these have not begun, or waited
replicas that differ                   in the bits of weights that they both hold
a part that is not finite              of a rank's own loss or gradient, or first given to others
a loss or a gradient that jumps        beside the steps before it
a rank that stood still for a while    its heart had stopped, and has gone on
a slow rank                            more time of its own than its peers, in the same steps
a slow link                            a group whose calls take long, though nobody comes late
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from tangram.tracing.files.format import End, Kind, Phase
from tangram.tracing.files.stacks import rank_words
from tangram.tracing.finding import Finding
from tangram.tracing.reading import Call, Ranks, RankTrace
from tangram.tracing.slow import Slow, peers_of, slow_links, slow_ranks, steps_without
from tangram.tracing.spikes import spike_findings
from tangram.tracing.stops import (
    STILL_SECONDS,
    UNKNOWN,
    Outside,
    absent_findings,
    others_do,
    outlived,
    so_far,
    stood_findings,
    where_is,
    where_was,
)
from tangram.tracing.unlike import not_finite, unlike_calls, unlike_replicas

WORTH = 0.01
"""Of a step: a rank that costs less is not slow."""
MOST_COMPARED = 64
"""Ranks that each rank is compared with."""


def findings(traces: Sequence[RankTrace], outside: Outside = UNKNOWN) -> list[Finding]:
    """All that is wrong; nothing where all is well."""
    last = max((trace.live.step for trace in traces), default=0)
    strayed = deviations(traces)
    now, before = [one for one in strayed if one.step == last], [one for one in strayed if one.step != last]
    still = _lifeless(traces, outside)
    # A call too many or too few makes ranks wait in the next step only, where it pairs with one of that.
    recent = any(one.step >= last - 1 for one in strayed)
    absent = [] if still or recent else absent_findings(traces, outside)
    odd = _odd(traces) if (still or absent) and not now else []
    found = [*now, *odd, *still, *before, *([] if odd else [*unlike_calls(traces), *absent])]
    return [
        *found,
        *unlike_replicas(traces),
        *not_finite(traces),
        *spike_findings(traces),
        *stood_findings(traces),
        *slow_rank_findings(traces),
    ]


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
        # One that has just made its files has not beaten yet.
        if trace.live.beat and latest[trace.host] - trace.live.beat > STILL_SECONDS * 1e9:
            found.setdefault(trace.rank, "stopped")
    return found


def _lifeless(traces: Sequence[RankTrace], outside: Outside) -> list[Finding]:
    dead = lifeless(traces, outside)
    found = {one.rank: dead[one.rank] for one in traces if one.rank in dead and not outlived(one, traces, outside)}
    if not found or len(found) == len(traces) > 1:
        return []
    result: list[Finding] = []
    for trace in traces:
        if trace.rank in found:
            what = found[trace.rank]
            call = _awaited(traces, {*found})
            said = "has died without a word" if what == "died" else _stands_still(trace.rank, outside)
            text = f"rank {trace.rank} {said}; it {where_was(trace)}"
            text += f", and others wait for it in {call}" if call else ""
            axes, layer, line = (call.axes, call.site.layer, call.site.line) if call else ("", "", "")
            others = others_do(traces, {*found})
            finding = Finding(what, (trace.rank,), text, trace.live.step, axes, layer, line, others)
            result.append(so_far(finding, traces, outside.now) if what == "stopped" else finding)
    return result


def _stands_still(rank: int, outside: Outside) -> str:
    """Who has written its stack runs, but no Python, or its heart would beat."""
    stack, stopped = outside.stacks.get(rank), rank in outside.stopped
    at = f" at {stack.lines[0]}" if stack and stack.lines else ""
    return "stands still: its " + ("process is stopped" if stopped or stack is None else f"interpreter is stuck{at}")


def _awaited(traces: Sequence[RankTrace], absent: set[int]) -> Call | None:
    """A call that others wait in for one of these ranks: of those of the smallest groups the first."""
    calls = (trace.waiting for trace in traces if trace.rank not in absent)
    direct = (call for call in calls if call is not None and any(rank in call.ranks for rank in absent))
    return min(direct, key=lambda call: len(call.ranks), default=None)


def deviations(traces: Sequence[RankTrace]) -> list[Finding]:
    """What ranks have noted themselves, the first of each rank and step, in order of steps.

    What several have noted alike is one finding: they agree on something other than the plan. Of calls that were
    only learned most are right, where the others have noted nothing: who does not call with them is to blame, and is
    found as who has not joined.
    """
    found: dict[tuple[object, ...], Finding] = {}
    noted = noted_by(traces)
    of_most: dict[tuple[object, ...], bool] = {}
    for trace in traces:
        steps: set[int] = set()
        for one in sorted(trace.deviations, key=lambda d: (d["step"], d["kind"] != "reordered", d["deviation"])):
            if one["step"] in steps:
                continue
            if one.get("learned"):
                call = one["step"], _wherever(one), _ranks_of(trace, one)
                if call not in of_most:  # ranks of a group agree on it
                    of_most[call] = _as_most(trace, one, noted)
                if of_most[call]:
                    continue
            steps.add(one["step"])
            axes = str(trace.groups.get(one["group"], {}).get("axes", ""))
            key = one["kind"], _wherever(one), axes
            ranks = (*found[key].ranks, trace.rank) if key in found else (trace.rank,)
            text = f"{rank_words(ranks)} {one['text']}"
            found[key] = Finding(one["kind"], ranks, text, one["step"], axes, one["layer"], one["line"])
    return sorted(found.values(), key=lambda one: one.step)


def _as_most(trace: RankTrace, one: Mapping[str, Any], noted: Mapping[tuple[int, str], set[int]]) -> bool:
    """Whether most ranks of a deviation's group have noted the same, and the others nothing else in that step."""
    others = peers_without(trace, one, noted)
    of_step = {rank for (step, _), ranks in noted.items() if step == one["step"] for rank in ranks}
    return 2 * len(others) < len(_ranks_of(trace, one)) and not others & of_step


def noted_by(traces: Sequence[RankTrace]) -> dict[tuple[int, str], set[int]]:
    """By step and words, but for lines of code, the ranks that have noted a deviation."""
    found: dict[tuple[int, str], set[int]] = {}
    for trace in traces:
        for one in trace.deviations:
            found.setdefault((one["step"], _wherever(one)), set()).add(trace.rank)
    return found


def _wherever(one: Mapping[str, Any]) -> str:
    """A deviation in words without lines of code: ranks may make one call from several."""
    return re.sub(r" \([^()]*:\d+\)", "", one["text"])


def peers_without(trace: RankTrace, one: Mapping[str, Any], noted: Mapping[tuple[int, str], set[int]]) -> set[int]:
    """The ranks of a deviation's group that have not noted the same.

    Where there are none, the ranks agree on a step unlike those that they learned from, as one that logs, the last of
    an epoch with a smaller batch, or what follows the last step: of calls that were only learned that is no fault.
    """
    return {*_ranks_of(trace, one)} - noted.get((one["step"], _wherever(one)), set())


def _ranks_of(trace: RankTrace, one: Mapping[str, Any]) -> Ranks:
    return trace.groups.get(one["group"], {}).get("ranks", range(trace.world))


def _odd(traces: Sequence[RankTrace]) -> list[Finding]:
    """The rank whose calls of a step that ranks are in are not those of its peers, as far as these have come."""
    for peers in peers_of(traces):
        for step in sorted({trace.live.step for trace in peers}):
            each = {trace.rank: _calls_until(trace, step) for trace in peers if trace.live.step >= step}
            # Of a ring that does not go back to the begin of the step nothing says which call is which.
            calls = {rank: some for rank, some in each.items() if some is not None}
            some = [*calls.values()][:MOST_COMPARED]
            alike = {rank: sum(_agree(own, other) for other in some) for rank, own in calls.items()}
            least = min(alike.values(), default=0)
            odd = [rank for rank in alike if alike[rank] == least]
            if least == len(some) or (len(odd) > 1 and len(calls) > 2):
                continue
            other = next(rank for rank in calls if not _agree(calls[odd[0]], calls[rank]))
            return [_unlike(traces, odd, calls, other, step)]
    return []


def _unlike(
    traces: Sequence[RankTrace],
    odd: Sequence[int],
    calls: Mapping[int, Sequence[tuple[object, Call | None]]],
    other: int,
    step: int,
) -> Finding:
    """Of two ranks nobody knows which is right: then both are `odd`."""
    one = odd[0]
    here, there = calls[one], calls[other]
    at = next(i for i, (a, b) in enumerate(zip(here, there, strict=False)) if a[0] != b[0])
    call = there[at][1] or here[at][1]
    assert call is not None  # both would have ended alike
    said, others = ("nothing more" if some[at][1] is None else str(some[at][1]) for some in (here, there))
    where = where_is(next(trace for trace in traces if trace.rank == one))
    text = f"rank {one} called {said} as call {at + 1} of step {step}, where rank {other} called {others}; it {where}"
    place = call.axes, call.site.layer, call.site.line
    return Finding("unlike", (*odd,), text, step, *place, others_do(traces, {*odd}))


def _calls_until(trace: RankTrace, step: int) -> list[tuple[object, Call | None]] | None:
    """`calls_of_step`, and that no more come where the rank is beyond the step."""
    found = calls_of_step(trace, step)
    over: list[tuple[object, Call | None]] = [(None, None)] if trace.live.step > step else []
    return None if found is None else [*found, *over]


def _agree(some: Sequence[tuple[object, Call | None]], others: Sequence[tuple[object, Call | None]]) -> bool:
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


def _why(one: Slow, computes: str, its: str) -> str:
    if one.cause == "computes":
        return f"; {computes} for {one.cpu_ms:.1f} ms of them"
    waits = f"{its} data" if one.phase is Phase.DATA else "something outside, as a disk or a lock"
    other = {"starved": "was starved of CPU: others ran in its place", "waits": f"waited for {waits}"}
    return f"; {computes} for {one.cpu_ms:.1f} ms of them and else {other[one.cause]}" if one.cause else ""


def _by_host(traces: Sequence[RankTrace], slow: Sequence[Slow]) -> list[tuple[str, list[Slow]]]:
    """Slow ranks, those of a host all of whose ranks are slow together with its name; the slowest first."""
    hosts: dict[str, set[int]] = {}
    for trace in traces:
        hosts.setdefault(trace.host, set()).add(trace.rank)
    slow_hosts = {
        rank: host
        for host, ranks in hosts.items()
        if len(hosts) > 1 and len(ranks) > 1 and ranks <= {one.rank for one in slow}
        for rank in ranks
    }
    found: dict[str | int, tuple[str, list[Slow]]] = {}
    for one in slow:
        host = slow_hosts.get(one.rank, "")
        found.setdefault(host or one.rank, (host, []))[1].append(one)
    return [*found.values()]


def _slow_words(host: str, some: Sequence[Slow]) -> str:
    """Of a rank, or of a host by its slowest."""
    one, ranks = some[0], rank_words(sorted(each.rank for each in some))
    who, its, they, computes, most = (
        (f"host {host}, with {ranks}, is slow", "their", "for them others", "they compute", "up to ")
        if host
        else (f"{ranks} is slow", "its", "for it they", "it computes", "")
    )
    since = f" since step {one.since}" if one.since > 1 else ""
    where = f", {they} wait over {one.axes}" if one.axes else ""
    return (
        f"{who}{since}: {most}{one.own_ms:.1f} ms a step of {its} own where {its} peers take {one.peers_ms:.1f}, "
        f"most of it in {one.phase.word}{where}{_why(one, computes, its)}"
    )


def slow_rank_findings(traces: Sequence[RankTrace]) -> list[Finding]:
    """Ranks, or hosts, with more time of their own than their peers, and what a step would take without that."""
    result: list[Finding] = []
    groups = _by_host(traces, slow_ranks(traces))
    steps = steps_without(traces, [some for _, some in groups]) if groups else []
    # On a machine that others use ranks fall behind by chance, and the step waits for another one anyway.
    shares = [0.0, *(1 - step.without / step.now for step in steps)]
    worth = max((i for i in range(1, len(shares)) if shares[i] - shares[i - 1] > WORTH), default=0)
    for (host, some), step in zip(groups[:worth], steps, strict=False):
        one, before = some[0], " and those above" if result else ""
        ranks = tuple(sorted(each.rank for each in some))
        text = (
            f"{_slow_words(host, some)}. Without {'them' if host else 'it'}{before} a step would take about "
            f"{step.without:,.0f} ms instead of {step.now:,.0f}"
        )
        finding = Finding("slow", ranks, text, one.since, one.axes, cause=one.cause)
        result.append(replace(finding, step_ms=step.now, without_ms=step.without))
    for link in slow_links(traces):
        text = (
            f"calls over {link.axes} take long among {rank_words(link.ranks)}, though none of them comes late: "
            f"{link.own_ms:.1f} ms a step at least where other groups take {link.others_ms:.1f}"
        )
        result.append(Finding("slow link", (*link.ranks,), text, 0, link.axes))
    return result
