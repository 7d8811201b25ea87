"""The best configurations of the joint space: branch and bound, equal to trying everything.

A branch is what has a mesh (PP, TP, CP and DP ranks), a micro-batch, folded experts and a schedule in
common. Its bound is the step of that one of its configurations in which nothing is recomputed and the optimiser's
states are divided, exposed data traffic left aside: by the model of time every other part is at least as long where
something is recomputed or divided otherwise, whatever each part is multiplied by (`tests/planner/test_space.py`
draws configurations and factors). Branches are taken by their bound; when it is longer than the last of the best found,
the rest cannot hold a better one. Of the branches that are left each way of recomputing has a bound of its own.
So what is returned is what trying all would return.

What needs too much on one rank by any cut, with all layers recomputed, is left out
(`planner.search.uneven_stages.hopeless`), and branches of which all do, before they are laid out: by the mean over
ranks first (`planner.cost.memory.floor_of`). Too much is, before something fits, more than what needs least so far.
Of each configuration that is left, the quickest cut of the layers into virtual stages that fits is taken
(`planner.search.uneven_stages`), with as few layers recomputed as fit (`planner.space.recompute`); bounds are of the
best that any could be.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from operator import itemgetter

import numpy as np
from numpy.typing import NDArray

from tangram.errors import UserError
from tangram.models.outlines.outline import Group, Outline
from tangram.planner.cost.memory import floor_of
from tangram.planner.cost.step_time import COVERED, Scales, multiplied, seconds
from tangram.planner.legality.enumerate import ALL, Request, expanded, meshes, of_mesh, remade, roomiest, scheduled
from tangram.planner.search.evaluate import CutRequest
from tangram.planner.search.uneven_stages import CACHED, all_cuts, best_cuts, hopeless
from tangram.planner.space.grid import Grid, grid, joined
from tangram.planner.space.setting import Setting

__all__ = ["BestConfigurations", "bounds_of", "exhaustive", "floors", "least_of", "quickest", "search", "some_fits"]

Floats = NDArray[np.float64]
FIRST, BLOCK = 32, 2048
"""Branches that are looked at together: few at first, until something is known that others have to be quicker than."""
TOGETHER = 4096
"""Configurations that are tried together, of which others need not be quicker."""


@dataclass(frozen=True)
class BestConfigurations:
    """The best configurations, the fastest first."""

    grid: Grid
    step: Floats
    """Seconds."""
    memory: Floats
    """Bytes of the rank that needs most, as the device sees them."""
    looked: int
    """Configurations that were evaluated."""
    smallest: Grid
    """Of those looked at, cut evenly, the one that needs least memory."""
    smallest_memory: float


def search(
    outline: Outline, request: Request, setting: Setting, limit: float, most: int = 10, scales: Scales = None,
    within: float = np.inf,
) -> BestConfigurations:  # fmt: skip
    """The `most` fastest configurations that need at most `limit` bytes; fewer where fewer fit.

    `within`: seconds that a step may take.
    """
    every = _branches(outline, request)
    if every is None:
        raise UserError(
            f"{request.devices} devices and {request.batch} samples of {request.sequence} tokens have no legal layout "
            f"for {outline.name}: change the batch to a multiple of the devices, or leave less out"
        )
    wanted = CutRequest(outline, setting, limit, scales, request.able)
    bounds = _bounds(outline, request, setting, tuple(sorted((scales or {}).items())))
    least = floors(wanted, request, every)
    may = np.flatnonzero(least <= limit)  # nothing else of any other branch fits either
    order = may[np.argsort(bounds[may], kind="stable")]  # the most promising first, so that the rest is cut off soon

    def laid_out(rows: Grid, last: float) -> Grid:
        found = scheduled(request, rows)
        found = remade(outline, request, found if np.isfinite(last) else _roomy(wanted, request, found, limit))
        if np.isfinite(last):
            # The same sum in another order may differ in its last digit: a tie must not be lost to that.
            found = found.take(least_of(outline, found, setting, scales) <= last * (1 + 1e-12))
        found = expanded(outline, request, found)
        return found.take(~hopeless(wanted, found))

    branches = ((float(bounds[few[0]]), every.take(few)) for few in _in_turn(order))
    found = _take(wanted, most, branches, laid_out, within)
    if len(found.step):
        return replace(found, looked=found.looked + len(every))
    grid, need, looked = _leanest(wanted, request, every, least, any_will_do=np.isfinite(within))
    return replace(found, smallest=grid, smallest_memory=need, looked=found.looked + len(every) + looked)


def _leanest(
    wanted: CutRequest, request: Request, every: Grid, least: Floats, *, any_will_do: bool
) -> tuple[Grid, float, int]:
    """Of all branches the configuration that needs least memory, cut evenly: a grid of one, its bytes, and how many
    were evaluated. Branches are taken by their floors (`least`), until none may need less than what is known."""
    need, found, looked = np.inf, every.take(slice(0, 0)), 0
    for few in _in_turn(np.argsort(least, kind="stable")):
        if least[few[0]] > need or (any_will_do and len(found)):
            break
        room = replace(wanted, limit=need * (1 + 1e-9))
        rows = _roomy(room, request, scheduled(request, every.take(few)), room.limit)
        g = expanded(wanted.outline, request, remade(wanted.outline, request, rows))
        g = g.take(~hopeless(room, g))
        g, _, needs = replace(wanted, limit=0.0).evaluated(g)  # with as much recomputed as there can be
        looked += len(g)
        if needs.min(initial=np.inf) < need:
            at = int(np.argmin(needs))
            need, found = float(needs[at]), g.take(slice(at, at + 1))
    if not len(found):
        raise UserError(
            f"nothing that is allowed of {wanted.outline.name} can be run: rules leave no configuration of any mesh; "
            "allow more (kinds of optimisers, what is offloaded to the host, all but what --runs runs)"
        )
    return found, need, looked


def some_fits(outline: Outline, request: Request, setting: Setting, limit: float) -> bool:
    """Whether any configuration needs at most `limit` bytes: those that may need least are looked at first."""
    every, wanted = _branches(outline, request), CutRequest(outline, setting, limit, None, request.able)
    if every is None:
        return False
    least = floors(wanted, request, every)
    for few in _in_turn(np.argsort(least, kind="stable")[: (least <= limit).sum()]):
        rows = _roomy(wanted, request, scheduled(request, every.take(few)), limit)
        g = expanded(outline, request, remade(outline, request, rows))
        g, step, need = wanted.evaluated(g.take(~hopeless(wanted, g)))
        if np.isfinite(step).any() or np.isfinite(best_cuts(wanted, g, step, need).step).any():
            return True
    return False


def _in_turn(order: NDArray[np.int64]) -> Iterator[NDArray[np.int64]]:
    """Places of branches that are looked at together."""
    start, count = 0, FIRST
    while start < len(order):
        yield order[start : start + count]
        start, count = start + count, min(2 * count, BLOCK)


def floors(wanted: CutRequest, request: Request, rows: Grid) -> Floats:
    """Of each branch bytes below which no configuration of it is."""
    found = [(floor_of(wanted.outline, g, wanted.setting), there) for g, there in roomiest(request, rows)]
    return np.minimum.reduce([np.where(there, floor, np.inf) for floor, there in found])


def _roomy(wanted: CutRequest, request: Request, found: Grid, room: float) -> Grid:
    """Rows that `scheduled` laid out, without those of which no configuration needs at most `room`."""
    anything = replace(wanted, limit=room, able=ALL)  # with all layers recomputed, whether that may be or not
    over = [~there | hopeless(anything, _all_again(g)) for g, there in roomiest(request, found)]
    return found.take(~np.logical_and.reduce(over))


def _all_again(g: Grid) -> Grid:
    return replace(g, recompute=np.full(len(g), int(Group.BLOCK)), recomputed=np.ones(len(g)))


@lru_cache(maxsize=1)
def _branches(outline: Outline, request: Request) -> Grid | None:
    """Of all meshes, if there are any. What would be with other memory is a search of the same ones."""
    rows = [of_mesh(outline, request, mesh, bound=True) for mesh in meshes(outline, request)]
    return joined(rows) if any(map(len, rows)) else None


@lru_cache(maxsize=1)
def _bounds(outline: Outline, request: Request, setting: Setting, scales: tuple[tuple[str, float], ...]) -> Floats:
    every = _branches(outline, request)
    assert every is not None  # who asks has looked
    return least_of(outline, every, setting, dict(scales) or None, fewer=True)


def least_of(outline: Outline, rows: Grid, setting: Setting, scales: Scales, *, fewer: bool = False) -> Floats:
    """Of each row that `remade` laid out what none of its configurations is quicker than; with `fewer`, of each that
    `of_mesh` laid out with `bound`.

    Without what DP ranks move beyond computation: of that more hides where more is recomputed, and with parts
    multiplied unlike each other the one could outweigh the other.
    """
    found: list[Floats] = []
    for start in range(0, len(rows), CACHED):  # so many stay in a processor's caches
        of = seconds(outline, rows.take(slice(start, start + CACHED)), setting, least=True, fewer=fewer)
        found.append(sum(multiplied(of, scales, COVERED).values(), np.zeros(())))
    least, other = np.concatenate(found), (rows.pipeline > 1) & (rows.inner == 0)
    experts = any(block.experts for block, _ in outline.runs)
    if not (fewer and experts and scales and scales["launch"] > scales["expert"] and other.any()):
        return least
    # Launches hide behind exchanges, which take longer where PP ranks lie within DP ranks, and launches then less.
    within = rows.take(other)
    within = replace(within, inner=np.ones(len(within)))
    least[other] = np.minimum(least[other], least_of(outline, within, setting, scales, fewer=True))
    return least


def bounds_of(outline: Outline, every: Grid, sizes: Sequence[int], setting: Setting, scales: Scales) -> list[float]:
    """Of each mesh, what none of its configurations is quicker than; `every` has their rows one after the other."""
    starts = np.cumsum([0, *sizes])[:-1]
    return np.minimum.reduceat(least_of(outline, every, setting, scales, fewer=True), starts).tolist()


def exhaustive(
    outline: Outline, request: Request, setting: Setting, limit: float, most: int = 10, scales: Scales = None
) -> BestConfigurations:
    """The same by trying everything."""
    every = _together(of_mesh(outline, request, mesh) for mesh in meshes(outline, request))
    wanted = CutRequest(outline, setting, limit, scales, request.able)
    return _take(wanted, most, ((0.0, rows) for rows in every), lambda rows, last: rows, whole=True)


def _together(grids: Iterator[Grid]) -> Iterator[Grid]:
    """The same rows in fewer grids: each call of numpy takes a while, however few rows it is for."""
    some: list[Grid] = []
    for g in grids:
        some.append(g)
        if sum(map(len, some)) >= TOGETHER:
            yield joined(some)
            some = []
    if some:
        yield joined(some)


def quickest(wanted: CutRequest, g: Grid) -> Grid:
    """Of some configurations the best, a grid of one; of none where none fits."""
    g, step, need = wanted.evaluated(wanted.least_again(g))
    cuts = best_cuts(wanted, g, step, need)
    order = np.lexsort((cuts.need, cuts.step))[: int(np.isfinite(cuts.step).any())]
    return cuts.grid.take(order)


def _take(
    wanted: CutRequest, most: int, branches: Iterator[tuple[float, Grid]], laid_out: Callable[[Grid, float], Grid],
    within: float = np.inf, *, whole: bool = False,
) -> BestConfigurations:  # fmt: skip
    """`laid_out`: of a branch all configurations that may be as quick as some seconds and may fit; `whole`: all cuts of
    all configurations are evaluated."""
    best: list[Grid] = []
    steps: list[Floats] = []
    needs: list[Floats] = []
    last, looked, smallest = within, 0, (np.inf, grid(batch=1, sequence=1).take(slice(0, 0)))
    for bound, rows in branches:
        if bound > last:  # bounds only grow from here on
            break
        g = laid_out(rows, last)
        if not len(g):
            continue
        looked += len(g)
        g, step, need = wanted.tried(g) if whole else wanted.evaluated(g)
        at = int(np.argmin(need))
        smallest = min(smallest, (float(need[at]), g.take(slice(at, at + 1))), key=itemgetter(0))
        if (step <= last).sum() >= most:  # a better cut of these is as quick at least
            last = min(last, float(np.partition(step, most - 1)[most - 1]))
        cuts = all_cuts(wanted, g, step, need) if whole else best_cuts(wanted, g, step, need, last)
        looked += cuts.looked
        fits = np.isfinite(cuts.step)
        if not fits.any():
            continue
        g, need, step = cuts.grid.take(fits), cuts.need[fits], cuts.step[fits]
        keep = np.argsort(step, kind="stable")[:most]
        keep = keep[step[keep] <= within]  # a bound is of the best cut, which may have turned out longer
        best, steps, needs = [*best, g.take(keep)], [*steps, step[keep]], [*needs, need[keep]]
        if sum(map(len, steps)) >= most:
            last = min(last, float(np.sort(np.concatenate(steps))[most - 1]))
    step, need = (np.concatenate([*one, np.zeros(0)]) for one in (steps, needs))
    order = np.lexsort((need, step))[:most]  # of equally quick ones first what needs less memory
    chosen = joined(best).take(order) if best else smallest[1].take(slice(0, 0))
    return BestConfigurations(chosen, step[order], need[order], looked, smallest[1], smallest[0])
