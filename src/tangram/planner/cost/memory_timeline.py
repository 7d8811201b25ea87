"""Bytes of every stage's ranks over the time of a step: `planner.cost.memory`'s numbers, played through the schedule.

    always             parameters, gradients, optimiser's states, spare gradients, workspaces, context
    forward to end     what a micro-batch keeps on its virtual stage (of a backward in two parts: until the second is
                       done)
      of backward
    while it works     a forward: what FSDP gathers, the last virtual stage's logits; a backward: what is gathered and
                       reduced,
                       and the larger of logits with their gradient and what is recomputed beside the widest gradient

It is the same model as `planner.cost.memory`'s closed form and so a check of it: a test draws configurations of every
schedule and compares the peaks. The closed form is what a search can afford; this knows which layers lie on which
virtual stage.

The trade-off: what works is taken to need its most from its beginning to its end.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from tangram.models.outlines.outline import Outline
from tangram.planner.cost.memory import Stage, context_of, fresh, stage, takes_of
from tangram.planner.cost.timeline import Play
from tangram.planner.space.grid import Array, Grid
from tangram.planner.space.layers_per_stage import counts_of
from tangram.planner.space.optimisers_and_offload import away
from tangram.planner.space.setting import Setting
from tangram.schema.schedule_table import Action

PARTS = (
    "parameters", "gradients", "optimiser", "activations", "logits", "again", "gathered", "step", "workspace",
    "reserve", "context",
)  # fmt: skip


@dataclass(frozen=True)
class Footprint:
    """Of the ranks of one stage."""

    rank: int
    """Of the pipeline."""
    at: Array
    """Seconds from which on bytes are as said; ascending, the last is the end of the step."""
    parts: dict[str, Array]
    """Bytes from then on, by name."""

    @property
    def total(self) -> Array:
        """As the device shows it."""
        return sum(self.parts.values(), np.zeros(len(self.at)))

    @property
    def peak(self) -> float:
        """The most at any time."""
        return float(self.total.max())

    @property
    def at_peak(self) -> dict[str, float]:
        """Bytes when it is most, by name."""
        most = int(np.argmax(self.total))
        return {name: float(values[most]) for name, values in self.parts.items()}


def footprints(outline: Outline, one: Grid, setting: Setting, found: Play) -> list[Footprint]:
    """Of each PP rank, of a grid of one configuration that has been played."""
    ends = np.cumsum(found.blocks)
    chunks = [
        _stage(outline, one, setting, [(end - count, end)], i == 0, i == len(ends) - 1)
        for i, (count, end) in enumerate(zip(found.blocks, ends, strict=True))
    ]
    made: list[Footprint] = []
    for rank, row in enumerate(found.rows):
        its = [i for i, where in enumerate(found.rank_of) if where == rank]
        ranges = [(ends[i] - found.blocks[i], ends[i]) for i in its]
        whole = _stage(outline, one, setting, ranges, 0 in its, len(ends) - 1 in its)
        made.append(_over_time(rank, whole, chunks, row, found.step, setting, one))
    return made


def _stage(
    outline: Outline, one: Grid, setting: Setting, ranges: list[tuple[Any, Any]], embeds: bool, heads: bool
) -> Stage:
    """Of layers in these ranges."""
    counts = [np.zeros(1) for _ in outline.runs]
    for start, end in ranges:
        more = counts_of(outline, np.full(1, float(start)), np.full(1, float(end)))
        counts = [count + other for count, other in zip(counts, more, strict=True)]
    takes = takes_of(outline, one, setting)
    return stage(outline, one, setting, counts, np.full(1, float(embeds)), np.full(1, float(heads)), takes)


def _over_time(
    rank: int, whole: Stage, chunks: list[Stage], row: tuple[tuple[float, float, Action], ...], end: float,
    setting: Setting, one: Grid,
) -> Footprint:  # fmt: skip
    states, weights, flows = away(int(one.offload[0]))  # what is offloaded to the host
    context = float(context_of(one, setting)[0])
    most = 2 * float(whole.largest[0]) if flows else np.inf
    at: list[float] = [0.0]
    flying: list[float] = [0.0]
    working: list[tuple[float, float, float]] = [(0.0, 0.0, 0.0)]
    now = 0.0
    for start, took, action in row:
        has = chunks[action.stage]
        each = float(has.kept[0] + has.embedded[0])
        now += each if action.kind == "F" else 0.0
        at, flying, working = [*at, start], [*flying, now], [*working, _working(action, has, whole)]
        now -= each if action.kind in "BW" else 0.0
        at, flying, working = [*at, start + took], [*flying, now], [*working, (0.0, 0.0, 0.0)]
    at, flying, working = [*at, end], [*flying, now], [*working, (0.0, 0.0, 0.0)]
    logits, again, gathered = np.array(working).T
    ones = np.ones(len(at))
    parts = {
        "parameters": ones * whole.parameters[0] * (not weights),
        "gradients": ones * whole.gradients[0] * (not weights),
        "optimiser": ones * whole.optimiser[0] * (1 - setting.away_share if states else 1.0),
        "activations": np.clip(
            np.array(flying) - float(fresh(whole, one, setting)[0]), 0.0, most
        ),  # what is left of adding and taking away
        "logits": logits,
        "again": again,
        "gathered": gathered,
        "step": np.where(np.arange(len(at)) == len(at) - 1, whole.step[0], 0.0),
        "workspace": ones * (whole.spare[0] + whole.workspace),
    }
    held = sum(parts.values(), np.zeros(len(at)))
    parts |= {"reserve": held * setting.framework.reserve, "context": ones * context}
    return Footprint(rank, np.array(at), parts)


def _working(action: Action, has: Stage, whole: Stage) -> tuple[float, float, float]:
    """Bytes of logits, of what is recomputed, and of what is gathered while an action runs."""
    head, again = float(has.logits[0]), float(has.again[0])
    if action.kind == "F":
        return head, 0.0, float(whole.gathered_ahead[0])
    return (
        (head, 0.0, float(whole.gathered_behind[0])) if head >= again else (0.0, again, float(whole.gathered_behind[0]))
    )
