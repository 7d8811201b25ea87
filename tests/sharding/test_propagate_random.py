"""Propagation proved by running: operators, meshes, layouts at random, the parts put together as predicted."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tangram.errors import UserError
from tangram.layout import Layout, Mesh, region
from tangram.layout.syntax import Cut
from tangram.sharding.local_ops.local_call import layout_of
from tangram.sharding.ops import rule_table
from tangram.sharding.ops.calls import OpCall
from tangram.sharding.ops.rule_table import builtin
from tangram.sharding.proof.propagated import check
from tangram.sharding.propagation.explain_conflicts import factor_table
from tangram.sharding.propagation.propagate import Propagation, propagate
from tests.sharding.propagating import calls, cuts, layouts, meshes, some


def propagated(call: OpCall, given: list[Layout | None], mesh: Mesh, *, differentiable: bool) -> Propagation | None:
    """None where an operator that writes in place would need what it writes otherwise."""
    try:
        return propagate(builtin(), call, given, mesh, differentiable=differentiable)
    except UserError as error:
        if "writes its input 0" in str(error):
            return None
        raise


@given(st.data())
@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_what_is_predicted_is_what_runs(data: st.DataObject) -> None:
    call, mesh = data.draw(calls()), data.draw(meshes())
    given_ = [
        None if t is None else data.draw(layouts(tuple(t.shape), mesh, t.is_floating_point())) for t in call.tensors
    ]
    found = propagated(call, given_, mesh, differentiable=data.draw(st.booleans()))
    if found is None:
        return
    assert check(found, call.run()) is None
    for place, (before, after) in enumerate(zip(given_, found.inputs, strict=True)):
        if before is not None and after is not None and not any(r.place == place for r in found.relayouts):
            assert all(region(before, mesh, rank) == region(after, mesh, rank) for rank in range(mesh.size))
    factor_table(found).as_json()


@given(st.data())
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_inputs_that_agree_stay_where_they_are(data: st.DataObject) -> None:
    """Every axis cuts one factor, in all tensors that have it: nothing is left to move."""
    call, mesh = data.draw(calls()), data.draw(meshes())
    bound = rule_table.bound(builtin(), call)
    wanted: dict[str, list[Cut]] = {}
    for axis in data.draw(st.permutations(list(mesh.axes))):
        free = [f for f in bound.cuttable if not {"max", "min"} & {*bound.pending[f]}]
        if free and data.draw(st.integers(0, 3)):
            wanted.setdefault(data.draw(st.sampled_from(free)), []).append(data.draw(cuts(axis)))
    layouts_ = [
        None if t is None else layout_of(dims or (), t.shape, bound, {f: tuple(some) for f, some in wanted.items()})
        for t, dims in zip(call.tensors, bound.inputs, strict=True)
    ]
    found = propagate(builtin(), call, layouts_, mesh)
    assert check(found, call.run()) is None
    assert found.nbytes == 0
    if all(mesh.axes[cut.axis][0] > 1 for some in wanted.values() for cut in some):
        assert found.relayouts == ()
        assert {axis for axis, one in found.choices.items() if one.kind == "cut"} <= {
            cut.axis for some in wanted.values() for cut in some
        }


WRONG: dict[str, Callable[[Propagation], Propagation]] = {
    "a result said to be whole": lambda p: replace(p, outputs=(Layout.parse("m n").bind((8, 6)),)),
    "a pending sum forgotten": lambda p: replace(p, outputs=(replace(p.outputs[0], pending=()),)),
    "a maximum for a sum": lambda p: replace(p, outputs=(replace(p.outputs[0], pending=(("max", "y"),)),)),
    "another map": lambda p: replace(p, outputs=(Layout.parse("m/x:cyclic n sum:y").bind((8, 6)),)),
    "another dim": lambda p: replace(p, outputs=(Layout.parse("m n/x sum:y").bind((8, 6)),)),
    "another axis": lambda p: replace(p, outputs=(Layout.parse("m/y n sum:x").bind((8, 6)),)),
    "an input cut otherwise": lambda p: replace(p, inputs=(Layout.parse("m/x k/y:cyclic").bind((8, 12)), p.inputs[1])),
    "an input left whole": lambda p: replace(p, inputs=(p.inputs[0], Layout.parse("k n").bind((12, 6)))),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_layout_is_found(name: str) -> None:
    call = OpCall.of(torch.ops.aten.mm.default, (some(8, 12), some(12, 6)), {})
    found = propagate(builtin(), call, [Layout.parse("m/x k/y"), None], Mesh.parse("x=2 y=2"))
    assert check(found, call.run()) is None
    assert check(WRONG[name](found), call.run()) is not None
