"""A step as it would run, action by action on every stage, for Perfetto (ui.perfetto.dev) or chrome://tracing.

Forwards and backwards take what the model of time says of their virtual stages, and are played through the schedule's
own table (`schema.schedules`); what DP ranks move beyond computation and the optimiser follow. So it is also a check of
the closed form, which `planner.cost.step_time` searches with. Of many micro-batches the first `MOST` are shown.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from tangram.models.outline import Outline
from tangram.planner.cost.step_time import passes_of, seconds
from tangram.planner.space.grid import Grid
from tangram.planner.space.layers_per_stage import sizes
from tangram.planner.space.schedule_formulas import SCHEDULES
from tangram.planner.space.setting import Setting
from tangram.schema.schedule_table import Action, Schedule, played
from tangram.schema.schedules import MAKERS

__all__ = ["MOST", "Event", "Play", "as_trace", "events_of", "play", "timeline"]

MOST = 64
"""Micro-batches that are shown."""
HEADS = {"F": 1 / 3, "B": 2 / 3, "I": 1 / 3, "W": 1 / 3}
"""Of the head's three matmuls one is the forward's, and one makes gradients of weights."""
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


@dataclass(frozen=True)
class Play:
    """A step as it would run."""

    blocks: tuple[int, ...]
    """Of each virtual stage of the model, in the model's order."""
    rank_of: tuple[int, ...]
    """The rank that has each virtual stage."""
    rows: tuple[tuple[tuple[float, float, Action], ...], ...]
    """Of each rank when each action begins, and how long it takes."""
    after: tuple[tuple[str, float], ...]
    """What every rank does when all of that is done: what, and how long it takes."""

    @property
    def end(self) -> float:
        """Of the last action, in seconds from the first."""
        return max(start + took for row in self.rows for start, took, _ in row)

    @property
    def step(self) -> float:
        """With what comes after."""
        return self.end + sum(took for _, took in self.after)


def play(
    outline: Outline, one: Grid, setting: Setting, scales: Mapping[str, float] | None = None, most: int = MOST
) -> Play:
    """Of one configuration, at most `most` micro-batches; parts multiplied by `scales`, where there are some."""
    shown = Grid(**{f.name: getattr(one, f.name) for f in fields(Grid)} | {"batch": _shown(one, most)})
    known = scales or {}
    passes, tail = passes_of(outline, shown, setting), seconds(outline, shown, setting)
    ahead = sum(known.get(name, 1.0) * float(part[0]) for name, part in passes.forward.items()) / outline.layers
    back = sum(known.get(name, 1.0) * float(part[0]) for name, part in passes.backward.items()) / outline.layers
    head = known.get("head", 1.0) * float(passes.head[0])
    ranks, own, micros = int(one.pipeline[0]), int(one.virtual[0]), int(shown.micros[0])
    hop = known.get("stages", 1.0) * float(passes.hop[0]) / (2 * own)
    chunks = ranks * own
    blocks = sizes(outline.layers, chunks, int(one.ahead[0]), int(one.behind[0]))

    weights = min(known.get("products", 1.0) * float(passes.weights[0]) / outline.layers, back)

    def takes(action: Action) -> float:
        share = {"F": ahead, "B": back, "I": back - weights, "W": weights}[action.kind]
        last = head * HEADS[action.kind] if action.stage == chunks - 1 else 0.0
        sent = hop if ranks > 1 and action.kind != "W" else 0.0
        return blocks[action.stage] * share + last + sent

    # The rules of the space say which micro-batches a schedule takes: 1F1B takes fewer than stages, too.
    maker = MAKERS[SCHEDULES[int(one.schedule[0])].name]
    rows = tuple(tuple(maker.row(rank, ranks, own, micros)) for rank in range(ranks))
    table = Schedule(rows, maker.rank_of(ranks, chunks), micros)
    return Play(
        tuple(blocks),
        table.rank_of,
        tuple(tuple((start, takes(action), action) for start, action in row) for row in played(table, takes)),
        tuple(
            (kind, known.get(kind, 1.0) * float(np.broadcast_to(getattr(tail, kind), 1)[0]))
            for kind in ("data", "optimiser")
        ),
    )


def timeline(outline: Outline, one: Grid, setting: Setting, scales: Mapping[str, float] | None = None) -> list[Event]:
    """Of a grid of one configuration, its parts multiplied by `scales` where there are some."""
    return events_of(play(outline, one, setting, scales))


def events_of(found: Play) -> list[Event]:
    """What each rank does, and when."""
    own, events = len(found.blocks) > len(found.rows), list[Event]()
    for rank, row in enumerate(found.rows):
        for start, took, action in row:
            chunk = f" of virtual stage {action.stage}" if own else ""
            kind = KINDS[action.kind]
            events.append(Event(rank, f"{kind} {action.micro}{chunk}", kind, start, took))
        after = found.end
        for kind, took in found.after:
            events.append(Event(rank, kind, kind, after, took))
            after += took
    return events


def _shown(one: Grid, most: int) -> Any:
    """Samples of as many micro-batches as are shown, in whole rounds of the stages: two at least, which fill them."""
    if one.micros[0] <= max(most, 2 * one.pipeline[0]):
        return one.batch
    rounds = max(2, most // int(one.pipeline[0])) * one.pipeline
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
