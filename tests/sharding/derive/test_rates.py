"""Rates: from a cluster, for each axis of a mesh."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tangram.errors import UserError
from tangram.hardware.catalogue import cluster
from tangram.layout import Mesh
from tangram.models.capturing.capture import capture
from tangram.sharding.derive.derive import AxisProblem
from tangram.sharding.derive.problem.folding import fold
from tangram.sharding.derive.problem.rates import WorkRates, effort
from tangram.sharding.ops import rule_table
from tangram.sharding.ops.calls import OpCall
from tangram.sharding.ops.rule_table import builtin
from tangram.sharding.propagation import op_cost


def test_each_axis_has_its_own() -> None:
    rates = WorkRates(cluster=cluster.builtin("h100-8x8"))
    mesh = Mesh.parse("dp=8 tp=8")
    near, far = rates.along(mesh, "tp"), rates.along(mesh, "dp")
    assert (near.flops_per_byte, near.moved_per_byte) == pytest.approx((2198, 7.44), rel=1e-3)
    assert (far.flops_per_byte, far.moved_per_byte) == pytest.approx((9 * 2198, 9 * 7.44), rel=1e-3)
    assert WorkRates().along(mesh, "dp") == WorkRates()


def test_a_mesh_that_is_larger_than_the_cluster() -> None:
    with pytest.raises(UserError, match="has 2 ranks, and an axis spans 4"):
        WorkRates(cluster=cluster.builtin("cpu-2")).along(Mesh.parse("tp=4"), "tp")


def test_effort_is_of_products_or_of_bytes() -> None:
    model = nn.Sequential(nn.Linear(8, 16, bias=False), nn.ReLU()).to("meta")
    folded = fold(capture(model, {"input": torch.empty(4, 8, device="meta")}), builtin())
    own = {step.call.name: effort(folded, step) for step in folded.steps}
    assert own["mm"] == (2 * 4 * 8 * 16, 4 * (4 * 8 + 8 * 16 + 4 * 16), True)
    assert own["relu"] == (4 * 16, 4 * 2 * 4 * 16, False)
    assert own["t"].worth(WorkRates()) == 0.0


def test_what_an_operator_does_is_weighed_anew_for_each_axis() -> None:
    model = nn.Linear(64, 64, bias=False).to("meta")
    folded = fold(capture(model, {"input": torch.empty(64, 64, device="meta")}), builtin())
    (number,) = (step.number for step in folded.steps if step.call.name == "mm")
    slow, quick = (
        AxisProblem(folded, "tp", 2, [], {}, WorkRates(flops_per_byte=n)).costs().tables[("move", number),][0]
        for n in (100.0, 200.0)
    )
    assert slow == pytest.approx(2 * quick)
    assert slow == pytest.approx(3 * 2 * 64**3 / 100)


def test_rows_in_groups_meet_one_matrix_each() -> None:
    x, w, ends = torch.empty(64, 8), torch.empty(4, 8, 16), torch.tensor([16, 32, 48, 64], dtype=torch.int32)
    call = OpCall(
        torch.ops.aten._grouped_mm.default, {"self": x, "mat2": w, "offs": ends, "bias": None, "out_dtype": None}
    )
    assert op_cost.flops(call, rule_table.bound(builtin(), call), {}, Mesh.parse("x=1"), None) == 2 * 64 * 8 * 16
