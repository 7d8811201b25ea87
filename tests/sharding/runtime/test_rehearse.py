"""What a rehearsal finds in the code of a model: sizes of parts, and what no runtime can do."""

# ruff: noqa: N803  a tensor carries its dims in its name

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from tangram.layout import Mesh
from tangram.sharding.derive.marks import Mark
from tangram.sharding.derive.of_model import derive_whole, graph_of
from tangram.sharding.runtime.program import Program
from tangram.sharding.runtime.rehearse import rehearsed


class Code(nn.Module):
    """Two products around some code."""

    def __init__(self, code: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.code = code
        self.up = nn.Linear(8, 16, bias=False)
        self.down = nn.Linear(16, 8, bias=False)

    def forward(self, x_BSH: Tensor) -> Tensor:
        return self.down(self.code(self.up(x_BSH)))


def program_of(code: Callable[[Tensor], Tensor], *marks: str) -> Program:
    model, inputs = Code(code), {"x_BSH": torch.zeros(2, 4, 8)}
    graph = graph_of(model, inputs, torch.float32)
    found = derive_whole(graph, [Mark.parse(mark) for mark in marks], Mesh.parse("tp=2"))
    return rehearsed(found, model, inputs, torch.float32)


def replaced(program: Program) -> list[tuple[str, str]]:
    """The functions whose operators run in their stead, and why."""
    actions = [(key, action) for own in program.actions.values() for key, action in own.items()]
    return [(name, action.why) for (_, name, _), action in actions if action.why]


COLUMNS = ("up.weight: f/tp h", "down.weight: h f/tp")


def _heads(x: Tensor) -> Tensor:
    return torch.tanh(x.view(*x.shape[:-1], -1, 4)).flatten(-2)


def _fixed_heads(x: Tensor) -> Tensor:
    return torch.tanh(x.view(2, 4, 4, 4)).flatten(-2)


def _fixed_tail(x: Tensor) -> Tensor:
    return torch.tanh(x.view(2, -1, 4, 4)).flatten(-2)


def _range(x: Tensor) -> Tensor:
    return x * torch.arange(x.shape[-1])


def _divided(x: Tensor) -> Tensor:
    return x / x.shape[-1]


def _in_place(x: Tensor) -> Tensor:
    y = x.clone()
    y += 1
    return y


def test_sizes_that_follow_from_parts_need_nothing() -> None:
    program = program_of(_heads, *COLUMNS)
    assert program.inside == 0
    assert {program.found.folded.graph.runs[run].module for run in program.borders} == {"down"}


@pytest.mark.parametrize(
    ("code", "function", "why"),
    [
        (_fixed_heads, "view", "it fails on a part"),
        (_fixed_tail, "view", "it gives (2, 2, 4, 4) on a part, not (2, 4, 2, 4)"),
        (_range, "arange", "arange gives (8,) on a part, not (16,)"),
        (_divided, "div", "div.Tensor is told other=8 on a part, not 16"),
    ],
)
def test_sizes_that_do_not_are_seen(code: Callable[[Tensor], Tensor], function: str, why: str) -> None:
    assert [(name, said.startswith(why)) for name, said in replaced(program_of(code, *COLUMNS))] == [(function, True)]


def test_what_is_written_in_place_stays_where_it_lies() -> None:
    assert replaced(program_of(_in_place, *COLUMNS)) == []
