"""Gated units, act(gate) * up: SwiGLU, and GELU by tanh. Either is gate * sigmoid(u) with u the gate or a cubic of it.

gelu   0.5 (1 + tanh z) = sigmoid(2 z)     z = sqrt(2 / pi) (g + 0.044715 g^3)
d act  s (1 + g (1 - s) u')                1 - s = sigmoid(-u), with nothing cancelled
"""

# ruff: noqa: N803  a kernel's constants and pointers are in capitals

from __future__ import annotations

import triton
import triton.language as tl

from tangram.kernels.compiled.elements import loaded, sigmoids, store

TWICE_ROOT = tl.constexpr(1.5957691216057308)
CUBIC = tl.constexpr(0.044715)


@triton.jit
def _exponent(g, GELU: tl.constexpr):
    if GELU:
        return g * (g * g * CUBIC + 1.0) * TWICE_ROOT
    return g


@triton.jit
def forward(GATE, UP, OUT, stride_g, stride_u, R, W, BW: tl.constexpr, ROWS: tl.constexpr, GELU: tl.constexpr):
    """OUT (R, W) in a row."""
    rows, columns = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS), tl.program_id(1) * BW + tl.arange(0, BW)
    there = (rows < R)[:, None] & (columns < W)[None, :]
    g = loaded(GATE, rows[:, None] * stride_g + columns[None, :], there)
    u = loaded(UP, rows[:, None] * stride_u + columns[None, :], there)
    s, _ = sigmoids(_exponent(g, GELU))
    store(OUT, rows[:, None] * W + columns[None, :], g * s * u, there)


@triton.jit
def backward(
    DY, GATE, UP, DGATE, DUP, stride_y, stride_g, stride_u, R, W,
    BW: tl.constexpr, ROWS: tl.constexpr, GELU: tl.constexpr,
):  # fmt: skip
    """DGATE and DUP (R, W) in a row."""
    rows, columns = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS), tl.program_id(1) * BW + tl.arange(0, BW)
    there = (rows < R)[:, None] & (columns < W)[None, :]
    dy = loaded(DY, rows[:, None] * stride_y + columns[None, :], there)
    g = loaded(GATE, rows[:, None] * stride_g + columns[None, :], there)
    u = loaded(UP, rows[:, None] * stride_u + columns[None, :], there)
    s, less = sigmoids(_exponent(g, GELU))
    slope = g
    if GELU:
        slope = g * (g * g * (3.0 * CUBIC) + 1.0) * TWICE_ROOT
    at = rows[:, None] * W + columns[None, :]
    store(DUP, at, dy * g * s, there)
    store(DGATE, at, dy * u * s * (1.0 + tl.where(s * less == 0.0, 0.0, slope) * less), there)
