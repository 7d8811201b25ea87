"""Operators that add up: sums, softmax, norms, losses, gradients of tables; and their backwards.

Each declares what its rounding errors are measured by: the magnitudes of the terms, to first order through the formula
that torch computes. A shape is (rows, length); what is added up lies along the last dim unless the name says otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from bench._accuracy.bounds import Truth
from bench._accuracy.operator import Call, Case, Cases, Claim, Draw, Inputs, Operator, exact_sum
from tangram.kernels.lab.formats import cast

A: Any = torch.ops.aten
EPS = 1e-5
SIZES = ((4, 64), (3, 1000), (2, 4096), (1, 16384), (5, 1), (3, 0), (0, 7))


LONG, HIGH = Case((2, 4096), "positive"), Case((4096, 2), "positive")
"""Sums that grow, along rows and along columns."""


def _cases(*laws: str, sizes: Sequence[tuple[int, int]] = SIZES, more: Sequence[Case] = ()) -> Cases:
    """All sizes by the plain law, two of them by every other."""
    plain = [Case(size, "normal") for size in sizes]
    rest = [Case(size, law) for law in laws for size in ((17, 51), (2, 4096))]
    return lambda dtype: [*plain, *rest, *more]


SUMS = _cases("wide", "tiny", "cancelling", "special", "nonfinite", more=(LONG,))
SOFT = _cases("wide", "special", "nonfinite")
FULL = tuple(size for size in SIZES if size[1] > 1 and size[0])
NORMS = _cases("wide", "cancelling", sizes=FULL)


def _rows(draw: Draw) -> Inputs:
    return [draw.values(*draw.case.shape)]


def _columns(draw: Draw) -> Inputs:
    """What cancels, cancels along columns."""
    rows, n = draw.case.shape
    return [draw.values(n, rows).T.contiguous()]


def _sum(x: Tensor) -> Truth:
    return Truth(exact_sum(x), x.abs().sum(-1), x.shape[-1])


def _mean(x: Tensor) -> Truth:
    n = x.shape[-1]
    return Truth(exact_sum(x) / n, x.abs().sum(-1) / n, n + 2)


def _cumsum(x: Tensor) -> Truth:
    return Truth(x.cumsum(-1), x.abs().cumsum(-1), x.shape[-1])


def _softmax(x: Tensor) -> Truth:
    """A rounded difference to the maximum is off by its own size, which the exponential makes a factor."""
    return Truth(x.softmax(-1), _probability_size(x), x.shape[-1] + 6)


def _probability_size(x: Tensor) -> Tensor:
    p = x.softmax(-1)
    apart = (x - x.amax(-1, keepdim=True)).nan_to_num(0.0, 0.0, 0.0).abs() if x.numel() else x
    return p * (1 + apart + (p * apart).sum(-1, keepdim=True))


def _log_softmax(x: Tensor) -> Truth:
    top = x.amax(-1, keepdim=True) if x.numel() else x.new_zeros(*x.shape[:-1], 1)
    shifted = x - top
    total = shifted.exp().sum(-1, keepdim=True)
    value = shifted - total.log()
    share = shifted.nan_to_num(0.0, 0.0, 0.0).abs()
    inner = 1 + (share * shifted.exp()).sum(-1, keepdim=True) / total
    return Truth(value, share + total.log().abs() + inner + top.nan_to_num(0.0, 0.0, 0.0).abs(), x.shape[-1] + 6)


def _logsumexp(x: Tensor) -> Truth:
    value = x.logsumexp(-1)
    return Truth(value, value.abs() + 1 + x.amax(-1).abs() + _probability_size(x).sum(-1), x.shape[-1] + 6)


def _softmax_backward(g: Tensor, y: Tensor) -> Truth:
    both, n = g * y, y.shape[-1]
    value = both - y * both.sum(-1, keepdim=True)
    return Truth(value, both.abs() + y.abs() * both.abs().sum(-1, keepdim=True), n + 4)


def _log_softmax_backward(g: Tensor, y: Tensor) -> Truth:
    p, n = y.exp(), y.shape[-1]
    return Truth(g - p * g.sum(-1, keepdim=True), g.abs() + p * g.abs().sum(-1, keepdim=True), n + 6)


def _with_result(forward: Callable[[Tensor], Tensor]) -> Callable[[Draw], Inputs]:
    """A gradient, and what the forward gave, rounded."""

    def draw(d: Draw) -> Inputs:
        return [d.values(*d.case.shape), cast(forward(d.normal(*d.case.shape)), d.of)]

    return draw


def _moments(d: Draw) -> Inputs:
    """A gradient, rows, their mean and inverse deviation as they were kept, and a weight."""
    g = d.values(*d.case.shape, law="positive" if d.case.law == "positive" else "normal")
    x = d.values(*d.case.shape, law="normal" if d.case.law == "positive" else d.case.law)
    deviation = 1 / torch.sqrt(x.var(-1, unbiased=False, keepdim=True) + EPS)
    return [g, x, cast(x.mean(-1, keepdim=True), d.of), cast(deviation, d.of), d.normal(x.shape[-1])]


def _layer_norm(x: Tensor, w: Tensor, b: Tensor) -> Truth:
    n, mean = x.shape[-1], x.mean(-1, keepdim=True)
    var = (x - mean).square().mean(-1, keepdim=True) + EPS
    unit = (x - mean) / var.sqrt()
    lost = (x.square().mean(-1, keepdim=True) / var).sqrt()
    size = w.abs() * ((x.abs() + x.abs().mean(-1, keepdim=True)) / var.sqrt() + unit.abs() * (1 + lost)) + b.abs()
    return Truth(unit * w + b, size, n + 8)


def _layer_norm_back(g: Tensor, x: Tensor, mean: Tensor, deviation: Tensor, w: Tensor) -> tuple[Truth, Truth, Truth]:
    rows, n = x.shape
    unit, large = (x - mean) * deviation, (x.abs() + mean.abs()) * deviation
    inner, scaled = (g * w).mean(-1, keepdim=True), g * w
    turn = (scaled * unit).mean(-1, keepdim=True)
    size = deviation * (
        scaled.abs() + scaled.abs().mean(-1, keepdim=True)
        + large * (scaled * large).abs().mean(-1, keepdim=True)
    )  # fmt: skip
    return (
        Truth(deviation * (scaled - inner - unit * turn), size, n + 8),
        Truth((g * unit).sum(0), (g * large).abs().sum(0), rows + 4),
        Truth(exact_sum(g, 0), g.abs().sum(0), rows),
    )


def _layer_norm_backward(which: int) -> Operator:
    def call(g: Tensor, x: Tensor, mean: Tensor, deviation: Tensor, w: Tensor) -> Tensor:
        mask = [i == which for i in range(3)]
        return A.native_layer_norm_backward(g, x, [x.shape[-1]], mean, deviation, w, torch.zeros_like(w), mask)[which]

    name = ("input", "weight", "bias")[which]
    cases = (*FULL, (300, 40))
    return Operator(
        f"native_layer_norm_backward, {name}", "reductions", ("native_layer_norm_backward.default",), _moments, call,
        lambda g, x, mean, deviation, w: _layer_norm_back(g, x, mean, deviation, w)[which],
        _cases("wide", sizes=cases, more=(HIGH,)),
    )  # fmt: skip


def _rms_norm(x: Tensor, w: Tensor) -> Truth:
    value = x / torch.sqrt(x.square().mean(-1, keepdim=True) + EPS) * w
    return Truth(value, value.abs(), x.shape[-1] + 8)


def _ids(d: Draw, among: int) -> Tensor:
    return torch.from_numpy(d.rng.integers(0, among, d.case.shape[0]).astype(np.int64))


def _table(d: Draw) -> Inputs:
    """Gradients of (tokens, width), for few rows of a table: each gets many."""
    return [d.values(*d.case.shape), _ids(d, 5)]


def _table_backward(g: Tensor, ids: Tensor) -> Truth:
    own = [(ids == i).nonzero().flatten() for i in range(5)]
    value = torch.stack([exact_sum(g[rows], 0) for rows in own])
    size = torch.stack([g[rows].abs().sum(0) for rows in own])
    return Truth(value, size, g.shape[0])


TABLE = _cases("wide", sizes=((64, 8), (4096, 3), (1, 5), (7, 64)), more=(HIGH,))


def _losses(d: Draw) -> Inputs:
    tokens, words = d.case.shape
    return [cast(d.values(tokens, words).log_softmax(-1), d.of), _ids(d, words)]


def _nll(x: Tensor, ids: Tensor) -> Truth:
    own = -x.gather(1, ids[:, None]).flatten()
    return Truth(exact_sum(own) / len(own), own.abs().sum() / len(own), len(own) + 2)


def _nll_backward(g: Tensor, x: Tensor, ids: Tensor) -> Truth:
    value = torch.zeros_like(x).scatter(1, ids[:, None], (-g / len(ids)).expand(len(ids), 1))
    return Truth(value, value.abs(), 2)


def _nll_call(g: Tensor, x: Tensor, ids: Tensor) -> Tensor:
    weight = torch.full((), float(len(ids)), dtype=x.dtype, device=x.device)
    return A.nll_loss_backward(g, x, ids, None, 1, -100, weight)


def _op(
    name: str, aten: str, draw: Callable[[Draw], Inputs], call: Call, truth: Claim,
    cases: Cases,
) -> Operator:  # fmt: skip
    return Operator(name, "reductions", (aten,), draw, call, truth, cases)


REDUCTIONS = (
    _op("sum", "sum.dim_IntList", _rows, lambda x: x.sum(-1), _sum, SUMS),
    _op("sum, of columns", "sum.dim_IntList", _columns, lambda x: x.sum(0), lambda x: _sum(x.T),
        _cases("wide", "cancelling", sizes=((64, 40), (1000, 7), (4096, 3), (16384, 1), (0, 4)), more=(HIGH,))),
    _op("mean", "mean.dim", _rows, lambda x: x.mean(-1), _mean, SUMS),
    _op("cumsum", "cumsum.default", _rows, lambda x: x.cumsum(-1), _cumsum,
        _cases("wide", "cancelling", "nonfinite", more=(LONG,))),
    _op("softmax", "_softmax.default", _rows, lambda x: A._softmax(x, -1, False), _softmax, SOFT),
    _op("softmax, safe", "_safe_softmax.default", _rows, lambda x: A._safe_softmax(x, -1), _softmax,
        _cases("wide", sizes=FULL)),
    _op("log_softmax", "_log_softmax.default", _rows, lambda x: A._log_softmax(x, -1, False), _log_softmax, SOFT),
    _op("logsumexp", "logsumexp.default", _rows, lambda x: x.logsumexp(-1), _logsumexp,
        _cases("wide", "special", "nonfinite", sizes=FULL)),
    _op("softmax_backward", "_softmax_backward_data.default", _with_result(lambda x: x.softmax(-1)),
        lambda g, y: A._softmax_backward_data(g, y, -1, y.dtype), _softmax_backward, SOFT),
    _op("log_softmax_backward", "_log_softmax_backward_data.default", _with_result(lambda x: x.log_softmax(-1)),
        lambda g, y: A._log_softmax_backward_data(g, y, -1, y.dtype), _log_softmax_backward, SOFT),
    _op("layer_norm", "native_layer_norm.default",
        lambda d: [*_rows(d), d.normal(d.case.shape[1]), d.normal(d.case.shape[1])],
        lambda x, w, b: F.layer_norm(x, [x.shape[-1]], w, b, EPS), _layer_norm, NORMS),
    *(_layer_norm_backward(which) for which in range(3)),
    _op("rms_norm", "_fused_rms_norm.default", lambda d: [*_rows(d), d.normal(d.case.shape[1])],
        lambda x, w: F.rms_norm(x, [x.shape[-1]], w, EPS), _rms_norm, NORMS),
    _op("embedding_dense_backward", "embedding_dense_backward.default", _table,
        lambda g, ids: A.embedding_dense_backward(g, ids, 5, -1, False), _table_backward, TABLE),
    _op("index_put, adding", "index_put.default", _table,
        lambda g, ids: g.new_zeros(5, g.shape[1]).index_put([ids], g, accumulate=True), _table_backward, TABLE),
    _op("scatter_add", "scatter_add.default", _table,
        lambda g, ids: g.new_zeros(5, g.shape[1]).scatter_add(0, ids[:, None].expand(g.shape), g), _table_backward,
        TABLE),
    _op("nll_loss", "nll_loss_forward.default", _losses, F.nll_loss, _nll,
        _cases("wide", sizes=((64, 9), (1000, 5), (4096, 3)))),
    _op("nll_loss_backward", "nll_loss_backward.default", lambda d: [d.normal(1)[0], *_losses(d)], _nll_call,
        _nll_backward, _cases(sizes=((64, 9), (1000, 5)))),
)  # fmt: skip
