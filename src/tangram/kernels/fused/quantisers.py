"""Tensors in few bits, as they are stored and multiplied: block FP8 as DeepSeek-V3 has it, and NVFP4.

    quantise_fp8(x, 1)      E4M3, one float32 scale for 128 neighbours of a row: activations and gradients
    quantise_fp8(x, 128)    E4M3, one for 128 x 128 of a matrix: weights
    quantise_nvfp4(x)       E2M1, two a byte, under E4M3 scales of 16 neighbours, under one float32 of the tensor

Codes and scales are those of the laboratory (`lab.quant`), bit by bit. With `turn`, an orthogonal matrix (n, n) such as
`lab.quant.hadamard(n)`, each n neighbours of the last dim are multiplied by it first; n divides 128. A device does that
by three products of TF32, which for bfloat16 and n of 16 or 64 round nothing. Scales lie row by row; a unit that wants
them in another order is not served. They have no gradient: who trains through a cast says what it is. A scale of whole
heads is attention's (`flash.launch`).
"""

# ruff: noqa: N806  a tensor carries its dims in its name

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from tangram.errors import UserError
from tangram.kernels.fused.common import by_kernels, in_rows
from tangram.kernels.host import cdiv, kernel

WIDE, GROUP = 128, 16
_SECOND = 6.0 * 448.0
_HEIGHTS = (1, WIDE)
_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_E4M3 = torch.float8_e4m3fn


@torch.library.custom_op("tangram::quantise_fp8", mutates_args=())
def quantise_fp8(x: Tensor, height: int = 1, turn: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """E4M3 like x (..., R, C), and scales (..., R, C / 128), or (..., R / 128, C / 128) of a `height` of 128."""
    _refuse(x, turn)
    if height not in _HEIGHTS or (height > 1 and x.ndim < 2):
        raise UserError(f"blocks are 1 x {WIDE}, or of matrices {WIDE} x {WIDE}, not {height} x {WIDE}")
    parts = _matrices(x, height)
    codes, scales = x.new_empty(parts.shape, dtype=_E4M3), x.new_empty(_scales(parts, height), dtype=torch.float32)
    if by_kernels(x):
        from tangram.kernels.compiled import packing  # where there is no device there may be no Triton

        (B, R, C), rows = parts.shape, WIDE if height > 1 else 32
        kernel(packing.fp8)[(cdiv(R, rows), cdiv(C, WIDE), B)](
            parts, _block_diagonal(turn, x), codes, scales, parts.stride(0), parts.stride(1), R, C, rows, height > 1,
            turn is not None, num_warps=8,
        )  # fmt: skip
    elif x.numel():
        tiles = _tiles(_turned(parts, turn), height)
        most = tiles.abs().amax((2, 4), keepdim=True)
        scale = torch.where(most == 0, 1.0, most / 448.0)
        found = (tiles / torch.where(scale == 0, 1.0, scale)).masked_fill(scale == 0, 0.0).clamp(-448.0, 448.0)
        codes.copy_(found.flatten(3).flatten(1, 2)[:, : parts.shape[1], : parts.shape[2]].to(_E4M3))
        scales.copy_(scale.view(scales.shape))
    return codes.view(x.shape), scales.view(_shape(x, height))


@quantise_fp8.register_fake
def _(x: Tensor, height: int = 1, turn: Tensor | None = None) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape, dtype=_E4M3), x.new_empty(_shape(x, height), dtype=torch.float32)


def dequantise_fp8(codes: Tensor, scales: Tensor, height: int = 1, dtype: torch.dtype = torch.float32) -> Tensor:
    """Codes times their scales; exact in float64."""
    wide = scales.to(torch.float64 if dtype == torch.float64 else torch.float32)
    wide = wide.repeat_interleave(WIDE, -1)[..., : codes.shape[-1]]
    if height > 1:
        wide = wide.repeat_interleave(height, -2)[..., : codes.shape[-2], :]
    return (codes.to(wide.dtype) * wide).to(dtype)


@torch.library.custom_op("tangram::quantise_nvfp4", mutates_args=())
def quantise_nvfp4(x: Tensor, turn: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Of x (..., C) bytes (..., C / 2), the first of two in the low bits, E4M3 scales (..., C / 16), and the one ()."""
    _refuse(x, turn)
    rows, C = in_rows(x) if x.numel() else x.new_empty(0, x.shape[-1]), x.shape[-1]
    packed = x.new_empty(_packed(x), dtype=torch.uint8)
    scales, second = x.new_empty(_groups(x), dtype=_E4M3), x.new_ones((), dtype=torch.float32)
    if by_kernels(x):
        from tangram.kernels.compiled import packing

        grid, whole = (cdiv(len(rows), 16), cdiv(C, WIDE)), _block_diagonal(turn, x)
        most, sizes = x.new_empty(grid, dtype=torch.float32), (rows.stride(0), *rows.shape, 16, turn is not None)
        kernel(packing.largest)[grid](rows, whole, most, *sizes)
        second = _second(most)
        kernel(packing.nvfp4)[grid](rows, whole, second, packed, scales, *sizes)
    elif x.numel():
        groups = F.pad(_turned(rows, turn), (0, -C % GROUP)).double().view(len(rows), -1, GROUP)
        second = _second(groups.float())
        most = groups.abs().amax(-1, keepdim=True)
        scale = (most / 6.0 / second.double()).float().clamp(max=448.0).to(_E4M3)
        wide = scale.double()
        values = (groups / (torch.where(wide == 0, 1.0, wide) * second.double())).float().masked_fill(wide == 0, 0.0)
        packed.copy_(_bytes(values.flatten(1)[:, : C + C % 2]).view(packed.shape))
        scales.copy_(scale.view(scales.shape))
    return packed, scales, second


@quantise_nvfp4.register_fake
def _(x: Tensor, turn: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    packed, scales = x.new_empty(_packed(x), dtype=torch.uint8), x.new_empty(_groups(x), dtype=_E4M3)
    return packed, scales, x.new_empty((), dtype=torch.float32)


def unpack_e2m1(packed: Tensor, width: int) -> Tensor:
    """The values of bytes, in float32, `width` a row."""
    codes: Tensor = torch.stack([packed & 15, packed >> 4], -1).flatten(-2)[..., :width].long()
    return torch.tensor([*_VALUES, *(-x for x in _VALUES)], device=packed.device)[codes]


def dequantise_nvfp4(
    packed: Tensor, scales: Tensor, second: Tensor, width: int, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Values times both scales, `width` a row; exact in float64."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    own = scales.to(wide).repeat_interleave(GROUP, -1)[..., :width]
    return (unpack_e2m1(packed, width).to(wide) * own * second.to(wide)).to(dtype)


# ---------------------------------------------------------------- parts


def _bytes(values: Tensor) -> Tensor:
    """Float32 (rows, an even number) to E2M1, two a byte."""
    size = values.abs()
    step = torch.where(size < 2.0, 0.5, torch.where(size < 4.0, 1.0, 2.0))
    grid = ((size / step).round() * step).clamp(max=6.0)
    number = torch.where(grid < 2.0, grid * 2.0, torch.where(grid < 4.0, grid + 2.0, grid * 0.5 + 4.0))
    codes = number.nan_to_num(7.0).to(torch.uint8) + 8 * ((values < 0) & (grid > 0)).to(torch.uint8)
    return codes[:, ::2] | (codes[:, 1::2] << 4)


def _second(x: Tensor) -> Tensor:
    """What the tensor's largest element is divided by so that its scale is E4M3's largest."""
    found: Tensor = x.abs().amax() / _SECOND
    return torch.where(found == 0, 1.0, found)


def _turned(x: Tensor, turn: Tensor | None) -> Tensor:
    if turn is None:
        return x.float()
    neighbours = x.float().reshape(*x.shape[:-1], -1, len(turn))
    return (neighbours @ turn.float()).flatten(-2)


def _block_diagonal(turn: Tensor | None, x: Tensor) -> Tensor:
    """As kernels multiply by it: 128 x 128. A pointer that is not read stands where there is none."""
    if turn is None:
        return x
    return torch.kron(torch.eye(WIDE // len(turn), device=turn.device), turn.float().contiguous())


def _matrices(x: Tensor, height: int) -> Tensor:
    """(B, R, C) with the elements of a row side by side."""
    flat = (1, math.prod(x.shape[:-1])) if height == 1 else (math.prod(x.shape[:-2]), x.shape[-2])
    found = x.reshape(*flat, x.shape[-1])
    return found if found.stride(2) == 1 else found.contiguous()


def _tiles(x: Tensor, height: int) -> Tensor:
    """(B, rows, height, columns, 128), filled up with zeros."""
    B, R, C = x.shape
    padded = F.pad(x, (0, -C % WIDE, 0, -R % height))
    return padded.view(B, cdiv(R, height), height, cdiv(C, WIDE), WIDE)


def _scales(parts: Tensor, height: int) -> tuple[int, int, int]:
    return parts.shape[0], cdiv(parts.shape[1], height), cdiv(parts.shape[2], WIDE)


def _shape(x: Tensor, height: int) -> tuple[int, ...]:
    rows = x.shape[:-1] if height == 1 else (*x.shape[:-2], cdiv(x.shape[-2], height))
    return (*rows, cdiv(x.shape[-1], WIDE))


def _packed(x: Tensor) -> tuple[int, ...]:
    return (*x.shape[:-1], cdiv(x.shape[-1], 2))


def _groups(x: Tensor) -> tuple[int, ...]:
    return (*x.shape[:-1], cdiv(x.shape[-1], GROUP))


def _refuse(x: Tensor, turn: Tensor | None) -> None:
    if x.dtype not in (torch.float32, torch.bfloat16):
        raise UserError(f"what is quantised is float32 or bfloat16, not {str(x.dtype).removeprefix('torch.')}: cast it")
    if not x.ndim:
        raise UserError("what is quantised has rows, this is one number")
    if turn is None:
        return
    if turn.ndim != 2 or turn.shape[0] != turn.shape[1] or not len(turn) or WIDE % len(turn):
        raise UserError(f"a turn is a square matrix whose width divides {WIDE}, not {tuple(turn.shape)}")
    if x.shape[-1] % len(turn):
        raise UserError(f"rows of {x.shape[-1]} are no whole number of {len(turn)} neighbours, which are turned")
