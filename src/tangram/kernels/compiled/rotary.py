"""Rotary positions of queries and keys: the first half of what is turned goes with the second (x1 x2).

    y1 = x1 cos1 - x2 sin1      y2 = x2 cos2 + x1 sin2      and back      x1 = y1 cos1 + y2 sin2 ...

A program reads cosines and sines of some tokens once and turns all heads of them.
"""

# ruff: noqa: N803  a kernel's constants and pointers are in capitals

from __future__ import annotations

import triton
import triton.language as tl

from tangram.kernels.compiled.device import tile_of, to_float
from tangram.kernels.compiled.elements import store


@triton.jit
def _heads(X, OUT, count, stride_xh, stride_xs, stride_oh, stride_os, tokens, columns, there, wide, half,
           first, second, of_second, of_first):  # fmt: skip
    for h in range(count):
        x1 = to_float(tile_of(X + h * stride_xh, tokens, columns, stride_xs, 1, there, wide))
        x2 = to_float(tile_of(X + h * stride_xh, tokens, columns + half, stride_xs, 1, there, wide))
        at = h * stride_oh + tokens[:, None] * stride_os + columns[None, :]
        both = there[:, None] & wide[None, :]
        store(OUT, at, x1 * first + x2 * of_second, both)
        store(OUT, at + half, x2 * second + x1 * of_first, both)


@triton.jit
def rotate(
    Q, K, COS, SIN, Q_OUT, K_OUT, stride_qb, stride_qh, stride_qs, stride_kb, stride_kh, stride_ks,
    stride_pb, stride_ph, stride_ps, stride_rb, stride_rh, stride_rs, stride_cb, stride_cs, stride_sb, stride_ss,
    H, G, S, half, BH: tl.constexpr, BS: tl.constexpr, BACK: tl.constexpr,
):  # fmt: skip
    """What is not turned is left alone. `half`: of the elements that are; BACK: the transposed turn."""
    tokens, b, columns = tl.program_id(0) * BS + tl.arange(0, BS), tl.program_id(1).to(tl.int64), tl.arange(0, BH)
    there, wide = tokens < S, columns < half
    cos1 = to_float(tile_of(COS + b * stride_cb, tokens, columns, stride_cs, 1, there, wide))
    cos2 = to_float(tile_of(COS + b * stride_cb, tokens, columns + half, stride_cs, 1, there, wide))
    sin1 = to_float(tile_of(SIN + b * stride_sb, tokens, columns, stride_ss, 1, there, wide))
    sin2 = to_float(tile_of(SIN + b * stride_sb, tokens, columns + half, stride_ss, 1, there, wide))
    of_second, of_first = -sin1, sin2
    if BACK:
        of_second, of_first = sin2, -sin1
    _heads(Q + b * stride_qb, Q_OUT + b * stride_pb, H, stride_qh, stride_qs, stride_ph, stride_ps, tokens, columns,
           there, wide, half, cos1, cos2, of_second, of_first)  # fmt: skip
    _heads(K + b * stride_kb, K_OUT + b * stride_rb, G, stride_kh, stride_ks, stride_rh, stride_rs, tokens, columns,
           there, wide, half, cos1, cos2, of_second, of_first)  # fmt: skip
