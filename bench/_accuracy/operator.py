"""An operator as it is tried: how it is called, what is true, and on which inputs."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
import torch
from torch import Tensor

from bench._accuracy.bounds import Truth
from bench._accuracy.laws import drawn
from bench._accuracy.ulps import FORMATS
from tangram.kernels.lab.formats import Format

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
Shape = tuple[int, ...]
Inputs = Sequence[Tensor]
T = Tensor
Call = (
    Callable[[T], T] | Callable[[T, T], T] | Callable[[T, T, T], T] | Callable[[T, T, T, T], T]
    | Callable[[T, T, T, T, T], T]
)  # fmt: skip
Claim = (
    Callable[[T], Truth] | Callable[[T, T], Truth] | Callable[[T, T, T], Truth] | Callable[[T, T, T, T], Truth]
    | Callable[[T, T, T, T, T], Truth]
)  # fmt: skip
Cases = Callable[[torch.dtype], Sequence["Case"]]


@dataclass(frozen=True)
class Case:
    """A shape, whose meaning is the operator's, and a law."""

    shape: Shape
    law: str
    apart: bool = False
    """The elements do not lie side by side, so that no vector takes several at once."""

    def __str__(self) -> str:
        return f"{self.drawing}{' apart' if self.apart else ''}"

    @property
    def drawing(self) -> str:
        """What the values depend on."""
        return f"{'x'.join(map(str, self.shape))} {self.law}"


@dataclass(frozen=True)
class Draw:
    """What inputs are drawn with."""

    case: Case
    rng: np.random.Generator
    of: Format

    def values(self, *shape: int, law: str = "") -> Tensor:
        """In float64, on the grid of the type."""
        return drawn(law or self.case.law, shape, self.rng, self.of)

    def normal(self, *shape: int) -> Tensor:
        """By the plain law, whatever the case's."""
        return self.values(*shape, law="normal")


@dataclass(frozen=True)
class Operator:
    """One result of an operator of torch's."""

    name: str
    group: str
    aten: tuple[str, ...]
    """The overloads that it stands for, as "mm.default"."""
    draw: Callable[[Draw], Inputs]
    """What it is called with: float64 tensors become the type that is tried, others stay."""
    call: Call
    truth: Claim
    """Of the same inputs in float64."""
    cases: Cases
    dtypes: tuple[torch.dtype, ...] = DTYPES


def inputs(one: Operator, case: Case, dtype: torch.dtype) -> tuple[Inputs, Inputs]:
    """In float64 as they were rounded, and in the type itself; the same on every machine."""
    seed = zlib.crc32(f"{one.name} {case.drawing}".encode())
    found = one.draw(Draw(case, np.random.default_rng(seed), FORMATS[dtype]))
    given = [x.to(dtype) if x.dtype == torch.float64 else x for x in found]
    return found, [torch.stack([x, x], -1)[..., 0] for x in given] if case.apart else given


def exact_sum(x: Tensor, dim: int = -1) -> Tensor:
    """Sums of float64 numbers, each rounded once (Shewchuk's, as math.fsum has it)."""
    x = x.movedim(dim, -1)
    rows = x.reshape(-1, x.shape[-1]) if x.numel() else x.new_zeros(math.prod(x.shape[:-1]), 0)
    plain = cast("list[float]", rows.sum(-1).tolist())
    terms = cast("list[list[float]]", rows.tolist())
    numbers = [math.fsum(row) if math.isfinite(about) else about for row, about in zip(terms, plain, strict=True)]
    return torch.tensor(numbers, dtype=torch.float64).view(x.shape[:-1])
