"""The types that products run in on devices with and without units for them, and the spread of every curve."""

from dataclasses import replace

import numpy as np
import pytest

from tangram.errors import UserError
from tangram.hardware.catalogue import curves
from tangram.hardware.catalogue.devices import WIDER, Figures, device, devices

KNOWN = [one for one in devices().values() if one.memory_bandwidth and (one.bf16 or one.fp16)]
SHAPE = (4096.0, 4096.0, 4096.0)


def took(one: Figures, kind: str) -> float:
    return float(curves.product_seconds(one, kind, *SHAPE))


def test_tf32_is_not_taken_for_a_narrower_type() -> None:
    """It was: at the rate of the narrowest type of the device, 9e15 on a B200."""
    assert len(KNOWN) > 35
    for one in KNOWN:
        assert one.peak("tf32") <= one.peak("bf16"), one.name
        assert took(one, "tf32") > took(one, "bf16"), one.name
    assert device("mtt-s4000").peak("tf32") == 50e12
    assert device("h100").peak("tf32") == device("h100").peak("fp32") == 67e12


@pytest.mark.parametrize("kind", ["int8", "", "bfloat16"])
def test_what_is_no_type_is_refused(kind: str) -> None:
    """It was taken for the narrowest one."""
    with pytest.raises(UserError, match=f'there is no type "{kind}" of products: there are fp4, fp8, bf16'):
        device("h100").peak(kind)
    with pytest.raises(UserError, match="there is no type"):
        curves.product_seconds(device("h100"), kind, *SHAPE)


@pytest.mark.parametrize(
    ("name", "kind", "runs"),
    [("h100", "fp4", "fp8"), ("a100", "fp4", "bf16"), ("v100", "fp8", "fp16"), ("v100", "bf16", "fp16"),
     ("b200", "fp4", "fp4"), ("h100", "fp32", "fp32"), ("gaudi3", "fp8", "bf16")],
)  # fmt: skip
def test_products_run_and_are_priced_in_the_narrowest_type_with_units(name: str, kind: str, runs: str) -> None:
    """4 bits on an H100 had the curve of devices with such units, and came out slower than 16 bits."""
    one = device(name)
    assert one.runs_in(kind) == runs
    assert took(one, kind) == took(one, runs)
    assert took(device("h100"), "fp4") < took(device("h100"), "bf16")


def test_a_device_of_which_only_8_bits_are_known_has_products_in_them() -> None:
    """They were refused for want of a rate in 16 bits."""
    one = device("ascend-950pr")
    assert one.bf16 is None
    assert 2 * 4096**3 / 1000e12 < took(one, "fp8") < 4 * 2 * 4096**3 / 1000e12
    with pytest.raises(UserError, match="no rate of products of Huawei Ascend 950PR"):
        took(one, "bf16")


def test_every_curve_of_every_device_says_how_far_times_lie_from_it() -> None:
    """Products in 16 bits other than bf16, in 32 bits and p2p raised KeyError."""
    for one in devices().values():
        found = [curves.spread(one, "product", kind) for kind in WIDER]
        found += [curves.spread(one, "attention", kind) for kind in WIDER]
        found += [curves.spread(one, "collective", what) for what in curves.SHARES]
        assert min(found) > 0.01, one.name
        assert max(found[: 2 * len(WIDER)]) < 0.5, one.name
    assert curves.spread(device("mi300x"), "product") > curves.spread(device("h100"), "product")
    with pytest.raises(UserError, match='there is no collective "gather"'):
        curves.spread(device("h100"), "collective", "gather")


@pytest.mark.parametrize("one", KNOWN, ids=lambda one: one.name)
def test_attention_is_never_faster_than_the_device_and_its_backward_never_than_the_forward(one: Figures) -> None:
    keys = np.array([128.0, 1024.0, 8192.0, 65536.0])
    of = curves.AttentionSizes(1.0, keys, keys, 32.0, 8.0, 128.0)
    there = curves.attention_seconds(one, "bf16", of)
    back = curves.attention_seconds(one, "bf16", of, backward=True)
    assert (there > 2 * 32 * keys**2 * 128 / one.peak("bf16")).all()
    assert (there[1:] > there[:-1]).all()
    assert (back > there).all()
    assert (curves.attention_seconds(one, "bf16", replace(of, causal=False)) >= there).all()


@pytest.mark.parametrize("what", list(curves.SHARES))
def test_a_collective_is_never_faster_than_its_links(what: str) -> None:
    nbytes = 2.0 ** np.arange(10, 36)
    for one in devices().values():
        rate = one.link_bandwidth or one.pcie_bandwidth or curves.PCIE
        least = nbytes * (1.0 if what == "p2p" else 7 / 8) / rate
        assert (curves.collective_seconds(one, what, nbytes, 8.0, near=8.0) > least).all(), one.name
        far = curves.collective_seconds(one, what, nbytes, 64.0, near=8.0, nic=1e9)
        assert (np.diff(far) > 0).all(), one.name
        quick = curves.collective_seconds(one, what, nbytes, 64.0, near=8.0, nic=1e12)
        assert (far >= quick).all(), one.name
        assert (far > quick).any() or (one.link_bandwidth or 0.0) <= curves.PCIE, one.name
