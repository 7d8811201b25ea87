"""RMSNorm of rows, x / rms(x) * (weight + offset), with what is added to x first; all in float32, rounded once.

    rstd = 1 / sqrt(mean(x x) + eps)     n = x rstd     g = dy (weight + offset)
    dx = rstd (g - n mean(g n))          dweight = sum over rows of dy n

The weight's gradient is summed in two steps: each program sums the rows of its part, and the host the parts. How many
parts there are follows from the shape alone, so a run gives the same bits every time and on every device.
"""

# ruff: noqa: N803  a kernel's constants and pointers are in capitals

from __future__ import annotations

import triton
import triton.language as tl

from tangram.kernels.compiled.elements import as_stored, loaded, store


@triton.jit
def forward(
    X, RESIDUAL, WEIGHT, OUT, SUM, RSTD, stride_x, stride_r, R, H, eps, offset,
    BH: tl.constexpr, ROWS: tl.constexpr, ADDED: tl.constexpr, WEIGHED: tl.constexpr,
):  # fmt: skip
    """OUT and SUM (R, H) in a row, RSTD (R)."""
    rows, columns = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS), tl.arange(0, BH)
    wide = columns < H
    there = (rows < R)[:, None] & wide[None, :]
    own = rows[:, None] * H + columns[None, :]
    x = loaded(X, rows[:, None] * stride_x + columns[None, :], there)
    if ADDED:
        x = as_stored(SUM, x + loaded(RESIDUAL, rows[:, None] * stride_r + columns[None, :], there))
        store(SUM, own, x, there)
    rstd = tl.rsqrt(tl.sum(x * x, 1) / H + eps)
    tl.store(RSTD + rows, rstd, mask=rows < R)
    found = x * rstd[:, None]
    if WEIGHED:
        found = found * (loaded(WEIGHT, columns, wide) + offset)[None, :]
    store(OUT, own, found, there)


@triton.jit
def backward(
    DY, DSUM, X, WEIGHT, RSTD, DX, PARTS, stride_y, stride_s, stride_x, R, H, offset, STEPS,
    BH: tl.constexpr, ROWS: tl.constexpr, ADDED: tl.constexpr, WEIGHED: tl.constexpr,
):  # fmt: skip
    """DX (R, H) in a row; PARTS (programs, H): the weight's gradient by the rows of each program."""
    part, columns = tl.program_id(0).to(tl.int64), tl.arange(0, BH)
    wide = columns < H
    summed = tl.zeros((BH,), tl.float32)
    factor = tl.full((BH,), 1.0, tl.float32)
    if WEIGHED:
        factor = loaded(WEIGHT, columns, wide) + offset
    for step in range(STEPS):
        rows = (part * STEPS + step) * ROWS + tl.arange(0, ROWS)
        there = (rows < R)[:, None] & wide[None, :]
        x = loaded(X, rows[:, None] * stride_x + columns[None, :], there)
        dy = loaded(DY, rows[:, None] * stride_y + columns[None, :], there)
        rstd = tl.load(RSTD + rows, mask=rows < R, other=0.0)
        n = x * rstd[:, None]
        g = dy * factor[None, :]
        dx = rstd[:, None] * (g - n * (tl.sum(g * n, 1) / H)[:, None])
        if ADDED:
            dx += loaded(DSUM, rows[:, None] * stride_s + columns[None, :], there)
        store(DX, rows[:, None] * H + columns[None, :], dx, there)
        if WEIGHED:
            summed += tl.sum(dy * n, 0)
    if WEIGHED:
        tl.store(PARTS + part * H + columns, summed, mask=wide)
