"""Wrong operators are called wrong and right ones are not; what is called true is what float64 gives."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from bench._accuracy.attention import ATTENTION
from bench._accuracy.copies import CASTS, MOVES, Move, moved, ordered, square
from bench._accuracy.judge import CLASSES, Outcome, judge
from bench._accuracy.laws import LAWS, drawn, specials
from bench._accuracy.operator import Case, Operator, exact_sum, inputs
from bench._accuracy.pointwise import POINTWISE
from bench._accuracy.products import PRODUCTS
from bench._accuracy.reductions import REDUCTIONS
from tangram.kernels.lab.formats import BF16, FP16, FP32

OPERATORS = {one.name: one for one in (*POINTWISE, *REDUCTIONS, *PRODUCTS, *ATTENTION)}
BF, HALF, SINGLE = torch.bfloat16, torch.float16, torch.float32
Function = Callable[..., Tensor]


def tried(name: str, call: Function, case: Case, dtype: torch.dtype) -> Outcome:
    one = OPERATORS[name]
    exact, given = inputs(one, case, dtype)
    return judge(call(*given), one.truth(*exact))  # type: ignore[call-arg]


def by_steps(x: Tensor) -> Tensor:
    """silu, each step rounded to the type."""
    return x / (1 + torch.exp(-x))


def products_by_steps(a: Tensor, b: Tensor) -> Tensor:
    total = torch.zeros(a.shape[0], b.shape[1], dtype=a.dtype)
    for k in range(a.shape[1]):
        total = total + a[:, k : k + 1] * b[k]
    return total


def sum_by_steps(x: Tensor) -> Tensor:
    total = torch.zeros(x.shape[0], dtype=x.dtype)
    for column in x.T:
        total = total + column
    return total


def lazy_softmax(x: Tensor) -> Tensor:
    large = x.float().exp()
    return (large / large.sum(-1, keepdim=True)).to(x.dtype)


def flushing(x: Tensor) -> Tensor:
    y = torch.exp(x)
    return torch.where(y.abs() < 2.0**-100, 0, y)


WRONG: list[tuple[str, Function, Case, torch.dtype]] = [
    ("softmax", lazy_softmax, Case((2, 4096), "wide"), SINGLE),
    ("softmax", lambda x: x.softmax(-1) * (1 + 2.0**-7), Case((4, 64), "normal"), BF),
    ("softmax", lambda x: x.softmax(0), Case((4, 64), "normal"), SINGLE),
    ("gelu", lambda x: F.gelu(x, approximate="tanh"), Case((4099,), "normal"), SINGLE),
    ("gelu, tanh", F.gelu, Case((4099,), "normal"), SINGLE),
    ("mm", products_by_steps, Case((7, 512, 6), "normal"), BF),
    ("mm", products_by_steps, Case((3, 4096, 8), "normal"), BF),
    ("mm", products_by_steps, Case((2, 16384, 3), "normal"), HALF),
    ("mm", lambda a, b: (a.bfloat16().float() @ b.bfloat16().float()), Case((8, 64, 16), "normal"), SINGLE),
    ("sum", sum_by_steps, Case((2, 4096), "positive"), BF),
    ("sum", lambda x: x[:, 1:].sum(-1), Case((2, 4096), "normal"), SINGLE),
    ("mean", lambda x: x.sum(-1) / (x.shape[-1] - 1), Case((2, 4096), "positive"), SINGLE),
    ("log_softmax", lambda x: x.softmax(-1).log(), Case((2, 4096), "wide"), SINGLE),
    ("layer_norm", lambda x, w, b: F.layer_norm(x, [x.shape[-1]], w, b, 1e-3), Case((4, 64), "normal"), SINGLE),
    ("rms_norm", lambda x, w: F.rms_norm(x, [x.shape[-1]], w, 1e-3), Case((4, 64), "normal"), SINGLE),
    ("exp", lambda x: 1 + x + x * x / 2, Case((4099,), "normal"), SINGLE),
    ("exp", flushing, Case((65536,), "every"), BF),
    ("sin", lambda x: torch.sin(x.bfloat16().float()), Case((4099,), "angles"), SINGLE),
    ("add", lambda a, b: torch.nan_to_num(a + b), Case((102,), "special"), SINGLE),
    ("div", lambda a, b: a * (1 / b), Case((4099,), "normal"), SINGLE),
    ("relu", lambda x: torch.where(x > 0, x, 0), Case((65536,), "every"), BF),  # loses NaN
    ("attention", lambda q, k, v, g: F.scaled_dot_product_attention(q, k, v, scale=0.18), Case((2, 64, 32), "normal"),
     SINGLE),
    ("attention, causal", lambda q, k, v, g: F.scaled_dot_product_attention(q, k, v), Case((2, 64, 32), "normal"), BF),
]  # fmt: skip


@pytest.mark.parametrize(("name", "call", "case", "dtype"), WRONG, ids=range(len(WRONG)))
def test_a_wrong_operator_is_called_wrong(name: str, call: Function, case: Case, dtype: torch.dtype) -> None:
    assert tried(name, call, case, dtype).verdict == "outside"


def test_steps_in_bfloat16_are_worse_than_faithful() -> None:
    case = Case((4096,), "normal")
    found = tried("silu", by_steps, case, BF)
    assert CLASSES.index(found.verdict) > CLASSES.index("faithful")
    assert found.own <= 1 < found.over, "right for what it is, which is not what torch's is"
    assert CLASSES.index(tried("silu", F.silu, case, BF).verdict) <= CLASSES.index("faithful")


RIGHT: list[tuple[str, Function, Case, torch.dtype]] = [
    ("softmax", lambda x: x.double().softmax(-1).float().to(x.dtype), Case((2, 4096), "wide"), BF),
    ("silu", lambda x: by_steps(x.double()).to(x.dtype), Case((4099,), "wide"), SINGLE),
    ("mm", products_by_steps, Case((3, 4096, 8), "normal"), SINGLE),
    ("mm", products_by_steps, Case((7, 512, 6), "cancelling"), SINGLE),
    ("mm", lambda a, b: products_by_steps(a.float(), b.float()).to(a.dtype), Case((2, 16384, 3), "normal"), HALF),
    ("sum", sum_by_steps, Case((2, 4096), "positive"), SINGLE),
    ("sum", lambda x: x.flip(-1).cumsum(-1)[:, -1], Case((1, 16384), "normal"), SINGLE),
    ("add", torch.add, Case((102,), "special"), SINGLE),
]


@pytest.mark.parametrize(("name", "call", "case", "dtype"), RIGHT, ids=range(len(RIGHT)))
def test_a_right_operator_of_another_order_is_not(name: str, call: Function, case: Case, dtype: torch.dtype) -> None:
    assert tried(name, call, case, dtype).verdict != "outside"


IN_DOUBLE = [one for one in OPERATORS.values() if one.name != "_grouped_mm"]
"""Torch has the grouped product in no such type."""


@pytest.mark.parametrize("one", IN_DOUBLE, ids=lambda one: one.name)
def test_what_is_true_is_what_torch_gives_in_float64(one: Operator) -> None:
    for case in [case for case in one.cases(SINGLE) if case.law in ("normal", "wide")][:6]:
        exact, _ = inputs(one, case, SINGLE)
        truth, got = one.truth(*exact), one.call(*exact)  # type: ignore[call-arg]
        assert got.shape == truth.value.shape
        assert torch.equal(got.isnan(), truth.value.isnan()), case
        known = truth.value.isfinite()
        off, size = (got - truth.value).abs()[known], truth.size[known]
        assert torch.all(off <= 1e-8 * size + 1e-300), case  # softplus is told to give x from 20 on
        assert torch.all(size >= truth.value[known].abs() * (1 - 1e-9)), case


def test_sums_are_rounded_once() -> None:
    x = torch.tensor([[1e16, 1.0, -1e16, *[0.0] * 7], [0.1] * 10], dtype=torch.float64)
    assert exact_sum(x).tolist() == [1.0, 1.0]
    assert exact_sum(x.T, 0).tolist() == exact_sum(x).tolist()
    assert exact_sum(torch.zeros(2, 0, dtype=torch.float64)).tolist() == [0.0, 0.0]
    assert exact_sum(torch.tensor([[float("inf"), 1.0]], dtype=torch.float64)).item() == float("inf")


@pytest.mark.parametrize("of", [BF16, FP16, FP32], ids=str)
def test_laws_draw_values_of_the_format(of: object) -> None:
    for law in LAWS:
        if law == "every" and of is FP32:
            with pytest.raises(ValueError, match="too many values"):
                drawn(law, (65536,), np.random.default_rng(0), FP32)
            continue
        shape = (65536,) if law == "every" else (17, 51)
        x = drawn(law, shape, np.random.default_rng(0), of)  # type: ignore[arg-type]
        kind = {BF16: BF, FP16: HALF, FP32: SINGLE}[of]  # type: ignore[index]
        assert x.shape == shape
        assert torch.equal(x.to(kind).double().nan_to_num(7.0), x.nan_to_num(7.0)), law
        if law == "every":
            assert len(set(x.nan_to_num(0.125).tolist())) > 60000
        if law == "special":
            assert {repr(v) for v in specials(of)} == {repr(v) for v in x.flatten().tolist()}  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="no law 'odd'"):
        drawn("odd", (3,), np.random.default_rng(0), FP32)


def test_inputs_are_the_same_each_time_and_lie_apart_where_asked() -> None:
    one = OPERATORS["silu_backward"]
    case, apart = Case((61,), "normal"), Case((61,), "normal", apart=True)
    (_, first), (_, second), (_, third) = (inputs(one, c, BF) for c in (case, case, apart))
    assert all(torch.equal(a, b) and torch.equal(a, c) for a, b, c in zip(first, second, third, strict=True))
    assert [x.stride() for x in third] == [(2,), (2,)]
    assert [str(case), str(apart)] == ["61 normal", "61 normal apart"]


def test_what_moves_keeps_its_bits() -> None:
    assert {how for one in MOVES for how in (moved(one, BF), moved(one, HALF))} <= {"exact", "but NaN"}
    assert ordered("sort", BF) == ordered("topk", HALF) == "exact"


def test_a_move_that_loses_something_is_found() -> None:
    clone = next(one for one in MOVES if one.name == "clone")

    def loses(call: Function) -> str:
        return moved(Move("clone", (), call, clone.oracle), BF)

    assert loses(lambda x: x + 0) == "wrong", "minus zero becomes zero"
    assert loses(lambda x: torch.where(x.isnan(), float("nan"), x)) == "but NaN"
    assert loses(lambda x: x.half().to(x.dtype)) == "wrong"
    assert loses(lambda x: x.T) == "wrong"
    assert loses(lambda x: x[1:]) == "wrong"
    assert square(BF).shape == (256, 256)


def test_a_cast_that_rounds_twice_is_found() -> None:
    one = next(c for c in CASTS if c.name == "_to_copy, from float64" and c.dtypes == (BF,))
    exact, _ = inputs(one, Case((4099,), "normal"), BF)
    twice, once = exact[0].float().bfloat16(), (exact[0] * 1.0)
    found = judge(twice, one.truth(*exact))  # type: ignore[call-arg]
    assert found.verdict == "outside"
    assert found.histogram[1] > 0, "just above half an ulp"
    assert judge(once.float(), one.truth(*exact)).verdict == "correct"  # type: ignore[call-arg]
