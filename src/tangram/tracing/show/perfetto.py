"""A trace as Perfetto (ui.perfetto.dev) and chrome://tracing read it: a process for each rank.

Of each rank the steps that are kept, with their memory; and phases and waits as far back as its ring goes. Times are of
the wall clock of each machine, from the first that is in the file.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tangram.errors import UserError
from tangram.tracing.files.format import Kind
from tangram.tracing.reading import RankTrace, read
from tangram.tracing.show.page import WAIT, spans_of
from tangram.tracing.slow import coords_of

STEPS, PHASES, CALLS = 0, 1, 2
"""Threads of a rank's process."""


def export(folder: Path, path: Path, ranks: str = "") -> int:
    """Write a trace of some ranks ("0,3": these, "": all); how many events. Raises UserError."""
    traces = read(folder)
    if ranks:
        some = {int(word) if word.strip().isdigit() else -1 for word in ranks.split(",")}
        if absent := some - {trace.rank for trace in traces}:
            wrong = "no rank" if -1 in absent else f"rank {min(absent)} is not there"
            raise UserError(f'"{ranks}": {wrong}; give some of the {len(traces)} ranks of "{folder}", as 0,3')
        traces = [trace for trace in traces if trace.rank in some]
    try:
        return write_perfetto(path, traces)
    except OSError as error:
        raise UserError(f'"{path}" cannot be written: {error.strerror}') from None


def write_perfetto(path: Path, traces: Sequence[RankTrace]) -> int:
    """Write the file, event by event; how many. Raises OSError."""
    offsets = {trace.host: trace.begun_wall - trace.begun for trace in reversed(traces)}
    first = min((_begin(trace) + offsets[trace.host] for trace in traces), default=0)
    count = 0
    with path.open("w", encoding="utf-8") as file:
        file.write('{"displayTimeUnit": "ms", "traceEvents": [')
        for trace in traces:
            for event in events_of(trace, first - offsets[trace.host]):
                file.write(("," if count else "") + "\n" + json.dumps(event))
                count += 1
        file.write("\n]}\n")
    return count


def _begin(trace: RankTrace) -> int:
    """When the first that is there of a rank began, by its own clock: before its first step, as of its start."""
    events = trace.events
    begins = events["time"] - np.where(events["kind"] == Kind.EXIT, events["size"], 0)
    return min((int(one) for one in (*begins, *trace.rows["begin"][:1])), default=trace.begun)


def events_of(trace: RankTrace, zero: int) -> Iterator[dict[str, Any]]:
    """Of one rank, in microseconds from `zero`, a time of its own clock in ns."""
    rank = trace.rank
    place = " ".join(f"{axis}={at}" for axis, at in coords_of(trace).items())
    names = ("process_name", 0, f"rank {rank} {place}".strip()), *((("thread_name"), tid, name) for tid, name in _NAMES)
    for what, tid, name in names:
        yield {"name": what, "ph": "M", "pid": rank, "tid": tid, "args": {"name": name}}

    def span(tid: int, name: str, kind: str, at: int, took: int) -> dict[str, Any]:
        return {
            "name": name,
            "cat": kind,
            "ph": "X",
            "pid": rank,
            "tid": tid,
            "ts": (at - zero) / 1e3,
            "dur": took / 1e3,
        }

    for row in trace.rows:
        yield span(STEPS, f"step {row['step']}", "step", int(row["begin"]), int(row["nanoseconds"]))
        memory = {"memory MB": round(int(row["memory_kb"]) * 1024 / 1e6, 1)}
        yield {"name": "memory", "ph": "C", "pid": rank, "ts": (int(row["begin"]) - zero) / 1e3, "args": memory}
    for at, took, kind, text in spans_of(trace, 0):
        yield span(CALLS, text, "wait", at, took) if kind == WAIT else span(PHASES, text, "phase", at, took)


_NAMES = ((STEPS, "steps"), (PHASES, "phases"), (CALLS, "waits in collectives"))
