"""The cross-entropy of rows of logits, of which a device may hold some of the classes only.

    top    the largest logit of a row               over all parts
    total  sum(exp(x - top))                        over all parts
    loss   log(total) - (x[label] - top)            nothing where the label is the one to ignore
    dx     (exp(x - top) / total - [label]) dloss   of each part by itself

Two numbers a row go over the parts after the largest one. All is computed in float32, of some rows at a time: what is
kept are the logits as they are, and no copy of all of them is ever made but their gradient, in their own type. Source
of the two reductions: vocabulary parallelism of Megatron-LM (Shoeybi et al. 2019).
"""

# ruff: noqa: N803, N806  a tensor carries its dims in its name

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

SOME_BYTES = {"cpu": 2**22}
"""How much is computed in float32 at a time, at most, by the kind of device: what its caches hold; a row at least."""
OTHERS_BYTES = 2**26
"""On other kinds, where a call costs more than what it misses in a cache."""

OverParts = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Classes:
    """Which classes the columns are, where others hold the other ones."""

    numbers: Tensor
    """Of each column its class, ascending (W)."""
    count: int
    """Of all classes."""
    largest: OverParts
    """The largest of what all parts have."""
    summed: OverParts
    """The sum of what all parts have."""


def cross_entropy(logits_NV: Tensor, labels_N: Tensor, ignored: int, classes: Classes | None = None) -> Tensor:
    """The loss of each row in nats, in float32 (in float64 of such logits); 0 where the label is `ignored`.

    `logits_NV`: of a part, its columns. A label that is no class has a loss that is not a number, so that it stops a
    run: looking for one would wait for the device. No second derivative.
    """
    return cast(Tensor, _CrossEntropy.apply(logits_NV, labels_N, ignored, classes))


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits_NV: Tensor, labels_N: Tensor, ignored: int, classes: Classes | None) -> Tensor:
        logits_NV = logits_NV.detach()
        count = logits_NV.shape[1] if classes is None else classes.count
        at_N, own_N = columns(labels_N, logits_NV.shape[1], classes)
        top_N = logits_NV.amax(1).to(computed(logits_NV))
        top_N = top_N if classes is None else classes.largest(top_N)
        sums_2N = top_N.new_empty(2, len(top_N))
        for some in chunks(logits_NV):
            away_NV = torch.sub(logits_NV[some], top_N[some, None])  # in float32, without a copy of the logits in it
            label_N = away_NV.gather(1, at_N[some, None]).squeeze(1)
            sums_2N[1, some] = torch.where(own_N[some], label_N, 0.0)
            sums_2N[0, some] = away_NV.exp_().sum(1)
        sums_2N = sums_2N if classes is None else classes.summed(sums_2N)
        total_N, label_N = sums_2N.unbind()
        kept_N = labels_N != ignored
        losses_N = torch.where(kept_N, total_N.log() - label_N, 0.0)
        losses_N = torch.where(kept_N & ((labels_N < 0) | (labels_N >= count)), math.nan, losses_N)
        ctx.save_for_backward(logits_NV, top_N, total_N, at_N, own_N & kept_N, kept_N)
        return losses_N

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        logits_NV, top_N, total_N, at_N, own_N, kept_N = ctx.saved_tensors
        gradient_N = torch.where(kept_N, gradients[0], 0.0)
        scale_N, less_N = gradient_N / total_N, torch.where(own_N, gradient_N, 0.0)
        found_NV = torch.empty_like(logits_NV)
        for some in chunks(logits_NV):
            part_NV = torch.sub(logits_NV[some], top_N[some, None]).exp_().mul_(scale_N[some, None])
            at_N1 = at_N[some, None]
            part_NV.scatter_(1, at_N1, part_NV.gather(1, at_N1) - less_N[some, None])
            found_NV[some] = part_NV
        return found_NV, None, None, None


def columns(labels_N: Tensor, width: int, classes: Classes | None) -> tuple[Tensor, Tensor]:
    """The column of each label, and whether it is there; some column where it is not."""
    if classes is None:
        return labels_N.clamp(0, width - 1), (labels_N >= 0) & (labels_N < width)
    at_N = torch.searchsorted(classes.numbers, labels_N).clamp_(max=width - 1)
    return at_N, classes.numbers[at_N] == labels_N


def computed(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def chunk_bytes(kind: str) -> int:
    """How much is computed at a time on a kind of device ("cpu" and so on), at most."""
    return SOME_BYTES.get(kind, OTHERS_BYTES)


def chunks(logits_NV: Tensor) -> Iterator[slice]:
    rows, width = logits_NV.shape
    most = chunk_bytes(logits_NV.device.type)
    size = max(1, most // (computed(logits_NV).itemsize * max(1, width)))
    return (slice(first, first + size) for first in range(0, rows, size))
