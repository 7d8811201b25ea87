"""Fronts (Pareto): what is not worse than anything else in both of two numbers.

    time against memory     the configurations of one number of devices of which none is as quick and needs less
    size against speed      over parts of a cluster, tokens a second against devices, or against what a token costs

The first is found as the search finds the quickest (`planner.search.branch_and_bound`): meshes are taken by their bound
of time; of each only what needs less memory than everything that is known to be quicker than the bound can be on the
front, and time is computed for that alone. Nothing else is left out, so it is the front of everything whose step is at
most `reach` times the shortest, which tests compare.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tangram.hardware.catalogue.cluster import Cluster
from tangram.models.outlines.outline import Outline
from tangram.planner.cost.calibration import published
from tangram.planner.cost.memory import needs
from tangram.planner.cost.step_time import Scales, scaled, seconds
from tangram.planner.legality.engine import facts_of, holding
from tangram.planner.legality.enumerate import Request, meshes, of_mesh
from tangram.planner.search.branch_and_bound import bounds_of, search
from tangram.planner.search.by_device_count import Sized, by_size
from tangram.planner.search.by_precision import by_step
from tangram.planner.search.objectives import Terms, objective
from tangram.planner.search.query import requested
from tangram.planner.search.strategy import Ask, Choice, described, limit_of, safe, setting_of
from tangram.planner.space.grid import Grid, joined
from tangram.planner.space.recompute import is_free
from tangram.planner.space.setting import Setting

__all__ = ["REACH", "Fronts", "Place", "front", "fronts", "memory_front"]

REACH = 2.0
"""How many times the shortest step is looked at."""


def front(points: NDArray[Any]) -> NDArray[np.bool_]:
    """Of n points of two numbers each, less being better, which none dominates; of equal points the first.

    One dominates another where it is not more in either and less in one.
    """
    order = np.lexsort((np.arange(len(points)), points[:, 1], points[:, 0]))
    second = points[order, 1]
    before = np.concatenate(([np.inf], np.minimum.accumulate(second)[:-1])) if len(points) else second
    found = np.zeros(len(points), dtype=bool)
    found[order] = second < before
    return found


def memory_front(
    outline: Outline, request: Request, setting: Setting, limit: float, scales: Scales = None, reach: float = REACH,
    quickest: Choice | None = None,
) -> Grid:  # fmt: skip
    """Of configurations that need at most `limit` bytes, the front of steps and memory, the quickest first.

    Of even cuts and the quickest, of layers recomputed in quarters, and only of steps up to `reach` times the
    shortest; empty where nothing fits.
    `quickest`: where it is known already.
    Raises UserError where there is no legal layout.
    """
    if quickest is None:
        found = search(outline, request, setting, limit, 1, scales)
        if not len(found.step):
            return found.grid
        kept, points = found.grid, np.stack([found.step, found.memory], axis=1)
    else:
        kept, points = quickest.grid(), np.array([[quickest.step, quickest.memory]])
    most = reach * float(points[0, 0])
    branches = [(mesh, of_mesh(outline, request, mesh, bound=True)) for mesh in meshes(outline, request)]
    branches = [(mesh, g) for mesh, g in branches if len(g)]
    bounds = bounds_of(outline, joined([g for _, g in branches]), [len(g) for _, g in branches], setting, scales)
    for at in sorted(range(len(bounds)), key=bounds.__getitem__):
        if bounds[at] > most:
            break
        g = laddered(outline, request, of_mesh(outline, request, branches[at][0]))
        need = needs(outline, g, setting)
        known = points[points[:, 0] <= bounds[at], 1].min(initial=np.inf)
        few = (need <= limit) & (need < known)
        if not few.any():
            continue
        g, need = g.take(few), need[few]
        step = scaled(seconds(outline, g, setting), scales)
        near = step <= most
        kept = joined([kept, g.take(near)])
        points = np.concatenate([points, np.stack([step[near], need[near]], axis=1)])
        on = front(points)
        kept, points = kept.take(on), points[on]
    near = points[:, 0] <= reach * points[:, 0].min()  # a quarter of the layers may be quicker than any number of them
    kept, points = kept.take(near), points[near]
    return kept.take(np.argsort(points[:, 0], kind="stable"))


def laddered(outline: Outline, request: Request, g: Grid) -> Grid:
    """Configurations with each share of layers recomputed that is looked at here."""
    ladder = request.able.ladder
    g = g if ladder is None else ladder.coarse.all_of(outline, g, is_free(g))
    return g.take(holding(facts_of(outline), g, request.able.rules))


@dataclass(frozen=True)
class Place:
    """The quickest plan of one part of the cluster."""

    devices: int
    choice: Choice
    rate: float
    """Tokens in a second."""
    cost: float | None
    """Of a million tokens; None without a price."""
    on_front: bool
    """Whether none has more tokens a second with no more devices (with a price: at no more cost)."""


@dataclass(frozen=True)
class Fronts:
    """Both fronts of a question."""

    memory: tuple[Choice, ...]
    """Steps against memory on the devices that were asked for, of a range on those of the best, the quickest first."""
    sizes: tuple[Place, ...]
    """Where something fits, the most devices first."""


def fronts(outline: Outline, cluster: Cluster, ask: Ask, terms: Terms, first: Choice | None = None) -> Fronts:
    """Of a model on a cluster; `first`: the best of a ranking, which is not searched again. Raises UserError."""
    devices = first.devices if first is not None and ask.fewest else ask.devices or cluster.ranks
    quickest = first if first is not None and first.devices == devices else None
    request, limit, learned = requested(cluster, ask.on(devices)), limit_of(cluster, ask), published()
    found: list[Choice] = []
    for one in ask.each():
        setting = setting_of(cluster, one)
        scales = learned.scales(setting.device.name, setting)
        known = quickest if not ask.others else None
        g = memory_front(outline, request, setting, safe(limit), scales, quickest=known)
        found += described(outline, g, setting, one, limit, learned)
    shortest = min((one.step for one in found), default=0.0)
    choices = [one for one in by_step(found) if one.step <= REACH * shortest]
    on = front(np.array([[one.step, one.memory] for one in choices]).reshape(-1, 2))
    memory = tuple(one for one, good in zip(choices, on.tolist(), strict=True) if good)
    return Fronts(memory, _places(by_size(outline, cluster, ask, quickest), terms))


def _places(found: list[Sized], terms: Terms) -> tuple[Place, ...]:
    fitting = [(one.devices, one.choice) for one in found if one.choice is not None]
    rates = [terms.tokens / terms.real(devices, choice.step) for devices, choice in fitting]
    value = objective("cost").value
    costs = [None if terms.price is None else value(terms, devices, choice.step) for devices, choice in fitting]
    against = [devices if cost is None else cost for (devices, _), cost in zip(fitting, costs, strict=True)]
    on = front(np.array([[float(x), -rate] for x, rate in zip(against, rates, strict=True)]).reshape(-1, 2))
    rows = zip(fitting, rates, costs, on.tolist(), strict=True)
    return tuple(Place(devices, choice, rate, cost, good) for (devices, choice), rate, cost, good in rows)
