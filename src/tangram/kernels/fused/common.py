"""What the fused operators share: who computes, how rows lie, what is refused."""

from __future__ import annotations

import torch
from torch import Tensor

from tangram.errors import UserError
from tangram.kernels.host import has_kernels, padded

TYPES = (torch.float32, torch.bfloat16, torch.float64)
"""Of tensors that are computed with; float64 by torch's own operators, everywhere."""
WIDEST = 2**16
"""Elements of a row that a tile holds."""


def by_kernels(x: Tensor) -> bool:
    """Whether kernels compute with it: not with float64, nor with nothing."""
    return x.dtype != torch.float64 and x.numel() > 0 and has_kernels(x.device)


def computed(x: Tensor) -> Tensor:
    """As torch's operators compute with it here: in float32, or float64."""
    return x if x.dtype == torch.float64 else x.float()


def registers(x: Tensor) -> torch.dtype:
    """The dtype of sums."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def in_rows(x: Tensor) -> Tensor:
    """(rows, width) with the elements of a row side by side; a copy only where they are not."""
    found = x.reshape(-1, x.shape[-1])
    return found if found.stride(1) == 1 else found.contiguous()


def refuse_types(name: str, *tensors: Tensor | None) -> None:
    """A sentence for what no back end computes with."""
    for x in tensors:
        if x is not None and x.dtype not in TYPES:
            raise UserError(f"{name} computes with float32, bfloat16 or float64, not with {_name(x.dtype)}: cast it")


def refuse_unlike(name: str, first: str, x: Tensor, second: str, other: Tensor) -> None:
    """A sentence for tensors that have to be of one shape and dtype, and are not."""
    if x.shape != other.shape or x.dtype != other.dtype:
        shapes = " and ".join(f"{tuple(one.shape)} in {_name(one.dtype)}" for one in (x, other))
        raise UserError(f"{name} wants {first} and {second} of one shape and dtype, they are {shapes}")


def wide(name: str, width: int) -> int:
    """The power of two that a tile of such rows has."""
    if width > WIDEST:
        raise UserError(f"{name} holds rows of {WIDEST} elements in its kernels, not of {width}")
    return padded(width)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
