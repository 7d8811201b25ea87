"""Maxima and minima, and where they are.

amax(x)      the mean of those that are the maximum, so that the gradient is shared as torch shares it
argmax(x)    the least place of those that are the maximum
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor


def extreme(x: Tensor, dims: list[int], pick: Callable[..., Tensor]) -> Tensor:
    """The maximum or minimum; its gradient is shared by those that are it."""
    found = pick(x.detach(), dims, keepdim=True)
    if not x.is_floating_point():
        return found
    there = (x == found) | x.isnan()
    return torch.where(there, x, 0.0).sum(dims, keepdim=True) / there.sum(dims, keepdim=True)


def amax(x: Tensor, dim: Sequence[int] = (), keepdim: bool = False) -> Tensor:
    dims = dims_of(x, dim)
    return squeezed(extreme(x, dims, torch.amax), dims, keepdim)


def amin(x: Tensor, dim: Sequence[int] = (), keepdim: bool = False) -> Tensor:
    dims = dims_of(x, dim)
    return squeezed(extreme(x, dims, torch.amin), dims, keepdim)


def counted(x: Tensor, dims: list[int]) -> Tensor:
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
    place = counted(own, dims)
    last = math.prod(x.shape[d] for d in dims)
    return torch.amin(torch.where(there, place, last), dims, keepdim=True), place


def _arg(x: Tensor, dim: int | None, keepdim: bool, pick: Callable[..., Tensor]) -> Tensor:
    dims = dims_of(x, dim)
    if not dims:
        raise UnfitModuleError
    return squeezed(_first(x, dims, pick)[0], dims, keepdim)


def argmax(x: Tensor, dim: int | None = None, keepdim: bool = False) -> Tensor:
    return _arg(x, dim, keepdim, torch.amax)


def argmin(x: Tensor, dim: int | None = None, keepdim: bool = False) -> Tensor:
    return _arg(x, dim, keepdim, torch.amin)


def _along(x: Tensor, dim: int, keepdim: bool, pick: Callable[..., Tensor]) -> tuple[Tensor, Tensor]:
    dims = dims_of(x, dim)
    if not dims:
        raise UnfitModuleError
    first, place = _first(x, dims, pick)
    value = torch.where(place == first, x, 0).sum(dims, keepdim=True, dtype=x.dtype)
    return squeezed(value, dims, keepdim), squeezed(first, dims, keepdim)


def max_dim(x: Tensor, dim: int, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    return _along(x, dim, keepdim, torch.amax)


def min_dim(x: Tensor, dim: int, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    return _along(x, dim, keepdim, torch.amin)


class UnfitModuleError(Exception):
    """A call that is not decomposed."""


def computed(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """A tensor in the type that is computed with: half ones as float32, integers as floats."""
    wanted = dtype or (x.dtype if x.is_floating_point() or x.is_complex() else torch.get_default_dtype())
    if wanted in (torch.float16, torch.bfloat16):
        wanted = torch.float32
    return x if x.dtype == wanted else x.to(wanted)


def as_type(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x if x.dtype == dtype else x.to(dtype)


def dims_of(x: Tensor, dim: int | Sequence[int] | None) -> list[int]:
    """Dims from 0 on; all where none is named."""
    if not x.numel():
        raise UnfitModuleError  # of nothing there is no maximum, and nothing to cut
    listed = [dim] if isinstance(dim, int) else [*(dim or range(x.ndim))]
    return sorted(d % x.ndim for d in listed) if x.ndim else []


def squeezed(x: Tensor, dims: list[int], keepdim: bool) -> Tensor:
    return x if keepdim or not dims else x.squeeze(tuple(dims))


def real(x: Tensor) -> Tensor:
    if x.is_complex():
        raise UnfitModuleError
    return x


def peak_of(x: Tensor, dims: list[int]) -> Tensor:
    """The maximum, without gradient."""
    return torch.amax(x.detach(), dims, keepdim=True)
