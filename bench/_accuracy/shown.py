"""The smallest reproductions of what the sweep found: an expression, what torch gives for it here, and what is true."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

A: Any = torch.ops.aten
BF, INF = torch.bfloat16, math.inf
Number = float | int


@dataclass(frozen=True)
class Shown:
    """One of them."""

    text: str
    """As one types it: `aten` is `torch.ops.aten`, `bf16` is `torch.bfloat16`."""
    call: Callable[[], Tensor]
    true: Number | str
    """A number, or words where there is more than one."""


def _zeros(n: int) -> Tensor:
    return torch.zeros(n, dtype=torch.int64)


def _norm_bias() -> Tensor:
    norm = torch.nn.LayerNorm(64, dtype=BF)
    norm(torch.arange(4096 * 64).view(4096, 64).to(BF)).sum().backward()
    assert norm.bias.grad is not None
    return norm.bias.grad[0]


def _silu(x: float) -> float:
    return x * math.exp(x) / (1 + math.exp(x))


ALL: Sequence[Shown] = (
    Shown("aten.embedding_dense_backward(torch.ones(4096, 1, dtype=bf16), zeros, 1, -1, False)",
          lambda: A.embedding_dense_backward(torch.ones(4096, 1, dtype=BF), _zeros(4096), 1, -1, False), 4096),
    Shown("torch.zeros(1, dtype=bf16).index_put([zeros], torch.ones(4096, dtype=bf16), True)",
          lambda: torch.zeros(1, dtype=BF).index_put([_zeros(4096)], torch.ones(4096, dtype=BF), True), 4096),
    Shown("torch.zeros(1, dtype=bf16).index_add(0, zeros, torch.ones(4096, dtype=bf16))",
          lambda: torch.zeros(1, dtype=BF).index_add(0, _zeros(4096), torch.ones(4096, dtype=BF)), 4096),
    Shown("nn.LayerNorm(64, dtype=bf16): the bias's gradient of a sum over 4096 rows", _norm_bias, 4096),
    Shown("F.gelu(torch.full((16,), inf))[0]", lambda: F.gelu(torch.full((16,), INF))[0], INF),
    Shown("F.gelu(torch.full((1,), inf))[0]", lambda: F.gelu(torch.full((1,), INF))[0], INF),
    Shown("F.gelu(torch.full((16,), 2e38))[0]", lambda: F.gelu(torch.full((16,), 2e38))[0], 2e38),
    Shown("aten.gelu_backward(torch.ones(1), torch.tensor([2.0**64]), approximate='tanh')",
          lambda: A.gelu_backward(torch.ones(1), torch.tensor([2.0**64]), approximate="tanh"), 1),
    Shown("torch.mm(torch.full((32, 32), 2.0**-130, dtype=bf16), torch.full((32, 32), 2.0**20, dtype=bf16))[0, 0]",
          lambda: torch.mm(torch.full((32, 32), 2.0**-130, dtype=BF), torch.full((32, 32), 2.0**20, dtype=BF))[0, 0],
          2.0**-105),
    Shown("torch.tensor([-0.0]).pow(-0.5)", lambda: torch.tensor([-0.0]).pow(-0.5), INF),
    Shown("torch.tensor([-inf]).pow(-0.5)", lambda: torch.tensor([-INF]).pow(-0.5), 0),
    Shown("torch.rsqrt(torch.full((33,), 0.10302734375, dtype=bf16)).unique()",
          lambda: cast(Any, torch.rsqrt(torch.full((33,), 0.10302734375, dtype=BF))).unique(), "3.109375 and no other"),
    Shown("F.silu(torch.tensor([-89.0]))", lambda: F.silu(torch.tensor([-89.0])), _silu(-89.0)),
    Shown("torch.sqrt(torch.tensor([19.0]))", lambda: torch.sqrt(torch.tensor([19.0])), math.sqrt(19)),
    Shown("torch.tensor(1 + 2**-8 + 2**-40, dtype=torch.float64).to(bf16)",
          lambda: torch.tensor(1 + 2**-8 + 2**-40, dtype=torch.float64).to(BF), 1 + 2**-7),
)  # fmt: skip


def table() -> list[tuple[str, str, str]]:
    """Expression, what torch gives with one thread, what is true."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return [(one.text, _words(one.call()), _number(one.true)) for one in ALL]
    finally:
        torch.set_num_threads(threads)


def _words(found: Tensor) -> str:
    return ", ".join(_number(x) for x in cast("list[float]", found.double().flatten().tolist()))


def _number(x: Number | str) -> str:
    return x if isinstance(x, str) else f"{x:.9g}"
