"""Operands of the kernels from bfloat16: E4M3 of blocks of tokens, or E2M1 of groups, which is exact in bfloat16.

Smoothing (less a mean over tokens) and turning by a Hadamard matrix happen on the way, so that a tensor is read once.
E4M3 comes in both orders where a matrix unit needs both: one that takes only what lies along its sum (Hopper's) reads
values, and the backward's tensors, with tokens as their last dim.
"""

# ruff: noqa: N806  a tensor carries its dims in its name

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tangram.kernels.compiled import quantisers
from tangram.kernels.host import cdiv, kernel, padded
from tangram.kernels.lab.quant import Operand


@dataclass(frozen=True)
class Codes:
    """An operand: values to be multiplied, and what they are multiplied by afterwards."""

    values: Tensor
    """(B, H, S, E), bfloat16 or E4M3; any strides."""
    scales: Tensor | None = None
    """float32 (B, H, blocks), or (B, H, S), or (B, H, E) of a tensor that is summed along tokens."""


def e4m3_blocks(
    x: Tensor, block: int, mean: Tensor | None = None, turn: Tensor | None = None, tokens_last: bool = False
) -> Codes:
    """E4M3 under one scale for each `block` tokens of a head, its largest magnitude over 448.

    `x` (B, H, S, E) with channels in a row. `mean` (B, H, E) is taken away first, then `turn` (E, E) is multiplied.
    """
    B, H, S, E = x.shape
    codes = x.new_empty((B, H, E, S) if tokens_last else (B, H, S, E), dtype=torch.float8_e4m3fn)
    codes = codes.mT if tokens_last else codes
    blocks = cdiv(S, block)
    scales = x.new_empty((B, H, blocks), dtype=torch.float32)
    some = scales
    kernel(quantisers.blocks)[(blocks, B * H)](
        x, some if mean is None else mean, some if turn is None else turn, codes, scales,
        *x.stride()[:3], *codes.stride(), H, S, E, padded(E), block, mean is not None,
        turn is not None, num_warps=8,
    )  # fmt: skip
    return Codes(codes, scales)


def e2m1_groups(x: Tensor, operand: Operand, mean: Tensor | None = None, along_tokens: bool = False) -> Codes:
    """E2M1 under scales of groups, in bfloat16, with the float32 scales over those, of rows or else of channels.

    `x` (B, H, S, E); groups are of neighbouring channels, or of neighbouring tokens of one channel.
    """
    scaling = operand.scaling
    values = torch.empty(x.shape, dtype=torch.bfloat16, device=x.device)
    source, found = (x.mT, values.mT) if along_tokens else (x, values)
    B, H, R, C = source.shape
    row = torch.ones((B, H, R), dtype=torch.float32, device=x.device)
    if scaling.second == "row":
        far = source.float() if mean is None else source.float() - mean[:, :, None]
        row = far.abs().amax(-1) / (6.0 * 448.0)
        row = torch.where(row == 0, 1.0, row)
    grid = (cdiv(R, 32), cdiv(C, 64), B * H)
    kernel(quantisers.groups)[grid](
        source, row if mean is None else mean, row, found, *source.stride(), *found.stride(), H, R, C, 32, 64,
        scaling.size, mean is not None, scaling.kind == "e4m3",
    )  # fmt: skip
    return Codes(values, row)
