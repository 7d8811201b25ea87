"""What an operator's inputs disagree on, as people and programs read it."""

import json

import torch
from torch._ops import OpOverload

from tangram.layout import Layout, Mesh
from tangram.sharding.ops.calls import OpCall
from tangram.sharding.ops.rule_table import builtin
from tangram.sharding.propagation.explain_conflicts import FactorTable, factor_table
from tangram.sharding.propagation.propagate import propagate

aten = torch.ops.aten


def table(operator: OpOverload, args: tuple[object, ...], layouts: list[str], mesh: str) -> FactorTable:
    call = OpCall.of(operator, args, {})
    return factor_table(propagate(builtin(), call, [Layout.parse(text) for text in layouts], Mesh.parse(mesh)))


def test_the_table_says_what_was_asked_for_what_was_chosen_and_what_else_there_was() -> None:
    x, w = torch.empty(64, 32), torch.empty(32, 16)
    assert (
        str(table(aten.mm.default, (x, w), ["m/x k/y", "k n/x"], "x=2 y=4"))
        == """\
mm(self=float32[64, 32], mat2=float32[32, 16]) over x=2 y=4
          m   k      n
  self    /x  /y
  mat2        whole  /x
  result  /x         whole  sum:y
axis x of 2 ranks: cut m, 256 B a rank; conflict
  cut n: 1,024 B
  whole: 2,048 B
axis y of 4 ranks: cut k
  whole: 3,072 B
mat2: k=32 n=16/x -> k=32/y n=16: slice over y, all-gather over x 256 B"""
    )


def test_what_is_refused_says_why() -> None:
    x = torch.empty(64, 32)
    shown = str(table(aten.amax.default, (x, [-1]), ["m d/x"], "x=2"))
    assert "cut {dim}0: it would leave a max pending, which has no gradient" in shown
    shown = str(table(aten._softmax.default, (x, 1, False), ["m d/x"], "x=2"))
    assert "cut {dim}0: the operator needs it whole" in shown
    shown = str(table(aten.add.Tensor, (torch.empty(1, 4), torch.empty(1, 4)), ["a/x b", "a b"], "x=2"))
    assert "1 of it cannot be shared" in shown
    shown = str(table(aten.mul_.Tensor, (x, x), ["a b/x", "a/x b"], "x=2"))
    assert "the operator writes input 0, which lies otherwise" in shown


def test_cuts_of_no_factor_are_named() -> None:
    shown = table(aten.view.default, (torch.empty(12, 32), [3, 4, 32]), ["b/x h/y"], "x=2 y=4")
    assert shown.rows[0].others == "/x to be gathered"
    assert [axis.name for axis in shown.conflicts] == ["x"]


def test_the_same_as_json() -> None:
    x, w = torch.empty(64, 32), torch.empty(32, 16)
    made = table(aten.mm.default, (x, w), ["m/x k/y", "k n/x"], "x=2 y=4")
    read = json.loads(json.dumps(made.as_json()))
    assert read["tensors"][1] == {
        "tensor": "mat2",
        "layout": "k=32 n=16/x",
        "factors": {"m": None, "k": "", "n": "/x"},
        "others": "",
    }
    first = read["axes"][0]
    assert (first["chosen"], first["bytes"], first["conflict"]) == ("cut m", 256, True)
    assert first["others"][0] == {"option": "cut n", "bytes": 1024, "due": 0.0, "refused": ""}


def test_without_a_conflict_there_is_none() -> None:
    x = torch.empty(64, 32)
    made = table(aten.add.Tensor, (x, x), ["a/x b", "a/x b"], "x=2")
    assert made.conflicts == ()
    assert "conflict" not in str(made)


def test_the_table_says_what_a_pending_sum_would_cost() -> None:
    x, index, src = torch.empty(64, 2), torch.zeros(2, 2, dtype=torch.int64), torch.empty(2, 2)
    call = OpCall.of(torch.ops.aten.scatter_add.default, (x, 0, index, src), {})
    table = factor_table(propagate(builtin(), call, [None, Layout.parse("i/x k"), None], Mesh.parse("x=2")))
    (axis,) = table.axes
    assert str(axis.chosen) == "whole"
    assert f"0 B, and {64 * 2 * 4 // 2} B for what it leaves pending" in str(table)
    assert [one["due"] for one in table.as_json()["axes"][0]["others"]] == [64 * 2 * 4 / 2]
