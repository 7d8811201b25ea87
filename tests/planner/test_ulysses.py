"""CP ranks that exchange heads: what they send, what they compute, what is legal, and where they win."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tangram.cli import main
from tangram.errors import UserError
from tangram.hardware.catalogue import curves
from tangram.hardware.catalogue.cluster import builtin
from tangram.hardware.catalogue.devices import device
from tangram.models.outlines.outline import Dims, decoder
from tangram.planner.cost.block_time import Ways
from tangram.planner.cost.memory import memory
from tangram.planner.cost.step_time import seconds
from tangram.planner.exports.numbers import numbers_of
from tangram.planner.exports.targets import EXPORTS, able_of, written
from tangram.planner.legality.engine import legal, reasons
from tangram.planner.legality.enumerate import Able, Request, meshes, of_mesh
from tangram.planner.search.explain import StrategyRequest, explain, laid_out
from tangram.planner.search.query import plan
from tangram.planner.search.strategy import Ask, mesh_of
from tangram.planner.space.framework_profiles import framework
from tangram.planner.space.grid import grid
from tangram.planner.space.setting import Setting

GROUPED = decoder(Dims(8, 2048, 16, 32000, ffn=8192, kv_heads=4), "grouped")
SETTING = Setting(device("h100"), framework("megatron-core"))
H100 = builtin("h100-8x8")
LONG: dict[str, Any] = {"batch": 8, "sequence": 65536, "data": 8, "context": 8}


def test_what_is_sent_by_hand() -> None:
    """Queries of 16 heads of 128, keys and values of 4, there; as many results as queries back."""
    g = grid(**LONG, ulysses=4)
    way = Ways(GROUPED.runs[0][0], GROUPED.hidden, g, SETTING)
    tokens = 65536 / 8
    there, back = 2 * tokens * (16 * 128 + 4 * 256), 2 * tokens * 16 * 128
    said = [float(curves.collective_seconds(SETTING.device, "all-to-all", each, 4, 4)) for each in (there, back)]
    assert way.dealt()[0, 0] == pytest.approx(sum(said))
    around = 2 * 65536 * 4 * 256 / 4  # a quarter of the heads' keys, of all tokens, over the two others
    keys = float(curves.collective_seconds(SETTING.device, "all-gather", around, 2, 2))
    assert way.around(np.zeros(1))[0][0, 0] == pytest.approx(keys)
    assert Ways(GROUPED.runs[0][0], GROUPED.hidden, grid(**LONG), SETTING).dealt().max() == 0
    alone = Ways(GROUPED.runs[0][0], GROUPED.hidden, grid(**LONG | {"context": 4}, ulysses=4), SETTING)
    assert alone.around(np.zeros(1))[0].max() == 0


def test_more_ranks_than_heads_of_keys_copy_them() -> None:
    way = Ways(GROUPED.runs[0][0], GROUPED.hidden, grid(**LONG, ulysses=8), SETTING)
    four = Ways(GROUPED.runs[0][0], GROUPED.hidden, grid(**LONG, ulysses=4), SETTING)
    (one,) = GROUPED.runs[0][0].scores
    assert way.keys(one)[0] == four.keys(one)[0] == 256  # one head each, not half of one


@given(st.sampled_from([1, 2, 4, 8, 16]), st.sampled_from([1, 2, 4, 8, 16]), st.sampled_from([1, 2, 4]))
def test_the_work_is_the_same_and_legality_has_its_reason(context: int, ulysses: int, tensor: int) -> None:
    g = grid(**LONG | {"data": 1, "context": context}, ulysses=ulysses, tensor=tensor, micro=1)
    assert bool(legal(GROUPED, g)[0]) == (not reasons(GROUPED, g))
    if context % ulysses:
        assert any("are no part of" in reason for reason in reasons(GROUPED, g))
        return
    if 16 % (tensor * ulysses):
        assert any(
            "the 16 attention heads (num_attention_heads) do not divide by" in reason for reason in reasons(GROUPED, g)
        )
        return
    assert not reasons(GROUPED, g)
    (one,) = GROUPED.runs[0][0].scores
    plain = grid(**LONG | {"data": 1, "context": context}, tensor=tensor, micro=1)
    with_heads, without = (Ways(GROUPED.runs[0][0], GROUPED.hidden, of, SETTING) for of in (g, plain))
    assert with_heads.scores(one, backward=False)[0] == pytest.approx(without.scores(one, backward=False)[0], rel=0.02)
    need, less = memory(GROUPED, g, SETTING).allocated[0], memory(GROUPED, plain, SETTING).allocated[0]
    twice = 8 * 2 * 65536 / context * 16 * 128 / tensor if ulysses > 1 else 0.0  # of 8 blocks, what attention gives
    copied = 8 * 2 * 65536 / context * max(1 - 4 / tensor / ulysses, 0) * 256 * ulysses if ulysses > 1 else 0.0
    assert need - less == pytest.approx(twice + copied, rel=1e-6, abs=1.0)
    other = [name for name in seconds(GROUPED, g, SETTING).parts() if name not in ("context", "attention", "data")]
    parts, before = seconds(GROUPED, g, SETTING).parts(), seconds(GROUPED, plain, SETTING).parts()
    assert all(parts[name][0] == pytest.approx(before[name][0], rel=1e-9) for name in other if name != "launch")


def test_sequences_that_only_heads_can_cut() -> None:
    """A ring takes two pieces a rank, an exchange of heads one."""
    request = Request(8, 8, 8 * 513)
    found = [mesh for mesh in meshes(GROUPED, request) if mesh[2] == 8]
    assert found
    g = of_mesh(GROUPED, request, found[0])
    assert len(g)
    assert (g.ulysses == 8).all()


def test_able_and_meshes_in_words() -> None:
    request = Request(64, 64, 8192, able=Able(ulysses=1))
    assert all((of_mesh(GROUPED, request, mesh).ulysses == 1).all() for mesh in meshes(GROUPED, request))
    assert mesh_of(2, 4, 8, 4, 1) == "pp=2 dp=4 cp=2 heads=4 tp=1"
    ask = Ask(64 * 8192, 8192)
    g = laid_out(H100, ask, StrategyRequest("pp=2 dp=4 cp=2 heads=4"))
    assert (g.context[0], g.ulysses[0], g.ranks[0]) == (8, 4, 64)
    found = explain(GROUPED, H100, ask, StrategyRequest("dp=8 heads=8"))
    assert found.choice is not None
    assert found.choice.mesh == "pp=1 dp=8 cp=1 heads=8 tp=1"
    assert found.choice.parts["context"] > 0
    refused = explain(GROUPED, H100, ask, StrategyRequest("dp=2 heads=32"))
    assert any("the 16 attention heads (num_attention_heads) do not divide by" in reason for reason in refused.refused)


def test_what_is_given_is_explained_where_its_frameworks_own_layouts_are_none() -> None:
    """DeepSpeed's export has DP ranks alone, of which 2 samples have 2: Ulysses over 8 was refused for it."""
    ask = Ask(2 * 65536, 65536, framework="deepspeed", devices=8)
    few = replace(ask, able=able_of("deepspeed", GROUPED))
    given = StrategyRequest("heads=4 tp=2", zero=3, again="full")
    found = explain(GROUPED, H100, few, given)
    assert found.choice is not None
    assert found == explain(GROUPED, H100, ask, given)
    with pytest.raises(UserError, match="have no legal layout"):
        plan(GROUPED, H100, few)


def test_exports_write_it_or_say_that_they_cannot() -> None:
    ask = Ask(64 * 8192, 8192)
    choice = explain(GROUPED, H100, ask, StrategyRequest("dp=8 cp=2 heads=4", zero=1)).choice
    assert choice is not None
    one = numbers_of(choice, ask)
    text = written("megatron-lm", one, GROUPED, H100).text
    assert "--cp-comm-type a2a+p2p" in text
    assert "--hierarchical-context-parallel-sizes 4 2" in text
    assert "--cp-comm-type a2a\n" in written("megatron-lm", replace(one, ulysses=8), GROUPED, H100).text
    assert "cp-comm-type" not in written("megatron-lm", replace(one, ulysses=1), GROUPED, H100).text
    for name in set(EXPORTS) - {"megatron-lm"}:
        with pytest.raises(UserError, match=r"exchange heads|CP ranks"):
            written(name, replace(one, zero=0), GROUPED, H100)


def test_the_command_takes_and_says_it(capsys: pytest.CaptureFixture[str], tmp_path: Any) -> None:
    words = ["plan", "llama-3-8b", "--cluster", "h100-8x8", "--seq", "131072", "--tokens-per-batch", "8M"]
    assert main([*words, "--explain", "dp=8 heads=8", "--recompute", "full", "--zero", "3"]) in (0, 1)
    assert "heads=8" in capsys.readouterr().out
    file = tmp_path / "args.sh"
    file.write_text(
        "--tensor-model-parallel-size 1 --context-parallel-size 8 --cp-comm-type a2a+p2p "
        "--hierarchical-context-parallel-sizes 4 3 --micro-batch-size 1 --global-batch-size 64 --seq-length 131072"
    )
    assert main(["plan", "llama-3-8b", "--cluster", "h100-8x8", "--explain", str(file)]) == 2
    assert "no two sizes that make 8 CP ranks" in capsys.readouterr().err
