"""Ranks that keep others waiting: whose process stood still for a while, or that are absent from a call.

A process that is stopped is at one place of its program, so all of a stop is in one step: its own time, or its wait in
a call, is longer by it, and all others wait for it. Played again, that step takes what the rank with most time of its
own takes and what is between in steps without a stop, and is shorter by no more than the stop was long.

Whoever has not begun a call that others of its group wait in is absent, unless it waits for one that is. A run that is
over may hide that: torch gives up a wait after its time-out, and who has kept the others waiting comes to the call then
and fails of them, or is ended by whoever started it. So a rank that lives beyond the failure of another has not died of
itself, and one that had more time of its own before the call than its peers, by seconds, has come late to it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from tangram.tracing.files.format import End, Kind, Phase
from tangram.tracing.files.heart import BEAT_SECONDS
from tangram.tracing.files.stacks import Stack, grouped, rank_words
from tangram.tracing.finding import Finding
from tangram.tracing.reading import Call, Ranks, RankTrace
from tangram.tracing.slow import FEWEST, Step, shared_steps

Stops = Mapping[int, Mapping[int, float]]
"""By step the ranks that stood still in it, and for how many ms at most."""


def stood_findings(traces: Sequence[RankTrace]) -> list[Finding]:
    """Ranks that stood still and went on, together where it was in the same steps."""
    stops: dict[int, dict[int, float]] = {}
    for trace in traces:
        for since, until in trace.stood:
            if (step := _step_of(trace, since, until)) > 1:  # the first may import for long
                some = stops.setdefault(step, {})
                some[trace.rank] = some.get(trace.rank, 0.0) + (until - since) / 1e6
    if not stops:
        return []
    steps, together = _without(traces, stops), dict[tuple[int, ...], list[int]]()
    for step, ranks in sorted(stops.items()):
        together.setdefault((*sorted(ranks),), []).append(step)
    return [_finding(traces, ranks, some, stops, steps) for ranks, some in together.items()]


def _finding(
    traces: Sequence[RankTrace], ranks: tuple[int, ...], some: Sequence[int], stops: Stops, steps: Mapping[int, Step]
) -> Finding:
    """Of ranks that stood still in these steps."""
    lasted = [max(stops[step].values()) / 1e3 - BEAT_SECONDS / 2 for step in some]
    worst = some[int(np.argmax(lasted))]
    where = f"in {_place(next(trace for trace in traces if trace.rank == ranks[0]), worst)} of step {worst}"
    text = f"{rank_words(ranks)} stood still for {lasted[0]:.1f} s {where}"
    if len(some) > 1:
        text = (
            f"{rank_words(ranks)} stood still in {len(some)} steps for {sum(lasted):.1f} s, longest {where} "
            f"({max(lasted):.1f} s)"
        )
    text += ": not slow, but stopped or without a machine"
    known = [steps[step] for step in some if step in steps]
    if not known:
        return Finding("stood still", ranks, text, worst)
    now, without = (float(np.mean([getattr(one, name) for one in known])) for name in ("now", "without"))
    who = "the step" if len(some) == 1 else "such a step"
    text += f"; without that {who} would have taken about {without:,.0f} ms instead of {now:,.0f}"
    return Finding("stood still", ranks, text, worst, step_ms=now, without_ms=without)


def _step_of(trace: RankTrace, since: int, until: int) -> int:
    """The step that has most of a time; one that is not over has no row."""
    begins = trace.rows["begin"].astype(np.int64)
    ends = begins + trace.rows["nanoseconds"].astype(np.int64)
    if not len(ends) or until - max(since, int(ends[-1])) > (until - since) / 2:
        return trace.live.step if trace.live.end is End.RUNNING or not len(ends) else int(trace.rows["step"][-1])
    return int(trace.rows["step"][int(np.argmax(np.minimum(ends, until) - np.maximum(begins, since)))])


def _place(trace: RankTrace, step: int) -> str:
    """What a rank did when it was stopped in a step: the phase whose own time was longer, or a wait."""
    rows = trace.rows
    at = np.flatnonzero(rows["step"] == step)
    if not len(at):
        return trace.live.phase.word
    own, waits = (rows[name].astype(float) for name in ("own_us", "wait_us"))
    more = (own - np.median(own, 0))[at[0]]
    waited = (waits.sum(1) - np.median(waits.sum(1)))[at[0]]
    return "a wait for others" if waited > more.max() else Phase(int(more.argmax())).word


def _without(traces: Sequence[RankTrace], stops: Stops) -> dict[int, Step]:
    """How long these steps took and would have without their stops; nothing where too few others are known."""
    steps = shared_steps(traces)[1:]
    calm = ~np.isin(steps, [*stops])
    if calm.sum() < FEWEST:
        return {}
    rows = [trace.rows[np.searchsorted(trace.rows["step"], steps)] for trace in traces]
    own, took = (
        np.stack([some["own_us"].sum(1) / 1e3 for some in rows]),
        np.stack([some["nanoseconds"] / 1e6 for some in rows]),
    )
    usual = np.median(own[:, calm], 1)
    between = float(np.median(np.median(took[:, calm], 0) - own[:, calm].max(0)))
    index, found = {trace.rank: i for i, trace in enumerate(traces)}, dict[int, Step]()
    for step, ranks in stops.items():
        for at in np.flatnonzero(steps == step).tolist():
            mine, now = own[:, at].copy(), max(float(took[index[rank], at]) for rank in ranks)
            for rank, most in ranks.items():
                i = index[rank]
                mine[i] -= min(max(mine[i] - usual[i], 0.0), most)
            least = now - sum(ranks.values())
            found[step] = Step(now, min(max(float(mine.max()) + between, least), now))
    return found


def so_far(found: Finding, traces: Sequence[RankTrace], now: int | None) -> Finding:
    """A finding of a rank that stands still, with how long its step has taken so far, and how long one takes."""
    trace = next(one for one in traces if one.rank == found.ranks[0])
    begun = trace.events[trace.events["kind"] == Kind.STEP]["time"][-1:]
    if not len(begun) or len(trace.rows) <= FEWEST:
        return found
    usual = float(np.median(np.concatenate([one.rows["nanoseconds"][1:] for one in traces]))) / 1e6
    until = max(now or 0, *(one.live.beat for one in traces if one.host == trace.host))
    took = (until - int(begun[0])) / 1e6
    text = f"{found.text}; the step has taken {took:,.0f} ms so far, and without that takes about {usual:,.0f}"
    return replace(found, text=text, step_ms=took, without_ms=usual) if took > usual else found


STILL_SECONDS = 3.0
"""A heart that has not beaten for so long while another has: its process does not run."""


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
    cpu: Mapping[int, int] = field(default_factory=dict[int, int])
    """CPU time of ranks' processes of this machine, ns."""


UNKNOWN = Outside()
"""Nothing is known, of a run that is over."""


def where_is(trace: RankTrace) -> str:
    step = f" of step {trace.live.step}" if trace.live.step else ""
    if trace.live.end is End.FINISHED:
        return f"has come to its end after step {trace.live.step}"
    if trace.failed and trace.waiting is None:
        return f"has failed of {trace.failed} in {trace.live.phase.word}{step}"
    if trace.waiting is not None:
        return f"waits in {trace.waiting}{step}"
    return f"is in {trace.live.phase.word}{step}"


def others_do(traces: Sequence[RankTrace], but: set[int]) -> tuple[str, ...]:
    """What the other ranks do, those who do the same together."""
    doing: dict[str, list[int]] = {}
    for trace in traces:
        if trace.rank not in but and trace.live.end is End.RUNNING:
            doing.setdefault(where_is(trace), []).append(trace.rank)
    return tuple(f"{rank_words(ranks)} {what}" for what, ranks in sorted(doing.items(), key=lambda item: len(item[1])))


def where_was(trace: RankTrace) -> str:
    return where_is(trace).replace("waits", "waited", 1).replace("is in", "was in", 1)


def absent_findings(traces: Sequence[RankTrace], outside: Outside) -> list[Finding]:
    """Ranks that others of their group have waited for, for some seconds, and that have not begun the call."""
    by_rank = {trace.rank: trace for trace in traces}
    waiting = [trace for trace in traces if trace.waiting is not None]
    calls: dict[tuple[Ranks, str], Call] = {}
    """Of each group, by its ranks and name, the last call that somebody waits in."""
    long: dict[tuple[Ranks, str], bool] = {}
    for trace in waiting:
        call = trace.waiting
        assert call is not None
        known = calls.get((call.ranks, call.name))
        if known is None or known.turn < call.turn:
            calls[call.ranks, call.name] = call
            long[call.ranks, call.name] = _waits_long(trace, traces, outside)
    late: dict[int, Call] = {}
    for group, call in calls.items():
        for rank in call.ranks:
            other = by_rank.get(rank)
            # For who has ended nobody need wait long: it never comes.
            ended = other is not None and _has_ended(other)
            if other is not None and (long[group] or ended) and other.turns(call) < call.turn:
                late.setdefault(rank, call)
    # Who waits for another absent rank is late for that reason.
    culprits = {rank: call for rank, call in late.items() if not _waits_for(by_rank[rank], late)} or late
    result: list[Finding] = []
    for rank, call in sorted(culprits.items()):
        trace = by_rank[rank]
        stack = outside.stacks.get(rank)
        at = f" at {stack.lines[0]}" if stack and stack.lines else ""
        ended = f"{where_was(trace)}, and was ended after they had failed" if outlived(trace, traces, outside) else ""
        text = f"rank {rank} has not joined the others in {call}: it {ended or where_is(trace)}{at}"
        others = (*others_do(traces, {rank}), *stack_lines(outside.stacks))
        place = call.axes, call.site.layer, call.site.line
        result.append(Finding("absent", (rank,), text, trace.live.step, *place, others))
    return result or _late_findings(traces, outside)


def outlived(trace: RankTrace, traces: Sequence[RankTrace], outside: Outside) -> bool:
    """Whether a rank whose process is gone still ran when another failed: then it was ended for that."""
    failed = [one.live.beat for one in traces if one.host == trace.host and one.live.end is End.FAILED]
    return trace.rank in outside.gone and trace.live.beat > min(failed, default=trace.live.beat)


@dataclass(frozen=True)
class _Coming:
    """How a rank came to a call."""

    time: int
    """When it began it, by its own clock."""
    own: int
    """For how long it had done something of its own since the last call of the group, ns."""
    step: int
    phase: Phase
    """In which it did that for longest."""


def _late_findings(traces: Sequence[RankTrace], outside: Outside) -> list[Finding]:
    """Ranks that came to a call when the others had given up waiting for them."""
    by_rank = {trace.rank: trace for trace in traces}
    given_up = [trace for trace in traces if trace.live.end is End.FAILED and trace.waiting is not None]
    found: dict[int, Finding] = {}
    for trace in given_up:
        call = trace.waiting
        assert call is not None
        comings = {rank: _coming(by_rank[rank], call) for rank in call.ranks if rank in by_rank}
        came = {rank: one for rank, one in comings.items() if one is not None}
        if not came:  # rings do not go back so far
            continue
        usual = (
            float(np.median([one.own for one in came.values()])) if len(came) > 2 else min(o.own for o in came.values())
        )
        late = {rank: one for rank, one in came.items() if one.own - usual > outside.still_ns}
        for rank, one in late.items():
            if by_rank[rank].host == trace.host and one.time < trace.live.beat:
                continue  # they did not wait in vain
            where = f"{one.phase.word} of step {one.step}" if one.step else one.phase.word
            text = (
                f"rank {rank} came to {call} {(one.own - usual) / 1e9:.1f} s after the others, who had given up: "
                f"until then it was in {where}"
            )
            place = call.axes, call.site.layer, call.site.line
            found[rank] = Finding("absent", (rank,), text, one.step, *place, others_do(traces, {rank}))
    return [found[rank] for rank in sorted(found)]


def _coming(trace: RankTrace, call: Call) -> _Coming | None:
    """How a rank came to another's call; None where it did not, or its ring does not go back so far."""
    events, group = trace.events, trace.same_group(call)
    begun = events[(events["group"] == group) & (events["kind"] == Kind.ENTER) & (events["turn"] == call.turn)]
    if group is None or not len(begun):
        return None
    time = int(begun["time"][0])
    before = events[events["time"] < time]
    ends = before[(before["group"] == group) & (before["kind"] == Kind.EXIT)]["time"]
    since = int(ends[-1]) if len(ends) else trace.begun
    some = events[(events["time"] > since) & (events["time"] <= time)]
    times = np.concatenate([[since], some["time"].astype(np.int64)])
    own = np.where(some["kind"] == Kind.EXIT, 0, np.diff(times))
    at = times[int(own.argmax())]
    phases = before[(before["kind"] == Kind.PHASE) & (before["time"] <= at)]["op"]
    steps = before[before["time"] <= at]["step"]
    phase = Phase(int(phases[-1])) if len(phases) else Phase.START
    return _Coming(time, int(own.sum()), int(steps[-1]) if len(steps) else 0, phase)


def _has_ended(trace: RankTrace) -> bool:
    """Whether a rank has come to its end, and not because somebody ended it by hand."""
    return trace.live.end is not End.RUNNING and trace.failed not in ("KeyboardInterrupt", "SystemExit")


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
        found += [f"{rank_words(ranks)}:", *(f"  {line}" for line in stack.lines)]
    return tuple(found)
