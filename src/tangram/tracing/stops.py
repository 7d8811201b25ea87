"""Ranks whose process stood still for a while, and what their steps would have taken without.

A process that is stopped is at one place of its program, so all of a stop is in one step: its own time, or its wait in
a call, is longer by it, and all others wait for it. Played again, that step takes what the rank with most time of its
own takes and what is between in steps without a stop, and is shorter by no more than the stop was long.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from tangram.tracing.files.format import End, Kind, Phase
from tangram.tracing.files.heart import BEAT_SECONDS
from tangram.tracing.files.stacks import rank_words
from tangram.tracing.finding import Finding
from tangram.tracing.reading import RankTrace
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
