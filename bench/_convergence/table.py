"""What the results say, as numbers: gaps to BF16 in units of what seeds differ by, and the highest of norms and logits.

The band is the largest less the smallest held-out loss of BF16 over its seeds. A gap is a mean of differences between
runs of the same seed, which saw the same text from the same weights; the interval is Student's, of 95 in 100.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from scipy.stats import t as student  # pyright: ignore[reportMissingTypeStubs]

from bench._convergence.running import result_of
from bench._convergence.settings import PLAIN, Run, Size
from tangram.hardware.measuring.measure import Row

Results = Mapping[Run, Mapping[str, Any]]
SETTLED = 0.1
"""The share of steps that are not counted for the usual gradient norm: a run begins with large ones."""


@dataclass(frozen=True)
class Line:
    """One recipe in one setting at so many tokens of a step, over its seeds."""

    setting: str
    step_tokens: int
    recipe: str
    seeds: int
    """That have a result."""
    loss: float | None
    """Held out, the mean; None: some run has none, or was ended."""
    band: float | None
    """Of BF16; None: there are not two seeds of it."""
    gap: float | None
    """The mean of the paired differences from BF16."""
    within: float | None
    """How far the interval of 95 % reaches from the gap; None: there are not two pairs."""
    usual_norm: float
    """The median of the gradient norm after the first steps, the largest of the seeds."""
    largest_norm: float
    largest_logit: float
    skipped: int
    """Steps that were not applied, of all seeds."""
    ended: int
    """Runs that ended before their last step, or have no finite held-out loss."""

    @property
    def bands(self) -> float | None:
        """The gap in units of the band."""
        return None if self.gap is None or not self.band else self.gap / self.band

    @property
    def verdict(self) -> str:
        """In a word."""
        if self.ended:
            return "diverged"
        if self.recipe == PLAIN or self.bands is None:
            return ""
        if abs(self.bands) <= 1:
            return "inside"
        return "outside" if self.bands > 0 else "better"


def read(runs: Iterable[Run], folder: Path) -> Results:
    """Those that have a result."""
    return {run: found for run in runs if (found := result_of(run, folder)) is not None}


def lines(results: Results) -> list[Line]:
    """By setting and tokens of a step; recipes in the order of the queue."""
    groups: dict[tuple[str, int, str], list[Run]] = {}
    for run in results:
        groups.setdefault((run.setting, run.step_tokens, run.recipe), []).append(run)
    return [_line(key, runs, results) for key, runs in sorted(groups.items(), key=lambda one: one[0][:2])]


def _line(key: tuple[str, int, str], runs: Sequence[Run], results: Results) -> Line:
    setting, tokens, recipe = key
    found = {run.seed: results[run] for run in runs}
    plain = {
        run.seed: one["held_out"] for run, one in results.items()
        if (run.setting, run.step_tokens, run.recipe) == (setting, tokens, PLAIN) and one["held_out"] is not None
    }  # fmt: skip
    losses = {seed: one["held_out"] for seed, one in found.items() if one["held_out"] is not None}
    pairs = [loss - plain[seed] for seed, loss in losses.items() if seed in plain]
    whole = len(losses) == len(found)
    norms = {seed: [norm for _, norm in one["gradient_norms"]] for seed, one in found.items()}
    return Line(
        setting=setting,
        step_tokens=tokens,
        recipe=recipe,
        seeds=len(found),
        loss=fmean(losses.values()) if losses and whole else None,
        band=max(plain.values()) - min(plain.values()) if len(plain) > 1 else None,
        gap=fmean(pairs) if pairs and whole and recipe != PLAIN else None,
        within=_interval(pairs) if len(pairs) > 1 and whole and recipe != PLAIN else None,
        usual_norm=max(_usual(one) for one in norms.values()),
        largest_norm=max(norm for own in norms.values() for norm in own[_warm(own) :]),
        largest_logit=_largest([value for one in found.values() for _, value in one["largest_logits"]]),
        skipped=sum(len(one["skipped"]) for one in found.values()),
        ended=sum(one["ended"] is not None or one["held_out"] is None for one in found.values()),
    )


def _largest(values: Sequence[float]) -> float:
    return math.nan if any(map(math.isnan, values)) else max(values)


def _warm(norms: Sequence[float]) -> int:
    return int(SETTLED * len(norms))


def _usual(norms: Sequence[float]) -> float:
    own = sorted(norms[_warm(norms) :])
    return own[len(own) // 2]


def _interval(pairs: Sequence[float]) -> float:
    return float(student.ppf(0.975, len(pairs) - 1)) * stdev(pairs) / math.sqrt(len(pairs))  # pyright: ignore


def rows(size: Size, results: Results) -> Iterable[Row]:
    """As a bench prints them, all of one size."""
    known = lines(results)
    plain = {(one.setting, one.step_tokens): one for one in known if one.recipe == PLAIN}
    for one in known:
        where = f"{size.name}, {one.setting}, {one.step_tokens} tokens a step: {one.recipe}"
        peer = plain.get((one.setting, one.step_tokens))
        other = peer if peer is not None and peer is not one else None
        if one.loss is not None:
            peers = {} if other is None or other.loss is None else {PLAIN: other.loss}
            yield Row(f"{where}, held-out loss", "nats", one.loss, peers)
        if one.bands is not None:
            yield Row(f"{where}, gap", "seed bands", one.bands, target=1.0)
        for what, unit, value, theirs in (
            ("usual gradient norm", "", one.usual_norm, None if other is None else other.usual_norm),
            ("largest logit", "", one.largest_logit, None if other is None else other.largest_logit),
        ):
            if math.isfinite(value):
                yield Row(f"{where}, {what}", unit, value, {} if theirs is None else {PLAIN: theirs})
        if one.ended:
            yield Row(f"{where}, runs that ended early", "", one.ended, target=0.0)
