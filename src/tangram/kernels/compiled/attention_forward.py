"""The forward kernel: a tile of queries goes over tiles of keys with a running maximum (Dao et al. 2022).

Scores are kept as powers of two. The operands come as they are multiplied, with scales beside them:

    SCALES    of queries and keys: 0 none, 1 of blocks of tokens, which a tile lies within, 2 of tokens
    VALUES    of values: 0 none, 1 of blocks of tokens, 2 of channels over all tokens
    SHARES    how probabilities are cast: 0 bfloat16, 1 E4M3 times 256, 2 E2M1 of groups under E4M3 under a float32
              scale of the row, 3 E2M1 of groups under powers of two (OCP)

Each product of E4M3 is a sum of its own that is added in float32: a matrix unit's short register never holds more than
a tile.
"""

# ruff: noqa: N803, N806  a kernel's constants and pointers are in capitals

from __future__ import annotations

import triton
import triton.language as tl

from tangram.kernels.compiled.device import E2M1_UNDER_E4M3, dot, rounded_groups, tile_of, to_bf16, to_e4m3

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
SHARE_FACTOR = tl.constexpr(256.0)


@triton.jit
def seen(since, reach, places):
    """The mask of a tile (queries, keys)."""
    return (since[:, None] <= places[None, :]) & (places[None, :] <= reach[:, None])


@triton.jit
def _over_keys(
    out, total, top, q, q_scale, since, reach, K, V, K_SCALES, V_SCALES, PLACES, first, end,
    stride_kt, stride_vt, stride_vf, T, E, F, scale,
    BE: tl.constexpr, BF: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr,
    SCALES: tl.constexpr, VALUES: tl.constexpr, SHARES: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Tiles of keys from `first` to `end`."""
    columns, channels, widths = tl.arange(0, BN), tl.arange(0, BE), tl.arange(0, BF)
    for tile in range(first, end):
        start = tile * BN
        inside = start + columns < T
        k = tile_of(K, channels, start + columns, 1, stride_kt, channels < E, inside)
        s = dot(q, k) * scale
        if SCALES == 1:
            s = s * (q_scale * tl.load(K_SCALES + start // BLOCK))
        if SCALES == 2:
            s = s * q_scale[:, None] * tl.load(K_SCALES + start + columns, mask=inside, other=0.0)[None, :]
        if MASKED:
            places = tl.load(PLACES + start + columns, mask=inside, other=-1)
            s = tl.where(seen(since, reach, places), s, float("-inf"))
        new = tl.maximum(top, tl.max(s, 1))
        safe = tl.where(new == float("-inf"), 0.0, new)
        p = tl.exp2(s - safe[:, None])
        less = tl.exp2(top - safe)
        total = total * less + tl.sum(p, 1)
        v = tile_of(V, start + columns, widths, stride_vt, stride_vf, inside, widths < F)
        if SHARES == 0:
            add = dot(to_bf16(p), v)
        elif SHARES == 1:
            add = dot(to_e4m3(p * SHARE_FACTOR), v)
        else:
            row = tl.full((BM,), 1.0, tl.float32)
            if SHARES == 2:
                most = tl.max(p, 1)
                row = tl.where(most == 0.0, 1.0, most / E2M1_UNDER_E4M3)
            codes = rounded_groups(p, row, BM, BN, GROUP, SHARES == 2)
            add = dot(to_bf16(codes), v) * row[:, None]
        if VALUES == 1:
            add = add * tl.load(V_SCALES + start // BLOCK)
        out = out * less[:, None] + add
        top = new
    return out, total, top


@triton.jit
def forward(
    Q, K, V, Q_SCALES, K_SCALES, V_SCALES, SINCE, REACH, PLACES, RANGES, SINKS, OUT, LSE,
    stride_qb, stride_qh, stride_qs, stride_kb, stride_kh, stride_kt,
    stride_vb, stride_vh, stride_vt, stride_vf, stride_ob, stride_oh, stride_os,
    H, SHARED, S, T, E, F, scale,
    BE: tl.constexpr, BF: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr,
    SCALES: tl.constexpr, VALUES: tl.constexpr, SHARES: tl.constexpr, HAS_SINKS: tl.constexpr,
):  # fmt: skip
    """One tile of queries of one head. Results (B, H, S, F), natural logarithms of sums (B, H, S), -inf of nothing."""
    tile, b, h = tl.program_id(0), (tl.program_id(1) // H).to(tl.int64), (tl.program_id(1) % H).to(tl.int64)
    g, heads = h // SHARED, b * H + h
    shared_heads = b * (H // SHARED) + g
    rows, channels, widths = tile * BM + tl.arange(0, BM), tl.arange(0, BE), tl.arange(0, BF)
    there = rows < S
    q = tile_of(Q + b * stride_qb + h * stride_qh, rows, channels, stride_qs, 1, there, channels < E)
    q_scale, blocks_q, blocks_k = 1.0, tl.cdiv(S, BLOCK), tl.cdiv(T, BLOCK)
    if SCALES == 1:
        q_scale = tl.load(Q_SCALES + heads * blocks_q + tile * BM // BLOCK)
        K_SCALES += shared_heads * blocks_k
    if SCALES == 2:
        q_scale = tl.load(Q_SCALES + heads * S + rows, mask=there, other=0.0)
        K_SCALES += shared_heads * T
    if VALUES == 1:
        V_SCALES += shared_heads * blocks_k
    since = tl.load(SINCE + b * S + rows, mask=there, other=0)
    reach = tl.load(REACH + b * S + rows, mask=there, other=-1)
    if HAS_SINKS:
        top = tl.load(SINKS + heads * S + rows, mask=there, other=0.0) * LOG2E
        total = tl.full((BM,), 1.0, tl.float32)
    else:
        top, total = tl.full((BM,), float("-inf"), tl.float32), tl.zeros((BM,), tl.float32)
    out = tl.zeros((BM, BF), tl.float32)
    K += b * stride_kb + g * stride_kh
    V += b * stride_vb + g * stride_vh
    PLACES += b * T
    ranges = RANGES + (b * tl.num_programs(0) + tile) * 4
    first, begin, stop, end = tl.load(ranges), tl.load(ranges + 1), tl.load(ranges + 2), tl.load(ranges + 3)
    for part in tl.static_range(3):
        low = first if part == 0 else (begin if part == 1 else stop)
        high = begin if part == 0 else (stop if part == 1 else end)
        out, total, top = _over_keys(
            out, total, top, q, q_scale, since, reach, K, V, K_SCALES, V_SCALES, PLACES, low, high,
            stride_kt, stride_vt, stride_vf, T, E, F, scale * LOG2E,
            BE, BF, BM, BN, BLOCK, GROUP, SCALES, VALUES, SHARES, part != 1,
        )  # fmt: skip
    if SHARES == 1:
        out = out * (1.0 / SHARE_FACTOR)
    if VALUES == 2:
        out = out * tl.load(V_SCALES + shared_heads * F + widths, mask=widths < F, other=0.0)[None, :]
    nothing = total == 0.0
    out = tl.where(nothing[:, None], 0.0, out / tl.where(nothing, 1.0, total)[:, None])
    lse = tl.where(nothing, float("-inf"), (top + tl.log2(tl.where(nothing, 1.0, total))) * LN2)
    tl.store(LSE + heads * S + rows, lse, mask=there)
    results = OUT + b * stride_ob + h * stride_oh + rows[:, None] * stride_os + widths[None, :]
    tl.store(results, to_bf16(out), mask=there[:, None] & (widths < F)[None, :])
