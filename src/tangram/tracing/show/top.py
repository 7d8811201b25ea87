"""The ranks of a run as they are now, those that take longest first; over files alone, from any terminal."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tangram.tracing.files.format import End
from tangram.tracing.reading import RankTrace, read, trace_folder
from tangram.tracing.show.report import doing, place_of
from tangram.tracing.slow import own_times
from tangram.tracing.spikes import spike_findings

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
    spikes: tuple[str, ...] = ()
    """What has jumped, the newest last."""

    def as_json(self) -> dict[str, object]:
        """One document."""
        rows = [dict(zip(HEADERS, row, strict=True)) for row in self.rows]
        return {"title": self.title, "over": self.over, "ranks": rows, "spikes": [*self.spikes]}


def top(folder: Path, shown: int = SHOWN) -> Top:
    """Look at a run once. Raises UserError where there is no trace."""
    folder = trace_folder(folder)
    traces, now = read(folder), time.monotonic_ns()
    running = [trace for trace in traces if trace.live.end is End.RUNNING]
    steps = [trace.live.step for trace in traces]
    order = sorted(traces, key=lambda trace: (-_own(trace), trace.rank))
    rows = tuple(_row(trace, now) for trace in order[:shown])
    more = f", {len(traces) - shown} more not shown" if len(traces) > shown else ""
    where = f"step {min(steps)}" if min(steps) == max(steps) else f"steps {min(steps)} to {max(steps)}"
    title = f"{folder}: {len(running)} of {traces[0].world} ranks run, {where}{more}"
    spikes = tuple(one.text for one in spike_findings(traces)[-SPIKES:])
    return Top(title, rows, not running, spikes)


def _own(trace: RankTrace) -> float:
    recent = own_times(trace)[-RECENT:].sum(1)
    return float(np.median(recent)) / 1e3 if len(recent) else 0.0


def _row(trace: RankTrace, now: int) -> tuple[str, ...]:
    rows = trace.rows[-RECENT:]
    event = trace.event(trace.live.waiting) if trace.live.waiting else None
    since = int(event["time"]) if event is not None else 0
    waits = rows["wait_us"].sum(1) / 1e3
    times = [f"{np.median(some):,.1f}" if len(rows) else "" for some in (waits, rows["nanoseconds"] / 1e6)]
    here = since and trace.live.end is End.RUNNING and trace.begun <= now
    return (
        str(trace.rank),
        place_of(trace),
        doing(trace),
        f"{max(0, now - since) / 1e9:.1f}" if here else "",
        str(trace.live.step),
        f"{_own(trace):,.1f}" if len(rows) else "",
        *times,
        f"{int(rows['memory_kb'][-1]) * 1024 / 1e6:,.0f}" if len(rows) else "",
    )
