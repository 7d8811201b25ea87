"""Errors in units of the last place of a result's own type, and their histogram.

One ulp is the distance of two neighbours around the true value, which below the smallest normal number no longer
shrinks. Infinity counts as the value after the largest, so that overflow is an error of a size like any other; where
the true value is itself infinite or NaN, nothing else will do.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast as cast_type

import torch
from torch import Tensor

from tangram.kernels.lab.formats import BF16, FP16, FP32, Format, cast, power_of_two

FORMATS = {torch.float32: FP32, torch.bfloat16: BF16, torch.float16: FP16}
EDGES = (0.5, 0.502, *(2.0**i for i in range(17)), float("inf"))
"""Upper ends of the bins. The second holds what was rounded twice: to float32, and of its ties once more."""
HALF = 0.5


@dataclass(frozen=True)
class Compared:
    """Element by element, how far results are from what is true."""

    ulps: Tensor
    """In float64; infinite where one is NaN or infinite and the other is not the same."""
    special: Tensor
    """Where that is so."""
    signs: int
    """Zeros that have the other sign."""
    flushed: int
    """Zeros where a subnormal number is right."""


def ulp(true: Tensor, of: Format) -> Tensor:
    """The distance between neighbours in `of` where each true value lies."""
    below = power_of_two(true.double().abs(), up=False)
    top = float(power_of_two(torch.tensor(of.largest).double(), up=False))
    return below.nan_to_num(1.0).clamp(2.0**of.lowest, top) * 2.0**-of.mantissa


def compared(got: Tensor, true: Tensor, of: Format) -> Compared:
    """`true` in float64, `got` in the type `of` (or any that holds its values)."""
    found, true = got.double(), true.double()
    grain = ulp(true, of)
    special = found.isnan() != true.isnan()
    special |= true.isinf() & (found != true)
    after = of.largest + float(ulp(torch.tensor(of.largest), of))
    rounded = cast(true, of, saturate=False)
    error = (found.clamp(-after, after) - true.clamp(-after, after)).abs() / grain
    error = torch.where(found == rounded, error.clamp_max(HALF), error)
    error = torch.where(special, torch.full_like(error, torch.inf), error)
    error = torch.where(~special & (true.isnan() | true.isinf()), torch.zeros_like(error), error)
    zeros = (found == 0) & ~true.isnan()
    signs = zeros & (rounded == 0) & (found.signbit() != true.signbit())
    flushed = zeros & (rounded != 0) & (rounded.abs() < 2.0**of.lowest)
    return Compared(error, special, int(signs.sum()), int(flushed.sum()))


def histogram(one: Compared) -> tuple[int, ...]:
    """How many elements lie in each bin of EDGES; the last number counts NaN and infinities that are wrong."""
    plain = one.ulps[~one.special].flatten()
    ends = torch.tensor(EDGES, dtype=torch.float64)
    bins = torch.bucketize(plain, ends)  # an end belongs to its bin
    counts = cast_type("list[int]", torch.bincount(bins, minlength=len(EDGES)).tolist())
    return (*counts, int(one.special.sum()))
