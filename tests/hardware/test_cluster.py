"""Cluster files: read, refused, and what things cost there."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from tangram.errors import UserError
from tangram.hardware.catalogue import cluster as c
from tangram.hardware.catalogue.devices import tables
from tangram.layout import Layout, Mesh
from tangram.relayout.collectives.sequences import Link, sequence
from tangram.sharding.derive.derive import WorkRates

GOOD = """
version = 1
ranks = 8
[device]
bf16 = 10e9
fp32 = 5e9
memory_bytes = 1e9
memory_bandwidth = 2e9
reaches = 0.5
memory_reaches = 0.5
[[links]]
name = "near"
ranks = 4
rate = 1e9
reaches = 0.5
latency = 1e-6
hop = 1e-6
[[links]]
name = "far"
ranks = 8
rate = 1e8
reaches = 1.0
latency = 5e-6
hop = 0
"""


def read(tmp_path: Path, text: str) -> c.Cluster:
    path = tmp_path / "c.toml"
    path.write_text(text)
    return c.load(path)


def test_what_comes_with_tangram_is_read() -> None:
    assert c.names() == ("cpu-2", "h100-8x8")
    for name in c.names():
        found = c.load(name)
        assert found == c.builtin(name)
        assert found.ranks == found.links[-1].ranks


def test_h100_is_what_the_derivation_was_set_by() -> None:
    flops, moved = c.rates(c.builtin("h100-8x8"), 8)
    assert flops == pytest.approx(WorkRates().flops_per_byte, rel=0.01)
    assert moved == pytest.approx(WorkRates().moved_per_byte, rel=0.01)
    between = c.rates(c.builtin("h100-8x8"), 8, 8)
    assert between[0] == pytest.approx(9 * flops)


def test_an_axis_has_the_nearest_link_that_all_its_ranks_meet_at(tmp_path: Path) -> None:
    found = read(tmp_path, GOOD)
    assert [found.link(k, stride).name for k, stride in [(1, 1), (4, 1), (2, 2), (8, 1), (2, 4)]] == [
        "near",
        "near",
        "near",
        "far",
        "far",
    ]
    links = c.axis_links(found, Mesh.parse("dp=2 tp=4"))
    assert links == {"dp": (5e-6, 1e8), "tp": (pytest.approx(4e-6), 5e8)}
    with pytest.raises(UserError, match="has 8 ranks, and an axis spans 16: take a smaller mesh"):
        c.axis_links(found, Mesh.parse("dp=16"))


def test_costs(tmp_path: Path) -> None:
    found = read(tmp_path, GOOD)
    assert c.collective_seconds(found, "all-gather", 1e9, 4) == pytest.approx(1e-6 + 3e-6 + 1.5)
    assert c.collective_seconds(found, "all-reduce", 1e9, 4) == pytest.approx(1e-6 + 6e-6 + 3)
    assert c.collective_seconds(found, "all-to-all", 1e9, 2, 4) == pytest.approx(5e-6 + 5)
    assert c.collective_seconds(found, "slice", 1e9, 4) == 0
    assert c.collective_seconds(found, "all-reduce", 1e9, 1) == 0
    assert c.product_seconds(found, 1e9) == pytest.approx(0.2)
    assert c.product_seconds(found, 1e9, "fp32") == pytest.approx(0.4)
    assert c.moved_seconds(found, 1e9) == pytest.approx(1.0)
    with pytest.raises(UserError, match="has no rate of fp8 products: it has bf16, fp32"):
        c.product_seconds(found, 1, "fp8")


def test_what_was_measured_is_what_is_predicted() -> None:
    """nccl 2.29.2 on 8 H100 (ai-dynamo/aiconfigurator@095f58a): collectives of 512 MiB, and of 512 bytes."""
    h100 = c.builtin("h100-8x8")
    for what, nbytes, measured in (
        ("all-gather", 512 << 20, 1.4015e-3),
        ("reduce-scatter", 512 << 20, 1.39936e-3),
        ("all-gather", 512, 1.035e-5),
        ("all-reduce", 512, 1.546e-5),
    ):
        assert c.collective_seconds(h100, what, nbytes, 8) == pytest.approx(measured, rel=0.06)


def test_sequences_are_chosen_by_the_links_of_a_cluster() -> None:
    mesh, shape = Mesh.parse("dp=8 tp=8"), (1 << 13, 1 << 13)
    links = tuple((axis, Link(*link)) for axis, link in c.axis_links(c.builtin("h100-8x8"), mesh).items())
    source, target = Layout.parse("x y sum:dp sum:tp").bind(shape), Layout.parse("x y").bind(shape)
    found = [(step.collective, step.axes) for step in sequence(shape, source, target, mesh, 2, links)]
    assert found == [("reduce-scatter", ("tp",)), ("all-reduce", ("dp",)), ("all-gather", ("tp",))]


@pytest.mark.parametrize(
    ("before", "after", "sentence"),
    [
        ("version = 1", "version = 2", "version is 2; this Tangram reads 1"),
        ("ranks = 8\n[device]", "[device]", 'the key "ranks" is missing'),
        ("rate = 1e9", "rat = 1e9", r"""the key "links.0.rat" is not known \(did you mean 'rate'\?\)"""),
        ("rate = 1e9", "", 'the key "links.0.rate" is missing'),
        ("rate = 1e9", "rate = 0", "links.0.rate is 0; write a number above 0"),
        ("rate = 1e9", "rate = nan", "links.0.rate is nan; write a number above 0"),
        ("rate = 1e9", "rate = true", "links.0.rate is True; write a number above 0"),
        ("hop = 0", "hop = -1", "links.1.hop is -1; write a number from 0"),
        ("reaches = 0.5\nmemory", "reaches = 1.5\nmemory", "device.reaches is 1.5; write what share is reached"),
        ("ranks = 4", "ranks = 3", "far joins 8 ranks and near before it 3; write the nearest link first"),
        ("ranks = 8\n[device]", "ranks = 16\n[device]", "there are 16 ranks, and the last link joins 8"),
        ("ranks = 8\n[device]", "ranks = 8.5\n[device]", "ranks is 8.5; write a whole number from 1"),
        (
            "bf16 = 10e9",
            'name = "h10"',
            r"there is no device 'h10' \(did you mean 'h100' or 'h20' or 'a10'\?\); write its figures",
        ),
        ("bf16 = 10e9", "name = 3", "device.name is 3; write a name of devices.toml"),
        ("bf16 = 10e9", "", 'the key "device.bf16" is missing'),
        ("[device]", "[device", "this is not TOML"),
    ],
)
def test_mistakes(tmp_path: Path, before: str, after: str, sentence: str) -> None:
    assert before in GOOD
    with pytest.raises(UserError, match=sentence) as caught:
        read(tmp_path, GOOD.replace(before, after, 1))
    assert "\n" not in str(caught.value)


def test_tables_that_are_none(tmp_path: Path) -> None:
    head = "version = 1\nranks = 8\n"
    with pytest.raises(UserError, match="links is 3; write at least one table"):
        read(tmp_path, head + "links = 3\ndevice = 3\n")
    with pytest.raises(UserError, match=r"links.0 is 3; write it as a table"):
        read(tmp_path, head + "links = [3]\ndevice = 3\n")


def test_files_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be read"):
        c.load(tmp_path / "none.toml")
    with pytest.raises(UserError, match=r"there is no cluster 'h100-8x' \(did you mean 'h100-8x8'\?\)"):
        c.load("h100-8x")


def test_a_device_of_the_catalogue_may_be_corrected(tmp_path: Path) -> None:
    device = GOOD.replace("bf16 = 10e9\nfp32 = 5e9\nmemory_bytes = 1e9\nmemory_bandwidth = 2e9\n", 'name = "h100"\n')
    assert read(tmp_path, device).device.flops["bf16"] == 989e12
    corrected = read(tmp_path, device.replace('name = "h100"', 'name = "h100"\nbf16 = 756e12')).device
    assert (corrected.flops["bf16"], corrected.flops["fp32"], corrected.name) == (756e12, 67e12, "h100")


@pytest.mark.parametrize("name", tables())
def test_every_device_of_the_catalogue_may_be_named(tmp_path: Path, name: str) -> None:
    """What it knows no memory of needs that from the file; products in 32 bits nothing needs but what asks for them."""
    text = GOOD.replace("bf16 = 10e9\nfp32 = 5e9\nmemory_bytes = 1e9\nmemory_bandwidth = 2e9\n", f'name = "{name}"\n')
    lacks = [one for one in ("memory_bytes", "memory_bandwidth") if one not in tables()[name]]
    for one in lacks:
        with pytest.raises(UserError, match=f'the key "device.{one}" is missing'):
            read(tmp_path, text)
        text = text.replace("[device]\n", f"[device]\n{one} = 1e12\n")
    cluster = read(tmp_path, text)
    assert set(cluster.device.flops) == {"bf16", "fp32"} & set(tables()[name])
    if "fp32" not in tables()[name]:
        with pytest.raises(UserError, match=r"has no rate of fp32 products: it has .*; give device.fp32 in its file"):
            c.product_seconds(cluster, 1e12, "fp32")


def test_equal_nodes_of_the_catalogue_by_name(tmp_path: Path) -> None:
    """As the file of one's own, with more ranks; what the catalogue does not know is told."""
    text = (Path(c.__file__).parents[1] / "clusters" / "h100-8x8.toml").read_text(encoding="utf-8")
    path = tmp_path / "mine.toml"
    path.write_text(text.replace("ranks = 64", "ranks = 2048"), encoding="utf-8")
    named, mine = c.load("h100-8x256"), c.load(path)
    assert (named.ranks, named.device) == (2048, mine.device)
    assert [replace(link, name="") for link in named.links] == [replace(link, name="") for link in mine.links]
    assert [link.ranks for link in c.load("H200-1x4").links] == [4]
    assert [link.ranks for link in c.load("gb200-72x2").links] == [72, 144]
    assert [link.ranks for link in c.load("l4-1x1").links] == [1]
    bridged, between = c.load("a6000-2x1").links[0].rate, c.load("a6000-4x1").links[0]
    assert (bridged, between.ranks, between.rate) == (56e9, 4, 16e9)  # half of PCIe, as of cards without a bridge
    for name, known, ranks in (
        ("a100-80x4", "a100", [4]), ("A100-40x8", "a100-40", [8]), ("8xh100", "h100", [8]), ("4 x B200", "b200", [4]),
        ("rtx4090x1", "rtx-4090", [1]), ("h100-96x16", "h100-96", [8, 16]), ("h100x64", "h100", [8, 64]),
        ("4090x8", "rtx-4090", [8]), ("8x4090", "rtx-4090", [8]), ("2x RTX 3090", "rtx-3090", [2]),
        ("a10gx4", "a10g", [4]), ("T4x2", "t4", [2]), ("l4x8", "l4", [8]), ("2xa100", "a100", [2]),
        ("h100_sxm-8x8", "h100", [8, 64]), ("H100-SXM5-80GBx8", "h100", [8]), ("8*H100", "h100", [8]),
        ("8 × A100-80GB", "a100", [8]), ("a100_40gbx4", "a100-40", [4]),
        ("nvidia-a100-sxm4-40gb-8x2", "a100-40", [8, 16]),
        ("h100-pciex2", "h100-pcie", [2]), ("h100-nvl-96gbx2", "h100-nvl", [2]), ("gb200x72", "gb200", [72]),
        ("gb200-4x2", "gb200", [8]), ("gb300-4x36", "gb300", [72, 144]), ("gb200-4x19", "gb200", [4, 76]),
        ("b100x8", "b100", [8]), ("mi350x-8x2", "mi350x", [8, 16]), ("rtx-pro-5000x2", "rtx-pro-5000", [2]),
        ("gb200-nvl72", "gb200", [72]), ("gb200x144", "gb200", [72, 144]), ("gb200x256", "gb200", [64, 256]),
        ("6000-adax2", "rtx-6000-ada", [2]), ("MI300Xx8", "mi300x", [8]), ("b200-192gbx8", "b200", [8]),
        ("gh200x4", "gh200", [4]), ("gh200-4x2", "gh200", [4, 8]), ("rtx5070tix1", "rtx-5070-ti", [1]),
        ("v100-16x8", "v100-16", [8]), ("V100-SXM2-16GBx4", "v100-16", [4]), ("v100x8", "v100", [8]),
    ):  # fmt: skip
        assert (c.load(name).device.name, [link.ranks for link in c.load(name).links]) == (known, ranks)
    for name, said in {
        "h100x12": "12 devices are no whole nodes of 8: write h100-4x3, say",
        "m3-ultra-1x1": "thead-ppu; of another device write a file of the cluster",
        "h100-16x2": "linked to 7 others at most: give nodes of 8, as h100-8x4",
        "h800-256x8": "give nodes of 8, as h800-8x256",
        "mi210-2x1": "knows no link within a node of AMD MI210",
        "": "no cluster is named: there are cpu-2, h100-8x8, and DEVICE-8x32",
        "4070": "(did you mean 'rtx-4070x8'?)",
        "5060ti": "(did you mean 'rtx-5060-tix8'?)",
        "h100": "there is no cluster 'h100' (did you mean 'h100-8x8'?)",
        "dgx-h100": "there is no cluster 'dgx-h100' (did you mean 'h100x8'?)",
        "8 a100 gpus": "(did you mean 'a100x8'?)",
        "v100-24gbx8": 'has no device "v100-24gb"',
        "40900x8": 'has no device "40900": did you mean rtx-4090',
        "8xh10": 'has no device "h10": did you mean',
        "a100-60gbx4": 'has no device "a100-60gb": did you mean a100',
        "h100-pcie-40gbx2": 'has no device "h100-pcie-40gb": did you mean h100-pcie',
        "p5.48xlarge": "there is no cluster 'p5.48xlarge': there are cpu-2, h100-8x8, and DEVICE-8x32",
        "h1000-8x2": 'has no device "h1000": did you mean h100',
        "h100-8x0": "there is no cluster of 0 nodes of 8 devices",
        "h100-8x999999999": "write a whole number from 1 to 10000000",
    }.items():
        with pytest.raises(UserError, match=re.escape(said)):
            c.load(name)


def test_nodes_of_cards_that_come_without_a_network_share_a_port() -> None:
    """anyscale/templates pull 130: 32 A10G of four cloud nodes."""
    assert [link.rate for link in c.load("a10g-8x4").links][1] == pytest.approx(100e9 / 8 / 8)
    assert [link.rate for link in c.load("a100-8x4").links][1] == 25e9


def test_all_mistakes_of_a_file_are_told_at_once(tmp_path: Path) -> None:
    wrong = (
        GOOD.replace("version = 1", "version = 9")
        .replace("memory_bytes = 1e9", "memory_bites = 1e9")
        .replace("memory_bandwidth = 2e9", "memory_bandwidth = -2e9")
        .replace("latency", "latencie", 1)
    )
    file = tmp_path / "wrong.toml"
    file.write_text(wrong)
    with pytest.raises(UserError) as told:
        c.load(file)
    for part in ("version is 9", '"device.memory_bites" is not known (did you mean', '"device.memory_bytes" is missing',
                 "device.memory_bandwidth is -2000000000.0", "latencie", "is missing"):  # fmt: skip
        assert part in str(told.value)
