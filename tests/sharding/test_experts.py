"""Mixtures of experts: groups of rows, and a block of transformers on simulated ranks with its experts cut."""

from functools import lru_cache
from typing import Any

import pytest
import torch
from torch import Tensor

from tangram.layout import Layout, Mesh
from tangram.layout.syntax import Cut
from tangram.sharding.ops.calls import OpCall
from tangram.sharding.ops.rule_table import bound, builtin
from tangram.sharding.proof.execute import check, run_reference, ways
from tangram.sharding.proof.simulate import SimWorld, cut, together

aten = torch.ops.aten


def some(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def ends(*at: int) -> Tensor:
    return torch.tensor(at, dtype=torch.int32)


FORMS = {
    "rows of experts": ((some(7, 8), some(3, 8, 12), ends(2, 2, 7)), "t k e n"),
    "transposed weights": ((some(7, 8), some(5, 4, 8).mT, ends(0, 1, 4, 4, 7)), "t k e n"),
    "rows of nobody's first": ((some(8, 4), some(4, 4, 4), ends(0, 0, 8, 8)), "t k e n"),
    "columns of experts": ((some(3, 4, 8), some(8, 8), ends(2, 2, 8)), "e m k t"),
    "contracted rows": ((some(4, 8), some(8, 12), ends(3, 5, 8)), "m t n"),
    "all rows": ((some(3, 5, 8), some(3, 8, 4)), "e m k n"),
}


@pytest.mark.parametrize("name", FORMS)
def test_groups_are_counted_from_a_parts_own(name: str) -> None:
    args, factors = FORMS[name]
    call = OpCall.of(aten._grouped_mm.default, args, {})
    own = bound(builtin(), call)
    assert own.cuttable == factors.split()
    expected = run_reference(call)
    assert expected.differentiated == {0, 1}
    tried = [*ways(own, (2, 3, 5))]
    for factor in ("t", "e"):  # rows and experts that do not stand together
        if factor in own.cuttable:
            tried += [({factor: (Cut("x", "cyclic", (1,)),)}, Mesh.parse("x=2"))]
            tried += [({factor: (Cut("x", "zigzag"),)}, Mesh.parse("x=2"))]
    for cuts, mesh in tried:
        assert check(call, own, cuts, mesh, expected) is None


def test_groups_with_a_bias_are_whole() -> None:
    call = OpCall.of(aten._grouped_mm.default, (some(7, 8), some(3, 8, 12), ends(2, 2, 7), some(3, 12)), {})
    assert not bound(builtin(), call).cuttable


@lru_cache
def block(implementation: str) -> Any:
    transformers = pytest.importorskip("transformers")
    from transformers.models.qwen3_moe import modeling_qwen3_moe as modeling

    config = transformers.Qwen3MoeConfig(
        hidden_size=16, moe_intermediate_size=8, num_experts=5, num_experts_per_tok=2, norm_topk_prob=True
    )
    config._experts_implementation = implementation
    torch.manual_seed(0)
    made: Any = modeling.Qwen3MoeSparseMoeBlock(config)
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return made


EXPERTS = {"experts.gate_up_proj": "e/x _ _", "experts.down_proj": "e/x _ _"}
REDUCED = {"all-reduce"}
CASES = {
    "two ranks": ("x=2", EXPERTS, "b s h", REDUCED),
    "three ranks": ("x=3", EXPERTS, "b s h", REDUCED),
    "tokens cut as well": ("x=2 y=3", EXPERTS, "b/y s h", REDUCED),
    "within experts": (
        "x=3",
        {"experts.gate_up_proj": "e (2 f/x) _", "experts.down_proj": "e _ f/x"},
        "b s h",
        REDUCED,
    ),
    "experts by turns": ("x=2", dict.fromkeys(EXPERTS, "e/x:cyclic[1] _ _"), "b s h", REDUCED),
}


@pytest.mark.parametrize("implementation", ["eager", "grouped_mm", "batched_mm"])
@pytest.mark.parametrize("name", CASES)
def test_a_block_of_experts_is_the_plain_one_and_its_weights_stay(name: str, implementation: str) -> None:
    mesh, layouts, of_x, kinds = CASES[name]
    own = block(implementation)
    generator = torch.Generator().manual_seed(1)
    x, cotangent = torch.randn(3, 4, 16, generator=generator), torch.randn(3, 4, 16, generator=generator)
    leaves = {key: p.detach().clone().requires_grad_() for key, p in own.named_parameters()}
    plain = x.clone().requires_grad_()
    want = torch.func.functional_call(own, leaves, (plain,))
    expected = torch.autograd.grad(want, [plain, *leaves.values()], cotangent)
    assert all(float(g.abs().max()) > 0 for g in expected)
    moved: list[tuple[str, str, float]] = []

    def told(given: Any, found: Any, made: Any) -> None:
        if found is not None:
            moved.extend((found.call.name, kind, n) for (kind, axis), n in found.moved.items() if axis == "x")

    world = SimWorld(Mesh.parse(mesh), builtin(), on_operator=told)
    given = {k: cut(p, Layout.parse(layouts[k]).bind(tuple(p.shape)), world) for k, p in leaves.items() if k in layouts}
    simulated = cut(plain, Layout.parse(of_x).bind((3, 4, 16)), world)
    made = torch.func.functional_call(own, {**leaves, **given}, (simulated,))
    found = together(made)
    assert torch.allclose(found, want, 1e-4, 1e-5)
    gradients = torch.autograd.grad(found, [plain, *leaves.values()], cotangent)
    for got, wanted in zip(gradients, expected, strict=True):
        assert torch.allclose(got, wanted, 1e-4, 1e-5)
    left = {"all-reduce"} if ("sum", "x") in made.own_layout.pending else set[str]()  # a sum that waits to the end
    assert {kind for _, kind, _ in moved} | left == kinds, moved
    weights = sum(leaves[k].nbytes for k in layouts)
    rows = 3 * 4 * 2  # each token goes to two experts
    assert sum(n for _, _, n in moved) <= 2 * rows * (2 * 8 + 16) * 4, moved
    assert world.moved < weights * world.mesh.size * 4
