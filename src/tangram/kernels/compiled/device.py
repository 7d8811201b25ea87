"""Casts and products inside of kernels, the same on a device and under Triton's interpreter.

The interpreter computes on the CPU, so the kernels that a device runs can be tested without one. Two things it gets
wrong (Triton 3.6 to 3.9, https://github.com/triton-lang/triton/issues/8322): a cast to bfloat16 or E4M3 does not round
(it drops bits, loses the carry of rounding, and does not saturate), and a product of bfloat16 multiplies their bits as
whole numbers. So under it a value is rounded here first, by float32's own bits, and products are taken of float32,
which holds every bfloat16. On a device these functions are the plain cast and the plain product.
`tests/kernels/compiled/test_device.py` says when the interpreter needs them no longer.
"""

# ruff: noqa: N803  a kernel's constants are in capitals; it has no conditional expressions

from __future__ import annotations

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))
E2M1_UNDER_E4M3 = tl.constexpr(6.0 * 448.0)
"""The largest number of E2M1 times the largest scale of E4M3."""


@triton.jit
def tile_of(X, rows, columns, row_stride, column_stride, rows_there, columns_there):
    """The elements (rows, columns), zero where there are none. Of long sequences a place does not fit in 32 bits."""
    there = rows_there[:, None] & columns_there[None, :]
    at = X + (rows.to(tl.int64) * row_stride)[:, None] + (columns.to(tl.int64) * column_stride)[None, :]
    return tl.load(at, mask=there, other=0.0)


@triton.jit
def _nearest(x, DROPPED: tl.constexpr):
    """Normal float32 with so many bits of the mantissa dropped, to the nearest, of two to the even one."""
    bits = x.to(tl.int32, bitcast=True)
    half: tl.constexpr = (1 << (DROPPED - 1)) - 1
    bits = (bits + half + ((bits >> DROPPED) & 1)) & (-(1 << DROPPED))
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def to_bf16(x):
    """float32 to bfloat16, to nearest."""
    if INTERPRETED:
        x = tl.where(x == x, tl.where(tl.abs(x) == float("inf"), x, _nearest(x, 16)), float("nan"))
        return (x.to(tl.int32, bitcast=True) >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    return x.to(tl.bfloat16)


@triton.jit
def e4m3_grid(x):
    """float32 to the nearest value of E4M3, the largest where it lies beyond, in float32."""
    top = tl.where(x > 448.0, 448.0, tl.where(x < -448.0, -448.0, x))
    shift: tl.constexpr = 24576.0  # 1.5 * 2**14: its last bit is E4M3's smallest number, 2**-9
    small = (top + shift) - shift
    return tl.where(tl.abs(top) < 0.015625, small, tl.where(x == x, _nearest(top, 20), x))


@triton.jit
def to_e4m3(x):
    """float32 to E4M3, to nearest, saturating; NaN stays."""
    if INTERPRETED:
        grid = e4m3_grid(x)
        bits = grid.to(tl.int32, bitcast=True)
        sign = (bits >> 24) & 0x80
        normal = ((bits >> 20) & 0x7FF) - (120 << 3)  # exponent and mantissa; 127 - 7 less in the exponent
        code = tl.where(tl.abs(grid) < 0.015625, (tl.abs(grid) * 512.0).to(tl.int32), normal)
        code = tl.where(x == x, code, 0x7F)
        return (code | sign).to(tl.uint8).to(tl.float8e4nv, bitcast=True)
    return x.to(tl.float8e4nv)


@triton.jit
def e2m1_grid(x):
    """float32 to the nearest value of E2M1, of two to the even one, saturating, in float32."""
    size = tl.abs(x)
    shift: tl.constexpr = 12582912.0  # 1.5 * 2**23
    step = tl.where(size < 2.0, 0.5, tl.where(size < 4.0, 1.0, 2.0))
    grid = ((size / step + shift) - shift) * step
    grid = tl.where(grid > 6.0, 6.0, grid)
    return tl.where(x < 0, -grid, grid)


@triton.jit
def rounded_groups(x, row, ROWS: tl.constexpr, COLUMNS: tl.constexpr, GROUP: tl.constexpr, E4M3_SCALES: tl.constexpr):
    """`x` (ROWS, COLUMNS) over `row` as E2M1 under scales of groups of columns: codes times scales, in float32.

    Scales are of E4M3, or the powers of two below (OCP). All values are exact in bfloat16.
    """
    parts = tl.reshape(x, (ROWS, COLUMNS // GROUP, GROUP))
    most = tl.max(tl.abs(parts), 2)
    if E4M3_SCALES:
        scale = e4m3_grid(most / 6.0 / row[:, None])
    else:
        exponent = ((most / row[:, None]).to(tl.int32, bitcast=True) >> 23) - 2  # 4 is the power of two below 6
        scale = (tl.maximum(exponent, 1) << 23).to(tl.float32, bitcast=True)
    scale = tl.where(most == 0.0, 1.0, scale)
    unit = tl.where(scale == 0.0, 1.0, scale * row[:, None])
    codes = tl.where((scale == 0.0)[:, :, None], 0.0, e2m1_grid(parts / unit[:, :, None]))
    return tl.reshape(codes * scale[:, :, None], (ROWS, COLUMNS))


@triton.jit
def to_float(x):
    """bfloat16 or E4M3 to float32; the interpreter makes numbers of E4M3's NaN, and zeros of bfloat16's smallest."""
    if INTERPRETED and x.dtype == tl.float8e4nv:
        code = x.to(tl.uint8, bitcast=True)
        return tl.where((code & 0x7F) == 0x7F, float("nan"), x.to(tl.float32))
    if INTERPRETED and x.dtype == tl.bfloat16:
        return (x.to(tl.uint16, bitcast=True).to(tl.int32) << 16).to(tl.float32, bitcast=True)
    return x.to(tl.float32)


@triton.jit
def dot(a, b):
    """`a @ b` in float32, of bfloat16 or E4M3; a sum of its own, so that one of E4M3 is short (two levels)."""
    if INTERPRETED:
        return tl.dot(to_float(a), to_float(b), input_precision="ieee")
    return tl.dot(a, b)
