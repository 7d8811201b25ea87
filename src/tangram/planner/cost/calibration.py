"""Learning from measured runs: how far the closed form of time is off, by what, and how sure that is.

The logarithm of measured over predicted seconds is modelled as a sum of few effects,

    log(measured / predicted) = sum_j w_j x_j + noise

whose features x are the shares of a step's parts ("matmuls are a tenth slower than their curve"), alone and within a
device, a framework or a place, and one constant for each of those and for each machine: a device with a framework at a
place. Every weight has a normal prior around zero with the width of its family (`WIDTHS`), so what has not been seen
stays at the physics, with an interval as wide as such effects are; noise and machines have the heavy tails of Student's
t with four degrees of freedom, so that single bad rows do not count, and a machine that is off as a whole (throttled,
set up badly) is not taken for its device (iterated weights; Gelman et al., Bayesian Data Analysis, 3rd edition, 17.2).
The posterior is normal and is kept: a few runs of a new place move that place's own effects most, since what is common
is known better already.

`Learned` is what `tangram plan` corrects its predictions by. The trade-off: effects are linear in logarithms, so what
overlaps differently is met only on average.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from importlib import resources
from pathlib import Path
from typing import cast

import numpy as np

from tangram.hardware.catalogue import curves
from tangram.hardware.catalogue.devices import devices
from tangram.planner.cost.step_time import PARTS
from tangram.planner.space.grid import Array
from tangram.planner.space.setting import Setting

# How wide intervals of step times are: from how far predictions were off of runs that had not been learned from.
# Split conformal (Vovk et al. 2005, Lei et al. 2018), weighted by what runs have in common (Tibshirani et al. 2019):
# of runs of other places, each predicted without the runs of its own place and of its own model, the error that 90 %
# stay within is the interval of a new one. Each fact that differs makes a run count `ALIKE` times less, so where few
# are alike the coarser groups decide. Errors are over the posterior's standard deviation, which says how much less is
# known of one run than of another; the errors say how wide that makes intervals. Tried: runs by the root of their
# source's number, five for three, the new run as one of the most alike. Of 11 groups 6 hold 85 to 95 of 100 then, for
# 3 (5, chosen without the group's source), as wide in the mean; of 91 timed questions no more do, and of kinds that
# nobody ran too few.
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


WIDTHS = {
    "part": 0.09,
    "device": 0.085,
    "device part": 0.14,
    "precision part": 0.14,
    "framework": 0.07,
    "framework part": 0.11,
    "place": 0.085,
    "place part": 0.175,
    "place machine": 0.05,
}
"""How large effects of each family are: the standard deviation of a weight before anything is seen."""
NO_CURVE = 0.35
"""The same of a device of the catalogue whose kernels nobody has measured, as long as no run of it is known: between
devices that are alike in their figures cards of little power reach half of what others do."""
SURE = 1.6449
"""Standard deviations to each side of the middle 90 % of a normal."""
TAILS = 4.0
TURNS = 4


@dataclass(frozen=True)
class Run:
    """What was predicted of a run, and what was measured."""

    parts: Mapping[str, float]
    """Predicted seconds, by what they are spent on."""
    device: str
    framework: str
    precision: str
    place: str
    """Whose machines and software: effects of their own."""
    measured: float = float("nan")
    """Seconds of a step."""
    kind: str = "dense"
    """Of the model: "dense" or "moe"."""

    @property
    def predicted(self) -> float:
        """Seconds of a step."""
        return sum(self.parts.values())

    @property
    def facts(self) -> tuple[str, str, str, str]:
        """What intervals are chosen by."""
        sixteen = self.precision in ("bf16", "fp16")
        return self.device, "16 bits" if sixteen else self.precision, self.kind, self.framework

    @cached_property
    def features(self) -> Mapping[tuple[str, str, str], float]:
        """(family, of what, part) and its value; of parts that take no time there are none."""
        found: dict[tuple[str, str, str], float] = {}
        predicted = self.predicted
        for name, part in self.parts.items():
            if not part:
                continue
            share = part / predicted
            found["part", "", name] = share
            found["device part", self.device, name] = share
            found["framework part", self.framework, name] = share
            found["precision part", self.precision, name] = share
            found["place part", self.place, name] = share
        found["device", self.device, ""] = 1.0
        found["framework", self.framework, ""] = 1.0
        found["place", self.place, ""] = 1.0
        found["place machine", f"{self.place} {self.device} {self.framework}", ""] = 1.0
        return found


@dataclass(frozen=True)
class Learned:
    """A normal distribution over the weights, and the noise of single runs."""

    names: tuple[tuple[str, str, str], ...]
    mean: Array
    """Of each weight."""
    covariance: Array
    noise: float
    """Standard deviation of a run's logarithm around what its effects say."""
    misses: Misses | None = None
    """How far it was off of runs that it was not learned from; None: the posterior alone says how sure it is."""

    def scales(self, device: str, setting: Setting) -> dict[str, float]:
        """By what each part of a step is multiplied on a device, with a framework, in a type."""
        known = dict(zip(self.names, self.mean.tolist(), strict=True))
        of = {"device": device, "framework": setting.framework.name, "precision": setting.precision}
        constant = sum(known.get((family, of[family], ""), 0.0) for family in ("device", "framework"))
        return {
            part: math.exp(
                constant
                + known.get(("part", "", part), 0.0)
                + sum(known.get((f"{family} part", name, part), 0.0) for family, name in of.items())
            )
            for part in PARTS
        }

    def spread(self, runs: Sequence[Run]) -> Array:
        """The standard deviation of each run's logarithm."""
        return self.correct(runs)[1]

    def half(self, runs: Sequence[Run]) -> Array:
        """Of each run the logarithm of the end of its interval of 90 % over its seconds, to both sides."""
        return self.half_of(runs, self.spread(runs))

    def half_of(self, runs: Sequence[Run], spread: Array) -> Array:
        """The same where the spread is known. Of devices whose matmuls nobody measured it is no less than the posterior
        says; in a type of which no run of such a device is known either, its curve may be any device's."""
        if self.misses is None:
            return SURE * spread
        found = self.misses.half([run.facts for run in runs], spread)
        unmeasured = np.array([run.device in devices() and not curves.measured(run.device) for run in runs])
        tried = {(one[0], one[1]) for one in self.misses.facts.tolist()}
        around = np.array([0.0 if run.facts[:2] in tried else _around_curve(run) for run in runs])
        return np.where(unmeasured, np.maximum(found, SURE * np.hypot(spread, around)), found)

    def apart(self, one: Run, other: Run) -> float:
        """The standard deviation of the logarithm of the ratio of two runs' steps: what both have in common counts for
        neither."""
        differs = dict(one.features)
        for name, value in other.features.items():
            differs[name] = differs.get(name, 0.0) - value
        values = np.array([differs.get(name, 0.0) for name in self.names])
        known = {*self.names}
        unseen = sum((_width(name) * value) ** 2 for name, value in differs.items() if name not in known)
        return math.sqrt(float(values @ self.covariance @ values) + unseen + 2 * self.noise**2)

    def elsewhere(self) -> Learned:
        """Without the effects of the places that it was learned from: what is known of any other."""
        keep = [i for i, (family, _, _) in enumerate(self.names) if not family.startswith("place")]
        at = np.array(keep, dtype=int)
        covariance = self.covariance[np.ix_(at, at)]
        return replace(self, names=tuple(self.names[i] for i in keep), mean=self.mean[at], covariance=covariance)

    def correct(self, runs: Sequence[Run]) -> tuple[Array, Array]:
        """Seconds of each run's step, and the standard deviation of their logarithm."""
        values, unseen = _matrix(runs, self.names)
        mean = values @ self.mean
        variance = ((values @ self.covariance) * values).sum(1) + unseen + self.noise**2
        return np.array([run.predicted for run in runs]) * np.exp(mean), np.sqrt(variance)

    def after(self, runs: Sequence[Run]) -> Learned:
        """With some more runs, of this place or any other; the noise stays."""
        if not runs:
            return self
        names = _names(runs, self.names)
        grown = _grown(self, names)
        values, _ = _matrix(runs, names)
        return _condition(grown, values, _targets(runs), self.noise)


def save(one: Learned, path: Path) -> None:
    """As an archive of numpy; the covariance in 16 bits, as correlations."""
    misses = one.misses or Misses(np.empty((0, len(FACTS)), dtype=np.str_), np.empty(0))
    deviation = np.sqrt(np.diag(one.covariance))
    correlation = (one.covariance / np.outer(deviation, deviation)).astype(np.float16)
    lower = correlation[np.tril_indices(len(deviation))]
    np.savez_compressed(
        path, names=np.array(["|".join(name) for name in one.names]), mean=one.mean.astype(np.float32),
        deviation=deviation.astype(np.float32), correlation=lower, noise=one.noise,
        facts=misses.facts, off=misses.off.astype(np.float32),
    )  # fmt: skip


def load(path: Path) -> Learned:
    """What `save` wrote."""
    with np.load(path, allow_pickle=False) as kept:
        names = tuple(cast("tuple[str, str, str]", tuple(name.split("|"))) for name in kept["names"].tolist())
        deviation: Array = kept["deviation"].astype(np.float64)
        half = np.zeros((len(names), len(names)))
        half[np.tril_indices(len(names))] = kept["correlation"]
        both = half + np.tril(half, -1).T
        mean: Array = kept["mean"].astype(np.float64)
        misses = Misses(kept["facts"], kept["off"]) if len(kept["off"]) else None
        return Learned(names, mean, both * np.outer(deviation, deviation), float(kept["noise"]), misses)


@cache
def published() -> Learned:
    """What published runs have taught (`bench/_planner/teach.py`), for runs anywhere else."""
    with resources.as_file(resources.files("tangram.planner.cost").joinpath("learned.npz")) as path:
        return load(path)


def learn(runs: Sequence[Run], noise: float = 0.08) -> Learned:
    """From runs, starting at the physics. `noise` is where its estimate begins."""
    names = _names(runs, ())
    one = Learned(names, np.zeros(len(names)), np.diag(_widths(names) ** 2), noise)
    if not runs:
        return one
    values, _ = _matrix(runs, names)
    targets = _targets(runs)
    one = _condition(one, values, targets, noise)
    noise = max(0.02, float(np.median(np.abs(targets - values @ one.mean))) / 0.6745)
    for _ in range(TURNS):
        prior = Learned(names, np.zeros(len(names)), np.diag(_widths(names, one.mean) ** 2), noise)
        one = _condition(prior, values, targets, noise)
    return one


def left_out(learned: Learned, runs: Sequence[Run], blocks: Sequence[Sequence[int]]) -> list[tuple[Array, Array]]:
    """Of each block of the runs that `learn` made it of: logarithms of measured over predicted, and their standard
    deviations, as if it had been learned without the block; bad rows count as little as they do with it.

    Closed: without rows X of weights W the posterior's covariance S becomes K = (1 - S X' W X)^-1 S, and what is left
    over of them, R, becomes R + X K X' W R.
    """
    values, _ = _matrix(runs, learned.names)
    targets = _targets(runs)
    weights = _weights(targets - values @ learned.mean, learned.noise) / learned.noise**2
    # Of just these weights: with others what a block alone tells of would not be taken out whole.
    scaled = values * np.sqrt(weights)[:, None]
    covariance = np.linalg.inv(np.diag(_widths(learned.names, learned.mean) ** -2) + scaled.T @ scaled)
    left = targets - values @ (covariance @ (values.T @ (weights * targets)))
    found: list[tuple[Array, Array]] = []
    for block in blocks:
        at = np.array(block, dtype=int)
        rows = values[at]
        cut = np.flatnonzero(rows.any(axis=0))  # of other effects these rows say nothing
        rows, own = rows[:, cut], covariance[np.ix_(cut, cut)]
        weighed = rows.T * weights[at]
        without = np.linalg.solve(np.eye(len(cut)) - own @ (weighed @ rows), own)
        gone = left[at] + rows @ (without @ (weighed @ left[at]))
        variance = np.maximum(((rows @ without) * rows).sum(1), 0.0) + learned.noise**2
        found.append((gone, np.sqrt(variance)))
    return found


def _condition(prior: Learned, values: Array, targets: Array, noise: float) -> Learned:
    """The posterior of some rows, their noise with heavy tails."""
    if len(targets) < len(prior.names):
        return _by_rows(prior, values, targets, noise)
    precision = np.linalg.inv(prior.covariance)
    pull = precision @ prior.mean
    weights, mean, inverse = np.ones(len(targets)), prior.mean, precision
    for _ in range(TURNS):
        root = np.sqrt(weights) / noise
        scaled = values * root[:, None]
        inverse = precision + scaled.T @ scaled
        mean = np.linalg.solve(inverse, pull + scaled.T @ (root * targets))
        weights = _weights(targets - values @ mean, noise)
    return Learned(prior.names, mean, np.linalg.inv(inverse), noise)


def _by_rows(prior: Learned, values: Array, targets: Array, noise: float) -> Learned:
    """The same for fewer rows than weights."""
    spread = prior.covariance @ values.T
    inner = values @ spread
    weights, mean, covariance = np.ones(len(targets)), prior.mean, prior.covariance
    for _ in range(TURNS):
        gain = np.linalg.solve(inner + np.diag(noise**2 / weights), spread.T).T
        mean = prior.mean + gain @ (targets - values @ prior.mean)
        covariance = prior.covariance - gain @ spread.T
        weights = _weights(targets - values @ mean, noise)
    return Learned(prior.names, mean, covariance, noise)


def _weights(left: Array, noise: float) -> Array:
    return (TAILS + 1) / (TAILS + (left / noise) ** 2)


def _targets(runs: Sequence[Run]) -> Array:
    return np.log([run.measured / run.predicted for run in runs])


def _names(runs: Iterable[Run], known: tuple[tuple[str, str, str], ...]) -> tuple[tuple[str, str, str], ...]:
    return tuple(dict.fromkeys((*known, *(name for run in runs for name in run.features))))


def _around_curve(run: Run) -> float:
    """How far devices' matmuls in a run's type lie around their median curve: the standard deviation of a logarithm."""
    known = devices().get(run.device)
    return curves.spread(known, "product", known.runs_in(run.precision)) if known is not None else 0.0


def _matrix(runs: Sequence[Run], names: tuple[tuple[str, str, str], ...]) -> tuple[Array, Array]:
    """Values by run and name, and the prior variance of what the names lack."""
    place = {name: i for i, name in enumerate(names)}
    values, unseen = np.zeros((len(runs), len(names))), np.zeros(len(runs))
    for i, run in enumerate(runs):
        for name, value in run.features.items():
            if name in place:
                values[i, place[name]] = value
            else:
                unseen[i] += (_width(name) * value) ** 2
    return values, unseen


def _widths(names: Sequence[tuple[str, str, str]], mean: Array | None = None) -> Array:
    """Of the prior of each effect; of machines' as wide as tails are that reach what they are taken for, `mean`."""
    widths = np.array([WIDTHS[family] for family, _, _ in names])
    if mean is None:
        return widths
    machines = np.array([family == "place machine" for family, _, _ in names], dtype=bool)
    return np.where(machines, widths * np.sqrt((TAILS + (mean / widths) ** 2) / (TAILS + 1)), widths)


def _width(name: tuple[str, str, str]) -> float:
    """Of an effect of which nothing has been seen."""
    family, what, _ = name
    return NO_CURVE if family == "device" and what in devices() and not curves.measured(what) else WIDTHS[family]


def _grown(one: Learned, names: tuple[tuple[str, str, str], ...]) -> Learned:
    """With more weights, at their priors."""
    more = len(names) - len(one.names)
    mean = np.concatenate([one.mean, np.zeros(more)])
    covariance = np.diag(np.array([_width(name) ** 2 for name in names]))
    covariance[: len(one.names), : len(one.names)] = one.covariance
    return Learned(names, mean, covariance, one.noise)
