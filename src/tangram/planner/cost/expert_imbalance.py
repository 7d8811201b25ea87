"""Experts that have not as much to do: how much more than the mean the busiest rank of experts has.

With experts' loads of mean 1 and standard deviation `spread` (alike otherwise, their sum given), the load of one of n
ranks of e = E / n experts each has the standard deviation

    spread sqrt((1 - e / E) E / (E - 1) / e)

(sampling without replacement), and the busiest of n is about as far above the mean as the greatest of n normal numbers:
in the mean by Blom's order statistics (1958), and at a quantile q of steps by the normal quantile of q^(1/n).

The trade-off: loads of real routers have longer tails than normal ones, and are alike from one micro-batch to the next.
"""

from __future__ import annotations

from statistics import NormalDist

import numpy as np

from tangram.planner.space.grid import Array, Grid
from tangram.planner.space.setting import Setting

SURE = 0.99
"""Of layers and micro-batches in which memory is to suffice."""


def busiest(experts: int, g: Grid, setting: Setting, quantile: float | None = None) -> Array:
    """Of a block's rows that go to experts, what the busiest rank has, as a multiple of the mean: 1 to the ranks.

    `quantile`: so many have no more; None: in the mean.
    """
    ranks = g.expert
    if not setting.unlike or experts < 2 or not (ranks > 1).any():
        return np.ones(len(g))
    each = np.maximum(experts / ranks, 1.0)
    deviation = setting.unlike * np.sqrt(np.maximum(1 - each / experts, 0.0) * experts / (experts - 1) / each)
    return np.where(ranks > 1, np.clip(1 + greatest(ranks, quantile) * deviation, 1.0, ranks), 1.0)


def greatest(ranks: Array, quantile: float | None = None) -> Array:
    """Of so many normal numbers the greatest: in the mean, or what it is not above at a quantile; of one 0."""
    at = (ranks - 0.375) / (ranks + 0.25) if quantile is None else quantile ** (1 / ranks)
    several, places = np.unique(np.clip(at, 0.5, None), return_inverse=True)  # one rank is 0.5: the mean
    return np.array([NormalDist().inv_cdf(float(one)) for one in several])[places]
