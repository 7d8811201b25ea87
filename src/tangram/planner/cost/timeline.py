"""A step as it would run, action by action on every stage, for Perfetto (ui.perfetto.dev) or chrome://tracing.

Actions are played in the order of the schedule's own table (`schema.schedules`), and within each layer by layer: on
the lanes of its rank run the layer, what it waits for, and what links carry beside it, which is
parameters gathered in the order of their use, one layer ahead (ZeRO-3) or from the step's start on, and gradients
reduced behind each layer. So it is the reference of the closed form with which `planner.cost.step_time` searches: tests
draw configurations and compare. Of many micro-batches the first `MOST` are shown.

The trade-off: all ranks of a stage are alike, all layers take as long as the mean of them, and what is sent from stage
to stage has its link to itself.

A rank has a lane for computation and one for each link. Exchanges that a layer waits for go first; what runs beside
(parameters gathered ahead of use, gradients reduced behind it) has a link whenever no layer's own exchange does, in the
order in which it was begun. A layer waits until its parameters are there.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np

from tangram.models.outlines.outline import Outline
from tangram.planner.cost.block_time import PARTS as BLOCKS
from tangram.planner.cost.block_time import Pass
from tangram.planner.cost.step_time import hop_seconds, passes_of, seconds
from tangram.planner.space.grid import Grid
from tangram.planner.space.layers_per_stage import sizes
from tangram.planner.space.schedule_formulas import SCHEDULES
from tangram.planner.space.setting import Setting
from tangram.schema.schedule_table import Action, Schedule, ran
from tangram.schema.schedules import MAKERS

DONE = 1e-12
"""Seconds of work that is none: what is left of adding and taking away."""


@dataclass(frozen=True)
class Layer:
    """What one layer of a pass takes."""

    alone: float
    """Seconds in which no link carries anything of it."""
    after: float
    """Seconds after those, in which its own exchanges run, some of them beside the rest of its computation."""
    links: tuple[float, ...]
    """Of these seconds how many each link is busy."""


@dataclass
class Item:
    """Something that links carry beside computation."""

    left: list[float]
    """Seconds of each link."""


@dataclass
class Lanes:
    """Of a rank, as far as it has been played."""

    links: int
    now: float = 0.0
    queues: list[deque[Item]] = field(init=False)

    def __post_init__(self) -> None:
        """A queue for each link."""
        self.queues = [deque() for _ in range(self.links)]

    def begin(self, seconds: tuple[float, ...]) -> Item:
        """Something more beside computation, behind what is under way."""
        item = Item([took if took > DONE else 0.0 for took in seconds])
        for link, took in enumerate(item.left):
            if took:
                self.queues[link].append(item)
        return item

    def run(self, layer: Layer, share: float = 1.0) -> None:
        """A layer; what runs beside has `share` of the time in which it leaves links free."""
        for link in range(self.links):
            self._carry(link, (layer.alone + max(layer.after - layer.links[link], 0.0)) * share)
        self.now += layer.alone + layer.after

    def idle(self, until: float) -> None:
        """Nothing is computed until then."""
        if until > self.now:
            for link in range(self.links):
                self._carry(link, until - self.now)
            self.now = until

    def wait(self, item: Item | None = None) -> None:
        """Until an item is done; without one until all are."""
        longest = 0.0
        for link, queue in enumerate(self.queues):
            if item is None or item.left[link] > 0:
                longest = max(longest, self._until(link, queue, item))
        self.idle(self.now + longest * (1 + 1e-12))

    def _until(self, link: int, queue: deque[Item], item: Item | None) -> float:
        """Seconds that a link needs for an item and all before it."""
        took = 0.0
        for one in queue:
            took += one.left[link]
            if one is item:
                break
        return took

    def _carry(self, link: int, seconds: float) -> None:
        """So long a link is free for what runs beside."""
        queue = self.queues[link]
        while queue and seconds > 0:
            done = min(queue[0].left[link], seconds)
            queue[0].left[link] -= done
            seconds -= done
            if queue[0].left[link] <= DONE:
                queue[0].left[link] = 0.0
                queue.popleft()


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
    """Of each rank when each action begins, and how long it takes, with what it waits for."""
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


Links = tuple[float, ...]


@dataclass(frozen=True)
class _Took:
    """Of one layer, and of a step."""

    layers: Mapping[str, Layer]
    """By the kind of action."""
    head: float
    gather: Links
    reduce: Links
    always: bool
    """Whether every pass gathers, and every backward reduces (ZeRO-3); else the first and the last."""
    shares: Mapping[str, float]
    """By the kind of action, of the time in which a link is free how much what runs beside has."""
    hop: float
    after: tuple[tuple[str, float], ...]


def _took(outline: Outline, one: Grid, setting: Setting, scales: Mapping[str, float]) -> _Took:
    closed, one = seconds(outline, one, setting), setting.met(one)
    passes = passes_of(outline, one, setting)
    data, count = passes.data(outline, one, setting), outline.layers
    weights = scales.get("products", 1.0) * float(passes.weights[0]) / count
    ahead, back = (_layer(which, scales, count) for which in (passes.forward, passes.backward))
    alone = min(weights, back.alone)
    kinds = {
        "F": ahead, "B": back,
        "I": Layer(back.alone - alone, back.after, back.links), "W": Layer(alone, 0.0, (0.0,) * len(back.links)),
    }  # fmt: skip
    always, framework, each = bool(one.zero[0] >= 3), setting.framework, float(one.pipeline[0]) / count

    def links(of: Any) -> Links:
        return tuple(float(part) * scales.get("data", 1.0) * each for part in of[:, 0])

    return _Took(
        kinds,
        scales.get("head", 1.0) * float(passes.head[0]),
        links(data.gather),
        links(data.reduce),
        always,
        {kind: 1.0 if always else framework.overlap_gather if kind == "F" else framework.overlap_reduce
         for kind in kinds},
        scales.get("stages", 1.0) * float(hop_seconds(outline, one, setting)[0]),
        tuple(
            (kind, scales.get(kind, 1.0) * float(np.broadcast_to(getattr(closed, kind), 1)[0]))
            for kind in ("optimiser", "host")
        ),
    )  # fmt: skip


def _layer(of: Pass, scales: Mapping[str, float], count: int) -> Layer:
    """Its links are busy behind what no exchange of its runs beside."""
    took = sum(scales.get(name, 1.0) * float(getattr(of, name)[0]) for name in BLOCKS) / count
    links = tuple(min(float(part) / count, took) for part in of.links[:, 0])
    return Layer(took - max(links), max(links), links)


@dataclass
class _Step:
    """A step that is being played."""

    took: _Took
    table: Schedule
    blocks: list[int]
    lanes: list[Lanes] = field(init=False)
    parameters: dict[int, list[Item]] = field(init=False)
    """Of each virtual stage, by layer, where they are gathered once."""
    last: dict[int, Action] = field(init=False)
    """Of each virtual stage with what its gradients are whole."""

    def __post_init__(self) -> None:
        """What is gathered once is begun everywhere at the start, in the order of its use."""
        self.lanes = [Lanes(len(self.took.gather)) for _ in self.table.rows]
        self.last = {one.stage: one for row in self.table.rows for one in row if one.kind in "BW"}
        self.parameters = {}
        if not self.took.always:
            for stage, rank in enumerate(self.table.rank_of):
                begun = [self.lanes[rank].begin(self.took.gather) for _ in range(self.blocks[stage])]
                self.parameters[stage] = begun

    @property
    def alone(self) -> bool:
        """Whether ranks have one virtual stage, so that they wait for what they send."""
        return len(self.blocks) == self.table.ranks

    def until(self, action: Action, start: float) -> float:
        """Play an action from when it can begin."""
        lanes, ends = self.lanes[self.table.rank_of[action.stage]], action.stage == len(self.blocks) - 1
        lanes.idle(start)
        head = Layer(self.took.head * HEADS[action.kind], 0.0, (0.0,) * lanes.links)
        if ends and action.kind != "F":
            lanes.run(head)
        if self.took.always:
            self._gathering(lanes, action)
        else:
            self._once(lanes, action)
        if ends and action.kind == "F":
            lanes.run(head)
        sends = not ends if action.kind == "F" else action.stage > 0 and action.kind != "W"
        if sends and self.alone:
            lanes.idle(lanes.now + self.took.hop)
        return lanes.now

    def _gathering(self, lanes: Lanes, action: Action) -> None:
        """Each layer's parameters while the one before is computed; a backward waits for its gradients."""
        count, layer = self.blocks[action.stage], self.took.layers[action.kind]
        gathers, reduces = action.kind != "W", action.kind in "BW"
        coming = lanes.begin(self.took.gather) if gathers else None
        for i in range(count):
            if coming is not None:
                lanes.wait(coming)
                coming = lanes.begin(self.took.gather) if i + 1 < count else None
            lanes.run(layer)
            if reduces:
                lanes.begin(self.took.reduce)
        if reduces:
            lanes.wait()

    def _once(self, lanes: Lanes, action: Action) -> None:
        """The first forward waits for its parameters, behind the last backward gradients are reduced."""
        layer, share = self.took.layers[action.kind], self.took.shares[action.kind]
        last = self.last.get(action.stage) == action
        coming = self.parameters.pop(action.stage, []) if action.kind == "F" else []
        for i in range(self.blocks[action.stage]):
            if coming:
                lanes.wait(coming[i])
            lanes.run(layer, share)
            if last:
                lanes.begin(self.took.reduce)


def play(
    outline: Outline, one: Grid, setting: Setting, scales: Mapping[str, float] | None = None, most: int = MOST
) -> Play:
    """Of one configuration, at most `most` micro-batches; parts multiplied by `scales`, where there are some."""
    shown = Grid(**{f.name: getattr(one, f.name) for f in fields(Grid)} | {"batch": _shown(one, most)})
    ranks, own, micros = int(one.pipeline[0]), int(one.virtual[0]), int(shown.micros[0])
    blocks = sizes(outline.layers, ranks * own, int(one.ahead[0]), int(one.behind[0]))
    # The rules of the space say which micro-batches a schedule takes: 1F1B takes fewer than stages, too.
    maker = MAKERS[SCHEDULES[int(one.schedule[0])].name]
    rows = tuple(tuple(maker.row(rank, ranks, own, micros)) for rank in range(ranks))
    step = _Step(
        _took(outline, shown, setting, scales or {}), Schedule(rows, maker.rank_of(ranks, ranks * own), micros), blocks
    )
    played = ran(step.table, step.until, 0.0 if step.alone else step.took.hop)
    end = max(lanes.now for lanes in step.lanes)
    for lanes in step.lanes:
        lanes.wait()
    data = max(0.0, max(lanes.now for lanes in step.lanes) - end)
    return Play(
        tuple(blocks),
        step.table.rank_of,
        tuple(tuple((start, until - start, action) for start, until, action in row) for row in played),
        (("data", data), *step.took.after),
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
