"""The best configurations of the joint space: branch and bound over meshes, equal to trying everything.

A mesh (pipeline, tensor, context, heads and data ranks) is a branch. Its bound is the shortest step of its
configurations in which nothing is computed again and the optimiser's states are divided, memory and exposed data
traffic left aside: by the model of time every other part is at least as long where something is computed again or
divided otherwise, whatever each part is multiplied by (`tests/planner/test_space.py` draws configurations and
factors). Branches are taken by their bound; when it is longer than the last of the best found, the rest cannot hold a
better one. So what is returned is what trying all would return.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from tangram.errors import UserError
from tangram.models.outline import Outline
from tangram.planner.grid import Grid
from tangram.planner.memory import memory
from tangram.planner.setting import Setting
from tangram.planner.space import Request, meshes, of_mesh
from tangram.planner.time import Seconds, seconds

__all__ = ["Found", "Scales", "bounds_of", "exhaustive", "joined", "scaled", "search"]

Floats = NDArray[np.float64]
Scales = Mapping[str, float] | None
"""By what each part of a step is multiplied (`planner.learn`); None: by one."""


@dataclass(frozen=True)
class Found:
    """The best configurations, the fastest first."""

    grid: Grid
    step: Floats
    """Seconds."""
    memory: Floats
    """Bytes of the rank that needs most, as the device sees them."""
    looked: int
    """Configurations that were evaluated."""
    of: int
    """Configurations in the space; -1 where branches were cut before they were laid out."""
    smallest: Grid
    """Of those looked at, the one that needs least memory."""
    smallest_memory: float


def search(
    outline: Outline, request: Request, setting: Setting, limit: float, most: int = 10, scales: Scales = None,
    within: float = np.inf,
) -> Found:  # fmt: skip
    """The `most` fastest configurations that need at most `limit` bytes; fewer where fewer fit.

    `within`: seconds that a step may take.
    """
    branches = [(mesh, of_mesh(outline, request, mesh, bound=True)) for mesh in meshes(outline, request)]
    branches = [(mesh, g) for mesh, g in branches if len(g)]
    if not branches:
        raise UserError(
            f"{request.devices} devices and {request.batch} samples of {request.sequence} tokens have no legal layout "
            f"for {outline.name}: change the batch to a multiple of the devices"
        )
    every = joined([g for _, g in branches])
    bounds = bounds_of(outline, every, [len(g) for _, g in branches], setting, scales)
    order = sorted(range(len(bounds)), key=bounds.__getitem__)
    return _take(
        outline, setting, limit, most, len(every),
        ((bounds[i], of_mesh(outline, request, branches[i][0])) for i in order), scales, within,
    )  # fmt: skip


def bounds_of(outline: Outline, every: Grid, sizes: Sequence[int], setting: Setting, scales: Scales) -> list[float]:
    """Of each branch, what none of its configurations is quicker than; `every` has the branches' one after the other.

    Without what data ranks move beyond computation: of that more hides where more is computed again, and with parts
    multiplied unlike each other the one could outweigh the other.
    """
    parts = {**seconds(outline, every, setting).parts()}
    del parts["data"]
    least = np.asarray(sum((scales[name] if scales else 1.0) * part for name, part in parts.items()))
    starts = np.cumsum([0, *sizes])[:-1]
    return np.minimum.reduceat(least, starts).tolist()


def exhaustive(
    outline: Outline, request: Request, setting: Setting, limit: float, most: int = 10, scales: Scales = None
) -> Found:
    """The same by trying everything."""
    every = ((0.0, of_mesh(outline, request, mesh)) for mesh in meshes(outline, request))
    return _take(outline, setting, limit, most, 0, every, scales)


def _take(
    outline: Outline,
    setting: Setting,
    limit: float,
    most: int,
    looked: int,
    branches: Iterator[tuple[float, Grid]],
    scales: Scales,
    within: float = np.inf,
) -> Found:
    best: list[Grid] = []
    steps: list[Floats] = []
    needs: list[Floats] = []
    last = within
    smallest: tuple[float, Grid] | None = None
    for bound, g in branches:
        if bound > last and smallest is not None:
            break
        if not len(g):
            continue
        looked += len(g)
        need = memory(outline, g, setting).device
        at = int(np.argmin(need))
        if smallest is None or need[at] < smallest[0]:
            smallest = (float(need[at]), g.take(slice(at, at + 1)))
        fits = need <= limit
        if not fits.any():
            continue
        g, need = g.take(fits), need[fits]
        step = scaled(seconds(outline, g, setting), scales)
        keep = np.argsort(step, kind="stable")[:most]
        keep = keep[step[keep] <= within]
        best, steps, needs = [*best, g.take(keep)], [*steps, step[keep]], [*needs, need[keep]]
        if sum(map(len, steps)) >= most:
            last = min(last, float(np.sort(np.concatenate(steps))[most - 1]))
    assert smallest is not None
    if not best:
        empty = smallest[1].take(slice(0, 0))
        return Found(empty, np.zeros(0), np.zeros(0), looked, -1, smallest[1], smallest[0])
    step, need, g = np.concatenate(steps), np.concatenate(needs), joined(best)
    order = np.lexsort((need, step))[:most]
    return Found(g.take(order), step[order], need[order], looked, -1, smallest[1], smallest[0])


def scaled(one: Seconds, scales: Scales) -> Floats:
    """Seconds of steps, each part multiplied: what is longer in every part stays longer."""
    parts = one.parts()
    return np.asarray(sum((scales[name] if scales else 1.0) * part for name, part in parts.items()))


def joined(grids: Sequence[Grid]) -> Grid:
    """One after the other."""
    return Grid(**{one.name: np.concatenate([getattr(g, one.name) for g in grids]) for one in fields(Grid)})
