"""The ranks of a run as they are now, those that take longest first; over files alone, from any terminal."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tangram.tracing.blame import lifeless
from tangram.tracing.files.format import End, Kind
from tangram.tracing.reading import RankTrace, read, trace_folder
from tangram.tracing.show.report import doing, place_of, verdict_of
from tangram.tracing.slow import own_times
from tangram.tracing.spikes import spike_findings
from tangram.tracing.watch import outside_of

RECENT = 8
"""Steps whose median is shown."""
SHOWN = 40
SPIKES = 3
"""The newest that are told."""
HEADERS = ("rank", "place", "state", "for s", "step", "own ms", "wait ms", "step ms", "memory MB")


@dataclass(frozen=True)
class Top:
    """One look."""

    title: str
    rows: tuple[tuple[str, ...], ...]
    over: bool
    """Whether no rank runs any more."""
    lines: tuple[str, ...] = ()
    """How it ended, where that was badly; what has jumped, the newest last."""

    def as_json(self) -> dict[str, object]:
        """One document."""
        rows = [dict(zip(HEADERS, row, strict=True)) for row in self.rows]
        return {"title": self.title, "over": self.over, "ranks": rows, "lines": [*self.lines]}


def top(folder: Path, shown: int = SHOWN) -> Top:
    """Look at a run once. Raises UserError where there is no trace."""
    folder = trace_folder(folder)
    traces, now = read(folder), time.monotonic_ns()
    outside, verdict = outside_of(traces, now), verdict_of(folder)
    ended = verdict is not None or (outside.now is None and {trace.host for trace in traces} == {os.uname().nodename})
    running = [trace for trace in traces if trace.live.end is End.RUNNING and not ended]
    steps = [trace.live.step for trace in traces]
    order = sorted(traces, key=lambda trace: (-_own(trace), trace.rank))
    gone = dict.fromkeys([trace.rank for trace in traces if ended], "ended") | lifeless(traces, outside)
    rows = tuple(_row(trace, now, gone.get(trace.rank, "")) for trace in order[:shown])
    more = f", {len(traces) - shown} more not shown" if len(traces) > shown else ""
    where = f"step {min(steps)}" if min(steps) == max(steps) else f"steps {min(steps)} to {max(steps)}"
    title = f"{folder}: {len(running)} of {traces[0].world} ranks run, {where}{more}"
    spikes = tuple(one.text for one in spike_findings(traces)[-SPIKES:])
    return Top(title, rows, not running, (*([f"ended badly: {verdict[0]}"] if verdict else []), *spikes))


def _own(trace: RankTrace) -> float:
    recent = own_times(trace)[-RECENT:].sum(1)
    return float(np.median(recent)) / 1e3 if len(recent) else 0.0


def _row(trace: RankTrace, now: int, gone: str) -> tuple[str, ...]:
    rows = trace.rows[-RECENT:]
    event = trace.event(trace.live.waiting) if trace.live.waiting else None
    begun = trace.events[trace.events["kind"] == Kind.PHASE]["time"][-1:]  # of what it is in, where it does not wait
    since = int(event["time"]) if event is not None else int(begun[0]) if len(begun) else 0
    waits = rows["wait_us"].sum(1) / 1e3
    times = [f"{np.median(some):,.1f}" if len(rows) else "" for some in (waits, rows["nanoseconds"] / 1e6)]
    running = trace.live.end is End.RUNNING
    here = since and running and gone in ("", "stopped") and trace.begun <= now
    return (
        str(trace.rank),
        place_of(trace),
        f"{gone} in {doing(trace)}" if gone and running else doing(trace),
        f"{max(0, now - since) / 1e9:.1f}" if here else "",
        str(trace.live.step),
        f"{_own(trace):,.1f}" if len(rows) else "",
        *times,
        f"{int(rows['memory_kb'][-1]) * 1024 / 1e6:,.0f}" if len(rows) else "",
    )
