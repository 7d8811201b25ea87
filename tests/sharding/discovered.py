"""What the tests of discovery run in one helper process: operators with a few calls each, and no table."""

import os
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from tangram.sharding.discover import calls_from, drawn_calls, operator_of, propose
from tangram.sharding.ops.calls import OpCall

aten = torch.ops.aten


@torch.library.custom_op("tangram_tests::lookup", mutates_args=())
def lookup(table: Tensor, words: Tensor) -> Tensor:
    return table[words]


@torch.library.custom_op("tangram_tests::scaled", mutates_args=())
def scaled(x: Tensor, w: Tensor, scale: float) -> Tensor:
    return (x @ w) * scale


@torch.library.custom_op("tangram_tests::noise", mutates_args=())
def noise(x: Tensor) -> Tensor:
    return x + torch.rand_like(x)


@torch.library.custom_op("tangram_tests::positive", mutates_args=())
def positive(x: Tensor) -> Tensor:
    return x[x > 0]


@torch.library.custom_op("tangram_tests::whole", mutates_args=())
def whole(x: Tensor) -> Tensor:
    return x.flip(0).roll(1) + x.flatten()[0]


@torch.library.custom_op("tangram_tests::aborts", mutates_args=())
def aborts(x: Tensor) -> Tensor:
    if len(x) < 3:
        os.abort()
    return x * 2


def some(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(sum(shape)))


def each(operator: Any, *given: tuple[Any, ...]) -> list[OpCall]:
    return [OpCall.of(operator, args, {}) for args in given]


ATEN: dict[str, Callable[[], list[OpCall]]] = {
    "mm": lambda: each(aten.mm.default, (some(4, 6), some(6, 5)), (some(7, 3), some(3, 5))),
    "bmm": lambda: each(aten.bmm.default, (some(3, 4, 6), some(3, 6, 5)), (some(5, 7, 3), some(5, 3, 6))),
    "_softmax": lambda: each(aten._softmax.default, (some(4, 6, 5), 1, False), (some(5, 7), -1, False)),
    "sum.dim_IntList": lambda: each(
        aten.sum.dim_IntList, (some(4, 6, 5), [-1, 0]), (some(5, 7), [1], True), (some(3, 5, 4), [1])
    ),
    "native_layer_norm": lambda: each(
        aten.native_layer_norm.default,
        (some(5, 4, 6), [6], some(6), some(6), 1e-5),
        (some(3, 5, 6), [5, 6], some(5, 6), None, 1e-5),
    ),
    "cumsum": lambda: each(aten.cumsum.default, (some(4, 6, 5), 1), (some(5, 7), -1)),
    "topk": lambda: each(aten.topk.default, (some(4, 6, 5), 2, 1), (some(5, 7), 3, -1)),
    "embedding": lambda: each(
        aten.embedding.default,
        (some(7, 5), torch.tensor([[6, 0, 3], [3, 2, 5]])),
        (some(6, 3), torch.tensor([5, 1, 0, 4]), 4),
    ),
    "addmm": lambda: each(aten.addmm.default, (some(5), some(4, 6), some(6, 5)), (some(7, 5), some(7, 3), some(3, 5))),
    "mse_loss": lambda: [
        call
        for reduction in (0, 1, 2)
        for call in each(
            aten.mse_loss.default, (some(5), -some(5), reduction), (some(4, 6), some(4, 6).exp(), reduction)
        )
    ],
    "gather": lambda: each(
        aten.gather.default,
        (some(5, 6, 3), 1, torch.randint(3, (5, 7, 3), generator=torch.Generator().manual_seed(0))),
        (some(6, 5), 0, torch.randint(5, (4, 1), generator=torch.Generator().manual_seed(0))),
    ),
}


def given() -> list[Any]:
    """Samples, as an author gives them."""
    return [(some(4, 6), some(6, 5), 0.5), ((some(7, 3), some(3, 5)), {"scale": -2.0})]


def job() -> Any:
    """Every proposal, by the operator."""
    torch.set_num_threads(1)
    found = {name: asdict(propose(calls())) for name, calls in ATEN.items()}
    found["lookup"] = asdict(propose(drawn_calls(operator_of("tangram_tests::lookup"))[:6]))
    for name in ("noise", "positive", "whole"):
        found[name] = asdict(propose(each(operator_of(f"tangram_tests::{name}"), (some(4, 7),), (some(9),))))
    found["given"] = asdict(propose(calls_from(operator_of("tangram_tests::scaled"), given)))
    found["aborts"] = asdict(propose(each(torch.ops.tangram_tests.aborts.default, (some(4, 7),), (some(9),))))
    return found
