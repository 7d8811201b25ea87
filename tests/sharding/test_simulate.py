"""Operators on simulated ranks, through torch's dispatcher as a model reaches it."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tangram.cli import main
from tangram.errors import UserError
from tangram.layout import Layout, Mesh
from tangram.sharding.proof.simulate import World, cut, together
from tangram.sharding.table import Table, builtin


def simulated(text: str, tensor: torch.Tensor, world: World) -> torch.Tensor:
    return cut(tensor, Layout.parse(text).bind(tuple(tensor.shape)), world)


class Block(nn.Module):
    """Attention and a feed-forward part, of torch's own functions."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.qkv = nn.Linear(8, 24)
        self.out = nn.Linear(8, 8)
        self.up = nn.Linear(8, 12)
        self.down = nn.Linear(12, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, s, h = x.shape
        q, k, v = (t.reshape(b, s, 2, 4).transpose(1, 2) for t in self.qkv(self.norm(x)).split(h, -1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, s, h))
        return x + self.down(F.gelu(self.up(self.norm(x))))


LAYOUTS = {
    "rows": ({}, "b/x _ _"),
    "uneven rows and columns": ({"up.weight": "f/y h", "up.bias": "f/y", "down.weight": "h f/y"}, "b/x _ _"),
    "everything over both": ({"qkv.weight": "o/x i/y", "out.weight": "o/y i/x", "norm.weight": "h/x"}, "_ s/y _"),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_block_has_the_same_loss_and_gradients_on_ranks(name: str) -> None:
    torch.manual_seed(0)
    block, x, target = Block().double(), torch.randn(3, 4, 8).double(), torch.randn(3, 4, 8).double()
    want = F.mse_loss(block(x), target)
    expected = torch.autograd.grad(want, list(block.parameters()))
    layouts, of_x = LAYOUTS[name]
    world = World(Mesh.parse("x=2 y=3"), builtin())
    leaves = {key: p.detach().clone().requires_grad_() for key, p in block.named_parameters()}
    given = {
        key: simulated(layouts.get(key, "... "), leaf, world) if key in layouts else leaf
        for key, leaf in leaves.items()
    }
    found = torch.func.functional_call(block, given, (simulated(of_x, x, world),))
    loss = together(F.mse_loss(found, target))  # pyright: ignore
    assert torch.allclose(loss, want)
    for got, wanted in zip(torch.autograd.grad(loss, list(leaves.values())), expected, strict=True):
        assert torch.allclose(got, wanted)
    assert (world.moved > 0) == (name != "rows"), "what is cut over the batch alone needs nothing of others"
    assert len(world.calls) > 20


def test_in_place_operators_write_the_callers_tensor() -> None:
    world = World(Mesh.parse("x=2"), builtin())
    x = torch.arange(6.0).reshape(3, 2)
    own = simulated("a/x b", x, world)
    own.mul_(2).add_(1)
    assert torch.equal(together(own), x * 2 + 1)
    own.unsqueeze_(0)
    assert own.shape == (1, 3, 2)
    assert torch.equal(together(own), (x * 2 + 1)[None])


def test_a_wrong_rule_is_seen_from_above() -> None:
    lines = builtin().lines
    wrong = Table({**lines, "cumsum": lines["pointwise"]})
    world = World(Mesh.parse("x=2"), wrong)
    x = torch.ones(4)
    assert not torch.equal(together(torch.cumsum(simulated("a/x", x, world), 0)), torch.cumsum(x, 0))


@pytest.mark.slow
def test_the_command_sweeps_entries(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("expecttest")
    assert main(["shard", "sweep", "softmax", "matmul"]) == 0
    shown = capsys.readouterr().out
    assert "right" in shown
    assert "wrong" not in shown
    assert main(["shard", "sweep", "no_such"]) == 2
    assert "no entry no_such" in capsys.readouterr().err


def test_what_computes_its_gradients_ahead_is_refused() -> None:
    """By chunks, the loss keeps gradients of those tensors that ask for them as it runs: simulated ones do not."""
    world = World(Mesh.parse("x=2"), builtin())
    x, weight = torch.randn(8, 3).double(), torch.randn(5, 3).double()
    options = pytest.importorskip("torch.nn.modules.linear_cross_entropy_options").LinearCrossEntropyOptions(
        batch_chunk_size=2
    )
    with pytest.raises(UserError, match="computes gradients in its forward"):
        F.linear_cross_entropy(simulated("b/x h", x, world), weight, torch.arange(8) % 5, options=options)
