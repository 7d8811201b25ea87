"""Parts that are run otherwise than by the operator alone: triangles, indices into cut dims, by any map of the cut."""

import pytest
import torch
from torch import Tensor

from tangram.layout import Layout, Mesh
from tangram.layout.syntax import Cut
from tangram.sharding.local_ops.local_call import run
from tangram.sharding.ops.calls import OpCall
from tangram.sharding.ops.rank_part import part_of
from tangram.sharding.ops.rule_table import bound, builtin
from tangram.sharding.proof.execute import check, run_reference, ways
from tangram.sharding.proof.mutate import mutations, planted
from tangram.sharding.proof.prove import prove_operator
from tangram.sharding.proof.simulate import SimWorld, cut, together

aten = torch.ops.aten


def some(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(sum(shape)))


AT = torch.tensor([[4, 0, 4], [1, 6, 1]])
CALLS = {
    "below a diagonal": (aten.tril.default, (some(7, 5), 1)),
    "above a diagonal, in place": (aten.triu_.default, (some(2, 7, 5), -2)),
    "one place": (aten.select.int, (some(7, 5), 0, -2)),
    "looked up": (aten.index.Tensor, (some(7, 5), [AT - 7])),
    "looked up by pairs": (aten.index.Tensor, (some(7, 5, 7), [AT, None, AT.flip(1)])),
    "looked up by a number": (aten.index.Tensor, (some(7, 5), [None, torch.tensor(3)])),
    "put": (aten.index_put.default, (some(7, 5), [torch.tensor([6, 0, -3])], some(3, 5))),
    "put in place and added": (aten.index_put_.default, (some(7, 5), [AT], some(5), True)),
    "scattered": (aten.scatter.src, (some(7, 3), 0, AT, some(2, 3))),
    "scattered and multiplied": (aten.scatter_reduce.two, (some(7, 3), 0, AT, some(2, 3), "prod")),
    "scattered and added": (aten.scatter_add.default, (some(7, 3), 0, AT, some(2, 3))),
    "rows added": (aten.index_add.default, (some(7, 3), 0, AT[0], some(3, 3))),
    "rows copied": (aten.index_copy_.default, (some(7, 3), 0, torch.tensor([5, 0]), some(2, 3))),
    "pieces alike": (aten.split.Tensor, (some(3, 14), 7, -1)),
    "rows filled": (aten.index_fill.int_Scalar, (some(7, 3), 0, AT[1], 2.5)),
}
DIMS = {"above a diagonal, in place": 2, "looked up by pairs": 3}


def test_a_part_without_the_place_that_is_taken_has_a_gradient_of_nothing() -> None:
    """Where it had none, a rank would not take part in what moves on the way back."""
    call = OpCall.of(aten.select.int, (some(6, 5), 0, 1), {})
    own = bound(builtin(), call)
    (factor,) = (f for f in own.cuttable if own.sizes[f] == 6)
    part = part_of(own, {factor: (Cut("x"),)}, Mesh.parse("x=2"), 1)
    x = some(3, 5).requires_grad_()
    (found,) = run(call, own, part, [x])
    found.sum().backward()
    assert not found.any()
    assert x.grad is not None
    assert not x.grad.any()


@pytest.mark.parametrize("name", CALLS)
def test_parts_together_are_the_whole(name: str) -> None:
    operator, args = CALLS[name]
    call = OpCall.of(operator, args, {})
    own, expected = bound(builtin(), call), run_reference(call)
    assert len([f for f in own.cuttable if own.sizes[f] > 4]) >= DIMS.get(name, 1), own.cuttable
    tried = [*ways(own, (2, 3, 5))]
    for factor in own.cuttable:
        tried += [
            ({factor: (Cut("x", "cyclic", (1,)),)}, Mesh.parse("x=3")),
            ({factor: (Cut("x", "zigzag"),)}, Mesh.parse("x=2")),
        ]
    for cuts, mesh in tried:
        assert check(call, own, cuts, mesh, expected) is None


def test_masks_leave_what_they_index_whole() -> None:
    call = OpCall.of(aten.index.Tensor, (some(7, 5), [some(7) > 0]), {})
    assert bound(builtin(), call).cuttable == ["d1"]


@pytest.mark.parametrize(
    ("name", "note"), [("below a diagonal", "triangle"), ("rows added", "spill"), ("one place", "taken")]
)
def test_a_rule_needs_its_note(name: str, note: str) -> None:
    call = OpCall.of(*CALLS[name], {})
    line = builtin().find(call)
    assert line is not None
    rules = [rule for what, rule in mutations(line.rule) if f"without {note}" in what]
    assert len(rules) == 1
    assert prove_operator(planted(builtin(), line, rules[0]), "x", [call]).kind == "refuted"


def test_a_cache_whose_places_are_cut_is_written_where_they_are() -> None:
    world = SimWorld(Mesh.parse("x=3"), builtin())
    cache, keys = torch.zeros(2, 7, 4), some(2, 2, 4).float()
    own = cut(cache, Layout.parse("b s/x h").bind((2, 7, 4)), world)
    own.index_copy_(1, torch.tensor([2, 5]), keys)
    last = own[:, 5]
    assert torch.equal(together(own), cache.index_copy(1, torch.tensor([2, 5]), keys))
    assert torch.equal(together(last), keys[:, 1])  # pyright: ignore
    assert world.moved == 0


def test_a_number_among_elements_is_what_any_part_says() -> None:
    for invert in (False, True):
        call = OpCall.of(aten.isin.Scalar_Tensor, (2, torch.tensor([0, 2, 5, 1, 7])), {"invert": invert})
        assert prove_operator(builtin(), "isin", [call]).kind == "proved"
