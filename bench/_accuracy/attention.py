"""Fused attention, forward and backward, in torch's own kernels.

A shape is (heads, tokens, width), the same number of queries and keys. The class of algorithms is FlashAttention's:
sums in float32, probabilities and their gradients rounded to the operator's type before they are multiplied, and in the
backward the rounded output taken for the sum over a row. Errors of scores become factors through the exponential, so
sizes hold the magnitudes of the scores.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bench._accuracy.bounds import Truth
from bench._accuracy.operator import Case, Draw, Inputs, Operator
from tangram.kernels.lab.formats import cast

A: Any = torch.ops.aten
SHAPES = ((2, 64, 32), (1, 100, 64), (2, 33, 16), (1, 1, 8), (1, 300, 128))


@dataclass(frozen=True)
class _Scores:
    """In float64: probabilities, the factor that each may be off by in roundings, and the scale."""

    p: Tensor
    wide: Tensor
    scale: float


def _cases(dtype: torch.dtype) -> Sequence[Case]:
    return [*(Case(shape, "normal") for shape in SHAPES), Case((2, 64, 32), "wide")]


def _draw(d: Draw) -> Inputs:
    """Queries, keys, values, gradient.

    Wide: values and gradients only, as scores would leave one key alone; of a size whose products float16 has.
    """
    shape = (1, *d.case.shape)
    less = 2.0**-8 if d.case.law == "wide" else 1.0
    return [d.normal(*shape), d.normal(*shape), *(cast(d.values(*shape) * less, d.of) for _ in range(2))]


def _scores(q: Tensor, k: Tensor, causal: bool) -> _Scores:
    scale = 1 / math.sqrt(q.shape[-1])
    s, size = (scale * a @ b.transpose(-1, -2) for a, b in ((q, k), (q.abs(), k.abs())))
    if causal:
        hidden = torch.ones_like(s[0, 0]).triu(1).bool()
        s, size = s.masked_fill(hidden, -torch.inf), size.masked_fill(hidden, 0.0)
    p = s.softmax(-1)
    wide = p * (1 + size + (p * size).sum(-1, keepdim=True) + size.amax(-1, keepdim=True))
    return _Scores(p, wide, scale)


def _forward(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Truth:
    s, n = _scores(q, k, causal), sum(k.shape[-2:])
    return Truth(s.p @ v, s.wide @ v.abs(), n + 8, casts=s.p @ v.abs())


def _backward(q: Tensor, k: Tensor, v: Tensor, g: Tensor, causal: bool, which: int) -> Truth:
    s, n = _scores(q, k, causal), sum(k.shape[-2:]) + 16
    turned = s.p.transpose(-1, -2)
    if which == 2:
        return Truth(turned @ g, s.wide.transpose(-1, -2) @ g.abs(), 2 * n, casts=turned @ g.abs())
    out, size = s.p @ v, s.p @ v.abs()
    dp, delta = g @ v.transpose(-1, -2), (g * out).sum(-1, keepdim=True)
    ds = s.p * (dp - delta)
    most = g.abs() @ v.abs().transpose(-1, -2) + (g.abs() * size).sum(-1, keepdim=True)
    lost = ds.abs() + s.p * (g * out).abs().sum(-1, keepdim=True) + s.p * (g.abs() * size).sum(-1, keepdim=True)
    other = k if which == 0 else q
    parts = (ds, s.wide * most, lost)
    ds, large, rounded = (x if which == 0 else x.transpose(-1, -2) for x in parts)
    return Truth(s.scale * ds @ other, s.scale * large @ other.abs(), 2 * n, casts=s.scale * rounded @ other.abs())


def _gradient(q: Tensor, k: Tensor, v: Tensor, g: Tensor, causal: bool, which: int) -> Tensor:
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    out = F.scaled_dot_product_attention(leaves[0], leaves[1], leaves[2], is_causal=causal)
    return torch.autograd.grad(out, leaves, g)[which]


def _operator(causal: bool, which: int | None) -> Operator:
    kind = ", causal" if causal else ""
    if which is None:
        return Operator(
            f"attention{kind}", "attention", ("_scaled_dot_product_flash_attention_for_cpu.default",), _draw,
            lambda q, k, v, g: F.scaled_dot_product_attention(q, k, v, is_causal=causal),
            lambda q, k, v, g: _forward(q, k, v, causal), _cases,
        )  # fmt: skip
    return Operator(
        f"attention_backward{kind}, {('query', 'key', 'value')[which]}", "attention",
        ("_scaled_dot_product_flash_attention_for_cpu_backward.default",), _draw,
        lambda q, k, v, g: _gradient(q, k, v, g, causal, which),
        lambda q, k, v, g: _backward(q, k, v, g, causal, which), _cases,
    )  # fmt: skip


ATTENTION = (
    *(_operator(causal, None) for causal in (False, True)),
    Operator(
        "attention, unfused", "attention", ("_scaled_dot_product_attention_math.default",), _draw,
        lambda q, k, v, g: A._scaled_dot_product_attention_math(q, k, v)[0],
        lambda q, k, v, g: _forward(q, k, v, False), _cases,
    ),
    *(_operator(True, which) for which in range(3)),
)  # fmt: skip
