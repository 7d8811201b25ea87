"""Criteria that are in use elsewhere, said again in a few lines, so that the same mutants can be put to them.

    transformer engine    the root of the mean square of the difference is less than 0.11 of the range of both (of fp8;
                          that elements are not close is logged and forgotten: tests/pytorch/utils.py)
    flash attention       the largest difference from float32's result is at most 2 times that of the same computation
                          in PyTorch at the same precision, and the noise of adding 0.3 (tests/cute/test_flash_attn.py)
    cudnn                 O within 0.08 + 0.2 of it, gradients 0.04 + 0.2 (test/python/sdpa/fp8.py)
    torchao               the ratio of signal to noise is more than 25 dB, with Hadamard 20
    sage                  cosine over 0.99, as SageAttention reports it for its kernels
    allclose              within 0.01 + 0.01 of it, of all elements

A criterion takes a result, the truth and the emulation (of which only `flash attention` makes use) and says whether
it accepts. They were read at the snapshots that `docs/attention-numerics.md` names.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from bench._numerics.cases import Results
from bench._numerics.metrics import norm

Criterion = Callable[[Results, Results, Results, bool], bool]
"""Results, truth, emulation, and whether the recipe turns by Hadamard."""


def _every(accepts: Callable[[Tensor, Tensor, Tensor], bool]) -> Criterion:
    """All four tensors."""
    return lambda found, true, emulation, turned: all(map(accepts, found, true, emulation))


def _transformer_engine(found: Tensor, true: Tensor, emulation: Tensor) -> bool:
    rmse = float((found - true).square().mean().sqrt())
    return rmse < 0.11 * float(torch.maximum(found.max(), true.max()) - torch.minimum(found.min(), true.min()))


def _flash_attention(found: Tensor, true: Tensor, emulation: Tensor) -> bool:
    true = true.float()
    noise = 2 * (true + 0.3 - 0.3 - true).abs().max()
    return bool((found.float() - true).abs().max() <= 2 * (emulation.float() - true).abs().max() + noise)


def _within(atol: float, rtol: float) -> Callable[[Tensor, Tensor, Tensor], bool]:
    return lambda found, true, emulation: torch.allclose(found, true, rtol=rtol, atol=atol)


def _cudnn(found: Results, true: Results, emulation: Results, turned: bool) -> bool:
    gradients = all(torch.allclose(a, b, rtol=0.2, atol=0.04) for a, b in zip(found[1:], true[1:], strict=True))
    return torch.allclose(found.o, true.o, rtol=0.2, atol=0.08) and gradients


def _torchao(found: Results, true: Results, emulation: Results, turned: bool) -> bool:
    return all(decibels(a, b) > (20 if turned else 25) for a, b in zip(found, true, strict=True))


def decibels(found: Tensor, true: Tensor) -> float:
    """The ratio of signal to noise; of what is not finite none."""
    noise = float(norm(found - true))
    if not noise < torch.inf:
        return -torch.inf
    return float(20 * torch.log10(norm(true) / max(noise, 1e-300)))


def _cosine(found: Tensor, true: Tensor, emulation: Tensor) -> bool:
    both = float(norm(found) * norm(true))
    return both > 0 and float((found * true).sum()) / both > 0.99


RIVALS: dict[str, Criterion] = {
    "transformer engine": _every(_transformer_engine),
    "flash attention": _every(_flash_attention),
    "cudnn": _cudnn,
    "torchao": _torchao,
    "sage": _every(_cosine),
    "allclose": _every(_within(1e-2, 1e-2)),
}
