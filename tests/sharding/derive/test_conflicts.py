"""Marks that contradict each other: which, where they meet, and fixes that really work."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from tangram.layout import Mesh
from tangram.models.capturing.capture import capture
from tangram.models.capturing.graph import Graph
from tangram.sharding.derive.derive import ConflictError, derive
from tangram.sharding.derive.explain.conflicts import Conflict, conflict
from tangram.sharding.derive.explain.show import total
from tangram.sharding.derive.marking.marks import Mark
from tests.sharding.derive.test_derive import derived, language


def conflicting(graph: Graph, mesh: str, *texts: str) -> Conflict:
    marks = [Mark.parse(text) for text in texts]
    with pytest.raises(ConflictError) as caught:
        derive(graph, marks, Mesh.parse(mesh))
    return conflict(graph, marks, Mesh.parse(mesh), caught.value)


class Sum(nn.Module):
    """Two parameters that meet before anything else does."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.randn(8, 8)), nn.Parameter(torch.randn(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        return x @ (self.a + self.b).tanh()


def test_two_marks_on_one_parameter() -> None:
    _, graph, _ = language("llama")
    others = "{model.embed_tokens,lm_head}.weight: v/tp h"
    found = conflicting(graph, "tp=2", "*.q_proj.weight: o/tp i", others, "*.0.*.q_proj.weight: o i/tp")
    assert found.marks == ("*.q_proj.weight: o/tp i", "*.0.*.q_proj.weight: o i/tp")  # and not the one beside
    assert found.tensors == ("model.layers.{0..1}.self_attn.q_proj.weight",)
    table = [" ".join(line.split()) for line in found.tables[0].splitlines()]
    assert table[0].startswith("mm in model.layers.{0..1}.self_attn.q_proj (modeling_llama.py:")
    assert table[0].endswith("): m k, k n -> m n")
    assert table[1:] == ["m k n", "self . .", "mat2 by 1 . /tp", "mat2 by 2 /tp .", "result . ."]
    assert [fix.what for fix in found.fixes] == [
        "without 1, so that it lies as _ _/tp",
        "without 2, so that it lies as _/tp _",
    ]
    assert found.fixes[0].received == total(derived(graph, "tp=2", [others, "*.0.*.q_proj.weight: o i/tp"]))
    assert not found.alike


def test_equal_layers_lie_alike() -> None:
    _, graph, _ = language("llama")
    found = conflicting(graph, "tp=2", "*.0.*.q_proj.weight: o/tp i", "*.1.*.q_proj.weight: o i/tp")
    assert found.alike
    assert "(equal layers lie alike)" in found.sentence


def test_an_activation_can_be_moved_in_between() -> None:
    _, graph, _ = language("llama")
    marks = ["*.q_proj.weight: o/tp i", "model.layers.*: b s/tp h", "model.layers.0: b/tp s h"]
    found = conflicting(graph, "tp=2", *marks)
    assert found.marks == tuple(marks[1:])
    last = found.fixes[-1]
    assert last.what.endswith("`model.layers.*.input_layernorm: b/tp s h`")
    again = derived(graph, "tp=2", [*marks[:2], "model.layers.*.input_layernorm: b/tp s h"])
    assert last.received == total(again) > 0


def test_marks_on_parameters_that_meet() -> None:
    graph = capture(Sum(), {"x": torch.randn(4, 8)})
    found = conflicting(graph, "dp=2 tp=2", "x: b/dp i", "a: i/tp o", "b: i o/tp")
    assert (found.axis, found.tensors, found.marks) == ("tp", ("a", "b"), ("a: i/tp o", "b: i o/tp"))
    (table,) = found.tables
    lines = [" ".join(line.split()) for line in table.splitlines()]
    assert lines[0].startswith("add in the model (test_conflicts.py:")
    assert lines[1:] == ["a b", "self by 1 /tp .", "other by 2 . /tp", "result . ."]
    assert len(found.fixes) == 2


def test_a_mark_that_fits_nothing() -> None:
    _, graph, _ = language("mamba2")
    found = conflicting(graph, "tp=2", "*.conv1d.weight: c _ k/tp", "lm_head.weight: v/tp h")
    assert found.marks == ("*.conv1d.weight: c _ k/tp",)
    assert found.sentence.startswith("no layout over tp fits the mark `*.conv1d.weight: c _ k/tp` on backbone.layers.")
    assert [fix.what for fix in found.fixes] == ["without 1, so that it lies as _ _ _"]
    assert "_ _ _/tp cuts what is whole here" in found.tables[0]
    assert str(found).count("\n") < 12
