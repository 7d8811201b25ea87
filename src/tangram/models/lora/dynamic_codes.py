"""Numbers as codes of 8 bits that are closer to each other where they are smaller (Dettmers 2016).

A block of numbers is kept by the largest of their absolute values, and of each number the place of its share of that in
a table of 256. Codes are those of bitsandbytes to the bit, where it takes the nearest place.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes  # pyright: ignore[reportPrivateUsage]


def table(device: torch.device, *, signed: bool = True) -> Tensor:
    """The 256 numbers in order, float32. Never kept: one that is made in a run without memory has no values."""
    return torch.tensor(dynamic_numbers(signed=signed), dtype=torch.float32, device=device)


def shares(blocks: Tensor, largest: Tensor) -> Tensor:
    """Numbers [blocks, n] as shares of the largest of each block, from -1 to 1."""
    return (blocks * (1.0 / largest.clamp(min=1e-38))[:, None]).clamp_(-1, 1)


def places(some: Tensor, numbers: Tensor) -> Tensor:
    """The place of the nearest number of a table in order, the lower one of two that are as near: uint8."""
    return torch.bucketize(some, (numbers[:-1] + numbers[1:]) / 2, out_int32=True).to(torch.uint8)


@cache
def dynamic_numbers(*, signed: bool = True) -> tuple[float, ...]:
    """256 numbers from -1 to 1, or from 0 to 1: of each of seven tenfold ranges the middles of twice as many parts as
    of the range below."""
    found = [0.0, 1.0]
    with _disable_current_modes():  # of a run without memory
        for power in range(7):
            ends = torch.linspace(0.1, 1, 2 ** (power + (not signed)) + 1, dtype=torch.float32, device="cpu")
            middles = 10 ** (power - 6) * ((ends[:-1] + ends[1:]) / 2.0)
            found += [*middles.tolist(), *((-middles).tolist() if signed else ())]
    return tuple(sorted(found))
