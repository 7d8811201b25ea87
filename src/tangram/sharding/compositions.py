"""Operators over a dim as others that need of a cut dim only small sums and maxima: a function each, on plain tensors.

    log_softmax(x)      x - m - log(sum(exp(x - m)))        m = max(x), of which the gradient is nothing
    nll_loss(x, t)      gather(x, t), which gives nothing where a part does not hold t: a pending sum
    amax(x)             the mean of those that are the maximum, so that the gradient is shared as torch shares it
    argmax(x)           the least place of those that are the maximum

Each is stable where torch's operator is, and has its gradient, also where that is not the formula's: a norm of zeros
has a gradient of zeros. Those that torch decomposes well are not here (`decompose.TORCH`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

NONE, MEAN = 0, 1


class UnfitError(Exception):
    """A call that is not decomposed."""


def _computed(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """A tensor in the type that is computed with: half ones as float32, integers as floats."""
    wanted = dtype or (x.dtype if x.is_floating_point() or x.is_complex() else torch.get_default_dtype())
    if wanted in (torch.float16, torch.bfloat16):
        wanted = torch.float32
    return x if x.dtype == wanted else x.to(wanted)


def _as(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x if x.dtype == dtype else x.to(dtype)


def _dims(x: Tensor, dim: int | Sequence[int] | None) -> list[int]:
    """Dims from 0 on; all where none is named."""
    if not x.numel():
        raise UnfitError  # of nothing there is no maximum, and nothing to cut
    listed = [dim] if isinstance(dim, int) else [*(dim or range(x.ndim))]
    return sorted(d % x.ndim for d in listed) if x.ndim else []


def _squeezed(x: Tensor, dims: list[int], keepdim: bool) -> Tensor:
    return x if keepdim or not dims else x.squeeze(tuple(dims))


def _real(x: Tensor) -> Tensor:
    if x.is_complex():
        raise UnfitError
    return x


def _peak(x: Tensor, dims: list[int]) -> Tensor:
    """The maximum, without gradient."""
    return torch.amax(x.detach(), dims, keepdim=True)


# Softmax and what belongs to it.


def _softmax(x: Tensor, dim: int, half_to_float: bool) -> Tensor:
    dims, own = _dims(x, dim), _computed(x)
    powers = torch.exp(own - _peak(own, dims))
    found = powers / powers.sum(dims, keepdim=True)
    return found if half_to_float else _as(found, x.dtype)


def _safe_softmax(x: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
    """Of a row of nothing but -inf, zeros."""
    own = _computed(x, dtype)
    none = (x.detach() == -math.inf).all(dim, keepdim=True)
    found = torch.where(none, 0.0, _softmax(torch.where(none, 0.0, own), dim, True))
    return _as(found, dtype or x.dtype)


def _log_softmax(x: Tensor, dim: int, half_to_float: bool) -> Tensor:
    dims, own = _dims(x, dim), _computed(x)
    shifted = own - _peak(own, dims)
    found = shifted - torch.log(torch.exp(shifted).sum(dims, keepdim=True))
    return found if half_to_float else _as(found, x.dtype)


def _logsumexp(x: Tensor, dim: Sequence[int], keepdim: bool = False) -> Tensor:
    dims, own = _dims(x, dim), _real(_computed(x))
    peak = _peak(own, dims)
    peak = torch.where(peak.abs() == math.inf, 0.0, peak)
    found = torch.log(torch.exp(own - peak).sum(dims, keepdim=True)) + peak
    return _as(_squeezed(found, dims, keepdim), x.dtype if x.is_floating_point() else own.dtype)


# Moments.


def _moments(x: Tensor, dims: list[int], correction: float | None) -> tuple[Tensor, Tensor]:
    mean = x.mean(dims, keepdim=True)
    away = x - mean
    left = math.prod(x.shape[d] for d in dims) - (1 if correction is None else correction)
    return (away * away).sum(dims, keepdim=True) / max(0.0, left), mean


def _root(x: Tensor) -> Tensor:
    """The square root, with a gradient of nothing at 0."""
    zero = x == 0
    return torch.where(zero, 0.0, torch.sqrt(torch.where(zero, 1.0, x)))


def _var_mean(
    x: Tensor, dim: Sequence[int] | None = None, *, correction: float | None = None, keepdim: bool = False
) -> tuple[Tensor, Tensor]:
    dims = _dims(_real(x), dim)
    return tuple(_as(_squeezed(t, dims, keepdim), x.dtype) for t in _moments(_computed(x), dims, correction))  # type: ignore


def _std_mean(
    x: Tensor, dim: Sequence[int] | None = None, *, correction: float | None = None, keepdim: bool = False
) -> tuple[Tensor, Tensor]:
    dims = _dims(_real(x), dim)
    var, mean = _moments(_computed(x), dims, correction)
    return tuple(_as(_squeezed(t, dims, keepdim), x.dtype) for t in (_root(var), mean))  # type: ignore


def _var(x: Tensor, dim: Any = None, *, correction: float | None = None, keepdim: bool = False) -> Tensor:
    return _var_mean(x, dim, correction=correction, keepdim=keepdim)[0]


def _std(x: Tensor, dim: Any = None, *, correction: float | None = None, keepdim: bool = False) -> Tensor:
    return _std_mean(x, dim, correction=correction, keepdim=keepdim)[0]


def _layer_norm(
    x: Tensor, shape: Sequence[int], weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    own, dims = _computed(_real(x)), _dims(x, [*range(x.ndim - len(shape), x.ndim)])
    var, mean = _moments(own, dims, 0)
    rstd = torch.rsqrt(var + eps)
    found = (own - mean) * rstd
    found = found if weight is None else found * weight
    found = found if bias is None else found + bias
    kept = x.dtype if x.device.type == "cpu" else own.dtype
    return _as(found, x.dtype), _as(mean, kept), _as(rstd, kept)


def _group_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, n: int, c: int, _: int, group: int, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Channels are taken together only once they are one number each: they may be cut anywhere, not only by groups."""
    own, others = _computed(_real(x)), [*range(2, x.ndim)]
    _dims(x, None)
    each = [n, c, *(1 for _ in others)]

    def together(t: Tensor) -> Tensor:
        t = t.mean(others, keepdim=True) if others else t
        return t.view(n, group, c // group).mean(2)

    def spread(t: Tensor) -> Tensor:
        return t.unsqueeze(2).expand(n, group, c // group).reshape(each)

    mean = together(own)
    away = own - spread(mean)
    rstd = torch.rsqrt(together(away * away) + eps)
    found = away * spread(rstd)
    for affine, how in ((weight, torch.mul), (bias, torch.add)):
        found = found if affine is None else how(found, affine.view([-1, *(1 for _ in others)]))
    return _as(found, x.dtype), _as(mean, x.dtype), _as(rstd, x.dtype)


def _vector_norm(
    x: Tensor, p: float = 2, dim: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Tensor:
    dims, own = _dims(x, dim), _computed(x, dtype)
    result = dtype or x.dtype
    if result.is_complex:
        result = result.to_real()
    size = own.abs()
    if math.isinf(p):
        found = _extreme(size, dims, torch.amax if p > 0 else torch.amin)
    elif p <= 0 and p != 0:
        raise UnfitError  # where one element is 0 so is the result, by a pole
    elif p == 0:
        found = _as((size != 0).sum(dims, keepdim=True), size.dtype)
    else:
        zero = size == 0
        powers = size * size if p == 2 else torch.where(zero, 0.0, torch.where(zero, 1.0, size) ** p)
        total = powers.sum(dims, keepdim=True)
        none = total == 0
        safe = torch.where(none, 1.0, total)
        found = torch.where(none, 0.0, torch.sqrt(safe) if p == 2 else safe ** (1.0 / p))
    return _as(_squeezed(found, dims, keepdim), result)


def _norm(x: Tensor, p: float | None = 2, dim: Any = None, keepdim: bool = False) -> Tensor:
    return _vector_norm(x, 2 if p is None else p, dim, keepdim)


def _dist(x: Tensor, other: Tensor, p: float = 2) -> Tensor:
    return _vector_norm(x - other, p)


# Maxima and their places.


def _extreme(x: Tensor, dims: list[int], pick: Callable[..., Tensor]) -> Tensor:
    """The maximum or minimum; its gradient is shared by those that are it."""
    found = pick(x.detach(), dims, keepdim=True)
    if not x.is_floating_point():
        return found
    there = (x == found) | x.isnan()
    return torch.where(there, x, 0.0).sum(dims, keepdim=True) / there.sum(dims, keepdim=True)


def _amax(x: Tensor, dim: Sequence[int] = (), keepdim: bool = False) -> Tensor:
    dims = _dims(x, dim)
    return _squeezed(_extreme(x, dims, torch.amax), dims, keepdim)


def _amin(x: Tensor, dim: Sequence[int] = (), keepdim: bool = False) -> Tensor:
    dims = _dims(x, dim)
    return _squeezed(_extreme(x, dims, torch.amin), dims, keepdim)


def _counted(x: Tensor, dims: list[int]) -> Tensor:
    """Of each element its place along some dims, counted together; cut as `x` is."""
    place = torch.zeros_like(x, dtype=torch.int64)
    step = 1
    for d in reversed(dims):
        n = x.shape[d]
        along = torch.arange(n, device=x.device).view([n if i == d else 1 for i in range(x.ndim)])
        place = place + along * step
        step *= n
    return place


def _first(x: Tensor, dims: list[int], pick: Callable[..., Tensor]) -> tuple[Tensor, Tensor]:
    """The first place of the maximum or minimum, and every place."""
    own = x.detach()
    there = own == pick(own, dims, keepdim=True)
    if x.is_floating_point():
        there = there | own.isnan()
    place = _counted(own, dims)
    last = math.prod(x.shape[d] for d in dims)
    return torch.amin(torch.where(there, place, last), dims, keepdim=True), place


def _arg(x: Tensor, dim: int | None, keepdim: bool, pick: Callable[..., Tensor]) -> Tensor:
    dims = _dims(x, dim)
    if not dims:
        raise UnfitError
    return _squeezed(_first(x, dims, pick)[0], dims, keepdim)


def _argmax(x: Tensor, dim: int | None = None, keepdim: bool = False) -> Tensor:
    return _arg(x, dim, keepdim, torch.amax)


def _argmin(x: Tensor, dim: int | None = None, keepdim: bool = False) -> Tensor:
    return _arg(x, dim, keepdim, torch.amin)


def _along(x: Tensor, dim: int, keepdim: bool, pick: Callable[..., Tensor]) -> tuple[Tensor, Tensor]:
    dims = _dims(x, dim)
    if not dims:
        raise UnfitError
    first, place = _first(x, dims, pick)
    value = torch.where(place == first, x, 0).sum(dims, keepdim=True, dtype=x.dtype)
    return _squeezed(value, dims, keepdim), _squeezed(first, dims, keepdim)


def _max_dim(x: Tensor, dim: int, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    return _along(x, dim, keepdim, torch.amax)


def _min_dim(x: Tensor, dim: int, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    return _along(x, dim, keepdim, torch.amin)


# Likelihood of a class.


def _by_class(weight: Tensor, x: Tensor, dim: int) -> Tensor:
    return weight.detach().view([-1 if d == dim else 1 for d in range(x.ndim)])  # torch has no gradient of it


def _nll_loss(
    x: Tensor, target: Tensor, weight: Tensor | None, reduction: int, ignore_index: int
) -> tuple[Tensor, Tensor]:
    _dims(x, None)
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
    total = _as(weights, x.dtype)
    if reduction == NONE:
        return loss, total
    summed = loss.sum()
    return (summed / total if reduction == MEAN else summed), total


def _nll_loss_backward(
    grad_output: Tensor,
    x: Tensor,
    target: Tensor,
    weight: Tensor | None,
    reduction: int,
    ignore_index: int,
    total_weight: Tensor,
) -> Tensor:
    _dims(x, None)
    dim = 1 if x.ndim > 1 else 0
    own = grad_output / total_weight if reduction == MEAN else grad_output
    own = torch.where(target != ignore_index, -own, 0.0).unsqueeze(dim)
    if weight is not None:
        own = own * _by_class(weight, x, dim)
    return torch.where(_counted(x, [dim]) == target.unsqueeze(dim), own, 0.0)


def _detached(operator: Any) -> Callable[..., Any]:
    """The operator itself, where no gradient passes: its maximum may then stay pending."""

    def found(x: Tensor, *others: Any) -> Tensor:
        return operator(x.detach(), *others)

    return found


def _all_dims(function: Callable[..., Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda x: function(x, [*range(x.ndim)])


_aten = torch.ops.aten
OWN: Mapping[str, Callable[..., Any]] = {
    "_softmax": _softmax,
    "_log_softmax": _log_softmax,
    "_safe_softmax": _safe_softmax,
    "logsumexp": _logsumexp,
    "var.correction": _var,
    "std.correction": _std,
    "var_mean.correction": _var_mean,
    "std_mean.correction": _std_mean,
    "native_layer_norm": _layer_norm,
    "native_group_norm": _group_norm,
    "linalg_vector_norm": _vector_norm,
    "norm.Scalar": _norm,
    "norm.ScalarOpt_dim": _norm,
    "dist": _dist,
    "amax": _amax,
    "amin": _amin,
    "max": _all_dims(_amax),
    "min": _all_dims(_amin),
    "max.dim": _max_dim,
    "min.dim": _min_dim,
    "argmax": _argmax,
    "argmin": _argmin,
    "nll_loss_forward": _nll_loss,
    "nll_loss2d_forward": _nll_loss,
    "nll_loss_backward": _nll_loss_backward,
    "nll_loss2d_backward": _nll_loss_backward,
    "any": _detached(_aten.any.default),
    "all": _detached(_aten.all.default),
    "any.dim": _detached(_aten.any.dim),
    "all.dim": _detached(_aten.all.dim),
    "any.dims": _detached(_aten.any.dims),
    "all.dims": _detached(_aten.all.dims),
}
"""Of operators by their names, functions of what they are called with."""
