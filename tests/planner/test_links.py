"""Every link is booked once: no configuration's step is shorter than any of its links is busy."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tangram.hardware.catalogue import curves
from tangram.hardware.catalogue.devices import device
from tangram.models.lora.outline import adapted
from tangram.models.outlines.catalogue import catalogue, in_catalogue
from tangram.models.outlines.outline import Dims, Outline, decoder
from tangram.planner.cost.calibration import published
from tangram.planner.cost.communication_time import Data, exchange, links_of
from tangram.planner.cost.step_time import COVERED, Seconds, scaled, seconds
from tangram.planner.legality.enumerate import Request, meshes, of_mesh
from tangram.planner.search.strategy import Ask, described
from tangram.planner.space.framework_profiles import framework, frameworks
from tangram.planner.space.grid import Grid, grid
from tangram.planner.space.optimisers_and_offload import offloads_of
from tangram.planner.space.schedule_formulas import SCHEDULES
from tangram.planner.space.setting import Host, Setting

DENSE = decoder(Dims(12, 1024, 16, 32000, ffn=4096, kv_heads=4), "dense")
MIXED = decoder(
    Dims(8, 1024, 16, 32000, ffn=2048, experts=64, per_token=8, expert_ffn=512, shared_ffn=512, dense_layers=1), "mixed"
)
SLOW = 3e9
"""Bytes a second of a NIC."""
SETTINGS = st.builds(
    Setting,
    device=st.sampled_from(["h100", "h800", "a100", "l40s", "v100-16"]).map(device),
    framework=st.sampled_from([one.name for one in frameworks()]).map(framework),
    node=st.sampled_from([1, 2, 8]),
    nic=st.sampled_from([None, 1e9, 3e9, 50e9]),
    islands=st.sampled_from([(), ((16, 1e9),)]),
    host=st.builds(Host, rate=st.sampled_from([2e9, 25e9])),
)
SPACES = st.tuples(
    st.sampled_from([DENSE, MIXED, adapted(DENSE, 8)]),
    st.sampled_from([1, 4, 16, 48]),
    st.sampled_from([16, 48, 96]),
    st.sampled_from([512, 4096]),
    st.sampled_from(["", "optimiser", "activations", "optimiser,parameters"]).map(offloads_of),
)


def spaces(drawn: tuple[Outline, int, int, int, tuple[int, ...]]) -> list[Grid]:
    """Some configurations of some meshes of a space."""
    outline, devices, batch, sequence, offloads = drawn
    request = Request(devices, batch, sequence, schedules=tuple(one.name for one in SCHEDULES), offloads=offloads)
    rng = np.random.default_rng(devices)
    every = [of_mesh(outline, request, mesh) for mesh in meshes(outline, request)]
    return [g.take(rng.permutation(len(g))[:200]) for g in every if len(g)]


@given(SPACES, SETTINGS)
@settings(deadline=None, max_examples=15)
def test_no_link_is_busy_for_longer_than_the_step(drawn: Any, setting: Setting) -> None:
    scales = published().scales(setting.device.name, setting)
    for g in spaces(drawn):
        of = seconds(drawn[0], g, setting)
        assert (of.busiest <= of.step * (1 + 1e-12)).all()
        assert (of.busiest <= scaled(of, scales) * (1 + 1e-12)).all()
        assert all((part >= -1e-9 * of.step).all() for part in of.parts().values())


def test_no_link_of_any_public_model_is_busy_for_longer_than_the_step() -> None:
    """Of every model of the catalogue some configurations of some meshes, on devices and frameworks in turn."""
    models = {id(row): name for name, row in catalogue().items() if "config" not in row}
    assert len(models) > 60
    draw, looked = np.random.default_rng(8), 0
    for turn, name in enumerate(models.values()):
        outline = in_catalogue(name)
        assert outline is not None
        kind = device(("h100", "h800", "a100", "l40s", "mi300x")[turn % 5])
        setting = Setting(
            kind, framework(frameworks()[turn % len(frameworks())].name), node=8, nic=(SLOW, 50e9)[turn % 2]
        )
        request = Request(64, 64, 4096, 8, tuple(one.name for one in SCHEDULES), node=8)
        every = [*meshes(outline, request)]
        for mesh in draw.permutation(len(every))[:3]:
            g = of_mesh(outline, request, every[mesh])
            g = g.take(draw.permutation(len(g))[:100])
            of, scales = seconds(outline, g, setting), published().scales(kind.name, setting)
            assert (of.busiest <= np.minimum(of.step, scaled(of, scales)) * (1 + 1e-12)).all(), (name, every[mesh])
            looked += len(g)
    assert looked > 5000


def old(outline: Outline, g: Grid, setting: Setting) -> np.ndarray[Any, Any]:
    """A step in which FSDP's traffic hides under whatever else a pass takes, as it was booked before."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Seconds, "busiest", property(lambda _: np.zeros(len(g))))
        patch.setattr("tangram.planner.cost.block_time.Pass.room", property(lambda self: self.total + 0 * self.links))
        return seconds(outline, g, setting).step


def test_a_link_that_is_booked_twice_is_seen() -> None:
    """The formula before: a network busy for longer than the step."""
    g = grid(batch=256, sequence=4096, data=64, expert=64, zero=3)
    setting = Setting(device("h800"), framework("tangram"), nic=SLOW)
    now = seconds(MIXED, g, setting)
    assert now.links["NIC out"][0] > old(MIXED, g, setting)[0]
    assert now.links["NIC out"][0] <= now.step[0]


def test_links_are_told_apart() -> None:
    """TP within a node is NVLink's, DP between nodes the NIC's, copies to the host PCIe's, by their direction."""
    setting = Setting(device("h100"), framework("megatron-core"))
    near = seconds(DENSE, grid(batch=8, sequence=4096, tensor=8, sequence_parallel=1), setting).links
    assert near["NVLink in"][0] == near["NVLink out"][0] > 0 == near["NIC in"][0]
    far = seconds(DENSE, grid(batch=64, sequence=4096, data=8, tensor=8, sequence_parallel=1), setting).links
    assert far["NIC out"][0] > 0
    (offloaded,) = {*offloads_of("optimiser")} - {0}
    hosted = seconds(DENSE, grid(batch=8, sequence=4096, offload=offloaded), setting).links
    trained, host = DENSE.numbers - DENSE.hidden, setting.host
    assert hosted["PCIe in"][0] == pytest.approx(2 * trained / host.rate)
    assert hosted["PCIe out"][0] == pytest.approx(4 * trained / host.rate)
    assert hosted["host memory"][0] > 0
    assert links_of(Setting(device("l40s"), framework("tangram")))[0] == "PCIe"


def test_a_ring_over_nodes_brings_a_part_by_each_nic_and_all_by_the_fast_link() -> None:
    setting = Setting(device("h100"), framework("tangram"), node=8)
    nbytes, ranks, one = np.array([8e9]), np.array([16.0]), np.ones(1)
    near, far = exchange(setting, "all-gather", nbytes, ranks, one)[:, 0]
    rate = float(setting.device.nic_bandwidth or 0) * curves.FAR["reach"]
    assert far == pytest.approx(8e9 * 15 / 16 / 8 / rate, rel=0.01)
    alone = curves.collective_seconds(setting.device, "all-gather", nbytes, ranks, ranks)[0]
    assert near == pytest.approx(alone, rel=0.05)
    spread = exchange(setting, "all-gather", nbytes, ranks, np.full(1, 8.0))[:, 0]
    assert spread[0] == 0 < spread[1]


def test_what_more_computation_covers_is_not_in_bounds() -> None:
    assert COVERED == ("data", "host")
    g = grid(batch=64, sequence=4096, data=16, expert=16, zero=3)
    of = seconds(MIXED, g, Setting(device("h800"), framework("tangram"), nic=1e8))
    assert of.busiest[0] == pytest.approx(of.step[0], rel=0.2)
    assert isinstance(Data(*np.zeros((4, 1))), Data)


def test_a_choice_says_what_its_links_carry() -> None:
    setting = Setting(device("h800"), framework("tangram"), nic=SLOW)
    g = grid(batch=256, sequence=4096, data=64, expert=64, zero=3)
    (one,) = described(MIXED, g, setting, Ask(2**20, 4096), 80e9, published())
    assert 0 < max(one.links.values()) <= one.step
    assert sum(one.parts.values()) == pytest.approx(one.step)
    quick = described(MIXED, g, replace(setting, nic=50e9), Ask(2**20, 4096), 80e9, published())[0]
    assert quick.links["NIC out"] < one.links["NIC out"]
