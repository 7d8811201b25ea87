"""The kernels that cast operands: one block of tokens of one head, or one tile of rows under scales of groups."""

# ruff: noqa: N803  a kernel's constants and pointers are in capitals

from __future__ import annotations

import triton
import triton.language as tl

from tangram.kernels.compiled.device import rounded_groups, to_bf16, to_e4m3


@triton.jit
def blocks(
    X, MEAN, TURN, CODES, SCALES, stride_xb, stride_xh, stride_xs, stride_cb, stride_ch, stride_cs, stride_ce,
    H, S, E, BE: tl.constexpr, BLOCK: tl.constexpr, SMOOTH: tl.constexpr, TURNED: tl.constexpr,
):  # fmt: skip
    block, b, h = tl.program_id(0), (tl.program_id(1) // H).to(tl.int64), (tl.program_id(1) % H).to(tl.int64)
    rows, channels = (block * BLOCK + tl.arange(0, BLOCK)).to(tl.int64), tl.arange(0, BE)
    there = (rows < S)[:, None] & (channels < E)[None, :]
    x = tl.load(
        X + b * stride_xb + h * stride_xh + rows[:, None] * stride_xs + channels[None, :], mask=there, other=0.0
    )
    x = x.to(tl.float32)
    if SMOOTH:
        mean = tl.load(MEAN + (b * H + h) * E + channels, mask=channels < E, other=0.0)
        x = tl.where(there, x - mean[None, :], 0.0)
    if TURNED:
        square = (channels < E)[:, None] & (channels < E)[None, :]
        turn = tl.load(TURN + channels[:, None] * E + channels[None, :], mask=square, other=0.0)
        x = tl.dot(x, turn, input_precision="tf32x3")
    most = tl.max(tl.max(tl.abs(x), 1), 0)
    scale = most / 448.0
    scale = tl.where(scale == 0.0, 1.0, scale)  # of nothing, or of what is too small to have one
    codes = CODES + b * stride_cb + h * stride_ch + rows[:, None] * stride_cs + channels[None, :] * stride_ce
    tl.store(codes, to_e4m3(x / scale), mask=there)
    tl.store(SCALES + (b * H + h) * tl.num_programs(0) + block, scale)


@triton.jit
def groups(
    X, MEAN, ROW, VALUES, stride_xb, stride_xh, stride_xr, stride_xc, stride_vb, stride_vh, stride_vr, stride_vc,
    H, R, C, ROWS: tl.constexpr, COLUMNS: tl.constexpr, GROUP: tl.constexpr, SMOOTH: tl.constexpr,
    E4M3_SCALES: tl.constexpr,
):  # fmt: skip
    b, h = (tl.program_id(2) // H).to(tl.int64), (tl.program_id(2) % H).to(tl.int64)
    rows = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    columns = (tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)).to(tl.int64)
    there = (rows < R)[:, None] & (columns < C)[None, :]
    at = X + b * stride_xb + h * stride_xh + rows[:, None] * stride_xr + columns[None, :] * stride_xc
    x = tl.load(at, mask=there, other=0.0).to(tl.float32)
    if SMOOTH:
        mean = tl.load(MEAN + (b * H + h) * C + columns, mask=columns < C, other=0.0)
        x = tl.where(there, x - mean[None, :], 0.0)
    row = tl.load(ROW + (b * H + h) * R + rows, mask=rows < R, other=1.0)
    found = to_bf16(rounded_groups(x, row, ROWS, COLUMNS, GROUP, E4M3_SCALES))
    at = VALUES + b * stride_vb + h * stride_vh + rows[:, None] * stride_vr + columns[None, :] * stride_vc
    tl.store(at, found, mask=there)
