"""Casts to the number formats of low-precision training, exact to the last bit, computed in float64.

A format is its grid: so many bits of mantissa, the exponent of the smallest normal number, the largest value. Between
two neighbours a cast takes the nearer one, of two as near the one whose last bit is zero, or throws dice in
proportion (stochastic rounding, which is right on average). What lies beyond the largest value becomes the largest,
as every instruction of training hardware does (satfinite), or infinity or NaN where that is asked for and exists.

References: OCP 8-bit floating point 1.0 (E4M3, E5M2), OCP microscaling formats 1.0 (E2M1, E8M0), PTX's `cvt` (a NaN
cast to E2M1 is its largest value). INT8 is symmetric: -127 to 127. Trade-off: bits are not kept, only the values that
they mean.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

_EXPONENT = 0x7FF0_0000_0000_0000


@dataclass(frozen=True)
class Format:
    """The values of a number format."""

    name: str
    bits: int
    mantissa: int
    lowest: int
    """Exponent of the smallest normal number; below it the grid is even."""
    largest: float
    infinity: bool = False
    nan: bool = True

    def __str__(self) -> str:
        return self.name


E4M3 = Format("e4m3", 8, 3, -6, 448.0)
E5M2 = Format("e5m2", 8, 2, -14, 57344.0, infinity=True)
E2M1 = Format("e2m1", 4, 1, 0, 6.0, nan=False)
INT8 = Format("int8", 8, 7, 7, 127.0, nan=False)
BF16 = Format("bf16", 16, 7, -126, 2.0**128 - 2.0**120, infinity=True)
FP16 = Format("fp16", 16, 10, -14, 65504.0, infinity=True)
FP32 = Format("fp32", 32, 23, -126, 2.0**128 - 2.0**104, infinity=True)
FORMATS = {one.name: one for one in (E4M3, E5M2, E2M1, INT8, BF16, FP16, FP32)}
SMALLEST_SCALE, LARGEST_SCALE = -127, 127
"""Exponents of E8M0."""


def cast(x: Tensor, to: Format, dice: torch.Generator | None = None, saturate: bool = True) -> Tensor:
    """The values of `to` that `x` becomes, in float64. With `dice`: stochastic rounding.

    Not `saturate`: what is rounded beyond the largest value is infinity, or NaN where the format has no infinity;
    formats that have neither saturate always.
    """
    x = x.double()
    grain = _power_of_two_below(x).clamp_min(2.0**to.lowest) * 2.0**-to.mantissa
    steps = x / grain  # exact: a power of two
    if dice is None:
        steps = torch.round(steps)  # halves to even
    else:
        low = torch.floor(steps)
        steps = low + (torch.rand(x.shape, generator=dice, dtype=torch.float64) < steps - low)
    found = steps * grain
    over = found.abs() > to.largest
    over |= x.isinf()
    if saturate or not to.nan:
        beyond = torch.full_like(x, to.largest)
    else:
        beyond = torch.full_like(x, torch.inf if to.infinity else torch.nan)
    found = torch.where(over, beyond.copysign(x), found)
    return torch.where(x.isnan(), torch.full_like(x, torch.nan if to.nan else to.largest), found)


def single(x: Tensor) -> Tensor:
    """Rounded to float32, where a kernel's registers hold float32; in float64 again."""
    return x.float().double()


def truncated(x: Tensor, mantissa: int) -> Tensor:
    """The bits of the mantissa after so many dropped: rounded towards zero, as tensor cores add."""
    keep = -1 << (52 - mantissa)
    return (x.double().view(torch.int64) & keep).view(torch.float64)


def power_of_two(x: Tensor, up: bool) -> Tensor:
    """Positive values as E8M0: the power of two below, or above where `up`. NaN stays, of zero the smallest."""
    below = _power_of_two_below(x.double())
    found = torch.where(below < x, below * 2, below) if up else below
    return torch.where(x.isnan(), x.double(), found.clamp(2.0**SMALLEST_SCALE, 2.0**LARGEST_SCALE))


def values(of: Format) -> Tensor:
    """Every finite value of a small format, ascending, zero once."""
    grain, found = 2.0 ** (of.lowest - of.mantissa), [0.0]
    steps = 2**of.mantissa
    found += [i * grain for i in range(1, steps)]
    exponent = of.lowest
    while (top := 2.0**exponent) <= of.largest:
        found += [top * (1 + i / steps) for i in range(steps) if top * (1 + i / steps) <= of.largest]
        exponent += 1
    positive = torch.tensor(sorted(set(found)), dtype=torch.float64)
    return torch.cat([-positive[1:].flip(0), positive])


def _power_of_two_below(x: Tensor) -> Tensor:
    """2**floor(log2|x|), exactly; zero below float64's normal numbers, infinity for infinity and NaN."""
    return (x.view(torch.int64) & _EXPONENT).view(torch.float64)
