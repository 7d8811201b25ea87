"""The backward kernels: one for keys and values, one for queries, each sum in one place and one order.

Both compute the scores of the forward again, from the same casts, so a run gives the same bits every time and nothing
is added atomically; that costs seven products where a kernel that adds into queries' gradients has five. With P =
exp(S - lse), delta = rowsum(dO O) or, of a forward of few bits, rowsum(P dP):

    dV = P' dO       dP = dO V'       dS = P (dP - delta)       dQ = dS K       dK = dS' Q

EIGHT: these four products are of E4M3: P times 256, dS under a scale of each tile, tensors under those of their blocks.
Otherwise they are of bfloat16 and take the tensors as they came, though scores come from casts of the forward.
"""

# ruff: noqa: N803, N806, PLR0915  a kernel's constants and pointers are in capitals

from __future__ import annotations

import triton
import triton.language as tl

from tangram.kernels.compiled.attention_forward import LOG2E, SHARE_FACTOR, seen
from tangram.kernels.compiled.device import dot, tile_of, to_bf16, to_e4m3


@triton.jit
def _scale_of(SCALES_AT, start, tokens, inside, BLOCK: tl.constexpr, SCALES: tl.constexpr):
    """Of a tile that begins at `start`: one number, or one a token."""
    if SCALES == 1:
        return tl.load(SCALES_AT + start // BLOCK)
    elif SCALES == 2:  # noqa: RET505  what is compiled has one return
        return tl.load(SCALES_AT + start + tokens, mask=inside, other=0.0)
    else:
        return 1.0


@triton.jit
def _tile_cast(x):
    """To E4M3 under the tile's own scale."""
    most = tl.max(tl.max(tl.abs(x), 1), 0)
    scale = most / 448.0
    scale = tl.where(scale == 0.0, 1.0, scale)  # of nothing, or of what is too small to have one
    return to_e4m3(x / scale), scale


@triton.jit
def keys_owed(
    Q, K, Q_SCALES, K_SCALES, DO, DO_TOKENS, DO_SCALES, V, V_SCALES, Q_TOKENS, LSE, DELTA, SINCE, REACH, PLACES,
    RANGES, TURN, DK, DV,
    stride_qb, stride_qh, stride_qs, stride_kb, stride_kh, stride_kt, stride_ob, stride_oh, stride_os,
    stride_tb, stride_th, stride_ts, stride_tf, stride_vb, stride_vh, stride_vt, stride_ub, stride_uh, stride_us,
    stride_ue, G, SHARED, S, T, E, F, scale,
    BE: tl.constexpr, BF: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BLOCK: tl.constexpr,
    SCALES: tl.constexpr, EIGHT: tl.constexpr, TURNED: tl.constexpr,
):  # fmt: skip
    """Of one tile of keys of one head: dK (B, G, T, E) and dV (B, G, T, F), summed over the heads that share it."""
    tile, b, g = tl.program_id(0), (tl.program_id(1) // G).to(tl.int64), (tl.program_id(1) % G).to(tl.int64)
    start, own = tile * BN, tl.arange(0, BN)
    rows, channels, widths = tl.arange(0, BM), tl.arange(0, BE), tl.arange(0, BF)
    keys, inside = start + own, start + own < T
    blocks_q, blocks_k, head = tl.cdiv(S, BLOCK), tl.cdiv(T, BLOCK), b * G + g
    wide_E, wide_F = channels < E, widths < F
    k = tile_of(K + b * stride_kb + g * stride_kh, keys, channels, stride_kt, 1, inside, wide_E)
    v = tile_of(V + b * stride_vb + g * stride_vh, keys, widths, stride_vt, 1, inside, wide_F)
    K_SCALES += head * (blocks_k if SCALES == 1 else T)
    k_scale = _scale_of(K_SCALES, start, own, inside, BLOCK, SCALES)
    v_scale = _scale_of(V_SCALES + head * blocks_k, start, own, inside, BLOCK, EIGHT)
    places = tl.load(PLACES + b * T + keys, mask=inside, other=-1)
    dk, dv = tl.zeros((BN, BE), tl.float32), tl.zeros((BN, BF), tl.float32)
    ranges = RANGES + (b * tl.num_programs(0) + tile) * 4
    first, begin, stop, end = tl.load(ranges), tl.load(ranges + 1), tl.load(ranges + 2), tl.load(ranges + 3)
    for shared in range(SHARED):
        h = g * SHARED + shared
        heads = b * G * SHARED + h
        for step in range(first, end):
            m = step * BM
            there = m + rows < S
            q = tile_of(Q + b * stride_qb + h * stride_qh, channels, m + rows, 1, stride_qs, wide_E, there)
            s = dot(k, q) * (scale * LOG2E)
            q_scale = _scale_of(Q_SCALES + heads * (blocks_q if SCALES == 1 else S), m, rows, there, BLOCK, SCALES)
            if SCALES == 1:
                s = s * (q_scale * k_scale)
            if SCALES == 2:
                s = s * q_scale[None, :] * k_scale[:, None]
            lse = tl.load(LSE + heads * S + m + rows, mask=there, other=0.0)
            p = tl.exp2(s - tl.where(lse == float("-inf"), 0.0, lse * LOG2E)[None, :])
            if (step < begin) | (step >= stop):
                since = tl.load(SINCE + b * S + m + rows, mask=there, other=0)
                reach = tl.load(REACH + b * S + m + rows, mask=there, other=-1)
                p = tl.where((since[None, :] <= places[:, None]) & (places[:, None] <= reach[None, :]), p, 0.0)
            do = tile_of(DO + b * stride_ob + h * stride_oh, widths, m + rows, 1, stride_os, wide_F, there)
            do_tokens = DO_TOKENS + b * stride_tb + h * stride_th
            do_tokens = tile_of(do_tokens, m + rows, widths, stride_ts, stride_tf, there, wide_F)
            q_tokens = Q_TOKENS + b * stride_ub + h * stride_uh
            q_tokens = tile_of(q_tokens, m + rows, channels, stride_us, stride_ue, there, wide_E)
            delta = tl.load(DELTA + heads * S + m + rows, mask=there, other=0.0)
            dp = dot(v, do)
            if EIGHT:
                do_scale = tl.load(DO_SCALES + heads * blocks_q + m // BLOCK)
                dv += dot(to_e4m3(p * SHARE_FACTOR), do_tokens) * (do_scale / SHARE_FACTOR)
                codes, ds_scale = _tile_cast(p * (dp * (do_scale * v_scale) - delta[None, :]))
                dk += dot(codes, q_tokens) * (ds_scale * q_scale)
            else:
                dv += dot(to_bf16(p), do_tokens)
                dk += dot(to_bf16(p * (dp - delta[None, :])), q_tokens)
    if TURNED:
        turn = tile_of(TURN, channels, channels, 1, E, wide_E, wide_E)
        dk = tl.dot(dk, turn, input_precision="tf32x3")
    at = (head * T + keys)[:, None]
    tl.store(DK + at * E + channels[None, :], to_bf16(dk * scale), mask=inside[:, None] & wide_E[None, :])
    tl.store(DV + at * F + widths[None, :], to_bf16(dv), mask=inside[:, None] & wide_F[None, :])


@triton.jit
def queries_owed(
    Q, K, Q_SCALES, K_SCALES, DO, DO_SCALES, V, V_SCALES, K_TOKENS, LSE, DELTA, SINCE, REACH, PLACES, RANGES, TURN, DQ,
    stride_qb, stride_qh, stride_qs, stride_kb, stride_kh, stride_kt, stride_ob, stride_oh, stride_os,
    stride_vb, stride_vh, stride_vt, stride_ub, stride_uh, stride_ut, stride_ue, H, SHARED, S, T, E, F, scale,
    BE: tl.constexpr, BF: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BLOCK: tl.constexpr,
    SCALES: tl.constexpr, EIGHT: tl.constexpr, TURNED: tl.constexpr, DELTA_ONLY: tl.constexpr,
):  # fmt: skip
    """Of one tile of queries of one head: dQ (B, H, S, E); or only delta, rowsum(P dP), written to DELTA (B, H, S)."""
    tile, b, h = tl.program_id(0), (tl.program_id(1) // H).to(tl.int64), (tl.program_id(1) % H).to(tl.int64)
    g, heads, start = h // SHARED, b * H + h, tile * BM
    rows, columns, channels, widths = tl.arange(0, BM), tl.arange(0, BN), tl.arange(0, BE), tl.arange(0, BF)
    there, wide_E, wide_F = start + rows < S, channels < E, widths < F
    blocks_q, blocks_k, head = tl.cdiv(S, BLOCK), tl.cdiv(T, BLOCK), b * (H // SHARED) + g
    q = tile_of(Q + b * stride_qb + h * stride_qh, start + rows, channels, stride_qs, 1, there, wide_E)
    do = tile_of(DO + b * stride_ob + h * stride_oh, start + rows, widths, stride_os, 1, there, wide_F)
    q_scale = _scale_of(Q_SCALES + heads * (blocks_q if SCALES == 1 else S), start, rows, there, BLOCK, SCALES)
    do_scale = _scale_of(DO_SCALES + heads * blocks_q, start, rows, there, BLOCK, EIGHT)
    lse = tl.load(LSE + heads * S + start + rows, mask=there, other=0.0)
    lse = tl.where(lse == float("-inf"), 0.0, lse * LOG2E)
    delta = tl.zeros((BM,), tl.float32)
    if not DELTA_ONLY:
        delta = tl.load(DELTA + heads * S + start + rows, mask=there, other=0.0)
    since = tl.load(SINCE + b * S + start + rows, mask=there, other=0)
    reach = tl.load(REACH + b * S + start + rows, mask=there, other=-1)
    dq = tl.zeros((BM, BE), tl.float32)
    ranges = RANGES + (b * tl.num_programs(0) + tile) * 4
    first, begin, stop, end = tl.load(ranges), tl.load(ranges + 1), tl.load(ranges + 2), tl.load(ranges + 3)
    for step in range(first, end):
        n = step * BN
        inside = n + columns < T
        k = tile_of(K + b * stride_kb + g * stride_kh, channels, n + columns, 1, stride_kt, wide_E, inside)
        s = dot(q, k) * (scale * LOG2E)
        k_scale = _scale_of(K_SCALES + head * (blocks_k if SCALES == 1 else T), n, columns, inside, BLOCK, SCALES)
        if SCALES == 1:
            s = s * (q_scale * k_scale)
        if SCALES == 2:
            s = s * q_scale[:, None] * k_scale[None, :]
        p = tl.exp2(s - lse[:, None])
        if (step < begin) | (step >= stop):
            places = tl.load(PLACES + b * T + n + columns, mask=inside, other=-1)
            p = tl.where(seen(since, reach, places), p, 0.0)
        v = tile_of(V + b * stride_vb + g * stride_vh, widths, n + columns, 1, stride_vt, wide_F, inside)
        dp = dot(do, v)
        if EIGHT:
            dp = dp * (do_scale * tl.load(V_SCALES + head * blocks_k + n // BLOCK))
        if DELTA_ONLY:
            delta += tl.sum(p * dp, 1)
        else:
            k_tokens = K_TOKENS + b * stride_ub + g * stride_uh
            k_tokens = tile_of(k_tokens, n + columns, channels, stride_ut, stride_ue, inside, wide_E)
            ds = p * (dp - delta[:, None])
            if EIGHT:
                codes, ds_scale = _tile_cast(ds)
                dq += dot(codes, k_tokens) * (ds_scale * k_scale)
            else:
                dq += dot(to_bf16(ds), k_tokens)
    if DELTA_ONLY:
        tl.store(DELTA + heads * S + start + rows, delta, mask=there)
    else:
        if TURNED:
            turn = tile_of(TURN, channels, channels, 1, E, wide_E, wide_E)
            dq = tl.dot(dq, turn, input_precision="tf32x3")
        at = DQ + (heads * S + start + rows)[:, None] * E + channels[None, :]
        tl.store(at, to_bf16(dq * scale), mask=there[:, None] & wide_E[None, :])


@triton.jit
def stored_delta(DO, OUT, DELTA, stride_ob, stride_oh, stride_os, stride_rb, stride_rh, stride_rs, H, S, F,
                 BF: tl.constexpr, BM: tl.constexpr):  # fmt: skip
    """rowsum(dO O) of the stored result, of a tile of queries."""
    b, h = (tl.program_id(1) // H).to(tl.int64), (tl.program_id(1) % H).to(tl.int64)
    rows, widths = tl.program_id(0) * BM + tl.arange(0, BM), tl.arange(0, BF)
    do = tile_of(DO + b * stride_ob + h * stride_oh, rows, widths, stride_os, 1, rows < S, widths < F)
    o = tile_of(OUT + b * stride_rb + h * stride_rh, rows, widths, stride_rs, 1, rows < S, widths < F)
    delta = tl.sum(do.to(tl.float32) * o.to(tl.float32), 1)
    tl.store(DELTA + (b * H + h) * S + rows, delta, mask=rows < S)
