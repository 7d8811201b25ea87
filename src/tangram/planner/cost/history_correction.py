"""What the history of a machine says about plans: how long their steps are likely to take, and which have no hope.

The seconds that `planner.local.estimate` gives by their parts are corrected by `planner.cost.calibration`: effects of a
device, of a place (a machine with its software and so many ranks) and of each part, regularised towards the estimate,
robust against single bad rows, with an interval. Where the very plan was measured here, the median of that counts.

A plan that ran out of memory says something of another one only if that one lies the same way and needs no less of
anything: each part of its prediction is at least as large, and the rank has no more room. That holds for any model
whose parts are off by factors of their own.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from tangram.planner.cost.calibration import SURE, Learned, Run, learn
from tangram.planner.cost.history import Entry

NOISE = 0.08
"""Standard deviation of the logarithm of one run's median step, run again on the same machine."""
MOST = 500
"""Runs that are learned from, the newest."""
FRAMEWORK = "tangram"


@dataclass(frozen=True)
class Here:
    """Where it would run, as entries of the history have it."""

    device: str
    place: str
    room: float
    """Bytes that a rank can use."""
    model: int
    """The version of the estimate."""


@dataclass(frozen=True)
class PredictedPlan:
    """Of a plan, as entries of the history have it."""

    key: str
    family: str
    precision: str
    parts: Mapping[str, float]
    held: Mapping[str, float]


@dataclass(frozen=True)
class Likely:
    """Seconds of a step."""

    step: float
    low: float
    high: float
    """90 % lie between these."""
    measured: int = 0
    """How often this very plan was measured here."""

    @property
    def least(self) -> float:
        """What it can hardly be below: three standard deviations, one of a thousand."""
        return self.step * (self.low / self.step) ** (3 / SURE)


def learned_of(entries: Sequence[Entry], here: Here) -> Learned:
    """What measured runs of any place teach; those that another version of the estimate predicted do not."""
    runs = [_run(one.parts, one.device, one.precision, one.place, one.seconds or 0.0) for one in _sound(entries, here)]
    return learn([], NOISE).after(runs[-MOST:])


def likely(entries: Sequence[Entry], here: Here, asked: Sequence[PredictedPlan]) -> list[Likely]:
    """How long each plan's step takes, with all that is known."""
    if not asked:
        return []
    learned = learned_of(entries, here)
    steps, spreads = learned.correct([_run(one.parts, here.device, one.precision, here.place) for one in asked])
    known: dict[str, list[float]] = {}
    for one in entries:
        if one.measured and one.seconds and one.place == here.place:
            known.setdefault(one.key, []).append(one.seconds)
    return [
        _likely(float(step), float(spread), known.get(one.key, []))
        for one, step, spread in zip(asked, steps, spreads, strict=True)
    ]


def hopeless(entries: Sequence[Entry], here: Here, asked: PredictedPlan) -> str:
    """Why a plan would run out of memory, as another did that needs no more; "" where nobody knows."""
    for one in reversed(entries):
        if one.outcome == "out of memory" and _no_less(asked, one) and here.room <= one.room and _alike(one, here):
            same = "it" if one.key == asked.key else "a plan that needs no more of anything"
            return f"{same} ran out of memory here before"
    return ""


def _alike(one: Entry, here: Here) -> bool:
    return one.place == here.place and one.model == here.model


def _no_less(asked: PredictedPlan, one: Entry) -> bool:
    """Whether a plan needs at least as much of everything as one that was tried."""
    if one.key == asked.key:
        return True
    same = one.family == asked.family and set(asked.held) == set(one.held)
    return same and all(asked.held[name] >= part for name, part in one.held.items())


def _sound(entries: Sequence[Entry], here: Here) -> list[Entry]:
    return [one for one in entries if one.measured and one.model == here.model]


def _run(parts: Mapping[str, float], device: str, precision: str, place: str, seconds: float = float("nan")) -> Run:
    return Run(parts, device, FRAMEWORK, precision, place, seconds)


def _likely(step: float, spread: float, measured: Sequence[float]) -> Likely:
    """What was measured counts before what is learned from other plans."""
    if measured:
        step, spread = median(measured), NOISE * math.sqrt(1 + 1 / len(measured))
    return Likely(step, step * math.exp(-SURE * spread), step * math.exp(SURE * spread), len(measured))
