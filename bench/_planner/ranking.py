"""How well the planner orders runs of one workload on the same machines under several layouts."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from bench._planner.rows import number
from bench._planner.tables import table


@dataclass(frozen=True)
class SetScore:
    """Of one set."""

    name: str
    source: str
    runs: int
    spearman: float
    first: float
    """How much longer the layout that is predicted to be best takes than the best."""
    third: float
    """The same of the best of the first three."""


def members(path: Path) -> dict[str, dict[str, float]]:
    """Of each set its runs and their seconds, without those that ran out of memory. Raises UserError."""
    found: dict[str, dict[str, float]] = defaultdict(dict)
    for row in table(path, ("set", "row", "step_s"), ("oom",)):
        if 0 < number(row, "step_s", math.nan) < math.inf and row["oom"] not in ("1", "True"):
            found[row["set"]][row["row"]] = number(row, "step_s", math.nan)
    return dict(found)


def sources(path: Path) -> dict[str, str]:
    """Where each set is from. Raises UserError."""
    return {row["set"]: row["source_id"] for row in table(path, ("set", "source_id"))}


def scores(sets: dict[str, dict[str, float]], origin: dict[str, str], predicted: dict[str, float]) -> list[SetScore]:
    """Of the sets of which at least four runs can be predicted."""
    found: list[SetScore] = []
    for name, measured in sets.items():
        rows = [row for row in measured if row in predicted]
        if len(rows) < 4:
            continue
        step = np.array([measured[row] for row in rows])
        said = np.array([predicted[row] for row in rows])
        order = np.argsort(said, kind="stable")
        best = step.min()
        rank = spearman(said, step)
        found.append(
            SetScore(
                name, origin.get(name, ""), len(rows), rank, float(step[order[0]] / best - 1),
                float(step[order[:3]].min() / best - 1),
            )
        )  # fmt: skip
    return found


def spearman(said: NDArray[np.float64], step: NDArray[np.float64]) -> float:
    """Of two orders; 0 where one has all equal."""
    return float(np.corrcoef(ranks(said), ranks(step))[0, 1]) if np.ptp(step) and np.ptp(said) else 0.0


def ranks(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """From 0; equal ones share the mean of theirs."""
    _, place, count = np.unique(values, return_inverse=True, return_counts=True)
    ends = np.cumsum(count)
    return (ends - (count + 1) / 2)[place]
