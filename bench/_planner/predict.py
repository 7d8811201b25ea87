"""What the planner says of published runs: seconds by parts, and corrected by what other sources have taught."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import fields, replace
from functools import cache

import numpy as np
from numpy.typing import NDArray

from bench._planner.rows import Case, Row, number, why_not
from tangram.errors import UserError
from tangram.hardware.catalogue.devices import device
from tangram.planner.cost.calibration import SURE, Learned, Misses, Run, learn, left_out
from tangram.planner.cost.step_time import seconds
from tangram.planner.space.grid import Grid
from tangram.planner.space.setting import Setting

RACK = 8
"""Devices of one machine at most; where a catalogue says more, they meet across machines."""
Floats = NDArray[np.float64]
Places = NDArray[np.intp]


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
            found[i] = Run(said, device(case.gpu).name, case.framework.name, case.precision, case.source, case.step,
                           case.kind)  # fmt: skip
    return [run for run in found if run is not None]


def joined(grids: Sequence[Grid]) -> Grid:
    """One after the other."""
    return Grid(**{one.name: np.concatenate([getattr(g, one.name) for g in grids]) for one in fields(Grid)})


def _source(case: Case) -> str:
    return case.source


def _model(case: Case) -> str:
    return case.row["model"]


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
            self._known[left] = self._taught(sorted(left))
        return self._known[left]

    def _taught(self, left: Sequence[int]) -> Learned:
        """From some of the runs, with how far it is off of each that is left out with its source and its model."""
        runs = [self.runs[i] for i in left]
        sources, models = (np.array([one(self.cases[i]) for i in left]) for one in (_source, _model))
        learned = learn(runs)
        blocks: dict[bytes, tuple[Places, list[Places]]] = {}
        for source, model in sorted(set(zip(sources.tolist(), models.tolist(), strict=True))):
            out = (sources == source) | (models == model)
            mine = np.flatnonzero((sources == source) & (models == model))
            blocks.setdefault(out.tobytes(), (np.flatnonzero(out), []))[1].append(mine)
        off, spread = np.zeros(len(left)), np.zeros(len(left))
        gone = left_out(learned, runs, [out.tolist() for out, _ in blocks.values()])
        for (out, owners), (error, sure) in zip(blocks.values(), gone, strict=True):
            for mine in owners:
                at = np.searchsorted(out, mine)
                off[mine], spread[mine] = error[at], sure[at]
        return replace(learned, misses=Misses.of([one.facts for one in runs], off, spread))

    def all(self) -> Learned:
        """From every run: what runs of no source of these are predicted by."""
        return self._taught(range(len(self.cases)))

    def predict(self, cases: Sequence[Case], said: Sequence[Run]) -> tuple[Floats, Floats]:
        """Seconds of each case's step as from scratch, and how far its logarithm may be off in 90 of 100."""
        step, sure = np.zeros(len(cases)), np.zeros(len(cases))
        for learned, places in self._together(cases):
            these = [said[i] for i in places]
            step[places], spread = learned.correct(these)
            sure[places] = learned.half_of(these, spread)
        return step, sure

    def posterior(self, cases: Sequence[Case], said: Sequence[Run]) -> Floats:
        """The same distance by the posterior alone."""
        sure = np.zeros(len(cases))
        for learned, places in self._together(cases):
            sure[places] = SURE * learned.spread([said[i] for i in places])
        return sure

    def _together(self, cases: Sequence[Case]) -> Iterator[tuple[Learned, list[int]]]:
        """What is known without each case's source and model, and which cases it is for."""
        together: dict[tuple[str, str], list[int]] = defaultdict(list)
        for i, one in enumerate(cases):
            together[one.source, one.row["model"]].append(i)
        for (source, model), places in together.items():
            yield self.learned(source, model), places
