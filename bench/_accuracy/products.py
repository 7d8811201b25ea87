"""Operators that multiply and add: matmuls, convolutions, and the orders they lie in memory in.

A shape is (m, k, n): m times n results of k products each. The bound is that of a sum of k terms; the terms themselves
are exact in float32 for 16-bit types, and once rounded for float32.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from bench._accuracy.bounds import Truth
from bench._accuracy.operator import DTYPES, Call, Case, Cases, Claim, Draw, Inputs, Operator, exact_sum

A: Any = torch.ops.aten
SIZES = ((8, 64, 16), (5, 1000, 7), (32, 256, 48), (3, 4096, 8), (2, 16384, 3), (1, 256, 1), (0, 8, 4), (4, 0, 3))
LAWS = ("wide", "tiny", "positive", "cancelling", "nonfinite")
TAPS = 4


def _cases(dtype: torch.dtype) -> Sequence[Case]:
    return [*(Case(size, "normal") for size in SIZES), *(Case((7, 512, 6), law) for law in LAWS)]


def _few(dtype: torch.dtype) -> Sequence[Case]:
    return [Case(size, law) for size in ((8, 64, 16), (5, 1000, 7)) for law in ("normal", "wide", "cancelling")]


def _pair(d: Draw) -> Inputs:
    """The second is plain where the first is not finite, and of size one where it is tiny."""
    m, k, n = d.case.shape
    law = "normal" if d.case.law in ("tiny", "nonfinite", "cancelling") else d.case.law
    a, b = d.values(m, k), d.values(k, n, law=law)
    if d.case.law == "cancelling":  # what pairs up in a must meet the same in b
        b = b[:1].expand(k, n).contiguous()
    return [a, b]


def dot(a: Tensor, b: Tensor, more: int = 0) -> Truth:
    """Of (.., m, k) and (.., k, n), each result rounded once."""
    terms = a.unsqueeze(-2) * b.transpose(-1, -2).unsqueeze(-3)
    return Truth(exact_sum(terms), terms.abs().sum(-1), a.shape[-1] + more)


def _added(c: Tensor, a: Tensor, b: Tensor) -> Truth:
    one = dot(a, b, 2)
    return Truth(one.value + c, one.size + c.abs(), one.steps)


def _batched(d: Draw) -> Inputs:
    pairs = [_pair(d) for _ in range(3)]
    return [torch.stack(part) for part in zip(*pairs, strict=True)]


def _groups(d: Draw) -> Inputs:
    """Tokens of three experts, one of which has none."""
    m, k, n = d.case.shape
    ends = torch.tensor([m // 3, m // 3, m], dtype=torch.int32)
    return [d.values(m, k), d.values(3, k, n), ends]


def _grouped(a: Tensor, b: Tensor, ends: Tensor) -> Truth:
    stops = cast("list[int]", ends.tolist())
    parts = [dot(a[i:j], b[e]) for e, (i, j) in enumerate(pairwise([0, *stops]))]
    return Truth(torch.cat([p.value for p in parts]), torch.cat([p.size for p in parts]), a.shape[1])


def _convolved(d: Draw) -> Inputs:
    """Channels each with its own filter over time, as the scans have it: (batch, channels, time)."""
    b, t, c = d.case.shape
    return [d.values(b, c, t), d.normal(c, 1, TAPS), d.normal(c)]


def _windows(x: Tensor) -> Tensor:
    """What each filter sees, (b, c, time, taps)."""
    return F.pad(x, (TAPS - 1, 0)).unfold(-1, TAPS, 1)


def _convolution(x: Tensor, w: Tensor, b: Tensor) -> Truth:
    seen = _windows(x) * w[:, 0][None, :, None]
    return Truth(exact_sum(seen) + b[:, None], seen.abs().sum(-1) + b.abs()[:, None], TAPS + 1)


def _convolution_call(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.conv1d(F.pad(x, (TAPS - 1, 0)), w, b, groups=x.shape[1])


def _convolution_backward(which: int) -> Operator:
    def call(x: Tensor, w: Tensor, g: Tensor) -> Tensor:
        mask, c = [i == which for i in range(3)], x.shape[1]
        padded = F.pad(x, (TAPS - 1, 0))
        found = A.convolution_backward(g, padded, w, [c], [1], [0], [1], False, [0], c, mask)[which]
        return found[..., TAPS - 1 :] if which == 0 else found

    def truth(x: Tensor, w: Tensor, g: Tensor) -> Truth:
        if which == 0:
            seen = F.pad(g, (0, TAPS - 1)).unfold(-1, TAPS, 1) * w[:, 0].flip(-1)[None, :, None]
            return Truth(exact_sum(seen), seen.abs().sum(-1), TAPS)
        rows = g[..., None] * _windows(x) if which == 1 else g[..., None]
        flat = rows.permute(1, 3, 0, 2).flatten(2)
        shape = (x.shape[1], 1, TAPS) if which == 1 else (x.shape[1],)
        return Truth(exact_sum(flat).view(shape), flat.abs().sum(-1).view(shape), flat.shape[-1])

    def draw(d: Draw) -> Inputs:
        b, t, c = d.case.shape
        return [d.values(b, c, t), d.normal(c, 1, TAPS), d.normal(b, c, t)]

    name = ("input", "weight", "bias")[which]
    aten = ("convolution_backward.default",)
    return Operator(f"convolution_backward, {name}", "products", aten, draw, call, truth, _times)


def _times(dtype: torch.dtype) -> Sequence[Case]:
    sizes = ((2, 64, 8), (1, 1000, 3), (2, 7, 16))
    return [*(Case(size, "normal") for size in sizes), Case((2, 64, 8), "wide")]


def _op(
    name: str, aten: str, draw: Callable[[Draw], Inputs], call: Call, truth: Claim,
    cases: Cases = _few, dtypes: tuple[torch.dtype, ...] = DTYPES,
) -> Operator:  # fmt: skip
    return Operator(name, "products", (aten,), draw, call, truth, cases, dtypes)


PRODUCTS = (
    _op("mm", "mm.default", _pair, torch.mm, dot, _cases),
    _op("mm, second transposed", "mm.default", _pair, lambda a, b: torch.mm(a, b.T.contiguous().T), dot, _cases),
    _op("mm, first transposed", "mm.default", _pair, lambda a, b: torch.mm(a.T.contiguous().T, b), dot),
    _op("addmm", "addmm.default", lambda d: [d.values(d.case.shape[2]), *_pair(d)], torch.addmm, _added),
    _op("bmm", "bmm.default", _batched, torch.bmm, dot),
    _op("baddbmm", "baddbmm.default", lambda d: [d.values(3, 1, d.case.shape[2]), *_batched(d)], torch.baddbmm, _added),
    _op("_grouped_mm", "_grouped_mm.default", _groups, lambda a, b, e: A._grouped_mm(a, b, e), _grouped,
        lambda dtype: [Case((16, 64, 32), "normal"), Case((24, 512, 16), "normal"), Case((24, 512, 16), "wide")]),
    _op("convolution", "convolution.default", _convolved, _convolution_call, _convolution, _times),
    *(_convolution_backward(which) for which in range(3)),
)  # fmt: skip
