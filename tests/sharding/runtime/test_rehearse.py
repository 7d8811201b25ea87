"""What a rehearsal finds in the code of a model: sizes of parts, and what no runtime can do."""

# ruff: noqa: N803  a tensor carries its dims in its name

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from tangram.errors import UserError
from tangram.layout import Mesh
from tangram.sharding.derive.marking.marks import Mark
from tangram.sharding.derive.of_model import derive_model, graph_of
from tangram.sharding.derive.problem.states import SAME, cut, part_dim
from tangram.sharding.derive.transitions import StateStep
from tangram.sharding.runtime import operators
from tangram.sharding.runtime.dry_check import _Rehearsal, rehearsed
from tangram.sharding.runtime.program import OpAction, Program
from tangram.sharding.runtime.writes import lost_views

SOME = (StateStep("tp", SAME, cut(2)),)


class Code(nn.Module):
    """Two products around some code."""

    def __init__(self, code: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.code = code
        self.up = nn.Linear(8, 16, bias=False)
        self.down = nn.Linear(16, 8, bias=False)

    def forward(self, x_BSH: Tensor) -> Tensor:
        return self.down(self.code(self.up(x_BSH)))


class BesideCode(Code):
    """Two products, and code beside them that looks at what no operator takes."""

    def forward(self, x_BSH: Tensor) -> Tensor:
        like = torch.zeros_like(x_BSH)
        found = self.down(self.up(x_BSH))
        return found if like.shape[1] == 4 else self.code(found)


def program_of(code: Callable[[Tensor], Tensor], *marks: str, mesh: str = "tp=2", kind: type[Code] = Code) -> Program:
    model, inputs = kind(code), {"x_BSH": torch.zeros(2, 4, 8)}
    graph = graph_of(model, inputs, torch.float32)
    found = derive_model(graph, [Mark.parse(mark) for mark in marks], Mesh.parse(mesh))
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
    assert {program.derived.folded.graph.runs[run].module for run in program.borders} == {"down"}


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


def _attention(x: Tensor, scale: float | None) -> Tensor:
    heads = x.view(2, 4, -1, 4).transpose(1, 2)
    mask = torch.ones(4, 4, dtype=torch.bool).tril()
    found = nn.functional.scaled_dot_product_attention(heads, heads, heads, attn_mask=mask, scale=scale)
    return found.transpose(1, 2).flatten(-2)


@pytest.mark.parametrize("sized", [False, True])
def test_attention_that_is_done_by_its_operators_needs_its_mask(sized: bool) -> None:
    program = program_of(lambda x: _attention(x, 1.0 / x.shape[-1] if sized else None), *COLUMNS)
    assert ("scaled_dot_product_attention" in dict(replaced(program))) == sized
    assert program.cuts_queries == sized


def test_what_is_written_in_place_stays_where_it_lies() -> None:
    assert replaced(program_of(_in_place, *COLUMNS)) == []


def _more_on_a_part(x: Tensor) -> Tensor:
    return torch.tanh(x) if x.shape[-1] < 16 else x


def _less_on_a_part(x: Tensor) -> Tensor:
    return torch.tanh(x) if x.shape[-1] == 16 else x


def _fails_on_a_part(x: Tensor) -> Tensor:
    return torch.tanh(x if x.shape[-1] == 16 else x.expand(2, 4, 16))


def _refuses_a_part(x: Tensor) -> Tensor:
    if x.shape[-1] != 16:
        raise ValueError("16 are needed")
    return torch.tanh(x)


@pytest.mark.parametrize("code", [_more_on_a_part, _less_on_a_part, _fails_on_a_part, _refuses_a_part])
def test_code_that_takes_another_way_on_a_part_sees_the_whole(code: Callable[[Tensor], Tensor]) -> None:
    program = program_of(code, *COLUMNS)
    modules = {program.derived.folded.graph.runs[run].module: border for run, border in program.borders.items()}
    ((step,),) = modules["up"].gives.values()
    assert (step.source, part_dim(step.target)) == (cut(2), None)


def test_what_no_operator_takes_is_whole_where_code_asks_for_its_shape() -> None:
    """As of the zeros of a stage, of which the model makes its masks."""
    program = program_of(torch.tanh, "x_BSH: b s/tp h", kind=BesideCode)
    ((action,),) = (own.values() for own in program.actions.values())
    ((step,),) = action.gives.values()
    assert (action.why, step.source, part_dim(step.target)) == ("", cut(1), None)


def _repeated(x: Tensor) -> Tensor:
    ones = torch.ones(1, 4, 16)
    return ones if x.shape[0] == 1 else ones.expand(x.shape[0], -1, -1)


def test_rows_that_are_repeated_for_nobodys_part_need_not_be() -> None:
    program = program_of(lambda x: x * _repeated(x).amax(0), "up: b/tp s f")
    assert not program.derived.replicated
    assert replaced(program) == []


def test_rows_that_are_repeated_to_be_cut_have_to_be() -> None:
    with pytest.raises(UserError, match="expand is not called on a part"):
        program_of(lambda x: x * _repeated(x), "up: b/tp s f")


def test_what_it_sees_whole_over_one_axis_may_be_cut_over_another() -> None:
    program = program_of(_more_on_a_part, *COLUMNS, "up: b s/cp f", mesh="cp=2 tp=2")
    modules = {program.derived.folded.graph.runs[run].module: border for run, border in program.borders.items()}
    ((step,),) = modules["up"].gives.values()
    assert (step.axis, step.source, part_dim(step.target)) == ("tp", cut(2), None)


@pytest.mark.parametrize(
    ("code", "why"),
    [
        (_more_on_a_part, "tanh is called on a part only"),
        (_less_on_a_part, "tanh is not called on a part"),
        (_fails_on_a_part, "The expanded size of the tensor"),
        (_refuses_a_part, "ValueError: 16 are needed"),
    ],
)
def test_where_a_mark_cuts_what_it_sees_it_is_refused(code: Callable[[Tensor], Tensor], why: str) -> None:
    with pytest.raises(UserError, match=rf"^Code cannot be run on parts: .*test_rehearse.py:\d+: {why}"):
        program_of(code, *COLUMNS, "up: b s f/tp")


def _written_in_part(x: Tensor) -> Tensor:
    y = torch.zeros_like(x)
    y[:, 1:] = x[:, 1:]
    return y


@pytest.mark.parametrize("moved", ["what is written", "what a view is made of", "a view of it", "the view on a part"])
def test_what_is_written_through_a_view_is_not_lost(moved: str) -> None:
    """LED's windows: `y[:, 1:] = x` on a moved y, or where the view is made otherwise, would write into another one."""
    program = program_of(_written_in_part, *COLUMNS)
    graph = program.derived.folded.graph
    number = next(i for i, call in enumerate(graph.calls) if call.function == "__setitem__")
    call = graph.calls[number]
    (base, view) = next(node.renews for node in graph.nodes if node.renews is not None)
    write = next(i for i in range(call.first, call.stop) if graph.nodes[i].operator == torch.ops.aten.copy_.default)
    planted = {
        "what is written": OpAction(number, why="planted", before={(write, 0): SOME}),
        "what a view is made of": OpAction(number, takes={[*call.takes].index(base): SOME}),
        "a view of it": OpAction(number, why="planted", after={graph.nodes[view].results[0] or 0: SOME}),
        "the view on a part": OpAction(number, why="planted"),
    }[moved]
    assert not [*lost_views(program, lambda _: True)]
    program.actions.setdefault(call.run, {})[call.line, call.function, call.turn] = planted
    ((said, run),) = lost_views(program, lambda i: i != view or moved != "the view on a part")
    assert (run, "what is written into a view of a tensor would be lost" in said) == (call.run, True)


def _made_of_a_size(x: Tensor) -> Tensor:
    return x + x.new_zeros(2, 4, 16)  # as keys of MLA are put together


def test_what_only_says_the_type_may_have_any_size() -> None:
    program = program_of(_made_of_a_size, *COLUMNS)
    calls = program.derived.folded.graph.calls
    (number,) = (i for i, call in enumerate(calls) if call.function == "new_zeros")
    rehearsal, key = _Rehearsal(program, 0), (calls[number].line, "new_zeros", 0)
    given = (torch.zeros(2, 4, 3), *(None for _ in calls[number].takes[1:]))
    rehearsal.around(calls[number].run, key, torch.Tensor.new_zeros, given, {}, OpAction(number, why="planted"))
    assert rehearsal.unfit is None


def test_operators_in_a_function_s_stead_get_the_sizes_that_were_derived() -> None:
    """Planted: a tensor is not brought to how an operator needs it."""
    program = program_of(_fixed_tail, *COLUMNS)
    (call,) = (call for call in program.derived.folded.graph.calls if call.function == "tanh")
    rehearsal = _Rehearsal(program, 0)
    rehearsal.met |= {*rehearsal.calls.values()}
    rehearsal.around(call.run, (call.line, "tanh", 0), torch.tanh, (torch.zeros(2, 4, 4, 4),), {}, OpAction(0, why="x"))
    assert "tanh is given (2, 4, 4, 4) on a part, not (2, 4, 2, 4)" in str(rehearsal.unfit)


@pytest.mark.parametrize(
    ("raised", "seen"),
    [
        (RuntimeError("sizes differ.\nmore"), UserError),
        (ValueError("sizes differ"), UserError),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), RuntimeError),
        (torch.OutOfMemoryError("sizes differ"), torch.OutOfMemoryError),
        (torch.distributed.DistBackendError("sizes differ"), torch.distributed.DistBackendError),
    ],
)
def test_what_an_operator_refuses_of_parts_is_one_sentence(
    raised: Exception, seen: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refusing(*_: object, **__: object) -> None:
        raise raised

    program = program_of(_fixed_tail, *COLUMNS)
    call = next(call for call in program.derived.folded.graph.calls if call.function == "view")
    number = program.derived.folded.graph.calls.index(call)
    monkeypatch.setattr(operators, "run", refusing)
    whole = [torch.zeros(2, 4, 8) if v is not None else None for v in call.takes]
    with pytest.raises(seen) as error:
        operators.Operators(program.derived, 1).instead(OpAction(number), whole, lambda x, _: x)
    assert type(error.value) is seen
    if seen is UserError:
        assert re.fullmatch(
            r".*test_rehearse.py:\d+: view cannot be run on the parts \(2, 4, 8\) of rank 1: sizes differ",
            str(error.value),
        )


class Derivative(Code):
    """What the code makes of both products, with biases, and the tensor itself."""

    def __init__(self, code: Callable[..., Tensor]) -> None:
        super().__init__(code)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x_BSH: Tensor) -> Tensor:
        return self.code(self, x_BSH)


def _within(module: Code, x: Tensor) -> Tensor:
    return module.down(torch.tanh(module.up(x)))


def _by_autograd(module: Code, x: Tensor) -> Tensor:
    with torch.enable_grad():
        x = x.detach().requires_grad_(True)
        return torch.autograd.grad(_within(module, x).sum(), x, create_graph=True)[0]


def _by_transform(module: Code, x: Tensor) -> Tensor:
    return torch.func.grad(lambda x: _within(module, x).sum())(x)


@pytest.mark.parametrize(
    ("code", "why"),
    [
        (_by_autograd, "torch.autograd.grad goes back through layers that lie in parts"),
        (_by_transform, "a tensor would move between ranks within a transform of torch.func"),
    ],
)
@pytest.mark.parametrize("mark", COLUMNS)
def test_derivatives_and_transforms_over_parts_are_refused_by_their_line(
    code: Callable[[Code, Tensor], Tensor], why: str, mark: str
) -> None:
    model, inputs = Derivative(code), {"x_BSH": torch.zeros(2, 4, 8)}
    found = derive_model(graph_of(model, inputs, torch.float32), [Mark.parse(mark)], Mesh.parse("tp=2"))
    with pytest.raises(UserError, match=rf"test_rehearse.py:\d+: {why}"):
        rehearsed(found, model, inputs, torch.float32)
