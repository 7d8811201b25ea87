"""Models with a `torch.autograd.Function` of their own, in the ways in which people write one, on two ranks.

Each comes out as in one process or is refused when it is derived: an error in the backward, and a gradient that is
silently another one, are what the last test plants.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from tangram.models.capturing.capture import capture
from tangram.sharding.derive.marking.marks import Mark
from tangram.training.run.launch import run_ranks
from tests.sweep.ranks import Case, Result, run_all
from tests.training.oracle.warm import once


class Twice(Function):
    """A product with a weight, and something before it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return (x * 2) @ w.t()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        x, w = ctx.saved_tensors
        return 2 * (g @ w), g.flatten(0, -2).t() @ (2 * x).flatten(0, -2)


class AsTorchs(Twice):
    """Planted: taken for one of torch's own."""


AsTorchs.__module__ = "torch.own"


class Normed(Function):
    """What it gives says nothing of what its backward does."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g / g.norm()


class Clamped(Function):
    """Element by element, but not of the parts of a sum."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g.clamp(-1e-3, 1e-3)


class Gelu(Function):
    """As Bloom's, in the newer style, and differentiable once."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return F.gelu(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return g * (0.5 * (1 + torch.erf(x / 2**0.5)) + x * torch.exp(-x * x / 2) / (2 * torch.pi) ** 0.5)


class Inner(Function):
    """Autograd within the backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
        ctx.save_for_backward(x, y)
        return torch.softmax(x, -1) * y

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        with torch.enable_grad():
            x, y = (one.detach().requires_grad_() for one in ctx.saved_tensors)
            z = torch.softmax(x, -1) * y
        return torch.autograd.grad(z, (x, y), g)


class Kept(Function):
    """A tensor that only the backward works with."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
        ctx.save_for_backward(x, y)
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        x, y = ctx.saved_tensors
        return g * y, g * x


class Drawn(Function):
    """A mask that is kept."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(mask := F.dropout(torch.ones_like(x)))
        return x * mask

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g * ctx.saved_tensors[0]


class DrawnAgain(Function):
    """A mask that is drawn again by the state of the generator."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.state = torch.get_rng_state()
        ctx.save_for_backward(x)
        return F.dropout(x)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        torch.set_rng_state(ctx.state)
        return g * F.dropout(torch.ones_like(ctx.saved_tensors[0]))


class Again(Function):
    """Modules that run again in the backward, as those of reversible layers."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, block: nn.Module) -> Tensor:
        ctx.block = block
        ctx.save_for_backward(x.detach())
        return block(x)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        with torch.enable_grad():
            x = ctx.saved_tensors[0].detach().requires_grad_()
            torch.autograd.backward(ctx.block(x), g)
        return x.grad, None


class Reader(Function):
    """A backward that reads a parameter which its forward does not."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, module: nn.Linear) -> Tensor:
        ctx.module = module
        return x * 2

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        return g * 2 + ctx.module.weight.sum(0), None


def _first(net: Net, x: Tensor) -> Tensor:
    return F.linear(x * 2, net.up.weight)


WAYS: Mapping[str, Any] = {
    "product": lambda net, x: Twice.apply(x, net.up.weight),
    "product of torch's": lambda net, x: AsTorchs.apply(x, net.up.weight),
    "norm before": lambda net, x: net.up(Normed.apply(x)),
    "norm behind": lambda net, x: Normed.apply(net.up(x)),
    "norm of a weight": lambda net, x: F.linear(x, Normed.apply(net.up.weight), net.up.bias),
    "clamp before": lambda net, x: net.up(Clamped.apply(x)),
    "clamp behind": lambda net, x: Clamped.apply(net.up(x)),
    "clamp of a weight": lambda net, x: F.linear(x, Clamped.apply(net.up.weight), net.up.bias),
    "gelu": lambda net, x: Gelu.apply(net.up(x)),
    "inner": lambda net, x: Inner.apply(net.up(x), net.up(x).tanh()),
    "kept": lambda net, x: Kept.apply(net.up(x), x.repeat(1, 1, 2)),
    "drawn": lambda net, x: Drawn.apply(net.up(x)),
    "drawn again": lambda net, x: DrawnAgain.apply(net.up(x)),
    "again": lambda net, x: net.up(Again.apply(x, net.block)),
    "reader": lambda net, x: net.up(Reader.apply(x, net.up)),
    "reader of what is whole": lambda net, x: net.up(Reader.apply(x, net.pre)),
    "checkpoint": lambda net, x: checkpoint(net.ahead, x, use_reentrant=True),
    "checkpointed function": lambda net, x: checkpoint(partial(_first, net), x, use_reentrant=False),
    "reentrant function": lambda net, x: checkpoint(partial(_first, net), x, use_reentrant=True),
    "seeded anew": lambda net, x: net.up(x) + 0 * torch.seed(),
    "seeded alike": lambda net, x: net.up(F.dropout(x, 0.5 + 0 * len(str(torch.manual_seed(3))))),
}


class Net(nn.Module):
    """A small model."""

    def __init__(self, way: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.way = way
        self.pre, self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 16), nn.Linear(16, 8)
        self.block = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.GELU())
        self.ahead = nn.Sequential(self.up, nn.GELU())

    def forward(self, x: Tensor) -> Tensor:
        return self.down(WAYS[self.way](self, self.pre(x)))


def _inputs(_: nn.Module) -> Mapping[str, Any]:
    return {"x": torch.randn(4, 4, 8, generator=torch.Generator().manual_seed(1))}


def _marks(texts: Sequence[str], _: nn.Module, __: Mapping[str, Any]) -> list[Mark]:
    return [Mark.parse(text) for text in texts]


MARKS = {
    "cut": ("{up,ahead.0}.weight: o/tp i", "{up,ahead.0}.bias: o/tp", "down.weight: o i/tp"),
    "samples": ("pre: b/tp ...",),
    "gathered": ("{up,ahead.0}.weight: o/tp i -> o i",),
}
OWN = "is an autograd.Function with a backward of its own, which works on whole tensors"
AGAIN = "calls it again outside of any module's forward: checkpoint a module instead of a function"
SEEDS = "seeds torch's generator in its forward by another number on every rank"
REFUSED = {
    ("product", "cut"): OWN,
    ("norm of a weight", "cut"): OWN,
    ("reader", "cut"): OWN,
    ("norm before", "samples"): OWN,
    ("again", "samples"): OWN,
    ("drawn again", "cut"): "an autograd.Function, draws again outside of any module's forward",
    ("drawn again", "samples"): "an autograd.Function, draws again outside of any module's forward",
    ("reader", "gathered"): "the backward of Reader, an autograd.Function, takes up.weight, of which a rank has a part",
    ("checkpointed function", "cut"): AGAIN,
    ("checkpointed function", "samples"): AGAIN,
    ("reentrant function", "cut"): AGAIN,
    ("seeded anew", "cut"): SEEDS,
}
EQUAL = (
    *((way, "cut") for way in WAYS if (way, "cut") not in REFUSED and way != "product of torch's"),
    *((way, "samples") for way in ("norm behind", "clamp before", "gelu", "inner", "kept", "drawn", "checkpoint")),
    *((way, "gathered") for way in ("product", "norm of a weight", "clamp of a weight")),
)


def cases() -> list[Case]:
    """The task of the ranks."""
    ways = [*EQUAL, *REFUSED, ("product of torch's", "cut")]
    return [Case(f"{way}, {how}", partial(Net, way), _inputs, partial(_marks, MARKS[how])) for way, how in ways]


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Result]:
    return once(tmp_path_factory, "functions", lambda _: _run())


def _run() -> dict[str, Result]:
    (first, _) = run_ranks(run_all, cases, world=2, on_event=lambda _: None, device="cpu")
    return {one.name: one for one in first}


@pytest.mark.parametrize(("way", "how"), EQUAL)
def test_two_ranks_are_as_one_process(ran: dict[str, Result], way: str, how: str) -> None:
    name = f"{way}, {how}"
    assert ran[name] == Result(name, "equal")


@pytest.mark.parametrize(("way", "how"), REFUSED)
def test_the_others_are_refused_with_their_line(ran: dict[str, Result], way: str, how: str) -> None:
    found = ran[f"{way}, {how}"]
    assert found.what == "refused"
    assert REFUSED[way, how] in found.why
    assert "test_functions.py:" in found.why or way == "seeded anew"


def test_a_function_that_is_not_seen_would_give_other_gradients(ran: dict[str, Result]) -> None:
    assert ran["product of torch's, cut"].what == "wrong"


@pytest.mark.parametrize(("way", "each"), [("gelu", True), ("clamp before", True), ("norm before", False)])
def test_what_goes_element_by_element_is_seen(way: str, each: bool) -> None:
    net = Net(way)
    (custom,) = capture(net, _inputs(net)).customs
    assert custom.each == each
    assert not capture(net, _inputs(net), grad=False).customs
