"""Marks with an arrow: parameters that lie in parts and are gathered to be used."""

from __future__ import annotations

import pytest
import torch

from tangram.errors import UserError
from tangram.layout import Layout, Mesh
from tangram.models.capturing.graph import Graph
from tangram.sharding.derive.derive import Derived, derive
from tangram.sharding.derive.layouts import moved, used, value_layout
from tangram.sharding.derive.marking.marks import Mark, states
from tangram.sharding.derive.of_model import fitting, graph_of, parameter_states
from tests.sharding.derive.test_marks_files import tiny

IDS = {"input_ids": torch.zeros(4, 16, dtype=torch.long), "use_cache": False}
SAMPLES = "model.layers.*: b/dp s h"


@pytest.fixture(scope="module")
def graph() -> Graph:
    return graph_of(tiny("llama"), IDS, torch.float32)


def derived(graph: Graph, mesh: str, *marks: str) -> Derived:
    return derive(graph, [Mark.parse(mark) for mark in marks], Mesh.parse(mesh))


def test_a_mark_prints_as_it_was_written() -> None:
    text = "*.up_proj.weight: out/tp/dp in -> out/tp in"
    assert str(Mark.parse(text)) == text


def test_what_is_gathered_lies_in_parts_and_costs_a_gather_and_a_scatter(graph: Graph) -> None:
    found = derived(graph, "dp=2", "*.up_proj.weight: o/dp i -> o i", SAMPLES)
    name = "model.layers.0.mlp.up_proj.weight"
    v = next(v for v, value in graph.of_kind("parameter") if value.name == name)
    assert parameter_states(found)[name]["dp"].kind == "cut"
    assert used(found, found.folded.classes[v])["dp"].kind == "several"
    assert "dp" not in str(value_layout(found, v))
    (one,) = [m for m in moved(found) if m.value == found.folded.classes[v]]
    assert (one.forward, one.backward, one.nbytes) == ("all-gather", "reduce-scatter", 2 * 2 * 64 * 32 * 4 / 2)


def test_fitting_keeps_the_arrow(graph: Graph) -> None:
    marks = [Mark.parse("{*.up_proj.weight,nothing.weight}: o/dp i -> o i")]
    assert [str(mark) for mark in fitting(graph, marks, Mesh.parse("dp=2"))] == ["*.up_proj.weight: o/dp i -> o i"]


@pytest.mark.parametrize(
    "mark",
    [
        "*.up_proj.weight: o i/dp -> o/dp i",
        "*.up_proj.weight: o i -> o/dp i",
        "*.up_proj.weight: o/dp i -> o/dp i",
        "model.layers.*: b/dp s h -> b s h",
    ],
)
def test_behind_the_arrow_stand_fewer_axes_of_a_parameter(graph: Graph, mark: str) -> None:
    with pytest.raises(UserError, match="behind an arrow stands how a parameter is used"):
        derived(graph, "dp=2", mark)


def test_the_order_of_cuts_is_that_of_the_mesh() -> None:
    assert len(states(Layout.parse("o/dp/tp i"), (8, 8), Mesh.parse("dp=2 tp=2"))) == 2
    with pytest.raises(UserError, match="cuts over tp before dp, which stands first in the mesh"):
        states(Layout.parse("o/tp/dp i"), (8, 8), Mesh.parse("dp=2 tp=2"))
