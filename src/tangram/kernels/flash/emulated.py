"""The recipes' casts and formulas in plain torch operators, float32: the back end where no device is, and a reference.

Tile by tile as the kernels go, so that probabilities are cast relative to the same running maximum; the casts are those
of the laboratory. What differs from a kernel is the order of sums. It takes memory for all queries times a tile of
keys, and as long as plain attention does, so that recipes can be trained with on a CPU.
"""

# ruff: noqa: N803, N806  a tensor carries its dims in its name

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from tangram.kernels.attention import Heads, Partial
from tangram.kernels.flash.modes import own_sums
from tangram.kernels.flash.spans import Spans
from tangram.kernels.lab.formats import BF16, E2M1, E4M3, E5M2, Format
from tangram.kernels.lab.quant import Along, Operand, hadamard, quantise
from tangram.kernels.lab.recipes import Recipe

TILE = 128
"""Keys of a step; of scores whose gradients share scales, so many as share one."""


@dataclass(frozen=True)
class Scored:
    """Queries (B, G, R, S, E) and keys (B, G, T, E) of the scores, float32, cast; R query heads share a key head."""

    q: Tensor
    k: Tensor
    mean: Tensor | None
    """Of the keys over tokens (B, G, E), which was taken away."""
    turn: Tensor | None


def forward(heads: Heads, spans: Spans, sinks: Tensor | None, scale: float, recipe: Recipe) -> Partial:
    """Results (B, H, S, F) in bfloat16; logarithms of sums (B, H, S), of scores as they were computed.

    Raises ValueError for a recipe that is not emulated.
    """
    if why := cannot(recipe):
        raise ValueError(f"{recipe.name!r} is not emulated: {why}")
    heads = Heads(*(x.bfloat16().float() for x in heads))
    scored = _scored(heads, recipe)
    v = cast(heads.v, recipe.forward.v, "tokens")
    B, H, S, _ = heads.q.shape
    out = heads.q.new_zeros(*scored.q.shape[:4], v.shape[-1])
    total, top = out.new_zeros(*out.shape[:4], 1), out.new_full((*out.shape[:4], 1), -torch.inf)
    if sinks is not None:
        top = _sinks(heads, scored, sinks, scale)[..., None]
        total = torch.ones_like(top)
    for columns, mask in _tiles(spans, TILE):
        s = (scored.q @ scored.k[:, :, None, columns].mT * scale).masked_fill(~mask, -torch.inf)
        new = torch.maximum(top, s.amax(-1, keepdim=True))
        safe = torch.where(new == -torch.inf, 0.0, new)
        p, less = torch.exp(s - safe), torch.exp(top - safe)
        total = total * less + p.sum(-1, keepdim=True)
        out = out * less + cast(p, recipe.forward.p, "channels") @ v[:, :, None, columns]
        top = new
    seen = total > 0
    safe = torch.where(seen, total, 1.0)
    sums = torch.where(seen, top + torch.log(safe), -torch.inf)
    return Partial((out / safe).bfloat16().view(B, H, S, -1), sums.view(B, H, S))


def backward(
    grad: Tensor, heads: Heads, whole: Partial, spans: Spans, sinks: Tensor | None, scale: float, recipe: Recipe
) -> tuple[Heads, Tensor]:
    """Gradients in the dtypes of `heads`, and what each query's sink owes (B, H, S), zeros without any."""
    types = [x.dtype for x in heads]
    B, H, S, E = heads.q.shape
    heads, grad = Heads(*(x.bfloat16().float() for x in heads)), grad.bfloat16().float()
    scored, own = _scored(heads, recipe), recipe.backward
    shift = None
    if not recipe.matched:
        scored, shift = _scored_again(heads, scored, scale)
    grouped = scored.q.shape[:4]
    eight = own.dk_q.format is E4M3
    dp_do, dv_do = (cast(grad, one, "tokens").view(*grouped, -1) for one in (own.dp_do, own.dv_do))
    v = cast(heads.v, own.dp_v, "channels")
    q, k = (scored.q, scored.k) if eight else (heads.q.view(*grouped, E), heads.k)
    sums = whole.sums.float().view(*grouped, 1)
    sums = sums if shift is None else sums + shift
    safe = torch.where(sums == -torch.inf, 0.0, sums)
    size = own.dq_ds.scaling.size or TILE
    parts = [*_tiles(spans, size)]

    def shares(columns: slice, mask: Tensor) -> tuple[Tensor, Tensor]:
        s = scored.q @ scored.k[:, :, None, columns].mT * scale
        return torch.exp(s - safe).masked_fill(~mask, 0.0), dp_do @ v[:, :, None, columns].mT

    if recipe.delta == "high":
        delta = sums.new_zeros(sums.shape)
        for part in parts:
            p, dp = shares(*part)
            delta += (p * dp).sum(-1, keepdim=True)
    else:
        delta = (grad * whole.out.bfloat16().float()).sum(-1, keepdim=True).view(*grouped, 1)
    dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    for columns, mask in parts:
        p, dp = shares(columns, mask)
        dv[:, :, columns] = (cast(p, own.dv_p, "tokens").mT @ dv_do).sum(2)
        ds = cast(p * (dp - delta), own.dq_ds, "channels")
        dq += ds @ k[:, :, None, columns]
        dk[:, :, columns] = (ds.mT @ q).sum(2)
    if eight and scored.turn is not None:
        dq, dk = dq @ scored.turn.mT, dk @ scored.turn.mT
    owed = torch.zeros_like(sums)
    if sinks is not None:
        owed = torch.exp(_sinks(heads, scored, sinks, scale)[..., None] - safe) * delta
        if eight and scored.mean is not None:  # gradients were multiplied with keys less their mean
            dq = dq + owed * scored.mean[:, :, None, None]
    found = Heads((dq * scale).view(B, H, S, E), dk * scale, dv)
    return Heads(*(x.bfloat16().to(kind) for x, kind in zip(found, types, strict=True))), owed.view(B, H, S)


def cannot(recipe: Recipe) -> str:
    """Why a recipe of the laboratory is not emulated here, or ""."""
    if recipe.smooth_q or recipe.dice:
        return "queries are not smoothed, and nothing is rounded stochastically"
    if not own_sums(recipe):
        return "sums, registers and results are float32 and bfloat16"
    own, q = recipe.backward, recipe.forward.q
    of_backward = {own.dq_k, own.dk_q}
    plain = all(one.format is BF16 for one in of_backward)
    if not plain and not (q.format is E4M3 and of_backward == {q, recipe.forward.k}):
        return "a backward takes queries and keys in bfloat16, or as E4M3 of the forward's"
    if not recipe.matched and not (plain and own.q.format is own.k.format is BF16):
        return "a backward that does not match its forward is in bfloat16"
    return ""


# ---------------------------------------------------------------- casts


def cast(x: Tensor, operand: Operand, along: Along) -> Tensor:
    """As `lab.quant.quantise` has it, in float32; large operands by faster ways to the same values."""
    to, scaling = operand.format, operand.scaling
    if to is BF16 and scaling.per == "none":
        return x.bfloat16().float()
    if to is E4M3 and scaling.per == "static":
        return e4m3(x * scaling.factor) / scaling.factor
    if to in _EIGHT and scaling.per in ("block", "tile") and scaling.kind == "fp32" and not scaling.reciprocal:
        return _tiles_of_8_bits(x, to, scaling.size, x.shape[-1] if scaling.per == "block" else scaling.size)
    if to is E2M1 and scaling.per == "group" and scaling.kind == "e4m3" and scaling.second == "row":
        return _e2m1_rows(x, scaling.size) if along == "channels" else _e2m1_rows(x.mT, scaling.size).mT
    return quantise(x.double(), operand, along).values.float()


def e4m3(x: Tensor) -> Tensor:
    """To nearest, saturating; NaN stays."""
    return x.clamp(-448.0, 448.0).to(torch.float8_e4m3fn).float()


def e2m1(x: Tensor) -> Tensor:
    """To nearest, of two to the even one, saturating."""
    size = x.abs()
    step = torch.where(size < 2.0, 0.5, torch.where(size < 4.0, 1.0, 2.0))
    return torch.copysign((size / step).round_().mul_(step).clamp_(max=6.0), x)


_EIGHT = {E4M3: torch.float8_e4m3fn, E5M2: torch.float8_e5m2}


def _tiles_of_8_bits(x: Tensor, to: Format, high: int, wide: int) -> Tensor:
    """Float32 is enough: a quotient of two of its numbers is rounded alike by way of float64."""
    padded = F.pad(x, (0, -x.shape[-1] % wide, 0, -x.shape[-2] % high))
    rows, columns = padded.shape[-2] // high, padded.shape[-1] // wide
    tiles = padded.reshape(*x.shape[:-2], rows, high, columns, wide)
    most = tiles.abs().amax((-3, -1), keepdim=True)
    scale = most / to.largest
    scale = torch.where(scale == 0, 1.0, scale)  # of nothing, or of what is too small to have one
    codes = (tiles / scale).clamp_(-to.largest, to.largest).to(_EIGHT[to]).float()  # torch's E5M2 does not saturate
    found = codes.mul_(scale).flatten(-4, -3).flatten(-2)
    return found[..., : x.shape[-2], : x.shape[-1]]


def _e2m1_rows(x: Tensor, size: int) -> Tensor:
    padded = F.pad(x, (0, -x.shape[-1] % size))
    groups = padded.reshape(*x.shape[:-1], -1, size)
    most = groups.abs().amax(-1, keepdim=True)
    over = most.amax(-2, keepdim=True)
    row = torch.where(over == 0, 1.0, over / (6.0 * 448.0))
    scale = e4m3(most / 6.0 / row) * row
    found = e2m1(groups / torch.where(scale == 0, 1.0, scale)).masked_fill(scale == 0, 0.0)
    return (found * scale).flatten(-2)[..., : x.shape[-1]]


# ---------------------------------------------------------------- parts


def _scored(heads: Heads, recipe: Recipe) -> Scored:
    operand = recipe.forward.q
    low = operand.format is not BF16
    q, k = heads.q, heads.k
    mean = k.mean(2) if recipe.smooth_k and low else None
    turn = hadamard(q.shape[-1]).float().to(q.device) if recipe.hadamard and low else None
    k = k if mean is None else k - mean[:, :, None]
    if turn is not None:
        q, k = q @ turn, k @ turn
    q = cast(q, operand, "channels")
    return Scored(q.view(q.shape[0], k.shape[1], -1, *q.shape[2:]), cast(k, operand, "channels"), mean, turn)


def _scored_again(heads: Heads, scored: Scored, scale: float) -> tuple[Scored, Tensor | None]:
    """Of a backward that does not match: its own scores, and what has to be added to the sums of the forward's."""
    q = heads.q.view(*scored.q.shape)
    if scored.mean is None:
        return Scored(q, heads.k, None, None), None
    return Scored(q, heads.k, None, None), (q * scored.mean[:, :, None, None]).sum(-1, keepdim=True) * scale


def _sinks(heads: Heads, scored: Scored, sinks_H: Tensor, scale: float) -> Tensor:
    """As scores beside those of smoothed keys (B, G, R, S)."""
    B, G, R, S, _ = scored.q.shape
    sinks = sinks_H.float().view(G, R, 1).expand(B, G, R, S)
    if scored.mean is None:
        return sinks
    return sinks - torch.einsum("bgrse,bge->bgrs", heads.q.view(B, G, R, S, -1), scored.mean) * scale


def _tiles(spans: Spans, size: int) -> Iterator[tuple[slice, Tensor]]:
    """Keys of each step, and which of them queries see (B, 1, 1, S, keys)."""
    for start in range(0, spans.places.shape[1], size):
        columns = slice(start, min(start + size, spans.places.shape[1]))
        yield columns, Spans(spans.since, spans.reach, spans.places[:, columns]).visible()[:, None, None]
