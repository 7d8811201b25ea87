"""What the planner says of published runs: seconds by parts, and corrected by what other sources have taught."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import fields
from functools import cache

import numpy as np
from numpy.typing import NDArray

from bench._planner.rows import Case, Row, number, why_not
from tangram.errors import UserError
from tangram.hardware.devices import device
from tangram.planner.cost.calibration import Learned, Run, learn
from tangram.planner.cost.step_time import seconds
from tangram.planner.space.grid import Grid
from tangram.planner.space.setting import Setting

RACK = 8
"""Devices of one machine at most; where a catalogue says more, they meet across machines."""
Floats = NDArray[np.float64]


def predictable(cases: Sequence[Case]) -> list[Case]:
    """Those that were timed, on devices of the catalogue, and are more than tests of correctness."""
    return [one for one in cases if one.step > 0 and one.source != "mcore_golden" and known(one.gpu)]


def why_left_out(row: Row) -> str:
    """Why a run that was timed is not predicted; "" where it is, or where nothing was timed."""
    if row["source_id"] == "mcore_golden" or not (number(row, "step_s", 0) > 0 or number(row, "tok_s_gpu", 0) > 0):
        return ""
    return why_not(row) or (missing(row["gpu"]) if not known(row["gpu"]) else "")


def missing(gpu: str) -> str:
    """What the catalogue does not know of a device that it does not know enough of."""
    try:
        device(gpu)
    except UserError as error:
        return str(error).partition(" in the catalogue")[0]
    return f"the catalogue lacks figures of {gpu}"


@cache
def known(gpu: str) -> bool:
    """Whether the catalogue has the device."""
    try:
        of = device(gpu)
        return of.memory_bandwidth is not None and of.peak("bf16") > 0
    except UserError:
        return False


def runs(cases: Sequence[Case]) -> list[Run]:
    """The predicted parts of each case; all with one outline and setting are evaluated at once."""
    together: dict[object, list[int]] = defaultdict(list)
    for i, one in enumerate(cases):
        together[id(one.outline), one.framework, one.gpu, one.precision, one.node, one.graphs].append(i)
    found: list[Run | None] = [None] * len(cases)
    for places in together.values():
        one = cases[places[0]]
        of = device(one.gpu)
        near = of.domain if of.domain > RACK else one.node  # racks of which all devices meet at the fast link
        setting = Setting(of, one.framework, one.precision, near, graphs=one.graphs)
        parts = seconds(one.outline, joined([cases[i].grid for i in places]), setting).parts()
        for at, i in enumerate(places):
            said = {name: float(np.broadcast_to(values, len(places))[at]) for name, values in parts.items()}
            case = cases[i]
            found[i] = Run(said, device(case.gpu).name, case.framework.name, case.precision, case.source, case.step)
    return [run for run in found if run is not None]


def joined(grids: Sequence[Grid]) -> Grid:
    """One after the other."""
    return Grid(**{one.name: np.concatenate([getattr(g, one.name) for g in grids]) for one in fields(Grid)})


class HeldOut:
    """What is learned from published runs without those of a source and of models of the same name."""

    def __init__(self, cases: Sequence[Case]) -> None:
        self.cases, self.runs = list(cases), runs(cases)
        self._known: dict[frozenset[int], Learned] = {}
        self._places: dict[tuple[str, str], frozenset[int]] = {}

    def places(self, source: str, model: str) -> frozenset[int]:
        """Which runs are left to learn from."""
        if (source, model) not in self._places:
            left = (i for i, one in enumerate(self.cases) if one.source != source and one.row["model"] != model)
            self._places[source, model] = frozenset(left)
        return self._places[source, model]

    def learned(self, source: str, model: str) -> Learned:
        """From those."""
        left = self.places(source, model)
        if left not in self._known:
            self._known[left] = learn([self.runs[i] for i in sorted(left)])
        return self._known[left]

    def predict(self, cases: Sequence[Case], said: Sequence[Run]) -> tuple[Floats, Floats]:
        """Seconds of each case's step as from scratch, and how sure: the standard deviation of the logarithm."""
        step, sure = np.zeros(len(cases)), np.zeros(len(cases))
        together: dict[tuple[str, str], list[int]] = defaultdict(list)
        for i, one in enumerate(cases):
            together[one.source, one.row["model"]].append(i)
        for (source, model), places in together.items():
            step[places], sure[places] = self.learned(source, model).correct([said[i] for i in places])
        return step, sure
