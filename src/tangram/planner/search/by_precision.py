"""The quickest strategies for what is asked, over every type that matmuls may be computed in.

Each type is a search of its own, with its own rates and corrections; one that comes later looks only for what is as
quick as the best of those before.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from tangram.hardware.catalogue.cluster import Cluster
from tangram.models.outlines.outline import Outline
from tangram.planner.cost.calibration import Learned
from tangram.planner.legality.engine import legal
from tangram.planner.legality.enumerate import Request
from tangram.planner.search.branch_and_bound import quickest, search
from tangram.planner.search.evaluate import CutRequest
from tangram.planner.search.strategy import Ask, Choice, described, safe, setting_of
from tangram.planner.space.grid import Grid, grid

__all__ = ["Ranked", "among", "by_step", "ranked", "reached"]


@dataclass(frozen=True)
class Ranked:
    """What was found."""

    choices: tuple[Choice, ...]
    """The fastest first."""
    smallest: Choice
    """What needs least memory, whether it fits or not."""
    looked: int
    """Configurations that were evaluated."""


def ranked(
    outline: Outline, cluster: Cluster, ask: Ask, request: Request, limit: float, most: int, learned: Learned,
    within: float = math.inf,
) -> Ranked:  # fmt: skip
    """The `most` fastest whose steps take at most `within` seconds, and of which nine of ten runs stay within `limit`
    bytes. Raises UserError where nothing is legal."""
    choices: list[Choice] = []
    smallest: list[Choice] = []
    looked = 0
    for one in ask.each():
        setting = setting_of(cluster, one)
        scales = learned.scales(setting.device.name, setting)
        found = search(outline, request, setting, safe(limit), most, scales, within)
        choices += described(outline, found.grid, setting, one, limit, learned)
        smallest += described(outline, found.smallest, setting, one, limit, learned)
        looked += found.looked
        if len(choices) >= most:
            within = min(within, sorted(choice.step for choice in choices)[most - 1])
    return Ranked(by_step(choices)[:most], min(smallest, key=lambda one: one.memory), looked)


def reached(
    outline: Outline, cluster: Cluster, ask: Ask, request: Request, limit: float, learned: Learned,
    known: Sequence[Choice],
) -> float:  # fmt: skip
    """Seconds in which some of the `known` strategies would be done for this request: what is best is no slower.
    Infinite where none of them is legal and fits."""
    least = math.inf
    for one in ask.each():
        rows, setting = _rows(outline, request, one, known), setting_of(cluster, one)
        if not len(rows):
            continue
        scales = learned.scales(setting.device.name, setting)
        wanted = CutRequest(outline, setting, safe(limit), scales, request.able)
        _, step, _ = wanted.evaluated(wanted.least_again(rows))
        least = min(least, float(step.min(initial=math.inf)))
    return least * (1 + 1e-9)  # as sums of floats in another order may be


def among(
    outline: Outline, cluster: Cluster, ask: Ask, request: Request, limit: float, learned: Learned,
    known: Sequence[Choice],
) -> tuple[Choice, ...]:  # fmt: skip
    """The best for this request of the `known` strategies, with their layers cut and recomputed anew; none where none
    fits. Of all strategies it is the best where the others that fit are no quicker now than they were before."""
    found: list[Choice] = []
    for one in ask.each():
        rows, setting = _rows(outline, request, one, known), setting_of(cluster, one)
        if not len(rows):
            continue
        wanted = CutRequest(outline, setting, safe(limit), learned.scales(setting.device.name, setting), request.able)
        best = quickest(wanted, replace(rows, ahead=np.zeros(len(rows)), behind=np.zeros(len(rows))))
        found += described(outline, best, setting, one, limit, learned)
    return by_step(found)[:1]


def _rows(outline: Outline, request: Request, ask: Ask, known: Sequence[Choice]) -> Grid:
    """Known strategies in one type, for this request, as far as they are legal."""
    rows = [choice.at for choice in known if choice.precision == ask.precision]
    columns = {name: np.array([row[name] for row in rows]) for name in known[0].at}
    parallel = (columns["tensor"] > 1) & (request.sequence % (columns["context"] * columns["tensor"]) == 0)
    columns |= {"batch": request.batch, "sequence": request.sequence, "sequence_parallel": parallel * 1.0}
    found = grid(**columns)
    return found.take(legal(outline, found))


def by_step(choices: Sequence[Choice]) -> tuple[Choice, ...]:
    """The fastest first, of those the smallest."""
    return tuple(sorted(choices, key=lambda one: (one.step, one.memory)))
