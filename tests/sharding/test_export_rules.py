"""What DTensor asks for beside the table, proved as the table is; what is registered, and what is refused with which
reason."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib import resources

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor

from tangram.errors import UserError
from tangram.sharding.dtensor.choose import rows
from tangram.sharding.dtensor.rules import Registered, exported, register
from tangram.sharding.ops.calls import OpCall, name_of
from tangram.sharding.ops.rule_table import bound, parse_lines
from tangram.sharding.proof.execute import check, run_reference, ways
from tangram.sharding.proof.prove import check_pending
from tangram.sharding.proof.samples.samples import SampleRecorder

aten = torch.ops.aten
LINES = parse_lines(resources.files("tangram.sharding.dtensor").joinpath("dtensor.rules").read_text(), "dtensor.rules")


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64)


def losses() -> Iterator[OpCall]:
    named = {"smooth_l1_loss": (0.7,), "huber_loss": (0.7,), "mse_loss": (), "soft_margin_loss": ()}
    for reduction in (0, 1, 2):
        grad, x, y = randn(5, 3) if not reduction else randn(), randn(5, 3), randn(5, 3)
        for name, more in named.items():
            yield OpCall.of(getattr(aten, f"{name}_backward").default, (grad, x, y, reduction, *more), {})
        for weight in (None, randn(3)):
            args = (grad, x.sigmoid(), y.sigmoid(), weight, reduction)
            yield OpCall.of(aten.binary_cross_entropy_backward.default, args, {})


def convolutions() -> Iterator[OpCall]:
    for transposed, groups, masks in ((False, 1, (True,) * 3), (False, 3, (True,) * 3), (True, 3, (True, True, False))):
        x = randn(5, 6, 8)
        weight = randn(6, 3, 3) if transposed else randn(9, 6 // groups, 3)
        outputs = 3 * groups if transposed else 9
        args = (None, [2], [1], [1], transposed, [0], groups)
        grad = torch.randn_like(aten.convolution.default(x, weight, *args))
        yield OpCall.of(aten.convolution_backward.default, (grad, x, weight, [outputs], *args[1:], masks), {})


def attentions() -> Iterator[OpCall]:
    q, k, v = randn(5, 4, 7, 8), randn(5, 4, 7, 8), randn(5, 4, 7, 8)
    for causal, mask in ((True, None), (False, None), (False, randn(7, 7)), (False, randn(5, 1, 7, 7))):
        out, sums = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, attn_mask=mask)
        args = (torch.randn_like(out), q, k, v, out, sums, 0.0, causal)
        yield OpCall.of(aten._scaled_dot_product_flash_attention_for_cpu_backward.default, args, {"attn_mask": mask})


def norms() -> Iterator[OpCall]:
    x, weight, bias = randn(5, 6, 4), randn(6), randn(6)
    _, mean, rstd = aten.native_group_norm(x, weight, bias, 5, 6, 4, 3, 1e-5)
    yield OpCall.of(
        aten.native_group_norm_backward.default,
        (randn(5, 6, 4), x, mean, rstd, weight, 5, 6, 4, 3, [True, True, True]),
        {},
    )
    yield OpCall.of(aten._fused_rms_norm.default, (randn(5, 3, 4), [4], randn(4), 1e-5), {})
    yield OpCall.of(aten._fused_rms_norm.default, (randn(5, 3, 4), [3, 4], None, None), {})


def others() -> Iterator[OpCall]:
    for operator in (aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor):
        yield OpCall.of(operator, (randn(5, 3), randn(5, 3)), {})
        yield OpCall.of(operator, (randn(5, 3), 3.0), {})
    yield OpCall.of(aten.add.Tensor, (randn(5, 3), randn(3)), {"alpha": 2})
    for operator, *more in ((aten.neg.default,), (aten.mul.Scalar, 3.0), (aten.div.Scalar, 3.0), (aten.clone.default,)):
        yield OpCall.of(operator, (randn(5, 3), *more), {})
    yield OpCall.of(aten._to_copy.default, (randn(5, 3),), {"dtype": torch.float32})
    yield OpCall.of(aten.select_backward.default, (randn(5, 3), [5, 4, 3], -2, 1), {})
    yield OpCall.of(aten.select_backward.default, (randn(3, 5), [4, 3, 5], 0, -1), {})


def recorded() -> Iterator[OpCall]:
    """What backward calls of functions that users call."""
    functions: list[Callable[[torch.Tensor], torch.Tensor]] = [
        *(F.hardtanh, F.hardswish, F.hardsigmoid, F.softshrink, F.hardshrink, F.logsigmoid),
        *(lambda x, mode=mode: F.pad(x[0, 0], (1, 1), mode=mode) for mode in ("reflect", "replicate")),
        *(lambda x, mode=mode: F.pad(x[0], (1, 1, 1, 1), mode=mode) for mode in ("reflect", "replicate")),
        *(lambda x, mode=mode: F.pad(x, (1,) * 6, mode=mode) for mode in ("reflect", "replicate")),
        *(lambda x, pool=pool: pool(x[0], 2) for pool in (F.avg_pool2d, F.adaptive_avg_pool2d, F.adaptive_max_pool2d)),
        *(lambda x, pool=pool: pool(x, 2) for pool in (F.avg_pool3d, F.adaptive_avg_pool3d, F.adaptive_max_pool3d)),
        lambda x: F.max_pool3d(x, 2),
    ]
    for function in functions:
        x = randn(5, 3, 4, 4, 6).requires_grad_()
        result = function(x)
        with SampleRecorder() as recorder:
            result.backward(torch.randn_like(result))
        wanted = {name for line in LINES for name in line.rule.operators if name.endswith("_backward")} - {
            "select_backward"
        }
        found = [call for name, some in recorder.calls.items() if name.partition(".")[0] in wanted for call in some]
        assert len(found) == 1
        yield found[0]


def calls() -> list[OpCall]:
    torch.manual_seed(0)
    kinds: tuple[Callable[[], Iterator[OpCall]], ...] = (losses, convolutions, attentions, norms, others, recorded)
    return [call for kind in kinds for call in kind()]


@pytest.mark.parametrize("call", calls(), ids=str)
def test_each_line_is_proved(call: OpCall) -> None:
    found = bound(exported(), call)
    expected = run_reference(call)
    failures = [check(call, found, cuts, mesh, expected) for cuts, mesh in ways(found, (2, 3, 7))]
    assert failures  # there is a way to cut it
    pending = list(check_pending(call, found, expected))
    assert len(pending) == len(found.waiting(call))
    assert [str(failure) for failure in [*failures, *pending] if failure] == []


def test_the_proof_has_a_call_of_every_line_and_operator() -> None:
    table, tried = exported(), calls()
    met = {table.find(call) for call in tried}
    assert [line.text for line in LINES if line not in met] == []
    names = {name for call in tried for name in (call.name, call.name.partition(".")[0])}
    assert [name for line in LINES for name in line.rule.operators if name not in names] == []


# ---------------------------------------------------------------- what is registered


@pytest.fixture(scope="module")
def registered() -> Iterator[Registered]:
    with register() as found:
        yield found


def state() -> list[dict[object, object]]:
    dispatcher = DTensor._op_dispatcher
    inner = dispatcher.sharding_propagator
    tables = (
        dispatcher._custom_op_handlers,
        inner.op_to_rules,
        inner.op_strategy_funcs,
        inner.op_single_dim_strategy_funcs,
        inner.op_to_schema_info,
        inner.op_to_schema_info_for_single_dim_strategy,
    )
    return [dict(table) for table in tables]


def test_undo_brings_everything_back() -> None:
    before = state()
    first = register(operators=["mm", "convolution", "fill_", "argmax"])
    middle = state()
    with register(operators=["mm", "cumsum"]):
        assert state() != middle
    assert state() == middle != before
    first.undo()
    assert state() == before
    first.undo()
    assert state() == before


def test_every_operator_is_registered_or_refused_with_a_reason(registered: Registered) -> None:
    assert not set(registered.strategies) & set(registered.handlers)
    assert not set(registered.names) & set(registered.refused)
    assert all(registered.refused.values())
    for name in ("mm", "add.Tensor", "softmax", "_softmax", "amax", "convolution", "convolution_backward", "cumsum"):
        assert (name in registered.names) == (name != "softmax"), name
    assert "mm" in registered.strategies
    assert {"cumsum.out", "cat", "mse_loss", "mse_loss_backward", "fill_.Scalar", "embedding"} <= {*registered.handlers}


@pytest.mark.parametrize(("name", "why"), [
    ("view", "view"),
    ("native_dropout", "random"),
    ("_foreach_neg", "no rule"),
    ("zeros_like", "no element"),
    ("nonzero", "whole"),
    ("native_batch_norm", "running"),
    ("_local_scalar_dense", "no tensor"),
    ("as_strided_copy", "whole"),
    ("resize", "no rule"),
])  # fmt: skip
def test_what_is_refused_says_why(name: str, why: str, registered: Registered) -> None:
    assert why in registered.refused[name]


def test_operators_are_named_as_torch_names_them() -> None:
    with register(operators=["aten::mm", "sum", aten.tril.default]) as found:
        assert "mm" in found.names
        assert "sum.dim_IntList" in found.names
        assert "tril" in found.names
        assert not found.refused.keys() & {"mm"}
    with pytest.raises(UserError, match=r"torch has no operator aten\.mmm"):
        register(operators=["mmm"])
    with pytest.raises(UserError, match=r"aten\.sum\.nothing"):
        register(operators=["sum.nothing"])


def test_a_mistake_registers_nothing() -> None:
    before = state()
    with pytest.raises(UserError, match="no operator"):
        register(operators=["mm", "nothing"])
    assert state() == before


# ---------------------------------------------------------------- rows


def shown(operator: torch._ops.OpOverload, *args: object) -> list[str]:
    call = OpCall.of(operator, args, {})
    found = bound(exported(), call)
    results = list(call.run())
    short = {"Replicate()": "R", "Partial(sum)": "P"}
    return [
        f"{' '.join(one(p) for p in row.inputs)} -> {' '.join(one(p) for p in row.outputs)}"
        + (f" if {row.divides}" if row.divides else "")
        for row in rows(found, call, results)  # a tensor has what is asked of a meta: a shape
        for one in [lambda p: short.get(repr(p), repr(p).replace("Shard(dim=", "S(").replace("Partial", "P"))]
    ]


def test_rows_are_those_of_the_rule() -> None:
    meta = torch.empty(4, 6, device="meta")
    assert shown(aten.mm.default, meta, meta.t()) == ["R R -> R", "S(0) R -> S(0)", "S(1) S(0) -> P", "R S(1) -> S(1)"]
    assert shown(aten.amax.default, meta, [-1]) == ["R -> R", "S(0) -> S(0)", "S(1) -> P(max)"]
    assert shown(aten.cumsum.default, meta, -1) == ["R -> R", "S(0) -> S(0)"]


def test_a_dim_of_two_factors_is_cut_along_the_first_where_it_divides() -> None:
    x, weight = torch.empty(2, 8, 5, device="meta"), torch.empty(12, 2, 3, device="meta")
    found = shown(aten.convolution.default, x, weight, None, [1], [0], [1], False, [0], 4)
    assert found == ["R R R -> R", "S(0) R R -> S(0)", "S(1) S(0) R -> S(1) if 4"]


def test_operators_have_the_names_of_their_calls(registered: Registered) -> None:
    assert name_of(aten.sum.dim_IntList) in registered.names
