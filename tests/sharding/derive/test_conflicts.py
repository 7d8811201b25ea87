"""Marks that contradict each other: which, where they meet, and fixes that really work."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import tangram
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


class Crossing(nn.Module):
    """Attention of one sequence to another: keys and values lie in one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.attend = nn.MultiheadAttention(16, 4, batch_first=True)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.attend(x, y, y)[0]


class Skew(nn.Module):
    """A weight that is made of another one, and of what it is transposed."""

    def forward(self, weight: Tensor) -> Tensor:
        return weight.triu(1) - weight.triu(1).mT


def skewed() -> nn.Module:
    layer = nn.Linear(16, 16)
    nn.utils.parametrize.register_parametrization(layer, "weight", Skew())
    return layer


@pytest.mark.parametrize(
    ("make", "mark", "operator", "breaks"),
    [
        (
            Crossing,
            "attend.in_proj_weight: f/tp e",
            "split_with_sizes of attend",
            "in_proj_weight sharded over tp in dim 0",
        ),
        (
            lambda: nn.EmbeddingBag(32, 16),
            "weight: v/tp d",
            "_embedding_bag",
            "cannot take weight sharded over tp in dim 0",
        ),
        (lambda: nn.ConvTranspose1d(1, 4, 3), "weight: i/tp o k", "convolution", "cannot take weight sharded over tp"),
        (skewed, "*.original: o/tp i", "parametrizations.weight.0", "cannot give its result"),
    ],
)
def test_the_operator_and_its_line_are_named(
    make: Callable[[], nn.Module], mark: str, operator: str, breaks: str
) -> None:
    inputs = {
        "Crossing": {"x": torch.randn(2, 4, 16), "y": torch.randn(2, 4, 16)},
        "EmbeddingBag": {"input": torch.zeros(4, 6, dtype=torch.long)},
        "ConvTranspose1d": {"input": torch.randn(2, 1, 8)},
    }
    model = make()
    given = inputs.get(type(model).__name__, {"input": torch.randn(4, 16)})
    with pytest.raises(ConflictError) as caught:
        tangram.derive(model, "tp=2", [mark], inputs=given)
    said = str(caught.value)
    assert said.startswith("no layout over tp fits the marks: ")
    assert operator in said
    assert "test_conflicts.py:" in said
    assert breaks in said


def test_a_mark_on_the_last_module_is_one_on_the_result() -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 8))
    found = tangram.derive(model, "tp=2", ["1: b o/tp"], inputs={"input": torch.randn(4, 8)})
    assert str(found.modules["1"]) == "_=4 _=8/tp"


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_bags_of_embeddings_are_cut_by_columns(mode: str) -> None:
    model = nn.EmbeddingBag(32, 16, mode=mode)
    found = tangram.derive(model, "tp=2", ["weight: v d/tp"], inputs={"input": torch.zeros(4, 6, dtype=torch.long)})
    assert str(found.parameters["weight"]) == "_=32 _=16/tp"
