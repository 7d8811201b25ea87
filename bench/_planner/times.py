"""Errors of step time by group: zero-shot, after a few runs of the group, beside a constant MFU; and intervals."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from bench._planner.predict import Floats, HeldOut
from bench._planner.rows import Case
from tangram.hardware.catalogue.devices import device
from tangram.planner.cost.calibration import Learned, Run

Group = tuple[str, str, str, str]
K = TypeVar("K")

SMALLEST = 20
"""Runs of a group that counts."""
FEW, DRAWS = 5, 20


@dataclass(frozen=True)
class GroupError:
    """Of one group: medians of |predicted / measured - 1|."""

    group: Group
    runs: int
    physics: float
    """Of the closed form with the devices' curves, nothing learned."""
    zero: float
    """Corrected by other sources and models."""
    worst: float
    """The 90th percentile of that."""
    constant: float
    """Of the constant MFU that the same other runs have."""
    few: float
    """After `FEW` runs of the group, mean over draws of the median over the rest."""
    covered: float
    """Share of the runs within their interval of 90 of 100."""

    @property
    def counts(self) -> bool:
        """Whether there are enough runs."""
        return self.runs >= SMALLEST


def errors(
    cases: Sequence[Case], said: Sequence[Run], known: HeldOut, draws: int = DRAWS, least: int = 6
) -> list[GroupError]:
    """Of all groups of at least so many runs."""
    step = np.array([one.step for one in cases])
    physics = np.array([one.predicted for one in said])
    zero, sure = known.predict(cases, said)
    within = np.abs(np.log(step / zero)) < sure
    found: list[GroupError] = []
    for group, places in sorted(together([one.group for one in cases]).items()):
        if len(places) < least:
            continue
        at = np.array(places)
        off = np.abs(zero[at] / step[at] - 1)
        found.append(
            GroupError(
                group,
                len(places),
                float(np.median(np.abs(physics[at] / step[at] - 1))),
                float(np.median(off)),
                float(np.quantile(off, 0.9)),
                constant([cases[i] for i in places], known),
                few([cases[i] for i in places], [said[i] for i in places], known, draws),
                float(within[at].mean()),
            )
        )
    return found


def together(keys: Sequence[K]) -> dict[K, list[int]]:
    """Where each key stands."""
    found: dict[K, list[int]] = defaultdict(list)
    for i, key in enumerate(keys):
        found[key].append(i)
    return found


def few(cases: Sequence[Case], said: Sequence[Run], known: HeldOut, draws: int) -> float:
    """The error on the rest after learning from some of the runs of one source; nan where too few are left."""
    if len(cases) < 2 * FEW:
        return float("nan")
    step = np.array([one.step for one in cases])
    found: list[float] = []
    models = [one.row["model"] for one in cases]
    for draw in range(draws):
        chosen: list[int] = np.random.default_rng(draw).permutation(len(cases)).tolist()
        first, rest = chosen[:FEW], chosen[FEW:]
        off: list[float] = []
        for learned, places in _learned_by_places([models[i] for i in rest], cases[0].source, known):
            at = [rest[i] for i in places]
            off += np.abs(
                learned.after([said[i] for i in first]).correct([said[i] for i in at])[0] / step[at] - 1
            ).tolist()
        found.append(float(np.median(off)))
    return float(np.mean(found))


def _learned_by_places(models: Sequence[str], source: str, known: HeldOut) -> list[tuple[Learned, list[int]]]:
    """What is known without a source and a model, and which of the models it is for."""
    found: dict[int, tuple[Learned, list[int]]] = {}
    for i, model in enumerate(models):
        one = known.learned(source, model)
        found.setdefault(id(one), (one, []))[1].append(i)
    return [*found.values()]


def flops(case: Case) -> float:
    """Of a step, forward and backward, attention as causal masks leave it."""
    g = case.grid
    return float(3 * case.outline.flops(int(g.sequence[0])) * g.batch[0] * g.sequence[0])


def utilisation(case: Case) -> float:
    """Share of the devices' best rate, of the type that is computed in, that was reached: MFU."""
    peak = device(case.gpu).peak(case.precision) * float(case.grid.ranks[0])
    return flops(case) / peak / case.step


def constant(cases: Sequence[Case], known: HeldOut) -> float:
    """The error of FLOPs / (devices x peak x the median MFU of like runs elsewhere).

    Like are those of the same device, type and kind of model; where there are fewer than three, of the same device;
    then of the same type and kind; then all.
    """
    one = cases[0]
    like: tuple[Callable[[Case], bool], ...] = (
        lambda other: other.group[:3] == one.group[:3],
        lambda other: other.gpu == one.gpu,
        lambda other: other.group[1:3] == one.group[1:3],
        lambda other: True,
    )
    shares = {id(other): share for other, share in zip(known.cases, map(utilisation, known.cases), strict=True)}

    @cache
    def usual(places: frozenset[int]) -> float:
        left = [known.cases[i] for i in places]
        near = next(found for kind in like if len(found := [other for other in left if kind(other)]) >= 3)
        return float(np.median([shares[id(other)] for other in near]))

    off = [abs(utilisation(case) / usual(known.places(case.source, case.row["model"])) - 1) for case in cases]
    return float(np.median(off))


def covered(cases: Sequence[Case], zero: Floats, sure: Floats) -> NDArray[np.bool_]:
    """Which runs lie within their interval."""
    step = np.array([one.step for one in cases])
    return np.abs(np.log(step / zero)) < sure
