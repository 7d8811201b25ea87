"""The order of axes over the ranks: who meets at a fast link, what is tried, and what that is worth."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tangram.errors import UserError
from tangram.hardware.catalogue.cluster import builtin
from tangram.hardware.catalogue.devices import device
from tangram.models.outlines.outline import Dims, decoder
from tangram.models.outlines.outlined import outlined
from tangram.planner.cost.communication_time import apart
from tangram.planner.cost.step_time import seconds
from tangram.planner.legality.engine import Rule
from tangram.planner.legality.enumerate import Able, Request, meshes, of_mesh
from tangram.planner.search.branch_and_bound import search
from tangram.planner.search.explain import StrategyRequest, explain, ordered
from tangram.planner.search.query import requested
from tangram.planner.search.strategy import Ask, mesh_of
from tangram.planner.space.framework_profiles import framework
from tangram.planner.space.grid import grid, joined
from tangram.planner.space.setting import Setting

CLUSTER = builtin("h100-8x8")
SETTING = Setting(device("h100"), framework("megatron-core"))
MODEL = decoder(Dims(16, 1024, 16, 32000, ffn=4096, kv_heads=4), "small")
POWERS = st.sampled_from([1, 2, 4, 8])


@given(POWERS, POWERS, POWERS, POWERS, st.sampled_from([2, 4, 8, 16]), st.data())
def test_who_meets_is_who_is_counted(
    tensor: int, context: int, data: int, pipeline: int, node: int, drawn: st.DataObject
) -> None:
    """Every rank is given its place, and members of the group of rank 0 that share its node are counted."""
    ranks = drawn.draw(st.sampled_from([n for n in (1, 2, 4, 8) if tensor * context * data % n == 0]))
    strides = [n for n in (1, 2, 4, 8, 16) if tensor * context * data % (n * ranks) == 0]
    stride = drawn.draw(st.sampled_from(strides or [1]))
    g = grid(tensor=tensor, context=context, data=data, pipeline=pipeline, inner=1, batch=64, sequence=1024)
    together = tensor * context

    def rank(place: int) -> int:  # of stage 0, by its place within the stage
        return place % together + place // together * together * pipeline

    members = [rank(stride * i) for i in range(ranks)]
    met = sum(member // node == 0 for member in members)
    assert min(float(apart(g, node, np.array([float(stride)]))[0]), ranks) == met


@given(st.sampled_from([16, 32]), st.sampled_from([2, 4, 8]), st.sampled_from([1, 2]))
@settings(deadline=None, max_examples=12)
def test_where_it_is_not_tried_it_is_never_quicker(devices: int, node: int, nodes: int) -> None:
    """Also with islands of several nodes and a slow network between them."""
    islands = ((node * nodes, 5e9),) if nodes > 1 else ()
    setting = Setting(device("h100"), framework("megatron-core"), node=node, islands=islands)
    request = Request(devices, 64, 1024, node=node, islands=tuple(size for size, _ in islands), able=Able(near=False))
    g = joined([of_mesh(MODEL, request, mesh) for mesh in meshes(MODEL, request)])
    outer = g.take(g.inner == 0)
    inner = replace(outer, inner=np.ones(len(outer)))
    tried = (
        (outer.pipeline > 1)
        & (outer.data > 1)
        & (2 * outer.tensor * outer.context <= (node * nodes if node * nodes < devices else node))
    )
    before, after = seconds(MODEL, outer, setting), seconds(MODEL, inner, setting)
    assert (after.step[~tried] >= before.step[~tried] * (1 - 1e-12)).all()
    assert (after.stages[tried] <= before.stages[tried]).all()
    assert (after.stages[tried] < before.stages[tried]).any()
    assert (g.inner > 0).sum() == tried.sum()


def test_the_search_takes_it_where_it_is_quicker() -> None:
    """Of four stages with many micro-batches, whose gradients are summed once."""
    four = Rule("four stages", lambda o, g: g.pipeline == 4, lambda o, at: "")
    steps: dict[bool, float] = {}
    for inner in (False, True):
        able = Able(inner=inner, tensor=1, context=1, near=False, uneven=0, rules=(four,))
        found = search(MODEL, Request(32, 1024, 2048, node=8, able=able), SETTING, 80e9, 1)
        steps[inner] = float(found.step[0])
        assert bool(found.grid.inner[0]) == inner
    assert steps[True] < steps[False]


def test_a_mesh_says_the_order() -> None:
    assert mesh_of(4, 2, 1, 1, 8, inner=True) == "dp=2 pp=4 cp=1 tp=8"
    assert ordered("dp=8 pp=4 tp=2", ["dp", "pp", "tp"])
    assert not ordered("pp=4 tp=2", ["pp", "tp"])
    with pytest.raises(UserError, match="has axes in an order that is not priced: those farthest apart come first"):
        ordered("tp=8 pp=2", ["tp", "pp"])


def test_a_given_order_is_priced() -> None:
    outline, ask = outlined("llama-3-8b"), Ask(2**20, 8192, framework="megatron-core", most=1)
    assert requested(CLUSTER, ask).node == 8
    found = [
        explain(outline, CLUSTER, ask, StrategyRequest(mesh)).choice for mesh in ("pp=2 dp=16 tp=2", "dp=16 pp=2 tp=2")
    ]
    outer, inner = found
    assert outer is not None
    assert inner is not None
    assert inner.mesh == "dp=16 pp=2 cp=1 tp=2"
    assert inner.parts["stages"] < outer.parts["stages"]
    assert inner.memory == outer.memory
