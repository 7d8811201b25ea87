"""Laws that inputs are drawn from; all are rounded to bfloat16, which is what a kernel is given.

gaussian N(0, 1): what most tests take, and the kindest outliers N(0, 1), of a thousandth of the elements N(0, 100)
more (FlashAttention-3's law) channels a sixteenth of the channels of queries, keys and values are far from zero, as
language models' are sink every query looks at the first key, whose value is small, so the probabilities of the others
are small normed queries and keys are divided by their root mean square and have gains (QK-norm)
"""

# ruff: noqa: N806  a tensor carries its dims in its name

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from bench._numerics.cases import Case, Mask, shared


@dataclass(frozen=True)
class Shape:
    """Sizes and mask of a case."""

    tokens: int = 256
    keys: int = 0
    """Of cross attention; 0: as many as queries."""
    heads: int = 4
    groups: int = 2
    width: int = 64
    value_width: int = 0
    batch: int = 1
    mask: Mask = Mask()  # noqa: RUF009  frozen
    sinks: bool = False

    def __str__(self) -> str:
        tokens = f"{self.tokens} x {self.keys}" if self.keys else f"{self.tokens}"
        return f"{tokens}, {self.mask}" + (", sinks" if self.sinks else "")


class _Draw:
    """Tensors by a shape, from one seed."""

    def __init__(self, shape: Shape, seed: int) -> None:
        self.dice = torch.Generator().manual_seed(seed)
        self.shape = shape
        self.q = (shape.batch, shape.heads, shape.tokens, shape.width)
        T, F = shape.keys or shape.tokens, shape.value_width or shape.width
        self.k = (shape.batch, shape.groups, T, shape.width)
        self.v = (shape.batch, shape.groups, T, F)
        self.grad = (shape.batch, shape.heads, shape.tokens, F)

    def normal(self, size: tuple[int, ...]) -> Tensor:
        return torch.randn(size, generator=self.dice, dtype=torch.float64)

    def rare(self, size: tuple[int, ...]) -> Tensor:
        some = torch.rand(size, generator=self.dice, dtype=torch.float64) < 1e-3
        return self.normal(size) + some * 10.0 * self.normal(size)

    def biased(self, size: tuple[int, ...], by: float) -> Tensor:
        """One channel in sixteen of each head is off by about `by`."""
        channels = size[-1]
        few = max(1, channels // 16)
        bias = torch.zeros(size[1], 1, channels, dtype=torch.float64)
        for head in range(size[1]):
            where = torch.randperm(channels, generator=self.dice)[:few]
            bias[head, 0, where] = by * (1 + 0.2 * self.normal((few,))) * self.normal((few,)).sign()
        return self.normal(size) + bias


QKV = tuple[Tensor, Tensor, Tensor]


def _gaussian(draw: _Draw) -> QKV:
    return draw.normal(draw.q), draw.normal(draw.k), draw.normal(draw.v)


def _outliers(draw: _Draw) -> QKV:
    return draw.rare(draw.q), draw.rare(draw.k), draw.rare(draw.v)


def _channels(draw: _Draw) -> QKV:
    return draw.biased(draw.q, 3.0), draw.biased(draw.k, 6.0), draw.biased(draw.v, 4.0)


def _sink(draw: _Draw) -> QKV:
    q, k, v = _gaussian(draw)
    towards = draw.normal((draw.shape.groups, draw.shape.width))
    towards = towards / towards.square().sum(-1, keepdim=True).sqrt()
    q = q + 3.0 * shared(towards[None, :, None], draw.shape.heads)
    k[:, :, 0] = towards * 3.0 * draw.shape.width**0.5
    v[:, :, 0] *= 0.05
    return q, k, v


def _normed(draw: _Draw) -> QKV:
    q, k, v = draw.biased(draw.q, 4.0), draw.biased(draw.k, 4.0), draw.normal(draw.v)
    gains = [1.0 + 0.2 * draw.normal((draw.shape.width,)) for _ in range(2)]
    q, k = (x / x.square().mean(-1, keepdim=True).sqrt() * gain for x, gain in zip((q, k), gains, strict=True))
    return q, k, v


LAWS: dict[str, Callable[[_Draw], QKV]] = {
    "gaussian": _gaussian,
    "outliers": _outliers,
    "channels": _channels,
    "sink": _sink,
    "normed": _normed,
}


def drawn(law: str, shape: Shape, seed: int = 0) -> Case:
    """A case by the name of its law."""
    draw = _Draw(shape, seed)
    q, k, v = LAWS[law](draw)
    sinks = draw.normal((shape.heads,)) if shape.sinks else None
    return case_of(q, k, v, draw.normal(draw.grad), shape.mask, sinks=sinks)


def case_of(
    q: Tensor, k: Tensor, v: Tensor, grad: Tensor, mask: Mask, scale: float | None = None, sinks: Tensor | None = None
) -> Case:
    """Tensors as a kernel gets them: of bfloat16."""
    q, k, v, grad = (x.bfloat16().double() for x in (q, k, v, grad))
    sinks = None if sinks is None else sinks.float().double()
    own = q.shape[-1] ** -0.5 if scale is None else scale
    return Case(q, k, v, grad, mask.visible(q.shape[2], k.shape[2]), own, sinks, mask)
