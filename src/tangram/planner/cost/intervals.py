"""How wide intervals of step times are: from how far predictions were off of runs that had not been learned from.

Split conformal (Vovk et al. 2005, Lei et al. 2018), weighted by what runs have in common (Tibshirani et al. 2019): of
runs of other places, each predicted without the runs of its own place and of its own model, the error that 90 % stay
within is the interval of a new one. Runs alike in device, precision, kind of model and framework count most; each fact
that differs makes a run count `ALIKE` times less, so where few are alike the coarser groups decide.

Errors are taken over the posterior's standard deviation: that says how much less is known of one run than of another,
whose widths of effects were guessed, and the errors how wide that makes intervals.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tangram.planner.space.grid import Array

FACTS = ("device", "precision", "kind of model", "framework")
INSIDE = 0.9
ALIKE = 3.0


@dataclass(frozen=True)
class Misses:
    """How far held-out predictions were off."""

    facts: Array
    """Of each run its `FACTS`; shape (runs, 4)."""
    off: Array
    """|log(measured / predicted)| over its standard deviation."""

    @classmethod
    def of(cls, facts: Sequence[Sequence[str]], left: Array, spread: Array) -> Misses:
        """Of runs by their facts, logarithms of measured over predicted, and the posterior's spread."""
        return cls(np.array(facts), np.abs(left) / spread)

    def half(self, facts: Sequence[Sequence[str]], spread: Array) -> Array:
        """Of new runs how far the logarithm may be off to each side for 90 % to lie within."""
        known: dict[tuple[str, ...], float] = {}
        for one in {tuple(row) for row in facts}:
            known[one] = self._quantile(one)
        return np.array([known[tuple(row)] for row in facts]) * spread

    def _quantile(self, facts: tuple[str, ...]) -> float:
        differ = (self.facts != np.array(facts)).sum(axis=1)
        weights = ALIKE ** -differ.astype(float)
        order = np.argsort(self.off)
        # The new run counts as one that is off by any distance: with few alike the interval is the largest seen.
        reached = np.cumsum(weights[order]) / (weights.sum() + 1.0)
        return float(self.off[order][min(int(np.searchsorted(reached, INSIDE)), len(order) - 1)])
