"""What a derivation and a choice answer where they used to give up: wide models, three axes, unused parameters."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from tangram.errors import UserError
from tangram.hardware.catalogue import cluster
from tangram.layout import Mesh
from tangram.models.capturing.graph import Graph
from tangram.sharding.choose import choose as choosing
from tangram.sharding.choose.choose import choose, priced
from tangram.sharding.derive.derive import derive
from tangram.sharding.derive.explain.show import total
from tangram.sharding.derive.marking.marks import Mark
from tangram.sharding.derive.of_model import derive_model, graph_of, parameter_states
from tangram.sharding.derive.problem.states import SAME, cut
from tangram.sharding.derive.solve import bounded, solve


class Mixed(nn.Module):
    """Four products whose results all meet each other."""

    def __init__(self) -> None:
        super().__init__()
        self.ways = nn.ModuleList([nn.Linear(64, 64, bias=False) for _ in range(4)])
        self.unused = nn.Linear(64, 64, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        own = [torch.tanh(way(x)) for way in self.ways]
        return torch.stack([a * b for i, a in enumerate(own) for b in own[i:]]).sum(0)


@pytest.fixture(scope="module")
def graph() -> Graph:
    return graph_of(Mixed(), {"x": torch.zeros(4096, 64)}, torch.float32)


def _marks(*texts: str) -> list[Mark]:
    return [Mark.parse(text) for text in texts]


def test_a_wide_model_is_derived_and_its_gap_is_told(graph: Graph, monkeypatch: pytest.MonkeyPatch) -> None:
    marks, mesh = _marks("ways.0.weight: o/tp i"), Mesh.parse("tp=2")
    exact = derive(graph, marks, mesh)
    monkeypatch.setattr(bounded, "LIMIT", 40)
    monkeypatch.setattr(bounded.bounded, "__defaults__", (40,))
    found = derive(graph, marks, mesh)
    assert [over.gap for over in exact.axes] == [0.0]
    assert found.axes[0].used.keys() == exact.axes[0].used.keys()
    assert total(found) >= 0.9 * total(exact)
    assert solve.LIMIT > 40  # only this test's


def test_a_choice_over_more_axes_than_tables_hold(graph: Graph, monkeypatch: pytest.MonkeyPatch) -> None:
    mesh, own = Mesh.parse("a=2 b=2 c=2"), cluster.builtin("h100-8x8")
    free = choose(graph, mesh, own, seconds=3)
    monkeypatch.setattr(choosing, "LARGEST", 200)
    found = choose(graph, mesh, own, seconds=3)
    assert 0 < found.bound <= free.price.seconds * (1 + 1e-9)
    assert found.price.seconds <= 1.5 * free.price.seconds
    assert priced(found.plan, own).seconds == pytest.approx(found.price.seconds)
    with pytest.raises(UserError, match="no layouts over `a=2 b=2 c=2` that fit into"):
        choose(graph, mesh, own, seconds=1, memory_limit=0.1 * found.price.nbytes)


def test_a_parameter_that_no_operator_takes_lies_as_its_mark_says(graph: Graph) -> None:
    """And so it does with where it lies as a mark beside: they used to contradict each other."""
    marks, mesh = _marks("{ways.0,unused}.weight: o/tp i"), Mesh.parse("tp=2")
    states = parameter_states(derive_model(graph, marks, mesh))
    assert states["unused.weight"] == {"tp": cut(0)}
    again = derive_model(graph, [*marks, *_marks("unused.weight: 64/tp 64")], mesh)
    assert parameter_states(again) == states


@pytest.mark.parametrize("marks", [("ways.0.weight: o/dp i", "ways.0.weight: o i/dp"), ("output0: b/dp h",)])
def test_marks_over_an_axis_of_one_rank_contradict_nothing(graph: Graph, marks: tuple[str, ...]) -> None:
    found = derive_model(graph, _marks(*marks, "ways.1.weight: o/tp i"), Mesh.parse("dp=1 tp=2"))
    assert parameter_states(found)["ways.0.weight"]["dp"] == SAME
