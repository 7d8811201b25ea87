"""Over classes: softmax and its kin, and the likelihood of one class.

log_softmax(x)      x - m - log(sum(exp(x - m)))        m = max(x), of which the gradient is nothing
nll_loss(x, t)      gather(x, t), which gives nothing where a part does not hold t: a pending sum
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from tangram.sharding.compositions.places import (
    UnfitModuleError,
    as_type,
    computed,
    counted,
    dims_of,
    peak_of,
    real,
    squeezed,
)

NONE, MEAN, SUM = 0, 1, 2
REDUCTIONS = {"mean": MEAN, "sum": SUM}


def softmax(x: Tensor, dim: int, half_to_float: bool) -> Tensor:
    dims, own = dims_of(x, dim), computed(x)
    powers = torch.exp(own - peak_of(own, dims))
    found = powers / powers.sum(dims, keepdim=True)
    return found if half_to_float else as_type(found, x.dtype)


def safe_softmax(x: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
    """Of a row of nothing but -inf, zeros."""
    own = computed(x, dtype)
    none = (x.detach() == -math.inf).all(dim, keepdim=True)
    found = torch.where(none, 0.0, softmax(torch.where(none, 0.0, own), dim, True))
    return as_type(found, dtype or x.dtype)


def log_softmax(x: Tensor, dim: int, half_to_float: bool) -> Tensor:
    dims, own = dims_of(x, dim), computed(x)
    shifted = own - peak_of(own, dims)
    found = shifted - torch.log(torch.exp(shifted).sum(dims, keepdim=True))
    return found if half_to_float else as_type(found, x.dtype)


def logsumexp(x: Tensor, dim: Sequence[int], keepdim: bool = False) -> Tensor:
    dims, own = dims_of(x, dim), real(computed(x))
    peak = peak_of(own, dims)
    peak = torch.where(peak.abs() == math.inf, 0.0, peak)
    found = torch.log(torch.exp(own - peak).sum(dims, keepdim=True)) + peak
    return as_type(squeezed(found, dims, keepdim), x.dtype if x.is_floating_point() else own.dtype)


def _by_class(weight: Tensor, x: Tensor, dim: int) -> Tensor:
    return weight.detach().view([-1 if d == dim else 1 for d in range(x.ndim)])  # torch has no gradient of it


def nll_loss(
    x: Tensor, target: Tensor, weight: Tensor | None, reduction: int, ignore_index: int
) -> tuple[Tensor, Tensor]:
    dims_of(x, None)
    dim = 1 if x.ndim > 1 else 0
    kept = target != ignore_index
    safe = torch.where(kept, target, 0).unsqueeze(dim)
    loss = -torch.gather(x, dim, safe).squeeze(dim)
    own = None
    if weight is not None:
        own = torch.gather(_by_class(weight, x, dim).expand(x.shape), dim, safe).squeeze(dim)
        loss = loss * own
    loss = torch.where(kept, loss, 0.0)
    if reduction == NONE and x.ndim > 1:
        return loss, torch.zeros((), dtype=x.dtype, device=x.device)
    weights = kept.sum() if own is None else torch.where(kept, own, 0.0).sum()
    total = as_type(weights, x.dtype)
    if reduction == NONE:
        return loss, total
    summed = loss.sum()
    return (summed / total if reduction == MEAN else summed), total


def nll_loss_backward(
    grad_output: Tensor,
    x: Tensor,
    target: Tensor,
    weight: Tensor | None,
    reduction: int,
    ignore_index: int,
    total_weight: Tensor,
) -> Tensor:
    dims_of(x, None)
    dim = 1 if x.ndim > 1 else 0
    own = grad_output / total_weight if reduction == MEAN else grad_output
    own = torch.where(target != ignore_index, -own, 0.0).unsqueeze(dim)
    if weight is not None:
        own = own * _by_class(weight, x, dim)
    return torch.where(counted(x, [dim]) == target.unsqueeze(dim), own, 0.0)


def linear_cross_entropy(
    x: Tensor,
    linear: Tensor,
    target: Tensor,
    bias: Tensor | None,
    weight: Tensor | None,
    reduction: str,
    ignore_index: int,
    label_smoothing: float,
    chunk: int,
    policy: str,
    dtype: torch.dtype,
    retain: bool,
    wanted: bool,
    linear_wanted: bool,
    bias_wanted: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The loss, and the gradients that torch computes with it. What it saves by chunks a part saves by being one."""
    if label_smoothing or reduction not in REDUCTIONS:
        raise UnfitModuleError
    found, logs, total = _linear(x, linear, target, bias, weight, REDUCTIONS[reduction], ignore_index, dtype)
    kept = target != ignore_index
    rows = kept.to(dtype)
    if weight is not None:
        rows = torch.where(kept, weight.to(dtype)[torch.where(kept, target, 0)], 0.0)
    rows = (rows / total if reduction == "mean" else rows).detach().unsqueeze(1)
    away = torch.exp(logs.detach()) - (counted(logs, [1]) == target.unsqueeze(1)).to(dtype)
    away = away * rows

    def none(*shape: int) -> Tensor:
        return torch.zeros(shape, dtype=x.dtype, device=x.device)

    return (
        found,
        as_type(away @ linear.detach().to(dtype), x.dtype) if wanted else none(0, 0),
        as_type(away.T @ x.detach().to(dtype), x.dtype) if linear_wanted else none(0, 0),
        as_type(away.sum(0), x.dtype) if bias_wanted else none(0),
    )


def linear_cross_entropies(
    x: Tensor,
    linear: Tensor,
    target: Tensor,
    bias: Tensor | None,
    weight: Tensor | None,
    ignore_index: int,
    chunk: int,
    policy: str,
    dtype: torch.dtype,
) -> Tensor:
    return _linear(x, linear, target, bias, weight, NONE, ignore_index, dtype)[0]


def _linear(
    x: Tensor,
    linear: Tensor,
    target: Tensor,
    bias: Tensor | None,
    weight: Tensor | None,
    reduction: int,
    ignore_index: int,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    """The loss, the logarithms of probabilities, and the weight of all rows."""
    dims_of(x, None)
    logits = as_type(x, dtype) @ as_type(linear, dtype).T
    logits = logits if bias is None else logits + as_type(bias, dtype)
    logs = log_softmax(logits, 1, False)
    loss, total = nll_loss(logs, target, None if weight is None else as_type(weight, dtype), reduction, ignore_index)
    return as_type(loss, x.dtype), logs, total
