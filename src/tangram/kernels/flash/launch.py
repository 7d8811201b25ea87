"""Forward and backward by the Triton kernels: operands cast as a recipe says, tiles chosen, kernels started.

The backward casts the operands again: a cast is cheap, repeats bit by bit, and keeping it would take memory.

Operands are cast from bfloat16 to E4M3 of blocks of tokens, or E2M1 of groups, which is exact in bfloat16. Smoothing
(less a mean over tokens) and turning by a Hadamard matrix happen on the way, so that a tensor is read once. E4M3 comes
in both orders where a matrix unit needs both: one that takes only what lies along its sum (Hopper's) reads values, and
the backward's tensors, with tokens as their last dim.
"""

# ruff: noqa: N803, N806  a tensor carries its dims in its name

# ruff: noqa: N806  a tensor carries its dims in its name
from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from tangram.kernels.attention import Heads, Partial
from tangram.kernels.compiled import attention_backward, attention_forward, quantisers
from tangram.kernels.flash.modes import cannot
from tangram.kernels.flash.spans import Spans, ranges
from tangram.kernels.host import cdiv, kernel, padded
from tangram.kernels.lab.formats import BF16, E2M1, E4M3
from tangram.kernels.lab.quant import Operand, hadamard
from tangram.kernels.lab.recipes import Recipe


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


class Tile(NamedTuple):
    """Queries and keys of a step, and how a device runs it."""

    rows: int
    columns: int
    warps: int = 4
    stages: int = 2


@dataclass(frozen=True)
class Call:
    """One call of attention, all but its tensors."""

    recipe: Recipe
    spans: Spans
    scale: float
    sinks: Tensor | None = None
    """(H,), one more logit of each head, as a score beside those of keys that were not smoothed."""
    tile: Tile | None = None
    """Of all kernels; None: as `choose` has them."""


@dataclass(frozen=True)
class Scored:
    """Operands of the scores, the same forward and backward."""

    q: Codes
    k: Codes
    scales: int
    block: int
    mean: Tensor | None
    """Of the keys over all tokens (B, G, E), which was taken away."""
    turn: Tensor | None


Kernel = Literal["forward", "queries", "keys"]


def choose(recipe: Recipe, width: int, kernel: Kernel) -> Tile:
    """Tiles that fit the shared memory of a Hopper device and, but for the widest heads, its registers.

    `width`: of the wider head dim, a power of two. By what the compiler says of registers, not by times: no device was
    at hand. `bench/attention_kernels.py` times others beside them.
    """
    chosen = _chosen(recipe, width, kernel)
    block = _block(recipe)
    return chosen._replace(rows=min(chosen.rows, block), columns=min(chosen.columns, block))


def _chosen(recipe: Recipe, width: int, kernel: Kernel) -> Tile:
    shared = recipe.backward.dq_ds.scaling
    if kernel != "forward" and shared.per == "tile":
        few = width <= (64 if kernel == "keys" else 128)
        return Tile(shared.size, shared.size, 4 if few else 8, 2 if width <= 128 else 1)
    eight, four = (recipe.forward.q.format is one for one in (E4M3, E2M1))
    if kernel == "forward" and eight:
        return Tile(128, 128, 8, 3) if width <= 128 else Tile(128, 64, 8, 2)
    if kernel == "forward":
        return Tile(64, 64, 4 if width <= 128 else 8, 2) if four or width > 128 else Tile(128, 64, 8, 3)
    if width > 128:
        return Tile(64, 64, 8, 1)
    return Tile(64, 128, 8, 2) if kernel == "keys" else Tile(128, 64, 8, 2)


def _block(recipe: Recipe) -> int:
    """Tokens that share a scale, within which a tile lies; where there is none, more than any tile has."""
    scaling = recipe.forward.q.scaling
    return scaling.size if scaling.per == "block" else 2**30


def _fitting(call: Call, width: int, kernel: Kernel) -> Tile:
    tile, block = call.tile or choose(call.recipe, width, kernel), _block(call.recipe)
    if block % tile.rows or block % tile.columns:
        raise ValueError(f"tiles of {tile.rows} x {tile.columns} do not divide blocks of {block} tokens")
    return tile


def forward(heads: Heads, call: Call) -> Partial:
    """Results (B, H, S, F) in bfloat16; logarithms of sums (B, H, S), of scores as they were computed.

    Raises ValueError for a recipe that the kernels have not, and for tiles that do not lie within its blocks.
    """
    recipe = call.recipe
    if why := cannot(recipe):
        raise ValueError(f"the kernels have no recipe {recipe.name!r}: {why}")
    heads = Heads(*(_bf16(x) for x in heads))
    (B, H, S, E), (G, T, F) = heads.q.shape, (*heads.k.shape[1:3], heads.v.shape[3])
    if not heads.q.numel() or not heads.v.numel():
        return Partial(heads.q.new_zeros(B, H, S, F), heads.q.new_full((B, H, S), -torch.inf, dtype=torch.float32))
    scored, spans = _scored(heads, recipe), _in_rows(call.spans, B)
    v, values = _values(heads.v, recipe)
    wide_E, wide_F = padded(E), padded(F)
    tile = _fitting(call, max(wide_E, wide_F), "forward")
    out = heads.q.new_empty(B, H, S, F)
    lse = out.new_empty((B, H, S), dtype=torch.float32)
    sinks = None if call.sinks is None else _sinks(heads, call, scored)
    shares = {BF16: 0, E4M3: 1}.get(
        recipe.forward.p.format or BF16, 2 if recipe.forward.p.scaling.kind == "e4m3" else 3
    )
    kernel(attention_forward.forward)[(cdiv(S, tile.rows), B * H)](
        scored.q.values, scored.k.values, v.values, _or(scored.q.scales, lse), _or(scored.k.scales, lse),
        _or(v.scales, lse), *spans, ranges(spans, tile.rows, tile.columns).of_queries, _or(sinks, lse),
        out, lse, *scored.q.values.stride()[:3], *scored.k.values.stride()[:3], *v.values.stride(), *out.stride()[:3],
        H, H // G, S, T, E, F, call.scale, wide_E, wide_F, tile.rows, tile.columns, scored.block,
        recipe.forward.p.scaling.size or 16, scored.scales, values, shares, sinks is not None,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return Partial(out, lse)


def backward(grad: Tensor, heads: Heads, whole: Partial, call: Call) -> tuple[Heads, Tensor]:
    """Gradients in bfloat16, and what each query's sink owes (B, H, S), zeros without any."""
    recipe = call.recipe
    types = [x.dtype for x in heads]
    if not heads.q.numel() or not heads.v.numel():
        return Heads(*(torch.zeros_like(x) for x in heads)), torch.zeros_like(whole.sums)
    heads, grad = Heads(*(_bf16(x) for x in heads)), _bf16(grad)
    scored = _scored(heads, recipe)
    (B, H, S, E), (G, T, F) = heads.q.shape, (*heads.k.shape[1:3], heads.v.shape[3])
    wide_E, wide_F = padded(E), padded(F)
    tile, of_keys = (_fitting(call, max(wide_E, wide_F), kind) for kind in ("queries", "keys"))
    own = _owed(grad, heads, scored, recipe)
    spans = _in_rows(call.spans, B)
    visited = ranges(spans, tile.rows, tile.columns).of_queries
    delta = torch.empty_like(whole.sums)
    turn = scored.turn if own.eight else None
    sizes = (H // G, S, T, E, F, call.scale, wide_E, wide_F)
    kinds = (scored.block, scored.scales, int(own.eight), turn is not None)
    scores = (scored.q.values, scored.k.values, _or(scored.q.scales, delta), _or(scored.k.scales, delta))
    strides = (*scored.q.values.stride()[:3], *scored.k.values.stride()[:3])
    dq = heads.q.new_empty(heads.q.shape)

    def queries(delta_only: bool) -> None:
        kernel(attention_backward.queries_owed)[(cdiv(S, tile.rows), B * H)](
            *scores, own.do.values, _or(own.do.scales, delta), own.v.values, _or(own.v.scales, delta),
            own.k_tokens, whole.sums, delta, *spans, visited, _or(turn, delta), dq, *strides,
            *own.do.values.stride()[:3], *own.v.values.stride()[:3], *own.k_tokens.stride(), H, *sizes,
            tile.rows, tile.columns, *kinds, delta_only, num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip

    if recipe.delta == "high":
        queries(delta_only=True)
    else:
        out = _bf16(whole.out)
        kernel(attention_backward.stored_delta)[(cdiv(S, 64), B * H)](
            grad, out, delta, *grad.stride()[:3], *out.stride()[:3], H, S, F, wide_F, 64
        )
    queries(delta_only=False)
    dk, dv = (x.new_empty(x.shape) for x in (heads.k, heads.v))
    kernel(attention_backward.keys_owed)[(cdiv(T, of_keys.columns), B * G)](
        *scores, own.do.values, own.do_tokens, _or(own.do.scales, delta), own.v.values, _or(own.v.scales, delta),
        own.q_tokens, whole.sums, delta, *spans, ranges(spans, of_keys.rows, of_keys.columns).of_keys,
        _or(turn, delta), dk, dv, *strides,
        *own.do.values.stride()[:3], *own.do_tokens.stride(), *own.v.values.stride()[:3], *own.q_tokens.stride(), G,
        *sizes, of_keys.rows, of_keys.columns, *kinds, num_warps=of_keys.warps, num_stages=of_keys.stages,
    )  # fmt: skip
    owed = torch.zeros_like(delta)
    if call.sinks is not None:
        owed = torch.exp(_sinks(heads, call, scored) - whole.sums) * delta
        if own.eight and scored.mean is not None:  # gradients were multiplied with keys less their mean
            dq = (dq.float() + owed[..., None] * _of_queries(scored.mean, H)[:, :, None] * call.scale).to(dq.dtype)
    return Heads(*(x.to(kind) for x, kind in zip((dq, dk, dv), types, strict=True))), owed


# ---------------------------------------------------------------- operands


def _scored(heads: Heads, recipe: Recipe) -> Scored:
    operand = recipe.forward.q
    if operand.format is BF16:
        return Scored(Codes(heads.q), Codes(heads.k), 0, 1, None, None)
    mean = heads.k.mean(2, dtype=torch.float32) if recipe.smooth_k else None
    turn = hadamard(heads.q.shape[-1]).float().to(heads.q.device) if recipe.hadamard else None
    if operand.format is E4M3:
        size = operand.scaling.size
        return Scored(
            e4m3_blocks(heads.q, size, None, turn), e4m3_blocks(heads.k, size, mean, turn), 1, size, mean, turn
        )
    return Scored(e2m1_groups(heads.q, operand), e2m1_groups(heads.k, operand, mean), 2, 1, mean, None)


def _values(v: Tensor, recipe: Recipe) -> tuple[Codes, int]:
    """Those of the forward, and of what their scales are."""
    operand = recipe.forward.v
    if operand.format is BF16:
        return Codes(v), 0
    if operand.format is E4M3:
        return e4m3_blocks(v, operand.scaling.size, tokens_last=True), 1
    return e2m1_groups(v, operand, along_tokens=True), 2


@dataclass(frozen=True)
class _Owed:
    """Operands of the backward's four products."""

    eight: bool
    do: Codes
    do_tokens: Tensor
    v: Codes
    q_tokens: Tensor
    k_tokens: Tensor


def _owed(grad: Tensor, heads: Heads, scored: Scored, recipe: Recipe) -> _Owed:
    operand = recipe.backward.dp_do
    if operand.format is BF16:
        return _Owed(False, Codes(grad), grad, Codes(heads.v), heads.q, heads.k)
    size = operand.scaling.size
    return _Owed(
        True,
        e4m3_blocks(grad, size),
        e4m3_blocks(grad, size, tokens_last=True).values,
        e4m3_blocks(heads.v, size),
        _tokens_last(scored.q.values),
        _tokens_last(scored.k.values),
    )


def _tokens_last(x: Tensor) -> Tensor:
    """The same values, those of neighbouring tokens side by side."""
    return x.mT.contiguous().mT


def _sinks(heads: Heads, call: Call, scored: Scored) -> Tensor:
    """As scores beside those of smoothed keys, float32 (B, H, S)."""
    assert call.sinks is not None
    sinks = call.sinks.float()[None, :, None].expand(heads.q.shape[:3])
    if scored.mean is not None:
        mean = _of_queries(scored.mean, heads.q.shape[1])
        sinks = sinks - torch.einsum("bhse,bhe->bhs", heads.q.float(), mean) * call.scale
    return sinks.contiguous()


def _of_queries(x_BGE: Tensor, heads: int) -> Tensor:
    found: Tensor = x_BGE.repeat_interleave(heads // x_BGE.shape[1], 1)
    return found


def _in_rows(spans: Spans, rows: int) -> Spans:
    """As kernels read them: for each row of the batch, one number after the other."""
    return Spans(*(x.to(torch.int32).expand(rows, -1).contiguous() for x in spans))


def _bf16(x: Tensor) -> Tensor:
    """With channels in a row, as kernels read them."""
    x = x.to(torch.bfloat16)
    return x if x.stride(-1) == 1 else x.contiguous()


def _or(x: Tensor | None, other: Tensor) -> Tensor:
    """A pointer that is not read stands where there is nothing."""
    return other if x is None else x
