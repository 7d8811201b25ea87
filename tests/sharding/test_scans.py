"""Scans over a cut dim: joined by what comes before, at the price of one slice a rank."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tangram.errors import UserError
from tangram.layout import Layout, Mesh
from tangram.layout.rule import Rule
from tangram.layout.syntax import Cut
from tangram.sharding import find
from tangram.sharding.calls import Call
from tangram.sharding.conflicts import factor_table
from tangram.sharding.local import run_all
from tangram.sharding.parts import part_of, piece
from tangram.sharding.proof.execute import check as check_cut
from tangram.sharding.proof.execute import ways, whole
from tangram.sharding.proof.propagated import check
from tangram.sharding.propagate import options, propagate
from tangram.sharding.table import Table, builtin, parse_lines

aten = torch.ops.aten
SCANS = ("cumsum", "cumprod", "logcumsumexp", "cummax", "cummin")


def some(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(sum(shape)))


def scan(name: str, x: Tensor, dim: int) -> Call:
    return Call.of(getattr(aten, name).default, (x, dim), {})


def tried(rules: Table, call: Call) -> list[str]:
    """What is wrong with each way of cutting a call."""
    bound, expected = find.bound(rules, call), whole(call)
    found = (check_cut(call, bound, cuts, mesh, expected) for cuts, mesh in ways(bound, (2, 3, 5)))
    return [str(failure) for failure in found if failure]


def test_a_rule_with_a_scan_prints_as_it_parses() -> None:
    text = "cumsum : ... {dim} ... -> ... {dim} ... ; scan({dim} sum) linear"
    assert str(Rule.parse(text)) == text


@pytest.mark.parametrize("name", SCANS)
def test_every_way_of_cutting_a_scan_is_right(name: str) -> None:
    call = scan(name, some(4, 7), -1)
    assert "{dim}0" in find.bound(builtin(), call).cuttable
    assert not tried(builtin(), call)


SPECIAL: dict[str, Callable[[], Tensor]] = {
    "equal values": lambda: torch.tensor([2, 1, 2, 2, 0, 2, 1]),
    "what is no number": lambda: torch.tensor([0.5, 3, torch.nan, 9, torch.nan, 1, 2]),
    "truths": lambda: torch.tensor([False, True, False, True, True, False, False]),
    "nothing larger": lambda: torch.full((7,), -torch.inf),
    "nothing smaller": lambda: torch.full((7,), torch.inf),
}


@pytest.mark.parametrize("values", SPECIAL)
@pytest.mark.parametrize("name", ["cummax", "cummin"])
def test_places_of_extremes_are_torchs(name: str, values: str) -> None:
    assert not tried(builtin(), scan(name, SPECIAL[values](), 0))


def test_zeros_have_their_gradient_in_a_product() -> None:
    assert not tried(builtin(), scan("cumprod", torch.tensor([2.0, 0.0, 3.0, 4.0, 0.0, 5.0]).double(), 0))


@pytest.mark.parametrize(("right", "wrong"), [("sum", "prod"), ("prod", "sum"), ("max", "min"), ("min", "max")])
def test_another_reduction_is_refuted(right: str, wrong: str) -> None:
    line = f"cum{right} : ... {{dim}} ... -> ... {{dim}} ... ; scan({{dim}} {wrong})"
    assert tried(builtin().with_lines(parse_lines(line)), scan(f"cum{right}", some(4, 7), 1))


def test_complex_logarithms_are_whole() -> None:
    x = torch.complex(some(5), some(5))
    assert "{dim}0" in find.bound(builtin(), scan("cumsum", x, 0)).cuttable
    assert find.bound(builtin(), scan("logcumsumexp", x, 0)).cuttable == []


def test_a_scan_costs_one_slice_of_each_other_part() -> None:
    for name, itemsize in (("cumsum", 8), ("cummax", 16)):  # the places come along
        call = scan(name, some(6, 12), 1)
        one = propagate(builtin(), call, [Layout.parse("a/y b/x")], Mesh.parse("x=4 y=2"))
        assert check(one, call.run()) is None
        assert one.moved == {("scan", "x"): 3 * 3 * itemsize}
        assert [(step.kind, step.axis) for step in one.totals] == [("scan", "x")]
        assert not one.relayouts
        table = factor_table(one)
        assert table.conflicts == ()
        assert f"{'results' if name == 'cummax' else 'result'}: scan over x {9 * itemsize} B" in str(table)


def test_over_two_axes_each_has_its_own() -> None:
    call = scan("cumsum", some(5, 13), 1)
    one = propagate(builtin(), call, [Layout.parse("a b/y/x")], Mesh.parse("x=4 y=2"))
    assert one.moved == {("scan", "y"): 5 * 8, ("scan", "x"): 3 * 5 * 8}
    assert check(one, call.run()) is None


def test_parts_that_are_not_in_order_are_gathered() -> None:
    call = scan("cumsum", some(3, 8), 1)
    one = propagate(builtin(), call, [Layout.parse("a b/x:zigzag")], Mesh.parse("x=2"))
    assert one.choices["x"].kind == "whole"
    assert any("it is cut zigzag, and its parts need each other" in o.refused for o in options(one)["x"])
    assert check(one, call.run()) is None
    sizes = propagate(builtin(), call, [Layout.parse("a b/x:[1 7]")], Mesh.parse("x=2"))
    assert sizes.choices["x"].kind == "cut"
    assert check(sizes, call.run()) is None


def test_a_sum_may_wait_while_its_dim_is_cut() -> None:
    call = scan("cumsum", some(3, 8), 1)
    one = propagate(builtin(), call, [Layout.parse("a b/x sum:y")], Mesh.parse("x=2 y=3"))
    assert str(one.outputs[0]) == "a=3 b=8/x sum:y"
    assert check(one, call.run()) is None


def test_parts_in_two_stretches_are_refused_when_they_run() -> None:
    call = scan("cumsum", some(8), 0)
    bound, mesh = find.bound(builtin(), call), Mesh.parse("x=2")
    parts = [part_of(bound, {"{dim}0": (Cut("x", "zigzag"),)}, mesh, rank) for rank in range(2)]
    x, dims = call.tensors[0], bound.inputs[0]
    assert x is not None
    assert dims is not None
    with pytest.raises(UserError, match="in 2 stretches"):
        run_all(call, bound, parts, [[piece(x, dims, part, bound)] for part in parts])


def test_in_place_the_part_is_written() -> None:
    call = Call.of(aten.cumprod_.default, (some(7), 0), {})
    bound, mesh = find.bound(builtin(), call), Mesh.parse("x=3")
    parts = [part_of(bound, {"{dim}0": (Cut("x"),)}, mesh, rank) for rank in range(3)]
    x, dims = call.tensors[0], bound.inputs[0]
    assert x is not None
    assert dims is not None
    own = [piece(x, dims, part, bound) for part in parts]
    run_all(call, bound, parts, [[one] for one in own], in_place=True)
    assert torch.allclose(torch.cat(own), torch.cumprod(x, 0))
