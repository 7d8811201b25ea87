"""What decompositions share: the type that is computed with, dims counted from 0."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


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
