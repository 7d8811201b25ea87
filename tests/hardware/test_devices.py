"""The catalogue of devices, and the curves that price work on them."""

import tomllib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tangram.errors import UserError
from tangram.hardware.catalogue import curves
from tangram.hardware.catalogue.devices import device, devices

MAKERS = ("NVIDIA", "AMD", "Ascend", "Kunlun", "MTT", "Hygon", "Iluvatar", "MetaX", "TPU")
SIZES = st.integers(1, 1 << 16).map(float)
H100 = device("h100")


def test_the_catalogue_has_every_maker_with_a_source_for_each_device() -> None:
    labels = [one.label for one in devices().values()]
    assert len(labels) >= 45
    assert all(any(maker in label for label in labels) for maker in MAKERS)
    assert all(one.figures for one in devices().values())


@pytest.mark.parametrize(
    ("said", "key"),
    [("H100", "h100"), ("A100-80", "a100"), ("A100-40", "a100-40"), ("V100-16", "v100-16"), ("gb200", "gb200"),
     ("Ascend 910B (Atlas 900 A2 PoDc)", "ascend-910b"), ("nvidia b200 sxm", "b200")],
)  # fmt: skip
def test_a_device_is_found_as_tables_call_it(said: str, key: str) -> None:
    assert device(said).name == key


def test_an_unknown_device_is_refused_with_the_nearest() -> None:
    with pytest.raises(UserError, match='there is no device "h1000" in the catalogue: did you mean h100'):
        device("h1000")


def test_what_is_unknown_is_not_guessed() -> None:
    assert device("kunlun-p800").memory_bytes is None
    with pytest.raises(UserError, match="no rate of products of T-Head PPU"):
        device("thead-ppu").peak("bf16")
    assert curves.assumed(H100) == []
    assert any("network" in one for one in curves.assumed(device("a10g")))


def test_a_type_without_units_runs_in_the_next_wider_one() -> None:
    assert device("a100").peak("fp8") == device("a100").peak("bf16") == 312e12
    assert curves.product_seconds(device("a100"), "fp8", 4096.0, 4096.0, 4096.0) == curves.product_seconds(
        device("a100"), "bf16", 4096.0, 4096.0, 4096.0
    )


@given(SIZES, SIZES, SIZES, st.sampled_from(["bf16", "fp8"]))
def test_a_product_is_never_faster_than_the_device_nor_slower_when_smaller(m: float, n: float, k: float, kind: str):
    took = float(curves.product_seconds(H100, kind, m, n, k))
    assert took >= 2 * m * n * k / H100.peak(kind)
    assert H100.memory_bandwidth is not None
    assert took >= 2 * m * n / H100.memory_bandwidth
    for larger in ((2 * m, n, k), (m, 2 * n, k), (m, n, 2 * k)):
        assert float(curves.product_seconds(H100, kind, *larger)) >= took


@given(st.integers(1, 512), st.integers(0, 34), st.sampled_from(["all-gather", "all-reduce", "all-to-all"]))
def test_more_bytes_and_a_network_never_take_less(ranks: int, log: int, what: str) -> None:
    nbytes = 2.0**log
    near = float(curves.collective_seconds(H100, what, nbytes, float(ranks), near=float(ranks)))
    far = float(curves.collective_seconds(H100, what, nbytes, float(ranks), near=min(8.0, ranks)))
    assert far >= near >= 0
    assert (near == 0) == (ranks == 1)
    assert float(curves.collective_seconds(H100, what, 2 * nbytes, float(ranks), near=float(ranks))) >= near


def test_arrays_are_what_single_calls_are() -> None:
    m, n = np.array([64.0, 4096.0, 100.0]), np.array([128.0, 1024.0, 7.0])
    every = curves.product_seconds(H100, "bf16", m, n, 512.0)
    assert every == pytest.approx(
        [float(curves.product_seconds(H100, "bf16", a, b, 512.0)) for a, b in zip(m, n, strict=True)]
    )
    ranks = np.array([1.0, 8.0, 64.0])
    some = curves.collective_seconds(H100, "all-gather", 1e9, ranks, near=np.minimum(ranks, 8.0))
    assert some[0] == 0
    assert some[1] < some[2]


def test_every_device_of_which_products_are_known_has_finite_curves() -> None:
    for one in devices().values():
        if one.memory_bandwidth is None or not (one.bf16 or one.fp16):
            continue
        times = [
            curves.product_seconds(one, "bf16", 4096.0, 4096.0, 4096.0),
            curves.attention_seconds(one, "bf16", curves.AttentionSizes(1.0, 4096.0, 4096.0, 32.0, 8.0, 128.0)),
            curves.moved_seconds(one, 1e9),
            curves.collective_seconds(one, "all-reduce", 1e8, 16.0, near=8.0),
        ]
        assert np.isfinite(times).all(), one.name
        assert min(map(float, times)) > 0, one.name


def test_the_curves_are_what_the_script_fits() -> None:
    """One of them anew, so that nobody writes values by hand."""
    from bench._planner.curves import ROOT, products

    kept = tomllib.loads((ROOT / "src" / "tangram" / "hardware" / "curves.toml").read_text())["product"]
    (anew,) = [one for one in products(("h100", "bf16")) if (one.device, one.of) == ("h100", "bf16")]
    for name, value in anew.values.items():
        assert kept["h100"]["bf16"][name] == pytest.approx(value, rel=0.05), name
    assert anew.held_out < 0.08
    assert Path(ROOT / "data" / "published" / "README.md").exists()
