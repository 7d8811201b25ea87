"""What `tangram trace report` says of a trace: a row for each rank, and what is wrong."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np

from tangram.layout import Mesh
from tangram.tracing.blame import Finding, findings
from tangram.tracing.format import End
from tangram.tracing.reading import VERDICT, RankTrace, missing, read, trace_folder
from tangram.tracing.slow import own_times
from tangram.tracing.stacks import ranks_said
from tangram.tracing.watch import outside_of

MOST_ROWS = 64
"""Ranks that are shown, those with findings first."""


@dataclass(frozen=True)
class TraceReport:
    """A trace as people and programs are told of it."""

    folder: Path
    state: str
    """How the run goes, or ended, as a sentence."""
    headers: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    findings: tuple[Finding, ...]
    notes: tuple[str, ...]
    """Of the trace itself, as ranks that are missing."""

    def as_json(self) -> dict[str, object]:
        """One document."""
        return {
            "folder": str(self.folder),
            "state": self.state,
            "ranks": [dict(zip(self.headers, row, strict=True)) for row in self.rows],
            "findings": [one.as_json() for one in self.findings],
            "notes": [*self.notes],
        }


def report(folder: Path) -> TraceReport:
    """Of a run's folder, or that of its trace; while it runs, too. Raises UserError for what is no trace."""
    folder = trace_folder(folder)
    traces = read(folder)
    outside = outside_of(traces, time.monotonic_ns())
    verdict = verdict_of(folder)
    if verdict is not None:
        state, found = f"ended badly: {verdict[0]}", verdict[1]
    else:
        found = findings(traces, outside)
        state = _state(traces, outside.now is not None)
    axes = _axes(traces)
    headers = ("rank", "place", "state", "step", "step ms", "own ms", *(f"wait {one} ms" for one in axes), "memory MB")
    blamed = {rank for one in found for rank in one.ranks}
    shown = sorted(traces, key=lambda trace: (trace.rank not in blamed, trace.rank))[:MOST_ROWS]
    rows = tuple(_row(trace, axes) for trace in sorted(shown, key=lambda trace: trace.rank))
    return TraceReport(folder, state, headers, rows, tuple(found), _notes(traces, len(shown)))


def verdict_of(folder: Path) -> tuple[str, list[Finding]] | None:
    """What was found when the run ended badly: a sentence, and whose fault."""
    path = folder / VERDICT
    if not path.exists():
        return None
    try:
        words = cast("dict[str, Any]", json.loads(path.read_text(encoding="utf-8")))
        return str(words["sentence"]), [Finding.of_json(one) for one in words["findings"]]
    except (ValueError, KeyError, TypeError):  # torn, as where the disk was full
        return None


def _state(traces: Sequence[RankTrace], alive: bool) -> str:
    steps = [trace.live.step for trace in traces]
    done = sum(trace.live.end is End.FINISHED for trace in traces)
    where = f"step {min(steps)}" if min(steps) == max(steps) else f"steps {min(steps)} to {max(steps)}"
    if done == len(traces):
        return f"ended well, after {where}"
    if alive:
        return f"runs, in {where}"
    failed = [trace.rank for trace in traces if trace.live.end is End.FAILED]
    return f"ended in {where}" + (f" with an error on {ranks_said(failed)}" if failed else ", without a word")


def _notes(traces: Sequence[RankTrace], shown: int) -> tuple[str, ...]:
    notes: list[str] = []
    if absent := missing([*traces]):
        notes.append(f"{ranks_said(absent)} of {traces[0].world} have no trace here: findings are of the others")
    if shown < len(traces):
        notes.append(f"{shown} of {len(traces)} ranks are shown, those with findings first")
    clocks = {trace.host: trace.begun_wall - trace.begun for trace in traces}
    if clocks and max(clocks.values()) - min(clocks.values()) > 60e9 and len(clocks) > 1:
        notes.append("the clocks of hosts are apart by minutes: times of one host are not held against another's")
    return tuple(notes)


def _axes(traces: Sequence[RankTrace]) -> list[str]:
    """Over what groups of more than one rank collectives were called."""
    found: dict[str, None] = {}
    for trace in traces:
        for group in trace.groups.values():
            if len(group["ranks"]) > 1 and trace.rows["wait_us"][:, int(group["slot"])].any():
                found[str(group["axes"])] = None
    return [*found]


def _row(trace: RankTrace, axes: Sequence[str]) -> tuple[str, ...]:
    """The medians of its steps but the first, which is longer."""
    rows = trace.rows[1:] if len(trace.rows) > 1 else trace.rows
    slots = {str(group["axes"]): int(group["slot"]) for group in trace.groups.values()}
    own = own_times(trace)[-len(rows) :].sum(1)
    waits = (rows["wait_us"][:, slots[one]] if one in slots else None for one in axes)
    return (
        str(trace.rank),
        _place(trace),
        _doing(trace),
        str(trace.live.step),
        _median_ms(rows["nanoseconds"] / 1e3),
        _median_ms(own),
        *("" if some is None else _median_ms(some) for some in waits),
        f"{trace.rows['memory_kb'].max() * 1024 / 1e6:,.0f}" if len(trace.rows) else "",
    )


def _median_ms(microseconds: Any) -> str:
    return f"{np.median(microseconds) / 1e3:,.1f}" if len(microseconds) else ""


def _place(trace: RankTrace) -> str:
    mesh = str(trace.about.get("mesh", ""))
    return " ".join(f"{axis}={at}" for axis, at in Mesh.parse(mesh).coords(trace.rank).items()) if mesh else ""


def _doing(trace: RankTrace) -> str:
    if trace.live.end is not End.RUNNING:
        return trace.live.end.name.lower()
    call = trace.waiting
    return f"{trace.live.phase.word}: {call.op} over {call.axes}" if call is not None else trace.live.phase.word
