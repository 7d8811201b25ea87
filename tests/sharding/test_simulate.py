"""Operators on simulated ranks, through torch's dispatcher as a model reaches it."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tangram.cli import main
from tangram.errors import UserError
from tangram.layout import Layout, Mesh
from tangram.sharding.ops.rule_table import RuleTable, builtin
from tangram.sharding.proof.simulate import SimWorld, cut, together


def simulated(text: str, tensor: torch.Tensor, world: SimWorld) -> torch.Tensor:
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
    world = SimWorld(Mesh.parse("x=2 y=3"), builtin())
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
    world = SimWorld(Mesh.parse("x=2"), builtin())
    x = torch.arange(6.0).reshape(3, 2)
    own = simulated("a/x b", x, world)
    own.mul_(2).add_(1)
    assert torch.equal(together(own), x * 2 + 1)
    own.unsqueeze_(0)
    assert own.shape == (1, 3, 2)
    assert torch.equal(together(own), (x * 2 + 1)[None])


def test_a_wrong_rule_is_seen_from_above() -> None:
    lines = builtin().lines
    wrong = RuleTable({**lines, "cumsum": lines["pointwise"]})
    world = SimWorld(Mesh.parse("x=2"), wrong)
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


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_what_computes_its_gradients_ahead_sees_that_they_are_wanted(reduction: str) -> None:
    """By chunks, the loss keeps gradients of those tensors that ask for them as it runs."""
    options = pytest.importorskip("torch.nn.modules.linear_cross_entropy_options").LinearCrossEntropyOptions(
        batch_chunk_size=2
    )
    leaves = [torch.randn(*shape).double().requires_grad_() for shape in ((8, 3), (5, 3), (5,))]
    target = torch.arange(8) % 5
    named: dict[str, Any] = {"reduction": reduction, "options": options, "ignore_index": 3}
    for layouts in (("b/x h", "v h", "v"), ("b h/x", "v h/x", "v"), ("b h", "v/x h", "v/x")):
        world = SimWorld(Mesh.parse("x=2"), builtin())
        own = [simulated(layout, leaf, world) for layout, leaf in zip(layouts, leaves, strict=True)]
        assert own[0].requires_grad
        weight = torch.arange(1.0, 6.0).double()
        found = together(F.linear_cross_entropy(*own[:2], target, linear_bias=own[2], weight=weight, **named))
        whole = F.linear_cross_entropy(*leaves[:2], target, linear_bias=leaves[2], weight=weight, **named)
        assert torch.allclose(found, whole)
        given = zip(*(torch.autograd.grad(loss.sum(), leaves) for loss in (found, whole)), strict=True)
        assert all(torch.allclose(one, other) for one, other in given)
    assert not simulated("b/x h", torch.ones(2, 3), world).requires_grad


def test_functions_that_look_past_the_dispatcher() -> None:
    world = SimWorld(Mesh.parse("x=2"), builtin())
    table = torch.randn(10, 4).double().requires_grad_()
    bags = torch.tensor([[1, 2], [4, 9], [0, 1]])
    found = together(F.embedding_bag(bags, simulated("v d/x", table, world), mode="max"))
    assert torch.equal(found, F.embedding_bag(bags, table, mode="max"))
    cotangent = torch.randn(3, 4).double()
    wanted = torch.autograd.grad(F.embedding_bag(bags, table, mode="max"), table, cotangent)
    assert torch.equal(torch.autograd.grad(found, table, cotangent)[0], wanted[0]), "torch takes another operator then"
    at, x = torch.tensor([2, 3, 7]), torch.arange(8.0)
    parts = torch.tensor_split(simulated("a/x", x, world), simulated("a/x", at, world))
    assert [together(part).tolist() for part in parts] == [part.tolist() for part in torch.tensor_split(x, at)]
    assert together(simulated("a/x", x, world).tensor_split(tensor_indices_or_sections=at)[1]).tolist() == [2]


def test_views_of_nothing() -> None:
    world = SimWorld(Mesh.parse("x=2"), builtin())
    own = simulated("a b/x", torch.ones(0, 8), world)
    assert own[:, None, :].squeeze(1).shape == (0, 8)
    assert F.adaptive_avg_pool1d(simulated("a b/x c", torch.ones(0, 8, 6), world), 3).shape == (0, 8, 3)


def test_sparse_tensors_are_refused() -> None:
    world = SimWorld(Mesh.parse("x=2"), builtin())
    with pytest.raises(UserError, match="sparse_coo tensor cannot be cut"):
        cut(torch.eye(4).to_sparse(), Layout.parse("a/x b").bind((4, 4)), world)
    with pytest.raises(UserError, match="sparse_coo tensor cannot be cut"):
        simulated("a/x b", torch.eye(4), world).to_sparse()


def test_lists_of_results_and_plain_ones() -> None:
    world = SimWorld(Mesh.parse("x=2"), builtin())
    x = torch.randn(6, 3).double()
    edges = torch.histogramdd(simulated("a/x b", x, world), [2, 2, 2]).bin_edges
    wanted = torch.histogramdd(x, [2, 2, 2]).bin_edges
    assert [together(one).tolist() for one in edges] == [one.tolist() for one in wanted]
    empty = torch.linalg.matrix_rank(simulated("a b/x c", torch.ones(0, 4, 4), world))
    assert empty.shape == (0,)
