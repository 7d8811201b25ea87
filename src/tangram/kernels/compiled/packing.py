"""Tensors to E4M3 under scales of rows of 128 or of squares, and to packed E2M1 under E4M3 under float32 (NVFP4).

A tile is turned by a matrix of 128 x 128 first where one is given. Quotients are rounded correctly, so that codes are
those of the laboratory bit by bit; NVFP4 divides in float64 for it, because its unit, a scale times the tensor's, has
more bits than float32. A NaN makes a NaN of its scale, and so of all that share it.
"""

# ruff: noqa: N803  a kernel's constants and pointers are in capitals

from __future__ import annotations

import triton
import triton.language as tl

from tangram.kernels.compiled.device import e2m1_grid, e4m3_grid, tile_of, to_e4m3
from tangram.kernels.compiled.elements import loaded

WIDE = tl.constexpr(128)


@triton.jit
def _turned(X, TURN, stride_x, rows, columns, there, wide, TURNED: tl.constexpr):
    x = loaded(X, rows[:, None] * stride_x + columns[None, :], there[:, None] & wide[None, :])
    if TURNED:
        at = tl.arange(0, WIDE)
        x = tl.dot(x, tile_of(TURN, at, at, WIDE, 1, at >= 0, at >= 0), input_precision="tf32x3")
    return x


@triton.jit
def _marked(most, x, axis: tl.constexpr):
    """The largest, or NaN where there is one."""
    return tl.where(tl.max((x != x).to(tl.int32), axis) > 0, float("nan"), most)


@triton.jit
def fp8(X, TURN, CODES, SCALES, stride_b, stride_x, R, C, ROWS: tl.constexpr, SQUARE: tl.constexpr,
        TURNED: tl.constexpr):  # fmt: skip
    """CODES (B, R, C); SCALES (B, R, columns / 128), or (B, rows / 128, columns / 128) where SQUARE (ROWS of 128)."""
    b, tile, column = tl.program_id(2).to(tl.int64), tl.program_id(0), tl.program_id(1)
    rows, columns = tile.to(tl.int64) * ROWS + tl.arange(0, ROWS), column * WIDE + tl.arange(0, WIDE)
    there, wide = rows < R, columns < C
    x = _turned(X + b * stride_b, TURN, stride_x, rows, columns, there, wide, TURNED)
    most = _marked(tl.max(tl.abs(x), 1), x, 1)
    if SQUARE:
        most = tl.zeros((ROWS,), tl.float32) + _marked(tl.max(most, 0), most, 0)
    scale = tl.where(most == 0.0, 1.0, tl.div_rn(most, tl.full((ROWS,), 448.0, tl.float32)))
    safe = tl.where(scale == 0.0, 1.0, scale)[:, None] + tl.zeros((ROWS, WIDE), tl.float32)
    codes = tl.where((scale == 0.0)[:, None], 0.0, tl.div_rn(x, safe))
    at = b * R * C + rows[:, None] * C + columns[None, :]
    tl.store(CODES + at, to_e4m3(codes), mask=there[:, None] & wide[None, :])
    if SQUARE:
        at = (b * tl.num_programs(0) + tile) * tl.num_programs(1) + column
        tl.store(SCALES + at + tl.zeros((ROWS,), tl.int32), scale, mask=tl.arange(0, ROWS) == 0)
    else:
        tl.store(SCALES + (b * R + rows) * tl.num_programs(1) + column, scale, mask=there)


@triton.jit
def largest(X, TURN, MOST, stride_x, R, C, ROWS: tl.constexpr, TURNED: tl.constexpr):
    """Of each tile."""
    rows, columns = (
        tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS),
        tl.program_id(1) * WIDE + tl.arange(0, WIDE),
    )
    x = _turned(X, TURN, stride_x, rows, columns, rows < R, columns < C, TURNED)
    most = _marked(tl.max(tl.abs(x), 1), x, 1)
    tl.store(MOST + tl.program_id(0) * tl.num_programs(1) + tl.program_id(1), _marked(tl.max(most, 0), most, 0))


@triton.jit
def nvfp4(X, TURN, SECOND, PACKED, SCALES, stride_x, R, C, ROWS: tl.constexpr, TURNED: tl.constexpr):
    """PACKED (R, columns / 2), the first of two in the low bits; SCALES (R, columns / 16) in E4M3."""
    rows, columns = (
        tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS),
        tl.program_id(1) * WIDE + tl.arange(0, WIDE),
    )
    x = _turned(X, TURN, stride_x, rows, columns, rows < R, columns < C, TURNED)
    second = tl.load(SECOND).to(tl.float64)
    parts = tl.reshape(x, (ROWS, WIDE // 16, 16))
    most = tl.max(tl.abs(parts), 2).to(tl.float64)
    scale = e4m3_grid((most / 6.0 / second).to(tl.float32))
    unit = tl.where(scale == 0.0, 1.0, scale).to(tl.float64) * second
    grid = e2m1_grid((parts.to(tl.float64) / unit[:, :, None]).to(tl.float32))
    grid = tl.reshape(tl.where((scale == 0.0)[:, :, None], 0.0, grid), (ROWS, WIDE // 2, 2))
    size = tl.abs(grid)
    number = tl.where(size < 2.0, size * 2.0, tl.where(size < 4.0, size + 2.0, size * 0.5 + 4.0))
    low, high = tl.split(number.to(tl.int32) + tl.where(grid < 0.0, 8, 0))
    pairs, groups = (
        tl.program_id(1) * (WIDE // 2) + tl.arange(0, WIDE // 2),
        tl.program_id(1) * (WIDE // 16) + tl.arange(0, WIDE // 16),
    )
    count = tl.cdiv(C, 2)
    there = (rows < R)[:, None] & (pairs < count)[None, :]
    tl.store(PACKED + rows[:, None] * count + pairs[None, :], (low | (high << 4)).to(tl.uint8), mask=there)
    count = tl.cdiv(C, 16)
    there = (rows < R)[:, None] & (groups < count)[None, :]
    tl.store(SCALES + rows[:, None] * count + groups[None, :], to_e4m3(scale), mask=there)
