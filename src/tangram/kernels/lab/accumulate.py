"""Sums of products as matrix units make them: so many at a time, in a register of so many bits.

The model: `chunk` products are added without error, their sum is added to a register that keeps `mantissa` bits and
drops the rest, and after `promote` products the register is added to a float32 number and starts anew (two levels of
accumulation: DeepSeek-V3, section 3.3; SageAttention2). Hopper's FP8 unit is said to keep about 14 bits, that is 13
after the point. Trade-off: a model; a chip aligns each product before it adds, so only a chip can tell its own bits.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tangram.kernels.lab.formats import single, truncated


@dataclass(frozen=True)
class Accumulator:
    """How products are summed. `mantissa` of None: without error; `promote` of 0: in one register to the end."""

    chunk: int = 32
    mantissa: int | None = None
    promote: int = 0

    def __str__(self) -> str:
        if self.mantissa is None:
            return "exact"
        levels = f", float32 every {self.promote}" if self.promote else ""
        return f"{self.mantissa} bits, {self.chunk} at a time{levels}"


EXACT = Accumulator()
FP32_CHUNKED = Accumulator(chunk=16, mantissa=23)
HOPPER_FP8 = Accumulator(chunk=32, mantissa=13)
TWO_LEVEL = Accumulator(chunk=32, mantissa=13, promote=128)


def product(a: Tensor, b: Tensor, by: Accumulator = EXACT) -> Tensor:
    """`a @ b`; the last dim of `a` is summed."""
    if by.mantissa is None:
        return a @ b
    outer = torch.zeros_like(a[..., :1] @ b[..., :1, :])
    register = torch.zeros_like(outer)
    for start in range(0, a.shape[-1], by.chunk):
        end = start + by.chunk
        register = truncated(register + a[..., start:end] @ b[..., start:end, :], by.mantissa)
        if by.promote and end % by.promote == 0:
            outer, register = single(outer + register), torch.zeros_like(register)
    return single(outer + register)
