"""No core operator of torch is left without a rule, and functions of a call give rules that hold."""

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor

from tangram.sharding.discover import report
from tangram.sharding.ops import rule_table
from tangram.sharding.ops.calls import OpCall
from tangram.sharding.ops.computed_rules import ESCAPES, rule_of
from tangram.sharding.ops.rule_table import RuleTable
from tangram.sharding.proof.execute import check, run_reference, ways

aten = torch.ops.aten


def some(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(sum(shape)))


def below(n: int, *shape: int) -> Tensor:
    return torch.randint(n, shape, generator=torch.Generator().manual_seed(n))


def test_every_core_operator_has_a_way_and_whole_ones_a_reason() -> None:
    ways_ = report.coverage()
    assert len(ways_) > 180
    assert [one.operator for one in ways_ if not one.kind] == []
    counts = Counter(one.kind for one in ways_)
    assert counts["rule"] > 60
    assert counts["whole"] < 12
    for one in ways_:
        if one.kind == "whole":
            assert len(one.what.split()) > 4, one


def test_an_operator_without_any_way_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "builtin", RuleTable)
    assert report.way(aten.bmm.default).kind == ""
    assert report.way(aten.permute.default).kind == "view"
    assert report.way(aten.randn.default).kind == "factory"


def test_each_function_is_of_an_operator() -> None:
    for name in ESCAPES:
        packet, _, overload = name.partition(".")
        assert (overload or "default") in getattr(aten, packet).overloads()


CALLS: dict[str, tuple[Any, tuple[Any, ...], str, int]] = {
    "an index before others": (
        aten.index.Tensor,
        (some(5, 4, 6), [None, below(4, 3)]),
        "d0 at1 d2, _, i0 -> d0 i0 d2 ; looked(2 at1) linear(0)",
        4,
    ),
    "indices apart": (
        aten.index.Tensor,
        (some(5, 4, 6), [below(5, 7), None, below(6, 7)]),
        "at0 d1 at2, i0, _, i0 -> i0 d1 ; looked(1 at0 3 at2) linear(0)",
        4,
    ),
    "indices that broadcast": (
        aten.index.Tensor,
        (some(5, 4, 6), [below(5, 7, 1), below(4, 3)]),
        "at0 at1 d2, i0 i1, i1 -> i0 i1 d2 ; looked(1 at0 2 at1) linear(0)",
        5,
    ),
    "a mask": (aten.index.Tensor, (some(5, 4, 6), [below(2, 5, 4) > 0]), "_ _ d2, _ _ -> _ d2 ; linear(0)", 1),
    "values at indices": (
        aten.index_put.default,
        (some(5, 4, 6), [None, below(4, 3)], some(3, 6), True),
        "d0 at1 d2, _, _, _ d2 -> d0 at1 d2 ; spill(2 at1)",
        3,
    ),
    "repeated": (aten.repeat.default, (some(5, 4), [3, 1, 2]), "d0 _ -> _ d0 _", 1),
    "padded": (
        aten.constant_pad_nd.default,
        (some(3, 4, 5), [1, 2, 0, 0]),
        "d0 d1 d2' -> d0 d1 d2 ; pad(pad) outside(value)",
        3,
    ),
    "a diagonal": (aten.diag_embed.default, (some(3, 4, 5), 1, 0, -1), "d0 d1 _ -> _ d0 d1 _", 2),
    "a vector solved": (
        aten._linalg_solve_ex.default,
        (some(3, 4, 4), some(3, 4)),
        "... _ _, ... _ -> ... _, ... _ _, ... _, ...",
        1,
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_what_a_function_gives_holds(name: str) -> None:
    operator, args, line, factors = CALLS[name]
    call = OpCall.of(operator, args, {})
    rule = rule_of(call)
    assert rule is not None
    assert str(rule).partition(" : ")[2] == line
    bound = rule_table.bound(rule_table.builtin(), call)
    assert len(bound.cuttable) == factors
    expected = run_reference(call)
    for cuts, mesh in ways(bound, (2, 3)):
        assert check(call, bound, cuts, mesh, expected) is None


def test_a_line_of_ones_own_goes_before_the_function() -> None:
    call = OpCall.of(aten.repeat.default, (some(5, 4), [3, 1, 2]), {})
    own = rule_table.builtin().with_lines(rule_table.parse_lines("repeat : ...^ -> ...^"))
    assert rule_table.bound(own, call).cuttable == []


def test_indices_do_not_broadcast() -> None:
    """`gather` takes fewer indices than elements: a dim of one index is no broadcast one."""
    call = OpCall.of(aten.gather.default, (some(5, 3), 0, below(5, 4, 1)), {})
    assert rule_table.bound(rule_table.builtin(), call).cuttable == ["{dim}0", "i"]


def test_a_cut_that_the_table_lacks_is_reported() -> None:
    calls = [OpCall.of(aten.mm.default, (some(m, 6), some(6, 5)), {}) for m in (3, 4)]
    whole_only = RuleTable().with_lines(rule_table.parse_lines("mm : ...^ -> ...^", "whole.rules"))
    found = report.gaps_of(whole_only, "mm", calls)
    assert {gap.cut: gap.calls for gap in found} == {
        "input 0 dim -2 -> cut": 2,
        "input 1 dim -1 -> cut": 2,
        "input 0 dim -1, input 1 dim -2 -> sum": 2,
    }
    assert report.gaps_of(rule_table.builtin(), "mm", calls) == []
    assert report.gaps_of(whole_only, "mm", calls[:1]) == []  # one shape says little
    assert len(report.gaps_of(RuleTable(), "mm", calls)) == 3
