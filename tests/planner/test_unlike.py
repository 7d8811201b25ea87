"""Experts with unlike loads, and checkpoints: what the busiest rank has, and how long training stands still."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import MixtralConfig

from tangram.__main__ import main
from tangram.hardware.catalogue.devices import device
from tangram.models.outlines.outline import Dims, decoder
from tangram.planner.cost.kept_activations import busiest
from tangram.planner.cost.memory import memory
from tangram.planner.cost.step_time import seconds
from tangram.planner.legality.enumerate import Able, Request
from tangram.planner.search.branch_and_bound import exhaustive, search
from tangram.planner.space.framework_profiles import framework
from tangram.planner.space.grid import grid
from tangram.planner.space.optimisers_and_offload import OPTIMISERS, Offload
from tangram.planner.space.setting import Host, Setting

SETTING = Setting(device("h100"), framework("megatron-core"))
MIXED = decoder(Dims(6, 1024, 8, 32000, ffn=2048, experts=64, per_token=4, expert_ffn=1024, dense_layers=1), "mixed")
DENSE = decoder(Dims(6, 1024, 8, 32000, ffn=4096), "dense")


@pytest.mark.parametrize(("experts", "ranks", "spread"), [(64, 8, 0.3), (256, 64, 0.5), (128, 4, 1.0), (16, 16, 0.4)])
def test_the_busiest_rank_is_that_of_drawn_loads(experts: int, ranks: int, spread: float) -> None:
    """Loads are drawn from a gamma distribution, brought to a mean of 1, and dealt to ranks; 20,000 times."""
    rng = np.random.default_rng(0)
    loads = rng.gamma(1 / spread**2, spread**2, (20_000, experts))
    loads /= loads.mean(axis=1, keepdims=True)
    spread = float(loads.std(axis=1).mean())
    most = loads.reshape(-1, ranks, experts // ranks).mean(axis=2).max(axis=1)
    g, setting = grid(batch=64, sequence=2048, expert=ranks, data=ranks), replace(SETTING, unlike=spread)
    assert float(busiest(experts, g, setting)[0]) == pytest.approx(most.mean(), rel=0.12)
    assert float(busiest(experts, g, setting, 0.99)[0]) == pytest.approx(np.quantile(most, 0.99), rel=0.25)


@given(st.sampled_from([2, 8, 64]), st.floats(0, 2), st.floats(0, 2))
@settings(deadline=None, max_examples=25)
def test_more_unlike_is_never_quicker_nor_smaller(ranks: int, less: float, more: float) -> None:
    g = grid(batch=64, sequence=2048, expert=ranks, data=64, zero=1)
    few, many = (replace(SETTING, unlike=value) for value in sorted((less, more)))
    rounding = 1 + 1e-12  # of sums in another order: a share of 0.42 was 3e-17 s quicker than one of 0
    assert seconds(MIXED, g, few).step[0] <= seconds(MIXED, g, many).step[0] * rounding
    assert memory(MIXED, g, few).allocated[0] <= memory(MIXED, g, many).allocated[0]
    assert 1 <= busiest(64, g, few)[0] <= busiest(64, g, many)[0] <= ranks
    assert seconds(DENSE, g, few).step[0] == seconds(DENSE, g, many).step[0]


def test_one_rank_of_all_experts_has_the_mean() -> None:
    g, setting = grid(batch=64, sequence=2048, data=8), replace(SETTING, unlike=1.0)
    assert seconds(MIXED, g, setting).step[0] == seconds(MIXED, g, SETTING).step[0]
    assert memory(MIXED, g, setting).allocated[0] == memory(MIXED, g, SETTING).allocated[0]


def test_a_search_of_unlike_experts_is_that_of_trying_everything() -> None:
    setting = replace(SETTING, unlike=0.5, save_every=20)
    request = Request(8, 64, 2048, able=Able(uneven=0))
    found, tried = (way(MIXED, request, setting, 9e9, 6) for way in (search, exhaustive))
    assert found.step.tolist() == tried.step.tolist()
    assert found.step[0] > search(MIXED, request, SETTING, 9e9, 1).step[0]


def test_a_checkpoint_is_copied_once_by_those_that_have_it_alike() -> None:
    setting = replace(SETTING, host=Host(rate=10e9), save_every=10)
    g = grid(batch=64, sequence=2048, data=[1, 8, 8, 8], tensor=[1, 1, 1, 1], zero=[0, 0, 1, 0],
             offload=[0, 0, 0, int(Offload.OPTIMISER)])  # fmt: skip
    added = seconds(DENSE, g, setting).host - seconds(DENSE, g, replace(setting, save_every=0)).host
    each = 12 * DENSE.numbers / 10e9 / 10
    assert added[:3] == pytest.approx([each, each / 8, each / 8], rel=0.01)
    assert added[3] == 0
    low = next(code for code, kind in enumerate(OPTIMISERS) if kind.name == "sgd")
    assert (
        seconds(DENSE, replace(g, optimiser=np.full(4, low)), setting).host[0]
        - seconds(DENSE, replace(g, optimiser=np.full(4, low)), replace(setting, save_every=0)).host[0]
    ) == pytest.approx(each / 3, rel=0.01)


def test_typed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = MixtralConfig(
        vocab_size=32000, hidden_size=1024, intermediate_size=2048, num_hidden_layers=4, num_attention_heads=8,
        num_key_value_heads=8, num_local_experts=16, num_experts_per_tok=2,
    )  # fmt: skip
    config.save_pretrained(tmp_path)
    said = ("plan", str(tmp_path), "--cluster", "h100-8x8", "--gpus", "8", "--json", "--top", "1", "--explain", "dp=8",
            "--experts", "8 x 1", "--tokens-per-batch", "512K", "--micro-batch", "8")  # fmt: skip
    steps: list[tuple[float, float]] = []
    for more in ((), ("--imbalance", "0.3"), ("--imbalance", "0.3", "--checkpoint-every", "10")):
        assert main([*said, *more]) == 0
        found = json.loads(capsys.readouterr().out)["given"]
        steps.append((found["step"], found["memory"]))
    assert steps[0][0] < steps[1][0] < steps[2][0]
    assert steps[0][1] < steps[1][1] == steps[2][1]


@pytest.mark.parametrize(
    ("said", "why"),
    [
        (("--imbalance", "-1", "--cluster", "h100-8x8"), "--imbalance is a number from 0 to 10"),
        (("--imbalance", "nan", "--cluster", "h100-8x8"), "--imbalance is a number from 0 to 10"),
        (("--checkpoint-every", "-3", "--cluster", "h100-8x8"), "--checkpoint-every is a number of steps from 0"),
        (("--imbalance", "0.3"), "--imbalance is of what is planned for a cluster"),
    ],
)
def test_mistakes(said: tuple[str, ...], why: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "llama-3-8b", *said]) == 2
    assert why in capsys.readouterr().err
