"""What `tangram trace report` says of a trace: a row for each rank, and what is wrong."""

from __future__ import annotations

import json
import math
import os
import time
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np

from tangram.errors import UserError
from tangram.layout import Mesh
from tangram.planner.cost.goodput import FILE as FAILURES
from tangram.tracing.blame import findings, lifeless
from tangram.tracing.files.format import End, Kind
from tangram.tracing.files.stacks import rank_words
from tangram.tracing.finding import Finding
from tangram.tracing.reading import VERDICT, RankTrace, attempts, missing, read, trace_folder
from tangram.tracing.slow import coords_of, own_times
from tangram.tracing.spikes import spike_findings
from tangram.tracing.watch import outside_of

MOST_ROWS = 64
"""Ranks that are shown, those with findings first."""
MOST_KINDS = 6
"""Kinds of calls that are named."""
MOST_ATTEMPTS = 5
"""The newest others of a run that are told of."""


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
    basis: str = ""
    """What the calls of a step were held against, in words."""

    @property
    def slow_share(self) -> float:
        """Of a step, what ranks cost that are slower than their peers."""
        steps = [(one.step_ms, one.without_ms) for one in self.findings if one.kind == "slow" and one.step_ms]
        return 1 - steps[-1][1] / steps[-1][0] if steps else 0.0

    def as_json(self) -> dict[str, object]:
        return {
            "folder": str(self.folder),
            "state": self.state,
            "ranks": [dict(zip(self.headers, row, strict=True)) for row in self.rows],
            "findings": [one.as_json() for one in self.findings],
            "notes": [*self.notes],
            "basis": self.basis,
        }


def report(folder: Path) -> TraceReport:
    """Of a run's folder, or that of its trace; while it runs, too. Raises UserError for what is no trace."""
    return read_report(folder)[0]


def read_report(folder: Path) -> tuple[TraceReport, list[RankTrace]]:
    """The same with the traces that it is of."""
    folder = trace_folder(folder)
    traces = read(folder)
    outside = outside_of(traces, time.monotonic_ns())
    verdict = verdict_of(folder)
    if verdict is not None:
        state, found = f"ended badly: {verdict[0]}", verdict[1]
    else:
        found = findings(traces, outside)
        state = _state(traces, outside.now is not None)
    axes = axes_of(traces)
    waits = (f"wait {one} ms" for one in axes)
    headers = ("rank", "place", "state", "step", "step ms", "own ms", "cpu ms", *waits, "memory MB")
    blamed = {rank for one in found for rank in one.ranks}
    shown = sorted(traces, key=lambda trace: (trace.rank not in blamed, trace.rank))[:MOST_ROWS]
    rows = tuple(row_of(trace, axes) for trace in sorted(shown, key=lambda trace: trace.rank))
    notes = _notes(folder, traces, len(shown))
    return TraceReport(folder, state, headers, rows, tuple(found), notes, _basis(traces)), traces


def _basis(traces: Sequence[RankTrace]) -> str:
    """What calls were held against: the plan, and of which kinds; of all others what ranks do in their first steps."""
    planned = dict.fromkeys(words for trace in traces for words in trace.planned)
    if not planned:
        return "calls are held against what each rank did in its first steps, and ranks against each other"
    some = [*planned][:MOST_KINDS]
    over = len(planned) - len(some)
    more = f" and {over} kind{'s' if over > 1 else ''} more" if over else ""
    return f"held against the plan in each step: {', '.join(some)}{more}; all other calls against the first steps"


def verdict_of(folder: Path) -> tuple[str, list[Finding]] | None:
    """What was found when the run ended badly: a sentence, and whose fault."""
    path = folder / VERDICT
    if not path.exists():
        return None
    try:
        words = cast("dict[str, Any]", json.loads(path.read_text(encoding="utf-8")))
        return str(words["sentence"]), [Finding.of_json(one) for one in words["findings"]]
    except (OSError, ValueError, KeyError, TypeError):  # torn, as where the disk was full
        return None


def _state(traces: Sequence[RankTrace], alive: bool) -> str:
    done = sum(trace.live.end is End.FINISHED for trace in traces)
    where = _step_words(traces)
    if done == len(traces):
        return f"ended well, after {where}"
    if alive and any(trace.live.end is End.RUNNING for trace in traces):
        return f"runs, in {where}"
    failed = [trace.rank for trace in traces if trace.live.end is End.FAILED]
    return f"ended in {where}" + (f" with an error on {rank_words(failed)}" if failed else ", without a word")


def _step_words(traces: Sequence[RankTrace]) -> str:
    first, last = (pick(trace.live.step for trace in traces) for pick in (min, max))
    return f"step {first}" if first == last else f"steps {first} to {last}"


def _notes(folder: Path, traces: Sequence[RankTrace], shown: int) -> tuple[str, ...]:
    notes = _attempts(folder)
    if (folder / VERDICT).exists() and verdict_of(folder) is None:
        notes.append(
            f"{VERDICT} is cut off or foreign: why the run ended is worked out anew, of the ranks' files alone"
        )
    if other := _other_plan(folder, traces[0]):
        notes.append(other)
    if absent := missing([*traces]):
        have = "has" if len(absent) == 1 else "have"
        notes.append(f"{rank_words(absent)} of {traces[0].world} {have} no trace here: findings are of the others")
    torn = [trace.rank for trace in traces if _lacks_names(trace)]
    if torn:
        notes.append(f"the names file of {rank_words(torn)} is cut off or gone: what it noted is not among these")
    elif len(traces) > 1 and all(len(trace.rows) and not trace.groups for trace in traces):
        notes.append(
            "no collective was recorded: on the CPU groups are made within the recording and with its back end; on "
            "accelerators none is"
        )
    if shown < len(traces):
        notes.append(f"{shown} of {len(traces)} ranks are shown, those with findings first")
    clocks = {trace.host: trace.begun_wall - trace.begun for trace in traces}
    if clocks and max(clocks.values()) - min(clocks.values()) > 60e9 and len(clocks) > 1:
        notes.append("the clocks of hosts are apart by minutes: times of one host are not held against another's")
    return tuple(notes)


def _attempts(folder: Path) -> list[str]:
    """Of a run that was begun, or went on, several times: which of them this trace is of, and how the others ended."""
    every = attempts(folder.parent)
    if folder not in every or len(every) < 2:
        return []
    others = [(number, path) for number, path in enumerate(every, 1) if path != folder]
    notes = [f"this is attempt {every.index(folder) + 1} of {len(every)}"]
    if len(others) > MOST_ATTEMPTS:
        notes.append(f"of {len(others)} others only how the last {MOST_ATTEMPTS} ended is shown")
    return notes + [f"attempt {n} {_ended(path)} (--attempt {n} shows it)" for n, path in others[-MOST_ATTEMPTS:]]


def _ended(folder: Path) -> str:
    """How another attempt ended, or that it runs."""
    if (verdict := verdict_of(folder)) is not None:
        return f"ended badly: {verdict[0]}"
    try:
        traces = read(folder)
    except UserError as error:
        return f"cannot be read: {error}"
    return _state(traces, outside_of(traces, time.monotonic_ns()).now is not None)


def _lacks_names(trace: RankTrace) -> bool:
    calls = trace.rows["calls"].any() and not trace.sites
    return bool(calls) or trace.live.deviations > len(trace.deviations)


def _other_plan(folder: Path, trace: RankTrace) -> str:
    """A word on the plan beside a trace, where its mesh is not the trace's."""
    path, mesh = folder.parent / "plan.toml", str(trace.about.get("mesh", ""))
    try:
        if trace_folder(folder.parent) != folder:  # one of an older plan, which a run that resumed has replaced
            return ""
        other = str(tomllib.loads(path.read_text(encoding="utf-8")).get("mesh", ""))
        if not mesh or not other or Mesh.parse(other) == Mesh.parse(mesh):
            return ""
    except (OSError, ValueError, UserError):  # none, or none that can be read: findings need it not
        return ""
    return f'"{path}" has the mesh "{other}" and the trace "{mesh}": it is not the plan that ran; the trace\'s is used'


def axes_of(traces: Sequence[RankTrace]) -> list[str]:
    """Over what groups of more than one rank collectives were called."""
    found: dict[str, None] = {}
    for trace in traces:
        for group in trace.groups.values():
            if len(group["ranks"]) > 1 and trace.rows["wait_us"][:, int(group["slot"])].any():
                found[str(group["axes"])] = None
    return [*found]


def row_of(trace: RankTrace, axes: Sequence[str]) -> tuple[str, ...]:
    """The medians of its steps but the first, which is longer, and the last of a run that ended, which has the end."""
    count, ended = len(trace.rows), trace.live.end is not End.RUNNING
    some = slice(int(count > 1), count - int(ended and count > 2))
    rows = trace.rows[some]
    slots = {str(group["axes"]): int(group["slot"]) for group in trace.groups.values()}
    own = own_times(trace)[some].sum(1)
    waits = (rows["wait_us"][:, slots[one]] if one in slots else None for one in axes)
    return (
        str(trace.rank),
        place_of(trace),
        doing(trace),
        str(trace.live.step),
        _median_ms(rows["nanoseconds"] / 1e3),
        _median_ms(own),
        _median_ms(rows["cpu_us"]) if rows["cpu_us"].any() else "",
        *("" if some is None else _median_ms(some) for some in waits),
        f"{int(trace.rows['memory_kb'].max()) * 1024 / 1e6:,.0f}" if len(trace.rows) else "",
    )


def _median_ms(microseconds: Any) -> str:
    return f"{np.median(microseconds) / 1e3:,.1f}" if len(microseconds) else ""


def place_of(trace: RankTrace) -> str:
    return " ".join(f"{axis}={at}" for axis, at in coords_of(trace).items())


def doing(trace: RankTrace) -> str:
    if trace.live.end is not End.RUNNING:
        return trace.live.end.name.lower()
    call = trace.waiting
    return f"{trace.live.phase.word}: {call.op} over {call.axes}" if call is not None else trace.live.phase.word


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
        rows = [dict(zip(HEADERS, row, strict=True)) for row in self.rows]
        return {"title": self.title, "over": self.over, "ranks": rows, "lines": [*self.lines]}


def top(folder: Path, shown: int = SHOWN) -> Top:
    """Look at a run once. Raises UserError where there is no trace."""
    folder = trace_folder(folder)
    traces, now = read(folder), time.monotonic_ns()
    outside, verdict = outside_of(traces, now), verdict_of(folder)
    ended = verdict is not None or (outside.now is None and {trace.host for trace in traces} == {os.uname().nodename})
    running = [trace for trace in traces if trace.live.end is End.RUNNING and not ended]
    order = sorted(traces, key=lambda trace: (-_own(trace), trace.rank))
    gone = dict.fromkeys([trace.rank for trace in traces if ended], "ended") | lifeless(traces, outside)
    rows = tuple(_row(trace, now, gone.get(trace.rank, "")) for trace in order[:shown])
    more = f", {len(traces) - shown} more not shown" if len(traces) > shown else ""
    title = f"{folder}: {len(running)} of {traces[0].world} ranks run, {_step_words(traces)}{more}"
    spikes = tuple(one.text for one in spike_findings(traces)[-SPIKES:])
    return Top(title, rows, not running, (*([f"ended badly: {verdict[0]}"] if verdict else []), *spikes))


def looks(folder: Path, seconds: float) -> Iterator[Top]:
    """Look at a run each so many seconds until it is over; one that ended badly may be begun again, which is waited
    for. Raises UserError where there is no trace, or none any more."""
    alive, torn = -math.inf, 0
    while True:
        try:
            newest = trace_folder(folder)
            found, torn = top(newest), 0
        except UserError:  # ranks of the next attempt are just making their files
            torn += 1
            if torn > TORN:
                raise
        else:
            yield found
            now = time.monotonic()
            alive = alive if found.over else now
            if found.over and (newest == folder or now - alive >= _patience(newest)):
                return
        time.sleep(seconds)


TORN = 5
"""Looks in a row that find no whole trace, after which there is none."""
RECOVERS, SETTLES = 60.0, 5.0
"""Seconds until the next attempt begins at most, where somebody recovers the run, and until it is known whether."""


def _patience(newest: Path) -> float:
    """For how many seconds a run may yet go on after an attempt: `tangram launch` notes each failure."""
    if verdict_of(newest) is None:
        return 0.0
    return RECOVERS if (newest.parent / FAILURES).exists() else SETTLES


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
