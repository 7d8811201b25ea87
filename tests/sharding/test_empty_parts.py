"""Parts of nothing, which an uneven cut may leave: results of nothing, with gradients of nothing."""

from __future__ import annotations

import pytest
import torch

from tangram.layout import Mesh
from tangram.layout.syntax import Cut
from tangram.sharding.local_ops import local_call
from tangram.sharding.ops import rule_table
from tangram.sharding.ops.calls import OpCall
from tangram.sharding.ops.rule_table import builtin
from tangram.sharding.proof.execute import check, run_reference

CONVOLUTION = torch.ops.aten.convolution.default


def _transposed(size: int) -> OpCall:
    x, w = torch.randn(2, 4, size, requires_grad=True), torch.randn(4, 3, 2, requires_grad=True)
    return OpCall.of(CONVOLUTION, (x, w, None, [1], [1], [1], True, [0], 1), {})


@pytest.mark.parametrize("size", [1, 5])
def test_a_transposed_convolution_with_a_part_of_nothing(size: int) -> None:
    """Of one element it gives nothing, which torch takes for two samples and refuses for one."""
    call = _transposed(size)
    bound = rule_table.bound(builtin(), call)
    assert bound.cuttable
    for factor in bound.cuttable:
        assert (
            check(call, bound, {factor: (Cut("x"),)}, Mesh.parse(f"x={bound.sizes[factor] + 1}"), run_reference(call))
            is None
        )


def test_a_part_of_nothing_has_a_gradient_of_nothing() -> None:
    """A rank without one would leave out the collectives of the backward, for which others wait."""
    call = _transposed(5)
    bound = rule_table.bound(builtin(), call)
    part = local_call.part_of(bound, {"b": (Cut("x"),)}, Mesh.parse("x=3"), 2)
    x, w = (t for t in call.tensors[:2] if t is not None)
    (result,) = local_call.run(call, bound, part, [x[:0], w, None])
    assert (result.shape, result.requires_grad) == ((0, 3, 4), True)
    gradients = torch.autograd.grad(result.sum(), [x, w])
    assert [float(g.abs().sum()) for g in gradients] == [0.0, 0.0]
