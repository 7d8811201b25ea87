"""How far rounding may carry an operator: bounds from the literature, with the sizes that an operator declares.

A sum of n terms, or a chain of n roundings, in arithmetic of unit roundoff u is off by at most gamma_n = nu / (1 - nu)
times the sum of the magnitudes (Higham, Accuracy and Stability of Numerical Algorithms, 2002, sections 3.1 and 4.2).
Nothing comes near that when n is large; if roundings are independent and right on average, the error stays below
exp(c sqrt(n) u + n u^2 / (1 - u)) - 1 with probability at least 1 - 2n exp(-c^2 (1 - u)^2 / 2) (Higham and Mary 2019,
theorem 2.4). With c = 8 that is 1 - 2.5e-14 n for an element. The smaller of both is taken.

Torch computes 16-bit types in float32, so u is float32's for all; what an algorithm casts back on its way (the
probabilities of fused attention) is declared apart. The last rounding gives half an ulp more.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from bench._accuracy.ulps import FORMATS, HALF, ulp

CERTAINTY = 8.0
INNER = 2.0**-24
"""Unit roundoff of float32, in which operators compute."""
UNDERFLOW = 2.0**-126
"""What an operator of several steps may lose below float32's normal numbers."""
SLACK = 1e-6
"""In ulps: float64, which stands for the truth, is off, too."""


@dataclass(frozen=True)
class Truth:
    """What an operator should give, and what its errors are measured by; all in float64."""

    value: Tensor
    size: Tensor
    """The sum of the magnitudes of all that is added up for an element, at least its own."""
    steps: int = 0
    """Roundings in a row on the way to an element, before the last; 0: the nearest value and no other is right."""
    casts: Tensor | None = None
    """The part of `size` that this class of algorithms rounds to the operator's own type on its way."""
    free: Tensor | None = None
    """Where nothing is demanded: nothing times infinity, of which some take the limit."""


def gamma(n: int, u: float) -> float:
    """Higham's bound for n roundings; infinite where it says nothing."""
    return n * u / (1 - n * u) if n * u < 1 else math.inf


def probable(n: int, u: float) -> float:
    """Higham's and Mary's, which holds for all but one element in very many."""
    exponent = CERTAINTY * math.sqrt(n) * u + n * u * u / (1 - u)
    return math.expm1(exponent) if exponent < 700 else math.inf


def roundoff(dtype: torch.dtype) -> float:
    """The unit roundoff of a type: half the distance from one to the next."""
    return 2.0 ** -(FORMATS[dtype].mantissa + 1)


def limit(truth: Truth, dtype: torch.dtype, inner: float = INNER) -> Tensor:
    """How far each element may be off. `inner`: the unit roundoff that it computes in."""
    room = (HALF + SLACK) * ulp(truth.value, FORMATS[dtype])
    if not truth.steps:
        return room
    size = torch.where(truth.size.isnan(), truth.value.abs(), truth.size)
    room = room + min(gamma(truth.steps, inner), probable(truth.steps, inner)) * size + UNDERFLOW
    if truth.casts is not None:
        room = room + roundoff(dtype) * truth.casts.nan_to_num(0.0)
    return room
