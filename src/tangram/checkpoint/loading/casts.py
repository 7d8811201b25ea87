"""Values of one floating-point type as those of another: what a type can hold, and copies that refuse to overflow."""

from __future__ import annotations

import math
from functools import lru_cache

import torch
from torch import Tensor

from tangram.errors import UserError


def cast_into(name: str, values: Tensor, out: Tensor) -> None:
    """Copy values of a tensor into memory of its shape and any type.

    Raises UserError for numbers beyond the largest of that type, which would become that or infinite: rounding was
    asked for, and no more.
    """
    out.copy_(values)
    own, was = (str(one.dtype).removeprefix("torch.") for one in (out, values))
    if own != was and is_float(own) and is_float(was) and not holds(own, was):
        limit, infinite = _limit(out.dtype)
        # torch rounds twice on its way from float64 to half precision.
        sizes = (values.float() if values.itemsize == 1 or out.itemsize < 4 else values).abs()
        beyond = sizes >= limit
        if lost := int((beyond & sizes.isfinite() if infinite else beyond).sum()):
            raise UserError(f"{name}: {lost:,} of its numbers are too large for {own}: take a wider type, as bfloat16")


@lru_cache
def _limit(dtype: torch.dtype) -> tuple[float, bool]:
    """From which size on numbers are rounded beyond the largest of a type, and whether it has infinity."""
    kind = torch.finfo(dtype)
    half_a_step = kind.eps / 2 * 2.0 ** math.floor(math.log2(kind.max))
    return kind.max + half_a_step, bool(torch.tensor(math.inf).to(dtype).float().isinf())


@lru_cache(maxsize=256)
def holds(wide: str, narrow: str) -> bool:
    """Whether a floating-point type has every number of another: tried with all of them where they are few.

    `torch.finfo` does not tell: its eps of float8_e5m2fnuz is another type's.
    """
    large, small = getattr(torch, wide), getattr(torch, narrow)
    if small.itemsize > 2:
        return large.itemsize >= small.itemsize
    bits = torch.arange(256**small.itemsize).to(torch.uint8 if small.itemsize == 1 else torch.uint16)
    numbers = bits.view(small).double()
    numbers = numbers[~numbers.isnan()]
    return torch.equal(numbers.view(torch.int64), numbers.to(large).double().view(torch.int64))  # -0 is not 0


def is_float(dtype: str) -> bool:
    """Whether a type is one of floating-point numbers."""
    return getattr(torch, dtype).is_floating_point
