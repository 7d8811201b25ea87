"""Ranks that exchange heads for tokens (Ulysses): what they move and keep, when they are legal, and that the search
with them misses nothing."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tangram.errors import UserError
from tangram.hardware import curves
from tangram.hardware.cluster import builtin
from tangram.hardware.devices import device
from tangram.models.outline import Dims, Group, Outline, decoder
from tangram.models.outlined import outlined
from tangram.planner import search as searching
from tangram.planner.choice import Ask, Choice, described, limit_of, setting_of
from tangram.planner.explain import Given, laid_out
from tangram.planner.exports.numbers import given_of, numbers_of
from tangram.planner.exports.targets import EXPORTS, export
from tangram.planner.framework import framework
from tangram.planner.grid import Grid, grid
from tangram.planner.learn import PARTS, published
from tangram.planner.memory import memory
from tangram.planner.pipelines import SCHEDULES
from tangram.planner.rules import legal, reasons
from tangram.planner.search import exhaustive, search
from tangram.planner.setting import Setting
from tangram.planner.space import ALL, Able, Request, meshes, of_mesh
from tangram.planner.time import seconds
from tangram.planner.trainer import why_not

LLAMA = outlined("llama-3-8b")
DENSE = decoder(Dims(4, 512, 8, 32000, ffn=2048, kv_heads=2), "dense")
MIXED = decoder(Dims(3, 512, 8, 32000, ffn=2048, experts=4, per_token=2, expert_ffn=512, dense_layers=1), "mixed")
SETTING = Setting(device("h100"), framework("megatron-core"))
CLUSTER = builtin("h100-8x8")
ASK = Ask(tokens=2**20, sequence=8192)
STEPS = [6.368543577802787, 1.0998643729678206, 6.119035123334243]
BYTES = [35241175183.36, 12658775060.48, 78405213777.92]


def one(**given: Any) -> Grid:
    """A grid of one configuration."""
    return grid(**{"batch": 64, "sequence": 8192, **given})


def choice(mesh: str) -> Choice:
    """Of Llama-3-8B."""
    g = laid_out(CLUSTER, ASK, Given(mesh))
    assert reasons(LLAMA, g) == []
    return described(LLAMA, g, setting_of(CLUSTER, ASK), ASK, limit_of(CLUSTER, ASK), published())[0]


@pytest.mark.parametrize(("ranks", "tensor", "near"), [(2, 1, 2), (16, 1, 8), (2, 8, 1)])
def test_a_micro_batch_exchanges_its_heads_there_and_back(ranks: int, tensor: int, near: int) -> None:
    """By hand: 32 heads and 8 of keys and values, all of 128 numbers; a rank has at least one of either."""
    kv = max(8 / tensor / ranks, 1)
    nbytes = 2 * 8192 * 2 * (32 / tensor / ranks + kv) * 128  # queries and what comes of them, keys and values
    once = curves.collective_seconds(
        device("h100"), "all-to-all", np.array([nbytes]), np.array([ranks]), near=np.array([near]), nic=None
    )
    found = seconds(LLAMA, one(ulysses=ranks, tensor=tensor, sequence_parallel=1), SETTING)
    assert found.context == pytest.approx(2 * 32 * 64 * once)
    again = one(ulysses=ranks, tensor=tensor, sequence_parallel=1, recompute=int(Group.BLOCK))
    assert seconds(LLAMA, again, SETTING).context == pytest.approx(3 * 32 * 64 * once)


def test_what_is_kept_is_divided_over_them_and_what_attention_gives_is_kept_twice() -> None:
    heads, ring = (memory(LLAMA, one(**axis), SETTING).first for axis in ({"ulysses": 4}, {"context": 4}))
    tokens = 8192 / 4
    assert heads.activations - ring.activations == pytest.approx(32 * 2 * tokens * 32 * 128)
    assert heads.parameters == ring.parameters
    copied, fewer = (memory(LLAMA, one(ulysses=ranks), SETTING).first.activations[0] for ranks in (16, 8))
    # Of 8 key-value heads each of 16 ranks has a whole one, of a sample that all of them have.
    assert copied - fewer / 2 == pytest.approx(32 * 2 * 8192 / 16 * 0.5 * 256 * 16)
    again = (
        memory(LLAMA, one(recompute=int(Group.BLOCK), **axis), SETTING).first
        for axis in ({"ulysses": 4}, {"context": 4})
    )
    assert len({float(rank.activations[0]) for rank in again}) == 1


def test_what_has_none_costs_what_it_did() -> None:
    """Golden: of the models before these ranks were known to them."""
    g = one(
        tensor=[2, 8, 1], sequence_parallel=1, context=[2, 1, 4], data=[2, 4, 2], pipeline=[1, 2, 1], zero=[3, 1, 2]
    )
    assert seconds(LLAMA, g, SETTING).step == pytest.approx(STEPS, rel=1e-12)
    assert memory(LLAMA, g, SETTING).device == pytest.approx(BYTES, rel=1e-12)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"ulysses": 3, "sequence": 8193}, "1 tensor x 3 heads ranks do not divide the 32 heads"),
        ({"ulysses": 16, "tensor": 4}, "4 tensor x 16 heads ranks do not divide the 32 heads"),
        ({"ulysses": 4, "sequence": 8190}, "4 ranks that exchange heads do not divide the tokens of 1 context ranks"),
        ({"ulysses": 8, "context": 8, "sequence": 64 + 64 * 8}, "do not divide the tokens of 8 context ranks"),
        ({"ulysses": 2, "shard": 4}, "4 ranks to divide states over are no part of 2"),
    ],
)
def test_each_refusal_has_its_reason(given: dict[str, int], said: str) -> None:
    g = one(**given)
    assert not legal(LLAMA, g)[0]
    assert any(said in reason for reason in reasons(LLAMA, g))


def test_blocks_without_attention_have_no_heads_to_exchange() -> None:
    (block, count), *_ = DENSE.runs
    plain = replace(DENSE, runs=((block, count - 1), (replace(block, scores=()), 1)))
    assert "2 ranks cannot exchange the heads of blocks that have no attention" in reasons(plain, one(ulysses=2))
    request = Request(8, 8, 512, able=Able(ulysses=0))
    assert {mesh.ulysses for mesh in meshes(plain, request)} == {1}
    assert {mesh.ulysses for mesh in meshes(DENSE, request)} == {1, 2, 4, 8}
    assert {mesh.ulysses for mesh in meshes(DENSE, replace(request, able=ALL))} == {1}


SCALES = st.none() | st.fixed_dictionaries({name: st.floats(0.3, 3.0) for name in PARTS})


@given(
    st.sampled_from([DENSE, MIXED]), st.sampled_from([2, 4, 8]), st.sampled_from([4, 12]),
    st.sampled_from([512, 4096]), st.floats(0.2, 4.0), SCALES,
)  # fmt: skip
@settings(deadline=None, max_examples=25)
def test_the_search_with_them_finds_what_trying_everything_finds(
    outline: Outline, devices: int, batch: int, sequence: int, room: float, scales: dict[str, float] | None
) -> None:
    names = tuple(row.name for row in SCHEDULES)
    request = Request(devices, batch, sequence, schedules=names, able=Able(ulysses=0))
    limit = 3e9 + room * 1e9
    found, all_of_them = (way(outline, request, SETTING, limit, 4, scales) for way in (search, exhaustive))
    assert found.step.tolist() == all_of_them.step.tolist()
    for mesh in meshes(outline, request):
        bound = of_mesh(outline, request, mesh, bound=True)
        if mesh.ulysses > 1 and len(bound):
            (least,) = searching.bounds_of(outline, bound, [len(bound)], SETTING, scales)
            steps = searching.scaled(seconds(outline, of_mesh(outline, request, mesh), SETTING), scales)
            assert steps.min() >= least * (1 - 1e-12)


def test_a_given_mesh_is_explained_and_comes_back_in_words() -> None:
    found = choice("dp=4 cp=2 heads=4 tp=2")
    assert found.mesh == "pp=1 dp=4 cp=2 heads=4 tp=2"
    assert (found.devices, found.at["shard"]) == (64, 32)
    assert given_of(numbers_of(found, ASK)).mesh == found.mesh
    assert choice("dp=32 tp=2").mesh == "pp=1 dp=32 cp=1 tp=2"


@pytest.mark.parametrize("name", EXPORTS)
def test_who_has_no_such_ranks_refuses_them(name: str) -> None:
    found = choice("dp=16 heads=4")
    with pytest.raises(UserError, match="and the plan has 4 such ranks: plan without them"):
        export(name, found, LLAMA, ASK, CLUSTER)
    assert EXPORTS[name].able(LLAMA).ulysses == 1


def test_the_trainer_says_that_it_does_not_run_them() -> None:
    assert "ranks that exchange heads" in why_not(choice("dp=16 heads=4"), LLAMA)
