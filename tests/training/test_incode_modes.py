"""Eager marks with what models have by default: dropout, biases, and code that calls on torch's other machinery."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

from tangram.errors import UserError
from tangram.sharding.eager import mark
from tangram.sharding.local_ops.random_ops import DrawMode
from tangram.training.mesh.eager_marks import eager
from tangram.training.run.launch import Rank, run_ranks

Act = Callable[["Net", Tensor], Tensor]


class Net(nn.Module):
    """A product that is cut, with a bias, between two dropouts: one of what is cut, one of what is whole."""

    def __init__(self, act: Act = lambda _, x: x) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down, self.act = nn.Linear(8, 16), nn.Linear(16, 8), act
        mark(self.up.weight, "o/tp i")
        mark(self.down.weight, "o i/tp")

    def forward(self, x: Tensor) -> Tensor:
        scale = F.dropout(torch.ones(8), 0.3, self.training)  # of a tensor without a layout
        h = F.rms_norm(F.dropout(self.act(self, self.up(x)).relu(), 0.5, self.training), (16,))
        return F.dropout(self.down(h), 0.25, self.training) * scale


def _ran(net: nn.Module) -> list[list[float]]:
    """Two calls in training, one in evaluation, and the gradients of all."""
    torch.manual_seed(7)
    x = torch.arange(32.0).view(4, 8) / 32
    outputs = [net(x), net(x), net.eval()(x)]
    sum(y.square().sum() for y in outputs).backward()  # pyright: ignore
    grads = [getattr(p.grad, "full_tensor", lambda p=p: p.grad)() for p in net.parameters()]
    with torch.inference_mode():  # whose operators are not taken apart
        outputs.append(net(x))
    return [t.detach().flatten().tolist() for t in (*outputs, *grads)]


REFUSED: dict[str, tuple[Act, str]] = {
    "checkpoint": (lambda s, x: checkpoint(torch.sin, x, use_reentrant=False), "torch.utils.checkpoint computes"),
    "reentrant": (lambda s, x: checkpoint(torch.sin, x, use_reentrant=True), "torch.utils.checkpoint computes"),
    "vmap": (lambda s, x: torch.func.vmap(torch.sin)(x), "made this of a part"),
    "grad": (lambda s, x: torch.func.grad(lambda y: s.down(y).sum())(torch.ones(16)), "transforms of torch.func"),
    "cond": (lambda s, x: torch.cond(torch.tensor(True), torch.sin, torch.cos, (x,)), "operators that take functions"),
}


def run(rank: Rank, _: None) -> dict[str, list[list[float]] | str]:
    """On ranks."""
    devices = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    torch.manual_seed(rank.index)
    found: dict[str, list[list[float]] | str] = {}
    for name, act in {"plain": Net().act, "compiled": torch.compile(lambda _, x: x * 1, backend="eager")}.items():
        net = Net(act)
        with (held := eager(net, devices)):
            found[name] = _ran(net)
        found[f"{name} bias"] = str(held.session.parameters[net.up.bias].states)
    for name, (act, _says) in REFUSED.items():
        net = Net(act)
        try:
            with eager(net, devices):
                net(torch.ones(4, 8))
        except UserError as error:
            found[name] = str(error)
    return found


def test_eager_beside_one_process() -> None:
    net = Net()  # whose values are not drawn so
    with DrawMode():
        want = _ran(net)
    assert want[0] != want[1]
    for own in run_ranks(run, None, world=2, on_event=lambda _: None, device="cpu"):
        for name in ("plain", "compiled"):
            for ours, theirs in zip(own[name], want, strict=True):
                assert ours == pytest.approx(theirs, rel=1e-5, abs=1e-6)
            assert "cut" in own[f"{name} bias"]
        for name, (_, says) in REFUSED.items():
            assert says in own[name], own[name]
            assert "test_incode_modes.py:" in own[name]
