"""What the tests of fused operators share: drawn tensors, the other back end, distances in the last place."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor


@contextmanager
def plain() -> Iterator[None]:
    """Without kernels, for a while."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("TRITON_INTERPRET")
        yield


def drawn(*shape: int, seed: int = 0, kind: torch.dtype = torch.float32, scale: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed + 100 * len(shape))
    return (torch.randn(shape, generator=generator) * scale).to(kind)


def leaves(*tensors: Tensor) -> list[Tensor]:
    return [x.detach().clone().requires_grad_() for x in tensors]


def exact(function: Callable[..., Tensor], grad: Tensor, *tensors: Tensor) -> list[Tensor]:
    """A function's result in float64 and its gradients."""
    inputs = leaves(*(x.double() for x in tensors))
    out = function(*inputs)
    return [out.detach(), *torch.autograd.grad(out, inputs, grad.double())]


def close(found: Tensor, true: Tensor, size: float | None = None) -> None:
    """Within half of the last place of each element, rounded to its dtype, or the error of a sum in float32.

    `size`: of what was summed, where it cancels; else the largest element.
    """
    kind = found.dtype
    assert found.shape == true.shape
    if not found.numel():
        return
    limit = 0.51 * torch.finfo(kind).eps * true.abs() + 2e-6 * (float(true.abs().max()) if size is None else size)
    worst = ((found.double() - true).abs() - limit).max()
    assert worst <= 0, f"{kind}: {float(worst)} beyond"
