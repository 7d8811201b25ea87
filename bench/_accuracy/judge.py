"""The outcome of one comparison: the histogram, the class, and a digest of the bits.

    correct     every element is the value nearest to the truth
    faithful    every element is off by less than one ulp: one of the two neighbours of the truth
    bounded     some are further off, but within the bound of the operator's class of algorithms
    outside     some are beyond that bound, or NaN or infinite where they should not be (or not where they should):
                the operator is wrong there

What IEEE 754 demands the nearest value of (sums and products of two numbers, quotients, square roots) is correct or
outside.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch
from torch import Tensor

from bench._accuracy.bounds import Truth, limit, roundoff
from bench._accuracy.ulps import FORMATS, HALF, compared, histogram, ulp

CLASSES = ("correct", "faithful", "bounded", "outside")
"""From the best to the worst."""


@dataclass(frozen=True)
class Outcome:
    """What came of an operator on one input."""

    verdict: str
    worst: float
    """The largest error in ulps of the result; elements that are NaN or infinite by mistake are not in it."""
    over: float
    """The largest error over its bound; above one is outside."""
    own: float
    """The same with a bound for an operator that computes in its own type, step by step."""
    special: int
    signs: int
    flushed: int
    histogram: tuple[int, ...]
    digest: str

    @property
    def count(self) -> int:
        """Elements."""
        return sum(self.histogram)

    @property
    def right(self) -> float:
        """The share of elements that are correctly rounded; one where there is none."""
        return self.histogram[0] / self.count if self.count else 1.0


def judge(got: Tensor, truth: Truth) -> Outcome:
    """Of results in float32, bfloat16 or float16."""
    if got.shape != truth.value.shape:
        raise ValueError(f"results of shape {tuple(got.shape)} are no {tuple(truth.value.shape)}")
    got, true = got.detach().cpu(), truth.value
    of = FORMATS[got.dtype]
    demanded = got.double() if truth.free is None else torch.where(truth.free, true, got.double())
    found = compared(demanded, true, of)
    plain = ~found.special & true.isfinite()
    error = found.ulps * ulp(true, of)
    worst, over, own = (
        float(part[plain].max()) if plain.any() else 0.0
        for part in (found.ulps, error / limit(truth, got.dtype), error / limit(truth, got.dtype, roundoff(got.dtype)))
    )
    special = int(found.special.sum())
    verdict = _verdict(worst, over, special, truth.steps)
    bins = histogram(found)
    return Outcome(verdict, worst, over, own, special, found.signs, found.flushed, bins, digest(got))


def digest(x: Tensor) -> str:
    """Of the bits, where all NaN are one."""
    plain = torch.where(x.isnan(), torch.full_like(x, torch.nan), x) if x.is_floating_point() else x
    shape = repr(tuple(x.shape)).encode()
    return hashlib.sha256(shape + plain.contiguous().flatten().view(torch.uint8).numpy().tobytes()).hexdigest()[:8]


def _verdict(worst: float, over: float, special: int, steps: int) -> str:
    if special:
        return "outside"
    if worst <= HALF:
        return "correct"
    if not steps:
        return "outside"
    if worst <= 1:
        return "faithful"
    return "outside" if over > 1 else "bounded"
