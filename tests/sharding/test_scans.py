"""Scans over a cut dim: joined by what comes before, at the price of one slice a rank."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tangram.layout import Layout, Mesh, region
from tangram.layout.intervals import elements
from tangram.layout.rule import Rule
from tangram.layout.syntax import Cut
from tangram.sharding.local_ops.local_call import run_all
from tangram.sharding.ops import rule_table
from tangram.sharding.ops.calls import OpCall
from tangram.sharding.ops.rank_part import part_of, piece
from tangram.sharding.ops.rule_table import RuleTable, builtin, parse_lines
from tangram.sharding.proof.execute import check as check_cut
from tangram.sharding.proof.execute import run_reference, ways, ways_by_maps
from tangram.sharding.proof.propagated import check
from tangram.sharding.propagation import halo as scan_module
from tangram.sharding.propagation.explain_conflicts import factor_table
from tangram.sharding.propagation.propagate import options, propagate

aten = torch.ops.aten
SCANS = ("cumsum", "cumprod", "logcumsumexp", "cummax", "cummin")


def some(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(sum(shape)))


def scan(name: str, x: Tensor, dim: int) -> OpCall:
    return OpCall.of(getattr(aten, name).default, (x, dim), {})


def tried(rules: RuleTable, call: OpCall) -> list[str]:
    """What is wrong with each way of cutting a call."""
    bound, expected = rule_table.bound(rules, call), run_reference(call)
    every = [*ways(bound, (2, 3, 5)), *ways_by_maps(bound, (2, 3, 5))]
    found = (check_cut(call, bound, cuts, mesh, expected) for cuts, mesh in every)
    return [str(failure) for failure in found if failure]


def test_a_rule_with_a_scan_prints_as_it_parses() -> None:
    text = "cumsum : ... {dim} ... -> ... {dim} ... ; scan({dim} sum) linear"
    assert str(Rule.parse(text)) == text


@pytest.mark.parametrize("name", SCANS)
def test_every_way_of_cutting_a_scan_is_right(name: str) -> None:
    call = scan(name, some(4, 7), -1)
    assert "{dim}0" in rule_table.bound(builtin(), call).cuttable
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
    assert "{dim}0" in rule_table.bound(builtin(), scan("cumsum", x, 0)).cuttable
    assert rule_table.bound(builtin(), scan("logcumsumexp", x, 0)).cuttable == []


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
    three = 3 * (4 + 3) / 8  # of six elements over four ranks the last has none, and no total
    assert one.moved == {("scan", "y"): 5 * 8, ("scan", "x"): three * 5 * 8}
    assert check(one, call.run()) is None


MAPS = ("zigzag", "zigzag[5 0 91]", "strided[2]", "strided[3]", "cyclic[16]", "[1 0 95]", "[3 92 1]")


@pytest.mark.parametrize("text", [*MAPS, "(2 b/x)", "(b=5/x + c=91/x)"])
@pytest.mark.parametrize("name", ["cumsum", "cummax"])
def test_by_every_map_a_scan_stays_where_it_is(name: str, text: str) -> None:
    call, mesh = scan(name, some(3, 96), 1), Mesh.parse("x=3")
    layout = Layout.parse(f"a {text}" if text.startswith("(") else f"a b/x:{text}")
    one = propagate(builtin(), call, [layout], mesh)
    assert (one.choices["x"].kind, one.relayouts) == ("cut", ())
    assert check(one, call.run()) is None
    parts = [region(one.outputs[0], mesh, rank) for rank in range(3)]
    assert parts == [region(layout.bind((3, 96)), mesh, rank) for rank in range(3)]
    stretches = [len(part.boxes[0][1]) if part else 0 for part in parts]
    others = sum(sum(stretches) - own for own in stretches) / 3
    assert one.nbytes == pytest.approx(others * 3 * (8 if name == "cumsum" else 16))


def test_where_every_element_is_a_stretch_chunks_are_made() -> None:
    call = scan("cumsum", some(3, 24), 1)
    one = propagate(builtin(), call, [Layout.parse("a b/x:cyclic")], Mesh.parse("x=3"))
    assert one.moved == {("all-to-all", "x"): 3 * 8 * 8 * 2 / 3, ("scan", "x"): 2 * 3 * 8}
    assert str(one.outputs[0]) == "a=3 b=24/x"
    assert {str(o.tree[0]): o.nbytes for o in options(one)["x"] if o.kind == "cut"}["x:cyclic"] == 16 * 3 * 8


def test_by_maps_over_two_axes_every_part_hears_of_every_other() -> None:
    call = scan("cumprod", some(260), 0)
    for text in ("b/y:zigzag/x", "b/x/y:strided[2]", "b/x:cyclic[30]/y:zigzag"):
        one = propagate(builtin(), call, [Layout.parse(text)], Mesh.parse("x=3 y=2"))
        assert {kind for kind, _ in one.moved} <= {"scan"}
        assert check(one, call.run()) is None


def test_a_sum_may_wait_while_its_dim_is_cut() -> None:
    call = scan("cumsum", some(3, 8), 1)
    one = propagate(builtin(), call, [Layout.parse("a b/x sum:y")], Mesh.parse("x=2 y=3"))
    assert str(one.outputs[0]) == "a=3 b=8/x sum:y"
    assert check(one, call.run()) is None


@pytest.mark.parametrize("cut", [Cut("x"), Cut("x", "zigzag"), Cut("x", "cyclic", (2,))], ids=str)
def test_in_place_the_part_is_written(cut: Cut) -> None:
    call = OpCall.of(aten.cumprod_.default, (some(7), 0), {})
    bound, mesh = rule_table.bound(builtin(), call), Mesh.parse("x=3")
    parts = [part_of(bound, {"{dim}0": (cut,)}, mesh, rank) for rank in range(3)]
    x, dims = call.tensors[0], bound.inputs[0]
    assert x is not None
    assert dims is not None
    own = [piece(x, dims, part, bound) for part in parts]
    run_all(call, bound, parts, [[one] for one in own], in_place=True)
    whole_ = torch.cumprod(x, 0)
    for one, part in zip(own, parts, strict=True):
        assert torch.allclose(one, whole_[elements(part.indices["{dim}0"])])


@pytest.mark.parametrize("mistake", ["stretches in the order of ranks", "a stretch that goes on from the last"])
def test_a_scan_that_takes_stretches_for_one_part_is_found(mistake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if mistake == "stretches in the order of ranks":
        monkeypatch.setattr(scan_module, "sorted", lambda some: [*some], raising=False)
    else:
        monkeypatch.setattr(
            "tangram.sharding.local_ops.local_call.each", lambda bound, part, local, run: run(part, local)
        )
    call = scan("cumsum", some(2, 13), 1)
    bound, expected = rule_table.bound(builtin(), call), run_reference(call)
    cuts = {"{dim}0": (Cut("x", "zigzag"),)}
    assert check_cut(call, bound, cuts, Mesh.parse("x=2"), expected) is not None
