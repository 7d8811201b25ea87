"""What may stand in a model's code, without ranks: nobody's marks, layouts that are asked for, and mistakes."""

from __future__ import annotations

import re
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.library import custom_op

from tangram.errors import UserError
from tangram.layout import Layout, Mesh
from tangram.sharding.derive.collectives_between import Label
from tangram.sharding.derive.derive import ConflictError
from tangram.sharding.derive.layouts import layout_of as layout_from
from tangram.sharding.derive.layouts import value_layout
from tangram.sharding.derive.marking.marks import Mark, noted
from tangram.sharding.derive.of_model import derive_model, graph_of
from tangram.sharding.derive.problem.states import cut
from tangram.sharding.derive.transitions import Change
from tangram.sharding.eager import api, layout_of, mark, relayout
from tangram.sharding.eager.api import marks_in
from tangram.sharding.eager.session import Eager, Mode, ParameterPart
from tangram.sharding.eager.sharded_tensor import ShardedTensor

HERE = "test_incode.py:"


def _own(x: Tensor, change: Change, trained: bool) -> Tensor:
    """What the first rank can do by itself; what needs the others is no part of these tests."""
    for _, source, target in change:
        if (source.kind, target.kind) == ("same", "cut"):
            x = x.chunk(2, target.dim)[0]
        else:
            assert (source.kind, target.kind) in {("same", "several"), ("several", "same")}, "a test needs other ranks"
    return x


def session(mesh: str = "tp=2") -> Eager:
    return Eager(Mesh.parse(mesh), 0, _own, lambda parameter: parameter)


@contextmanager
def running(one: Eager | None = None) -> Generator[Eager]:
    """The first of two ranks runs."""
    one = one or session()
    token = api.current.set(one)
    try:
        with Mode(one):
            yield one
    finally:
        api.current.reset(token)


X = torch.randn(4, 6, 8)


# ---------------------------------------------------------------- what is right


def test_outside_of_any_mesh_marks_do_nothing() -> None:
    assert mark(X, "a b/tp c") is X
    assert relayout(X, "a b/tp c") is X


def test_layouts_can_be_asked_for_and_follow_the_operators() -> None:
    with running():
        x = relayout(X, "a b (2 c/tp)")
        assert isinstance(x, ShardedTensor)
        assert layout_of(x) == Layout.parse("_=4 _=6 (_=2 _=4/tp)")
        assert str(layout_of(x.transpose(1, 2).exp())) == "_=4 (_=2 _=4/tp) _=6"
        assert str(layout_of(torch.ones(5, 6) @ x)) == "_=4 _=5 (_=2 _=4/tp)"
        assert str(layout_of(x.sum(2))) == "_=4 _=6 sum:tp"
        assert str(layout_of(X)) == "_=4 _=6 _=8"
        assert (x.shape, x.part.shape) == ((4, 6, 8), (4, 6, 4))
        assert "(_=2 _=4/tp)" in repr(x)


def test_sizes_are_those_of_the_whole() -> None:
    with running():
        x = mark(X, "a b/tp c")
        assert (len(x), x.shape[1], x.numel(), x.stride()) == (4, 6, 192, X.stride())
        assert str(layout_of(x + torch.arange(x.shape[1])[:, None])) == "_=4 _=6/tp _=8"
        assert str(layout_of(x.view(x.shape[0], -1, 2, 4))) == "_=4 _=6/tp _=2 _=4"


def test_a_mark_is_on_the_tensor_itself_and_a_relayout_on_what_it_gives() -> None:
    with running():
        x = relayout(X, "a b c") * 1
        y = relayout(x, "a b/tp c")
        assert (str(layout_of(x)), str(layout_of(y))) == ("_=4 _=6 _=8", "_=4 _=6/tp _=8")
        mark(x, "a/tp b c")
        assert str(layout_of(x)) == "_=4/tp _=6 _=8"


def test_a_layout_can_be_asked_for_after_the_session() -> None:
    with running():
        x = mark(X, "a b/tp c")
    assert str(layout_of(x * 2)) == "_=4 _=6/tp _=8"


def test_modules_and_parameters_keep_their_marks() -> None:
    model = nn.Sequential(mark(nn.Linear(4, 4), "b/tp h"), nn.Linear(4, 4))
    mark(model[1].weight, "o/tp i")
    found = marks_in(model)
    assert [(one.pattern, str(one.layout)) for one in found] == [("0", "b/tp h"), ("1.weight", "o/tp i")]
    assert all(HERE in str(one) for one in found)


class Net(nn.Module):
    """With what its forward does to what its first layer gives."""

    def __init__(self, act: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.up, self.down, self.act = nn.Linear(8, 16), nn.Linear(16, 8), act

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.act(self.up(x))).sum(1)


def derived(act: Callable[[Tensor], Tensor], marks: str = "up.weight: f/tp h") -> Any:
    graph = graph_of(Net(act), {"x": X}, torch.float32)
    return derive_model(graph, [Mark.parse(marks)] if marks else [], Mesh.parse("tp=2"))


def test_a_capture_carries_marks_and_lines() -> None:
    found = derived(lambda h: relayout(mark(h, "b s h/tp").relu(), "b s/tp h"))
    graph = found.folded.graph
    one, other = noted(graph)
    assert re.fullmatch(r'mark\(…, "b s h/tp"\) in .*test_incode.py:\d+', str(one))
    assert other.pattern == "relayout"
    assert {str(value_layout(found, v)) for v in (one.on(graph) or {}).values()} == {"_=4 _=6 _=16/tp"}
    assert {str(value_layout(found, v)) for v in (other.on(graph) or {}).values()} == {"_=4 _=6/tp _=16"}


def test_what_needs_other_parts_is_cut_by_a_capture_and_not_as_it_runs() -> None:
    found = derived(lambda h: relayout(relayout(h, "b s/tp h").cumsum(1), "b s/tp h"), "")
    graph = found.folded.graph
    (scan,) = [i for i, node in enumerate(graph.nodes) if "cumsum" in node.operator.name()]
    assert found.axes[0].communication[scan].label == Label("{dim}0")
    with running():
        x = relayout(X, "a b c/tp")
        assert str(layout_of(x.cumsum(1))) == "_=4 _=6 _=8/tp"


# ---------------------------------------------------------------- mistakes


@custom_op("tangram_tests::odd", mutates_args=())
def odd(x: Tensor) -> Tensor:
    return x * 2


odd.register_fake(torch.empty_like)


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0] * 2


class Kind(Tensor):
    """Some library's own."""


def _backward_of_many(x: Tensor) -> None:
    relayout(torch.ones(4, requires_grad=True) * 1, "a").backward()


MISTAKES: dict[str, tuple[Callable[[Tensor], object], str]] = {
    "unreadable": (lambda x: mark(x, "a b) c"), r'the layout of mark\(…, "a b\) c"\) cannot be read at'),
    "other dims": (lambda x: mark(x, "a b/tp"), r'mark\(…, "a b/tp"\) in .*: .*2'),
    "unknown axis": (lambda x: relayout(x, "a b/cp c"), r"names the axis cp, which is none of the mesh `tp=2`"),
    "uneven": (
        lambda x: mark(x[:, :5], "a b/tp c"),
        r"dim 1 of \[4, 5, 8\] cannot be cut into even parts over tp",
    ),
    "uneven blocks": (lambda x: mark(x, "a (2 b/tp) (8 c/tp)"), r"tp"),
    "index map": (lambda x: mark(x, "a b/tp:zigzag c"), r"dim 1 of .* cannot be cut into even parts over tp of 2"),
    "contradiction": (
        lambda x: mark(mark(x, "a b/tp c"), "a b c/tp"),
        r'mark\(…, "a b/tp c"\) in .* and mark\(…, "a b c/tp"\) in .* contradict each other over tp',
    ),
    "no tensor": (lambda x: relayout([x], "a"), r"relayout is for tensors, and not for a list"),  # pyright: ignore[reportArgumentType]
    "no tensor to mark": (lambda x: mark(None, "a"), r"mark is for tensors, and not for None"),  # pyright: ignore[reportArgumentType, reportCallIssue]
    "a module": (lambda x: relayout(nn.Linear(2, 2), "a b"), r"Linear is a module: mark it"),  # pyright: ignore[reportArgumentType]
    "a module late": (lambda x: mark(nn.Linear(2, 2), "a b/tp"), r"mark a module before the model runs in parallel"),
    "no text": (lambda x: mark(x, 3), r"takes a layout as text, .* and not a int"),  # pyright: ignore[reportArgumentType]
    "a placement typed": (
        lambda x: mark(x, "Shard(1)"),
        r'takes a layout as text, and not Shard\(1\): write "a b/tp c"',
    ),
    "placements typed": (lambda x: relayout(x, "[Shard(dim=0)]"), r'and not \[Shard\(0\)\]: write "a/tp b c"'),
    "a partition typed": (lambda x: mark(x, 'P("tp", None)'), r"and not P\('tp', None\): write \"a/tp b c\""),
    "no layout": (lambda x: layout_of(3), r"layout_of is for tensors, and not for a int"),  # pyright: ignore[reportArgumentType]
    "no rule": (lambda x: odd(mark(x, "a b/tp c")), r"there is no rule for tangram_tests.odd: `tangram shard discover"),
    "values": (lambda x: mark(x, "a b/tp c").tolist(), r"a value is read of what lies as `_=4 _=6/tp _=8`: relayout"),
    "as numpy": (lambda x: mark(x, "a b/tp c").numpy(), r"a value is read of what lies as"),
    "sizes by value": (lambda x: mark(x, "a b/tp c").nonzero(), r"a value is read of what lies as"),
    "memory": (lambda x: mark(x, "a b/tp c").data_ptr(), r"data_ptr needs a tensor with memory of its own"),
    "an attribute set": (lambda x: setattr(mark(x, "a b/tp c"), "data", x), r"needs a tensor with memory of its own"),
    "a function of autograd": (
        lambda x: Doubled.apply(relayout((x * 1).requires_grad_(), "a b/tp c")) * 2,
        r"an autograd.Function has made this of a part: write it as functions of torch",
    ),
    "a result given": (lambda x: torch.exp(mark(x, "a b/tp c"), out=torch.empty(4, 6, 8)), r"leave `out=` away"),
    "another kind of tensor": (lambda x: mark(x, "a b/tp c") * x.as_subclass(Kind), r"a Kind comes from code that ran"),
    "backward of many": (_backward_of_many, r"backward begins at one number: take a mean or a sum of it"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_one_sentence_with_their_line(name: str) -> None:
    act, said = MISTAKES[name]
    with running(), pytest.raises(UserError, match=said) as raised:
        act(X.clone())
    assert HERE in str(raised.value)
    assert "\n" not in str(raised.value)


def test_two_axes_in_one_dim_have_to_divide_it_together() -> None:
    with running(session("dp=2 tp=2")), pytest.raises(UserError, match="over dp and tp in parts of unlike sizes"):
        mark(X, "a b/dp/tp c")


def test_what_is_not_marked_has_no_layout_outside() -> None:
    with pytest.raises(UserError, match="layout_of works while each operator is derived as it runs"):
        layout_of(X)


def _held(one: Eager, states: str) -> nn.Parameter:
    part = nn.Parameter(torch.randn(4, 8))
    one.parameters[part] = ParameterPart("up.weight", (4, 8), {"tp": cut(0) if states == "rows" else cut(1)})
    return part


def test_a_parameter_lies_since_the_model_was_made_parallel() -> None:
    one = session()
    weight = nn.Parameter(torch.randn(4, 8))
    with (
        running(one),
        pytest.raises(UserError, match="a parameter lies as `_=4 _=8` since the model was made"),
    ):
        mark(weight, "o/tp i")
    with running(one):
        assert mark(weight, "o i") is weight


def test_what_a_parameter_cannot_do_where_it_lies() -> None:
    one = session()
    weight, other = _held(one, "rows"), _held(one, "columns")
    with running(one), pytest.raises(UserError, match=r"mul.Tensor cannot use up.weight \(`_=4/tp _=8`\)"):
        _ = weight * other


def test_marks_that_contradict_each_other_in_a_capture() -> None:
    with pytest.raises(ConflictError) as raised:
        derived(lambda h: mark(mark(h, "b s h/tp"), "b s/tp h"))
    assert len(re.findall(r"mark\(…, .*?\) in \S*test_incode.py:\d+", str(raised.value))) == 2


def test_a_mark_in_a_capture_that_does_not_fit() -> None:
    with pytest.raises(UserError, match=r'mark\(…, "b s"\) in \S*test_incode.py:\d+` does not fit'):
        derived(lambda h: mark(h, "b s"))
    with pytest.raises(UserError, match=r"names the axis cp"):
        derived(lambda h: relayout(h, "b s h/cp"))
    with pytest.raises(UserError, match=r'test_incode.py:\d+: the layout of mark\(…, "b s/"\) cannot be read'):
        derived(lambda h: mark(h, "b s/"))


def test_layouts_are_written_alike() -> None:
    with running():
        assert layout_of(mark(X, "a b/tp c")) == layout_from((4, 6, 8), {"tp": cut(1)})
