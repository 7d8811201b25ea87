"""Marks and meshes as people type them who know other libraries."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import Shard

import tangram
from tangram.errors import UserError
from tests.training import own_operator

INPUTS = {"input": torch.zeros(4, 8)}
CUT = {"0.weight": "_=16/tp _=8", "0.bias": "_=16/tp", "1.weight": "_=8 _=16/tp", "1.bias": "_=8"}


def two() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 8))


@pytest.mark.parametrize(
    "marks", [{"0.weight": "o/tp i"}, [("0.weight", "o/tp i")], ["0.weight: o/tp i"], "0.weight: o/tp i"]
)
def test_a_mark_is_a_text_a_pair_or_in_a_table(marks: Any) -> None:
    found = tangram.derive(two(), "tp=2", marks, inputs=INPUTS).parameters
    assert {name: str(layout) for name, layout in found.items()} == CUT


@pytest.mark.parametrize(
    ("marks", "sentence"),
    [
        ({"0.weight": Shard(0)}, 'the mark of 0.weight takes a layout, and not Shard(0): write "a/tp ..."'),
        (
            [("0.weight", ("tp", None))],
            "the mark of 0.weight takes a layout, and not ('tp', None): write \"a/tp b ...\"",
        ),
        ([Shard(0)], 'a mark is a text `name: layout`, and not Shard(0): write "a/tp ..."'),
        (['0.weight: P("tp", None)'], "takes a layout, and not P('tp', None): write \"a/tp b ...\""),
    ],
)
def test_what_another_library_has_gets_the_text_to_write(marks: Any, sentence: str) -> None:
    with pytest.raises(UserError) as caught:
        tangram.derive(two(), "tp=2", marks, inputs=INPUTS)
    assert sentence in str(caught.value)


@pytest.mark.parametrize("mesh", [{"tp": 2}, (2,), None])
def test_a_mesh_that_is_no_text(mesh: Any) -> None:
    with pytest.raises(UserError, match=r'the mesh is .*: write each axis with its number of ranks, as in "dp=2 tp=4"'):
        tangram.derive(two(), mesh, ["0.weight: o/tp i"], inputs=INPUTS)


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("forward", [False, True])
def test_a_model_that_was_compiled_before(inside: bool, forward: bool) -> None:
    """A part of it, and its forward alone, are found as the model is; `module.compile()` compiles the call."""
    model = two()
    part: Any = model[0] if inside else model
    if forward:
        part.forward = torch.compile(part.forward, backend="eager")
    else:
        compiled: Any = torch.compile(part, backend="eager")
        model = nn.Sequential(compiled, *model[1:]) if inside else compiled
    with pytest.raises(UserError) as caught:
        tangram.derive(model, "tp=2", ["0.weight: o/tp i"], inputs=INPUTS)
    sentence = "is compiled by torch.compile: make it parallel first, and compile it after that"
    assert str(caught.value) == f"{'0' if inside else 'the model'} {sentence}"


class Gated(nn.Module):
    """A model with an operator of its own."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.tangram_gate.act(x)


def test_rules_of_ones_own(tmp_path: Path) -> None:
    assert own_operator.calls
    model, inputs = nn.Sequential(nn.Linear(8, 16), Gated()), INPUTS
    with pytest.raises(UserError, match=r"there is no rule for .*act"):
        tangram.derive(model, "tp=2", ["0.weight: o/tp i"], inputs=inputs)
    file = tmp_path / "own.rules"
    file.write_text("tangram_gate.act : ... -> ...\n")
    found = tangram.derive(model, "tp=2", ["0.weight: o/tp i", "1: b o/tp"], inputs=inputs, rules=file)
    assert str(found.modules["1"]) == "_=4 _=16/tp"
