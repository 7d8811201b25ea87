"""Moments and norms, and what is divided by them.

The mean first, then the squares of what is away from it: two sums, as stable as torch's. A root has a gradient of
nothing at 0, as torch's norms have.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tangram.sharding.compositions.places import UnfitModuleError, as_type, computed, dims_of, extreme, real, squeezed


def moments(x: Tensor, dims: list[int], correction: float | None) -> tuple[Tensor, Tensor]:
    mean = x.mean(dims, keepdim=True)
    away = x - mean
    left = math.prod(x.shape[d] for d in dims) - (1 if correction is None else correction)
    return (away * away).sum(dims, keepdim=True) / max(0.0, left), mean


def _root(x: Tensor) -> Tensor:
    """The square root, with a gradient of nothing at 0."""
    zero = x == 0
    return torch.where(zero, 0.0, torch.sqrt(torch.where(zero, 1.0, x)))


def var_mean(
    x: Tensor, dim: Sequence[int] | None = None, *, correction: float | None = None, keepdim: bool = False
) -> tuple[Tensor, Tensor]:
    dims = dims_of(real(x), dim)
    found, mean = moments(computed(x), dims, correction)
    return as_type(squeezed(found, dims, keepdim), x.dtype), as_type(squeezed(mean, dims, keepdim), x.dtype)


def std_mean(
    x: Tensor, dim: Sequence[int] | None = None, *, correction: float | None = None, keepdim: bool = False
) -> tuple[Tensor, Tensor]:
    dims = dims_of(real(x), dim)
    var, mean = moments(computed(x), dims, correction)
    return as_type(squeezed(_root(var), dims, keepdim), x.dtype), as_type(squeezed(mean, dims, keepdim), x.dtype)


def var(x: Tensor, dim: Any = None, *, correction: float | None = None, keepdim: bool = False) -> Tensor:
    return var_mean(x, dim, correction=correction, keepdim=keepdim)[0]


def std(x: Tensor, dim: Any = None, *, correction: float | None = None, keepdim: bool = False) -> Tensor:
    return std_mean(x, dim, correction=correction, keepdim=keepdim)[0]


def layer_norm(
    x: Tensor, shape: Sequence[int], weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    own, dims = computed(real(x)), dims_of(x, [*range(x.ndim - len(shape), x.ndim)])
    var, mean = moments(own, dims, 0)
    rstd = torch.rsqrt(var + eps)
    found = (own - mean) * rstd
    found = found if weight is None else found * weight
    found = found if bias is None else found + bias
    kept = x.dtype if x.device.type == "cpu" else own.dtype
    return as_type(found, x.dtype), as_type(mean.detach(), kept), as_type(rstd.detach(), kept)


def group_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, n: int, c: int, _: int, group: int, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Channels are taken together only once they are one number each: they may be cut anywhere, not only by groups."""
    own, others = computed(real(x)), [*range(2, x.ndim)]
    dims_of(x, None)
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
    return as_type(found, x.dtype), as_type(mean, x.dtype), as_type(rstd, x.dtype)


def batch_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Of the whole batch, however it is cut; the running statistics are written on every rank alike."""
    if not training:
        raise UnfitModuleError  # each element by itself
    dims_of(x, None)
    own, dims = computed(real(x)), [d for d in range(x.ndim) if d != 1]
    var, mean = moments(own, dims, 0)
    n = x.numel() // x.shape[1]
    for running, now in ((running_mean, mean), (running_var, var * (n / max(1, n - 1)))):
        if running is not None:
            running.copy_(running * (1 - momentum) + now.detach().squeeze(dims) * momentum)
    rstd = torch.rsqrt(var + eps)
    found = (own - mean) * rstd
    for affine, how in ((weight, torch.mul), (bias, torch.add)):
        found = found if affine is None else how(found, affine.view([-1 if d == 1 else 1 for d in range(x.ndim)]))
    kept = x.dtype if x.device.type == "cpu" else own.dtype
    return (
        as_type(found, x.dtype),
        as_type(mean.detach().squeeze(dims), kept),
        as_type(rstd.detach().squeeze(dims), kept),
    )


def batch_norm_no_stats(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, training: bool, momentum: float, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    return batch_norm(x, weight, bias, None, None, training, momentum, eps)


def vector_norm(
    x: Tensor, p: float = 2, dim: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Tensor:
    dims, own = dims_of(x, dim), computed(x, dtype)
    result = dtype or x.dtype
    if result.is_complex:
        result = result.to_real()
    size = own.abs()
    if math.isinf(p):
        found = extreme(size, dims, torch.amax if p > 0 else torch.amin)
    elif p <= 0 and p != 0:
        raise UnfitModuleError  # where one element is 0 so is the result, by a pole
    elif p == 0:
        found = as_type((size != 0).sum(dims, keepdim=True), size.dtype)
    else:
        zero = size == 0
        powers = size * size if p == 2 else torch.where(zero, 0.0, torch.where(zero, 1.0, size) ** p)
        total = powers.sum(dims, keepdim=True)
        none = total == 0
        safe = torch.where(none, 1.0, total)
        found = torch.where(none, 0.0, torch.sqrt(safe) if p == 2 else safe ** (1.0 / p))
    return as_type(squeezed(found, dims, keepdim), result)


def norm(x: Tensor, p: float | None = 2, dim: Any = None, keepdim: bool = False) -> Tensor:
    return vector_norm(x, 2 if p is None else p, dim, keepdim)


def dist(x: Tensor, other: Tensor, p: float = 2) -> Tensor:
    return vector_norm(x - other, p)
