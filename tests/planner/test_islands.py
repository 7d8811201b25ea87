"""Networks of several levels: nodes, islands of nodes, and what joins the islands, which may be oversubscribed."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tangram.cli import main
from tangram.hardware.catalogue import curves
from tangram.hardware.catalogue.cluster import Cluster, builtin
from tangram.hardware.catalogue.devices import device
from tangram.models.outlines.outline import Dims, decoder
from tangram.planner.cost.communication_time import exchange
from tangram.planner.cost.step_time import hop_seconds, seconds
from tangram.planner.legality.enumerate import meshes, of_mesh
from tangram.planner.search.branch_and_bound import search
from tangram.planner.search.query import plan, requested
from tangram.planner.search.strategy import Ask, setting_of
from tangram.planner.space.framework_profiles import framework
from tangram.planner.space.grid import grid, joined
from tangram.planner.space.setting import Setting

FLAT = builtin("h100-8x8")
DEVICE, NETWORK = device("h100"), FLAT.links[1].rate
MODEL = decoder(Dims(16, 1024, 16, 32000, ffn=4096, kv_heads=4), "small")
ASK = Ask(64 * 2048, 2048, most=1)
POWERS = st.sampled_from([1, 2, 4, 8, 16])


def islands(size: int, rate: float, ranks: int = 64) -> Cluster:
    """The cluster, with groups of so many devices that meet before a farther network."""
    near, far = FLAT.links
    leaf, spine = replace(far, name="leaf", ranks=size), replace(far, name="spine", ranks=ranks, rate=rate)
    return replace(FLAT, ranks=ranks, links=(near, leaf, spine))


def of(*levels: tuple[int, float], node: int = 8) -> Setting:
    """With such islands."""
    return Setting(DEVICE, framework("megatron-core"), node=node, nic=NETWORK, islands=levels)


def test_a_cluster_says_its_islands() -> None:
    setting = setting_of(islands(32, 5e9), ASK)
    assert (setting.node, setting.nic, setting.islands) == (8, NETWORK, ((32, 5e9),))
    assert requested(islands(32, 5e9), ASK).islands == (32,)
    assert setting_of(FLAT, ASK).islands == requested(FLAT, ASK).islands == ()


@pytest.mark.parametrize("what", ["all-reduce", "all-gather", "reduce-scatter", "all-to-all", "p2p"])
@given(POWERS, POWERS, st.sampled_from([16, 32, 64]), st.floats(0.01, 1.0), st.floats(1e3, 1e9))
@settings(deadline=None, max_examples=30)
def test_a_slower_spine_counts_for_those_who_cross_it(
    what: str, ranks: int, stride: int, size: int, part: float, nbytes: float
) -> None:
    def took(setting: Setting) -> float:
        one = (np.array([nbytes]), np.array([float(ranks)]), np.array([float(stride)]))
        return float(exchange(setting, what, *one).max())

    flat, slow = took(of()), took(of((size, part * NETWORK)))
    assert slow >= flat == took(of((size, 100 * NETWORK)))
    assert took(of((size, part * NETWORK / 2))) >= slow
    assert took(of((2 * size, part * NETWORK))) <= slow
    if ranks * stride <= size:
        assert slow == flat


def test_a_ring_over_islands_is_as_quick_as_what_its_members_there_carry() -> None:
    """Of 16 ranks, one of each node of eight, four are on an island of 32: a quarter of the rate of each is enough."""
    sent = 2 * 2.0**30 * 15 / 16
    one = (np.array([2.0**30]), np.array([16.0]), np.array([8.0]))
    flat, same = (float(exchange(of(*levels), "all-reduce", *one).max()) for levels in ((), ((32, NETWORK / 4),)))
    slow = float(exchange(of((32, NETWORK / 16)), "all-reduce", *one).max())
    assert same == flat
    far = curves.far_seconds(DEVICE, "all-reduce", np.array(0.0), np.array(16.0), np.array(4.0), NETWORK)
    reached = sent / (flat - float(far)) / NETWORK
    assert slow - float(far) == pytest.approx(sent / (4 * reached * NETWORK / 16))
    assert slow == pytest.approx(4 * flat, rel=0.01)


def test_hops_cross_islands_as_often_as_stages_lie_on_others() -> None:
    """16 stages of eight ranks on 128 devices: of 15 ways three are between islands of 32, the others between nodes."""
    g = grid(batch=64, sequence=2048, pipeline=16, tensor=8, sequence_parallel=1.0)
    flat, far = (float(hop_seconds(MODEL, g, of(*levels))[0]) for levels in ((), ((8, NETWORK / 10),)))
    assert far > 2 * flat
    assert float(hop_seconds(MODEL, g, of((32, NETWORK / 10)))[0]) == pytest.approx((12 * flat + 3 * far) / 15)


@pytest.mark.parametrize("size", [16, 32])
def test_the_search_finds_what_trying_everything_finds(size: int) -> None:
    cluster = islands(size, NETWORK / 20)
    setting, request = setting_of(cluster, ASK), requested(cluster, ASK)
    everything = joined([of_mesh(MODEL, request, mesh) for mesh in meshes(MODEL, request)])
    step = seconds(MODEL, everything, setting).step
    found = search(MODEL, replace(request, able=replace(request.able, uneven=0)), setting, 1e15, 1)
    assert float(found.step[0]) <= float(step.min()) * (1 + 1e-12)


def test_a_slower_spine_never_makes_the_best_quicker() -> None:
    steps = [plan(MODEL, islands(16, NETWORK * part), ASK, what_if=False).choices[0].step for part in (1, 0.1, 0.01)]
    assert steps == sorted(steps)
    assert steps[0] == plan(MODEL, FLAT, ASK, what_if=False).choices[0].step
    assert steps[-1] > steps[0]


def test_half_of_the_network_is_half_of_each_level() -> None:
    found = plan(MODEL, islands(16, NETWORK / 10), ASK).otherwise["with half of the network"]
    near, leaf, spine = islands(16, NETWORK / 20).links
    half = replace(FLAT, links=(near, replace(leaf, rate=NETWORK / 2), spine))
    best = plan(MODEL, half, ASK, what_if=False).choices[0]
    assert found is not None
    assert found.step == best.step


def test_the_command_reads_three_levels(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def link(name: str, ranks: int, rate: float) -> str:
        rest = "reaches = 0.8\nlatency = 5e-6\nhop = 1e-6\n"
        return f'[[links]]\nname = "{name}"\nranks = {ranks}\nrate = {rate}\n{rest}'

    steps: list[float] = []
    for spine in (50e9, 1e9):
        file = tmp_path / f"{spine:g}.toml"
        text = 'version = 1\nranks = 64\n[device]\nname = "h100"\nreaches = 0.8\nmemory_reaches = 0.9\n'
        file.write_text(text + link("nvlink", 8, 450e9) + link("leaf", 16, 50e9) + link("spine", 64, spine))
        assert main(["plan", "llama-3-8b", "--cluster", str(file), "--top", "1", "--json"]) == 0
        steps.append(json.loads(capsys.readouterr().out)["choices"][0]["step"])
    assert steps[0] < steps[1]
