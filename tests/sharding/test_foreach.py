"""Operators over lists: what each element gets, the proof, and simulated ranks."""

import pytest
import torch

from tangram.cli import main
from tangram.errors import UserError
from tangram.layout import Layout, Mesh
from tangram.sharding.ops import foreach
from tangram.sharding.ops.calls import OpCall, name_of
from tangram.sharding.ops.rule_table import NoRuleError, bound, builtin, each
from tangram.sharding.proof import lists
from tangram.sharding.proof.prove import prove_operator
from tangram.sharding.proof.simulate import SimWorld, cut, together

aten = torch.ops.aten
X = [torch.arange(6.0).reshape(3, 2), torch.ones(5)]


@pytest.mark.parametrize(
    ("operator", "base"),
    [
        (aten._foreach_add.List, "add.Tensor"),
        (aten._foreach_add_.ScalarList, "add_.Scalar"),
        (aten._foreach_mul.Tensor, "mul.Tensor"),
        (aten._foreach_addcdiv.Tensor, "addcdiv"),
        (aten._foreach_maximum.Scalar, "clamp_min"),
        (aten._foreach_pow.ScalarAndTensor, "pow.Scalar"),
        (aten._foreach_norm.Scalar, "linalg_vector_norm"),
        (aten._foreach_sqrt_.default, "sqrt_"),
    ],
)
def test_the_operator_of_an_element_follows_from_the_schema(operator: torch._ops.OpOverload, base: str) -> None:
    found = foreach.base_of(operator)
    assert found is not None
    assert name_of(found.operator) == base


def test_every_operator_over_lists_is_that_of_its_elements() -> None:
    operators = lists.operators()
    assert len(operators) > 140
    for operator in operators:
        assert foreach.base_of(operator) is not None, name_of(operator)
        for call in lists.calls_of(operator):
            assert lists.check(call) is None, call


def test_an_element_that_is_another_operator_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(foreach, "NAMES", {"maximum": ("minimum",)})
    foreach.base_of.cache_clear()
    try:
        verdict = prove_operator(builtin(), "x", lists.calls_of(aten._foreach_maximum.List))
    finally:
        monkeypatch.undo()
        foreach.base_of.cache_clear()
    assert verdict.kind == "refuted"
    assert "element 0" in verdict.why


@pytest.mark.parametrize("name", ["_foreach_addcdiv_.ScalarList", "_foreach_norm.Scalar", "_foreach_mm"])
def test_its_rule_is_proved(name: str) -> None:
    verdict = prove_operator(builtin(), name, lists.recorded((name,))[name])
    assert verdict.kind == "proved"
    assert verdict.gradients


def test_calls_and_places_of_elements() -> None:
    call = OpCall.of(aten._foreach_addcmul.Tensor, (X, X, X, torch.tensor([2.0, 3.0])), {})
    found = foreach.calls(call)
    assert found is not None
    assert [one.arguments["value"] for one in found] == [2.0, 3.0]
    assert foreach.places(call) == ((0, 2, 4), (1, 3, 5))
    assert [len(one.cuttable) for _, one in each(builtin(), call)] == [2, 1]
    assert foreach.calls(OpCall.of(aten.mm.default, (X[0], X[0].T), {})) is None
    with pytest.raises(NoRuleError, match="a rule for each element"):
        bound(builtin(), call)
    with pytest.raises(UserError, match="different lengths"):
        foreach.calls(OpCall.of(aten._foreach_add.List, (X, X[:1]), {}))


def test_lists_on_simulated_ranks_lie_each_by_itself() -> None:
    world = SimWorld(Mesh.parse("x=2"), builtin())
    one = cut(X[0], Layout.parse("a/x b").bind((3, 2)), world)
    other = cut(X[1], Layout.parse("a/x").bind((5,)), world)
    plain = torch.full((2,), 7.0)
    torch._foreach_mul_([one, other, plain], 3.0)
    torch._foreach_add_([one, other], [one, other], alpha=2)
    assert torch.equal(together(one), X[0] * 9)
    assert torch.equal(together(other), X[1] * 9)
    assert plain.tolist() == [21.0, 21.0]
    norms = torch._foreach_norm([one, other], 1)
    assert torch.allclose(torch.stack([together(n) for n in norms]), torch.stack([x.sum() * 9 for x in X]))


def test_an_optimiser_over_lists_takes_the_step_that_it_takes_whole() -> None:
    world = SimWorld(Mesh.parse("x=3"), builtin())
    layouts = [Layout.parse("a/x b").bind((3, 2)), Layout.parse("a/x").bind((5,))]
    own = [cut(x, layout, world) for x, layout in zip(X, layouts, strict=True)]
    whole = [x.clone() for x in X]
    for some in (own, whole):
        moments = [torch.zeros_like(t) for t in some]
        squares = [torch.zeros_like(t) for t in some]
        torch._foreach_lerp_(moments, some, 0.1)
        torch._foreach_mul_(squares, 0.9)
        torch._foreach_addcmul_(squares, some, some, 0.1)
        roots = torch._foreach_sqrt(squares)
        torch._foreach_add_(roots, 1e-8)
        torch._foreach_addcdiv_(some, moments, roots, -0.5)
    for t, want in zip(own, whole, strict=True):
        assert torch.allclose(together(t), want)
    assert world.moved == 0


def test_the_command_shows_the_rule_of_an_element(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["shard", "rule", "_foreach_norm", "--json"]) == 0
    assert "each element: linalg_vector_norm" in capsys.readouterr().out
    assert main(["shard", "rule", "repeat", "--json"]) == 0
    shown = capsys.readouterr().out
    assert "Dims that are repeated are whole. repeat(self=float32[5, 4], repeats=[3, 1, 2]) : d0 _ -> _ d0 _" in shown
