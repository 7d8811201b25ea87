"""Operators over a cut dim by their decompositions: small sums and maxima move, never the dim."""

import json
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tangram.layout import Layout, LayoutError, Mesh
from tangram.sharding import compositions
from tangram.sharding.ops import decompose
from tangram.sharding.ops.calls import OpCall
from tangram.sharding.ops.decompose import decomposition
from tangram.sharding.ops.rule_table import NoRuleError, RuleTable, builtin, parse_lines
from tangram.sharding.proof import routes as proof
from tangram.sharding.proof.execute import run_reference
from tangram.sharding.proof.routes import rms_norm_backward
from tangram.sharding.proof.simulate import SimTensor, SimWorld, cut, together
from tangram.sharding.propagation.routes import StepRoute, decomposed, route

aten = torch.ops.aten
ROWS = 5


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def way(
    operator: Any, args: tuple[Any, ...], texts: Sequence[str | None], mesh: str = "x=4", **named: Any
) -> StepRoute:
    layouts = [None if text is None else Layout.parse(text) for text in texts]
    return route(builtin(), OpCall.of(operator, args, {}), layouts, Mesh.parse(mesh), **named)


LOSSES: dict[str, dict[str, Any]] = {
    "mean": {},
    "sum": {"reduction": "sum", "ignore_index": 1},
    "none": {"reduction": "none"},
    "weights": {"weight": True},
    "smoothed": {"label_smoothing": 0.2},
    "weights smoothed": {"weight": True, "label_smoothing": 0.2, "ignore_index": 1},
}


def loss(x: Tensor, target: Tensor, weight: Tensor, options: dict[str, Any]) -> Tensor:
    own: dict[str, Any] = {**options, "weight": weight} if "weight" in options else options
    return F.cross_entropy(x, target, **own)


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("layout", ["b v/x", "b v/x/y", "b/y v/x", "b v/y:strided[2]"])
def test_cross_entropy_over_a_cut_vocabulary_moves_what_the_batch_is(name: str, layout: str) -> None:
    moved: list[float] = []
    for vocabulary in (59, 480):
        torch.manual_seed(0)
        x = torch.randn(ROWS, vocabulary, dtype=torch.float64).requires_grad_()
        target, weight = torch.randint(vocabulary, (ROWS,)), torch.rand(vocabulary, dtype=torch.float64)
        target[0] = 1
        want = loss(x, target, weight, LOSSES[name])
        cotangent = torch.randn_like(want)
        world = SimWorld(Mesh.parse("x=2 y=3"), builtin())
        given = cut(x, Layout.parse(layout).bind(tuple(x.shape)), world)
        found = loss(given, target, weight, LOSSES[name])
        assert isinstance(found, SimTensor)
        got = together(found)
        assert torch.allclose(got, want)
        expected, gradient = (torch.autograd.grad(one, x, cotangent)[0] for one in (want, got))
        assert torch.allclose(gradient, expected)
        moved.append(world.moved / world.mesh.size)
    assert moved[0] == moved[1], "nothing that moves grows with the vocabulary"
    assert 0 < moved[1] <= 10 * ROWS * 8, "a few numbers a row"


ACROSS: dict[str, tuple[Any, Callable[[int], tuple[Any, ...]], list[str | None]]] = {
    "softmax": (aten._softmax.default, lambda n: (meta(8, n), 1, False), ["b v/x"]),
    "log_softmax": (aten._log_softmax.default, lambda n: (meta(8, n), -1, False), ["b v/x"]),
    "its gradient": (
        aten._log_softmax_backward_data.default,
        lambda n: (meta(8, n), meta(8, n), 1, torch.float32),
        ["b v/x", "b v/x"],
    ),
    "logsumexp": (aten.logsumexp.default, lambda n: (meta(8, n), [1]), ["b v/x"]),
    "nll_loss": (
        aten.nll_loss_forward.default,
        lambda n: (meta(8, n), meta(8, dtype=torch.int64), meta(n), 1, -100),
        ["b v/x", None, None],
    ),
    "gradient of nll_loss": (
        aten.nll_loss_backward.default,
        lambda n: (meta(), meta(8, n), meta(8, dtype=torch.int64), None, 1, -100, meta()),
        ["", "b v/x", None, None, ""],
    ),
    "layer_norm": (
        aten.native_layer_norm.default,
        lambda n: (meta(8, n), [n], meta(n), meta(n), 1e-5),
        ["b h/x", "h/x", None],
    ),
    "rms_norm": (aten._fused_rms_norm.default, lambda n: (meta(8, n), [n], meta(n), 1e-5), ["b h/x", None]),
    "group_norm": (
        aten.native_group_norm.default,
        lambda n: (meta(2, 8, n), meta(8), meta(8), 2, 8, n, 2, 1e-5),
        ["b c n/x", None, None],
    ),
    "var": (aten.var.correction, lambda n: (meta(8, n), [1]), ["b h/x"]),
    "norm": (aten.linalg_vector_norm.default, lambda n: (meta(8, n), 3, [1]), ["b h/x"]),
    "amax": (aten.amax.default, lambda n: (meta(8, n), [1]), ["b h/x"]),
    "argmax": (aten.argmax.default, lambda n: (meta(8, n), 1), ["b h/x"]),
    "max": (aten.max.dim, lambda n: (meta(8, n), 1), ["b h/x"]),
}


@pytest.mark.parametrize("name", ACROSS)
def test_bytes_do_not_grow_with_the_cut_dim(name: str) -> None:
    operator, arguments, texts = ACROSS[name]
    small, large = (way(operator, arguments(n), texts) for n in (1 << 9, 1 << 14))
    assert not large.direct
    assert small.nbytes + small.due == large.nbytes + large.due < 16 * 8 * 8
    assert large.memory is not None
    assert large.flops > small.flops
    assert large.instead is None or large.instead > 8 * (1 << 14)


def test_what_moves_nothing_runs_as_it_is() -> None:
    found = way(aten._softmax.default, (meta(8, 64), 1, False), ["b/x v"])
    assert found.direct
    assert (found.nbytes, found.instead) == (0, None)
    tie = way(aten._softmax.default, (meta(8, 2), 1, False), ["b v/x"], "x=2")
    assert tie.direct
    assert tie.nbytes <= (tie.instead or 0)


def test_a_route_is_told() -> None:
    found = way(aten._softmax.default, (meta(8, 64), 1, False), ["b v/x"], "x=2")
    lines = str(found).splitlines()
    assert lines[0].endswith("over x=2: in 6 steps, 64 B a rank, 1,024 B as it is")
    assert any("all-reduce over x 32 B" in line and "div" in line for line in lines)
    told = json.loads(json.dumps(found.as_json()))
    assert [step["operator"] for step in told["steps"]][1] == "amax"
    assert told["bytes"] == 64
    assert str(found.outputs[0]) == "b=8 v=64/x"
    plain = way(aten.mm.default, (meta(4, 6), meta(6, 8)), ["m/x k", None], "x=2")
    assert "as it is, 0 B a rank" in str(plain)


def test_what_is_left_pending_counts_as_reduced() -> None:
    """Else looking up rows of a cut dim, a pending sum of everything, would look free."""
    found = way(aten.embedding.default, (meta(64, 8), meta(3, dtype=torch.int64)), ["v/x d", None], "x=2")
    assert found.nbytes == 0
    assert found.due == 3 * 8 * 4


def test_a_pending_sum_is_reduced_once() -> None:
    call = OpCall.of(aten._softmax.default, (meta(8, 64), 1, False), {})
    found = decomposed(builtin(), call, [Layout.parse("b v sum:x")], Mesh.parse("x=2"))
    assert found is not None
    assert found.moved == {("all-reduce", "x"): 8 * 64 * 4}


def test_a_maximum_stays_pending_where_no_gradient_is_wanted() -> None:
    args, texts = (meta(8, 64), [1]), ["b v/x"]
    smooth = way(aten.amax.default, args, texts)
    plain = way(aten.amax.default, args, texts, differentiable=False)
    assert plain.direct
    assert str(plain.outputs[0]) == "b=8 max:x"
    assert not smooth.direct
    assert all("max" not in str(layout) for layout in smooth.outputs)


def test_errors_are_those_of_the_operator() -> None:
    with pytest.raises(NoRuleError, match="there is no rule for kthvalue"):
        route(RuleTable(), OpCall.of(aten.kthvalue.default, (meta(4), 1), {}), [None], Mesh.parse("x=2"))
    with pytest.raises(LayoutError, match="dims"):
        way(aten._softmax.default, (meta(8, 64), 1, False), ["b v/x c"])
    assert decomposition(OpCall.of(aten.exp.default, (meta(3),), {})) is None
    assert decomposition(OpCall.of(aten._softmax.default, (meta(3, 0), 1, False), {})) is None
    assert decomposition(OpCall.of(aten.var.correction, (meta(3, dtype=torch.complex64),), {})) is None


def test_a_row_of_nothing_but_minus_infinity_over_parts() -> None:
    x = torch.randn(4, 6, dtype=torch.float64)
    x[0], x[1, :3], x[2, 3:] = -torch.inf, -torch.inf, -torch.inf
    for call in (
        OpCall.of(aten._softmax.default, (x, 1, False), {}),
        OpCall.of(aten._safe_softmax.default, (x, 1), {}),
        OpCall.of(aten._log_softmax.default, (x, 1, False), {}),
        OpCall.of(aten.logsumexp.default, (x, [1]), {}),
    ):
        found = proof.check(call, [Layout.parse("a b/x")], Mesh.parse("x=2"), run_reference(call))
        assert found is None, str(found)


def test_batch_norm_in_training_is_of_the_whole_batch() -> None:
    torch.manual_seed(0)
    x = torch.randn(5, 3, 4, dtype=torch.float64).requires_grad_()
    plain, other = (torch.nn.BatchNorm1d(3, dtype=torch.float64) for _ in range(2))
    world = SimWorld(Mesh.parse("x=2"), builtin())
    for name, buffer in other.named_buffers():  # a tensor of its own, which is written
        setattr(other, name, cut(buffer, Layout.parse("...").bind(tuple(buffer.shape)), world))
    want, found = plain(x), other(cut(x, Layout.parse("b/x c s").bind((5, 3, 4)), world))
    assert torch.allclose(together(found), want)
    cotangent = torch.randn_like(want)
    gradients = [torch.autograd.grad(one, x, cotangent)[0] for one in (together(found), want)]
    assert torch.allclose(*gradients)
    assert torch.allclose(together(other.running_mean), plain.running_mean)
    assert torch.allclose(together(other.running_var), plain.running_var)
    assert not together(other.running_var).requires_grad
    assert world.moved / 2 == 2 * 3 * 8, "the mean and the variance of each channel"


# Random layouts: maps, several axes on a dim, brackets, what is pending.

DRAWN: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "softmax": (aten._softmax.default, (1, False)),
    "log_softmax": (aten._log_softmax.default, (0, False)),
    "logsumexp": (aten.logsumexp.default, ([0, 2], True)),
    "var_mean": (aten.var_mean.correction, ([1],)),
    "norm": (aten.linalg_vector_norm.default, (2, [0, 1])),
    "largest": (aten.linalg_vector_norm.default, (float("inf"), [2])),
    "argmin": (aten.argmin.default, (1,)),
    "max": (aten.max.dim, (-1,)),
    "amin": (aten.amin.default, ([1, 2],)),
}


def drawn_layout(generator: random.Random, shape: tuple[int, ...]) -> Layout:
    """A layout over x=2 y=3 z=2, of any kind."""
    axes = generator.sample(["x", "y", "z"], generator.randint(1, 3))
    dims = [f"d{i}" if n % 2 or generator.random() < 0.5 else f"(d{i} e{i}=2)" for i, n in enumerate(shape)]
    pending = ""
    for axis in axes:
        at = generator.randrange(len(shape))
        if not pending and generator.random() < 0.2:
            pending = f" sum:{axis}"
        elif "(" in dims[at] and generator.random() < 0.5 and "/" not in dims[at]:
            dims[at] = dims[at].replace(" ", f"/{axis} ", 1)
        else:
            dims[at] += f"/{axis}" + generator.choice(["", "", ":strided[2]", ":cyclic[1]", ":zigzag"])
    return Layout.parse(" ".join(dims) + pending)


@pytest.mark.parametrize("seed", range(40))
def test_random_layouts(seed: int) -> None:
    generator = random.Random(seed)
    operator, others = DRAWN[generator.choice(sorted(DRAWN))]
    shape = tuple(generator.choice([1, 3, 4, 6, 7]) for _ in range(3))
    torch.manual_seed(seed)
    x = torch.randn(shape, dtype=torch.float64)
    call = OpCall.of(operator, (x.round() if generator.random() < 0.3 else x, *others), {})
    layout = drawn_layout(generator, shape)
    found = proof.check(call, [layout], Mesh.parse("x=2 y=3 z=2"), run_reference(call))
    assert found is None, str(found)


# Mistakes that the proof must find.


def refuted(name: str, calls: list[OpCall], table: RuleTable | None = None) -> str:
    """Why the proof refutes a decomposition; nothing where it proves it."""
    found = proof.verdict(name, calls, table)
    assert found.cases
    assert (found.kind == "proved") == (not found.why)
    return found.why


def without_peak(x: Tensor, dim: list[int], keepdim: bool = False) -> Tensor:
    peak = torch.amax(x.detach(), dim, keepdim=True)
    return torch.log(torch.exp(x - peak).sum(dim, keepdim=keepdim))


def last_place(x: Tensor, dim: int, keepdim: bool = False) -> Tensor:
    there = x.detach() == torch.amax(x.detach(), [dim], keepdim=True)
    return torch.amax(torch.where(there, torch.arange(x.shape[dim]), -1), [dim], keepdim)


def unshared(x: Tensor, dim: list[int], keepdim: bool = False) -> Tensor:
    there = x == torch.amax(x.detach(), dim, keepdim=True)
    return torch.where(there, x, 0.0).sum(dim, keepdim=keepdim)


def overflowing(x: Tensor, dim: int, half_to_float: bool) -> Tensor:
    powers = torch.exp(x)
    return powers / powers.sum([dim], keepdim=True)


MISTAKES: dict[str, tuple[Callable[..., Tensor], Any, list[Any]]] = {
    "logsumexp": (without_peak, aten.logsumexp.default, [[1]]),
    "argmax": (last_place, aten.argmax.default, [1]),
    "amax": (unshared, aten.amax.default, [[1]]),
    "_softmax": (overflowing, aten._softmax.default, [1, False]),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_wrong_decomposition_is_refuted(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong, operator, others = MISTAKES[name]
    calls = [OpCall.of(operator, (torch.randn(4, 6, dtype=torch.float64), *others), {})]
    assert not refuted(name, calls)
    monkeypatch.setattr(compositions, "OWN", {**compositions.OWN, name: wrong})
    monkeypatch.setattr(decompose, "_KNOWN", {})
    assert refuted(name, calls)


def test_a_wrong_rule_of_a_step_is_refuted() -> None:
    calls = [OpCall.of(aten._softmax.default, (torch.randn(4, 6, dtype=torch.float64), 1, False), {})]
    line = "sum.dim_IntList : ... {dim} ... -> ... {dim:keepdim} ... sum:{dim} ; scale({dim})"
    wrong = builtin().with_lines(parse_lines(line))
    assert "differs" in refuted("_softmax", calls, wrong)
    untrue = builtin().with_lines(parse_lines("amax : ... {dim} ... -> ... {dim:keepdim} ... min:{dim}"))
    assert "differs" in refuted("_softmax", calls, untrue), "the powers of what is left of large numbers overflow"


@pytest.mark.parametrize("weighted", [True, False])
def test_the_gradients_of_an_rms_norm_by_hand_are_those_of_torch(weighted: bool) -> None:
    """What the steps of `_fused_rms_norm_backward` are compared with: no processor runs the operator."""
    x, w = torch.randn(4, 2, 6).double().requires_grad_(), torch.randn(6).double().requires_grad_()
    y = torch.randn(4, 2, 6).double()
    own = w if weighted else None
    wanted = torch.autograd.grad(torch.rms_norm(x, [6], own, 1e-5), [x, w] if weighted else [x], y)
    rstd = torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-5).detach()
    mask = [True, weighted]
    call = OpCall.of(torch.ops.aten._fused_rms_norm_backward.default, (y, x.detach(), [6], rstd, own, mask), {})
    found = [one for one in rms_norm_backward(call) if one is not None]
    assert len(found) == len(wanted)
    assert all(torch.allclose(one, other) for one, other in zip(found, wanted, strict=True))


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_a_loss_by_chunks_gives_its_gradients_in_steps(reduction: str) -> None:
    """Over a cut batch, and a cut vocabulary: what it computes ahead is what torch computes ahead."""
    chunked = pytest.importorskip("torch.nn.modules.linear_cross_entropy")._linear_cross_entropy_batch_chunked
    operator = chunked._opoverload
    x, linear, bias, weight = (torch.randn(*shape).double() for shape in ((8, 3), (5, 3), (5,), (5,)))
    some = (reduction, 3, 0.0, 2, "compact", torch.float64, True, True, True, True)
    call = OpCall.of(operator, (x, linear, torch.arange(8) % 5, bias, weight.abs(), *some), {})
    tried = 0
    for layouts, mesh in proof.ways(call, (2, 3)):
        assert proof.check(call, layouts, mesh, proof._expected(call)) is None
        tried += 1
    assert tried > 10
    hidden, rows = 4096, 64
    big = [meta(*shape, dtype=torch.float64) for shape in ((rows, hidden), (5000, hidden))]
    call = OpCall.of(operator, (*big, meta(rows, dtype=torch.int64), None, None, *some[:-1], False), {})
    way = route(builtin(), call, [Layout.parse("b h"), Layout.parse("v/x h"), None, None, None], Mesh.parse("x=2"))
    assert way.nbytes < 3 * rows * hidden * 8  # of the batch, and nothing of the vocabulary's size
