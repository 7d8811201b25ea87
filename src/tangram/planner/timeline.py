"""A step as it would run, action by action on every stage, for Perfetto (ui.perfetto.dev) or chrome://tracing.

Forwards and backwards take what the model of time says of their chunks, and are played through the schedule's own
table (`planner.schedules`); what data ranks move beyond computation and the optimiser follow. So it is also a check of
the closed form, which `planner.time` searches with. Of many micro-batches the first `MOST` are shown.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from tangram.models.outline import Outline
from tangram.planner.actions import Action, played
from tangram.planner.grid import Grid
from tangram.planner.pipelines import SCHEDULES
from tangram.planner.schedules import micros_unlike, schedule
from tangram.planner.setting import Setting
from tangram.planner.time import passes_of, seconds

__all__ = ["MOST", "Event", "as_trace", "timeline"]

MOST = 64
"""Micro-batches that are shown."""
HEADS = {"F": 1 / 3, "B": 2 / 3, "I": 1 / 3, "W": 1 / 3}
"""Of the head's three products one is the forward's, and one makes gradients of weights."""
KINDS = {"F": "forward", "B": "backward", "I": "backward of inputs", "W": "backward of weights"}


@dataclass(frozen=True)
class Event:
    """Something that a rank of a stage does."""

    rank: int
    name: str
    kind: str
    """One of `KINDS`, "data" or "optimiser"."""
    start: float
    seconds: float


def timeline(outline: Outline, one: Grid, setting: Setting, scales: Mapping[str, float] | None = None) -> list[Event]:
    """Of a grid of one configuration, its parts multiplied by `scales` where there are some."""
    shown = Grid(**{f.name: getattr(one, f.name) for f in fields(Grid)} | {"batch": _shown(one)})
    known = scales or {}
    passes, tail = passes_of(outline, shown, setting), seconds(outline, shown, setting)
    ahead = sum(known.get(name, 1.0) * float(part[0]) for name, part in passes.forward.items()) / outline.layers
    back = sum(known.get(name, 1.0) * float(part[0]) for name, part in passes.backward.items()) / outline.layers
    head = known.get("head", 1.0) * float(passes.head[0])
    ranks, own, micros = int(one.pipeline[0]), int(one.virtual[0]), int(shown.micros[0])
    hop = known.get("stages", 1.0) * float(passes.hop[0]) / (2 * own)
    chunks = ranks * own
    blocks = [outline.layers // chunks + (i < outline.layers % chunks) for i in range(chunks)]

    weights = min(known.get("products", 1.0) * float(passes.weights[0]) / outline.layers, back)

    def takes(action: Action) -> float:
        share = {"F": ahead, "B": back, "I": back - weights, "W": weights}[action.kind]
        last = head * HEADS[action.kind] if action.stage == chunks - 1 else 0.0
        sent = hop if ranks > 1 and action.kind != "W" else 0.0
        return blocks[action.stage] * share + last + sent

    name = SCHEDULES[int(one.schedule[0])].name
    name = "GPipe" if micros_unlike(name, ranks, micros) else name
    began = played(schedule(name, ranks, chunks, micros), takes)
    found: list[Event] = []
    for rank, row in enumerate(began):
        for start, action in row:
            kind = KINDS[action.kind]
            chunk = f" of chunk {action.stage}" if own > 1 else ""
            found.append(Event(rank, f"{kind} {action.micro}{chunk}", kind, start, takes(action)))
    end = max(event.start + event.seconds for event in found)
    for rank in range(ranks):
        after = end
        for kind in ("data", "optimiser"):
            took = known.get(kind, 1.0) * float(np.broadcast_to(getattr(tail, kind), 1)[0])
            found.append(Event(rank, kind, kind, after, took))
            after += took
    return found


def _shown(one: Grid) -> Any:
    """Samples of as many micro-batches as are shown, in whole rounds of the stages."""
    if one.micros[0] <= MOST:
        return one.batch
    rounds = max(1, MOST // int(one.pipeline[0])) * one.pipeline
    return rounds * one.data * one.micro


def as_trace(events: list[Event]) -> dict[str, Any]:
    """The JSON object of the trace event format (microseconds): a thread for each stage."""
    names = [
        {"name": "thread_name", "ph": "M", "pid": 0, "tid": rank, "args": {"name": f"stage {rank}"}}
        for rank in sorted({event.rank for event in events})
    ]
    played_events = [
        {
            "name": event.name, "cat": event.kind, "ph": "X", "pid": 0, "tid": event.rank,
            "ts": event.start * 1e6, "dur": event.seconds * 1e6,
        }
        for event in events
    ]  # fmt: skip
    return {"displayTimeUnit": "ms", "traceEvents": [*names, *played_events]}
