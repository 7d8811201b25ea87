"""The machine at hand as a cluster's file: really measured, fitted, written, read back and planned with."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tangram.cli import main
from tangram.errors import UserError
from tangram.hardware.catalogue import cluster, curves
from tangram.hardware.catalogue.curves import PRODUCT, product
from tangram.hardware.catalogue.devices import device
from tangram.hardware.catalogue.owncurves import curves_in, fit, text_of
from tangram.hardware.measuring import measured, sweep
from tangram.planner.search.strategy import figures

FEW: dict[str, Any] = {"SIDES": (64, 128, 256), "LENGTHS": (128, 256), "HEADS": ((4, 64),), "MOVED": (1 << 12, 1 << 18)}
FEW |= {"POOL": 1 << 20, "MESSAGES": (1 << 12, 1 << 15, 1 << 18)}


def of_products(p: Any, x: Any) -> Any:
    """Seconds of products on an H100, by given values."""
    return product(p, device("h100"), "bf16", x["m"], x["n"], x["k"], 1.0)


def test_planted_values_are_found() -> None:
    """From seconds that a curve makes, with a bad row among them, its values come back."""
    chance = np.random.default_rng(0)
    planted = {**PRODUCT, "reach": 0.6, "m": 300.0, "start": 2e-5}
    x = {name: 2.0 ** chance.integers(6, 14, 200) for name in ("m", "n", "k")}
    t = of_products(planted, x) * chance.lognormal(0, 0.02, 200)
    t[7] *= 30
    found = fit("product", "here", "bf16", PRODUCT, of_products, x, t)
    assert found.values["reach"] == pytest.approx(0.6, rel=0.1)
    assert found.values["m"] == pytest.approx(300, rel=0.3)
    assert found.values["start"] == pytest.approx(2e-5, rel=0.1)
    assert found.median < 0.03
    assert found.spread == pytest.approx(0.02, abs=0.01)


def test_a_machine_is_measured_written_read_and_planned_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in FEW.items():
        monkeypatch.setattr(sweep, name, value)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    out = tmp_path / "here.toml"
    assert main(["doctor", "--measure", "--out", str(out), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert {one["kind"] for one in told["curves"]} == {"product", "attention", "moved", "collective"}
    assert {one["of"] for one in told["curves"] if one["kind"] == "attention"} == {"bf16", "fp32"}
    here = cluster.load(out)
    assert here.ranks == 2
    own = figures(here)
    assert not [line for line in curves.assumed(own) if "kernels" in line]
    real = sweep.products("cpu", "fp32", 2)[-1]
    said = float(curves.product_seconds(own, "fp32", *(real.sizes[name] for name in ("m", "n", "k"))))
    assert 0.1 < said / real.seconds < 10  # of a busy machine; its own curve and not that of an accelerator
    without = replace(own, curves={})
    assert said != float(curves.product_seconds(without, "fp32", *(real.sizes[name] for name in ("m", "n", "k"))))
    assert main(["plan", "qwen3-1m", "--cluster", str(out), "--seq", "128", "--tokens-per-batch", "2048"]) == 0
    assert "tokens/s/device" in capsys.readouterr().out


def test_each_curve_of_a_file_counts_before_those_that_come_with_tangram() -> None:
    h100 = device("h100")
    slow = {
        "product": {"bf16": {**PRODUCT, "reach": 0.01, "spread": 0.1}},
        "attention": {"bf16": {**curves.ATTENTION, "reach": 0.01, "spread": 0.1, "backward": 3.0}},
        "moved": {"any": {"start": 1.0, "reach": 0.5, "spread": 0.1}},
        "collective": {"all-reduce": {"start": 1.0, "hop": 1e-6, "reach": 0.5, "spread": 0.1}},
    }
    own = replace(h100, curves=slow)

    def seconds(of: Any) -> dict[str, float]:
        sizes = curves.AttentionSizes(1, 4096, 4096, 32, 8, 128)
        found = {
            "product": curves.product_seconds(of, "bf16", 4096, 4096, 4096),
            "attention": curves.attention_seconds(of, "bf16", sizes),
            "backward": curves.attention_seconds(of, "bf16", sizes, backward=True),
            "moved": curves.moved_seconds(of, 1e6),
            "collective": curves.collective_seconds(of, "all-reduce", 1e6, 4, 8),
        }
        return {name: float(value) for name, value in found.items()}

    ours, usual = seconds(own), seconds(h100)
    assert all(ours[name] > 5 * usual[name] for name in usual)
    assert ours["backward"] == pytest.approx(7.5 * ours["attention"], rel=0.01)
    assert curves.spread(own, "product") == curves.spread(own, "attention") == 0.1
    assert curves.product_seconds(own, "fp8", 4096, 4096, 4096) == curves.product_seconds(h100, "fp8", 4096, 4096, 4096)


def test_what_is_written_reads_back(tmp_path: Path) -> None:
    found = measured.Measured("a machine", 2, replace(device("h100"), name="here"), (), "gloo", 1e-4)
    x = {name: np.array([64.0, 128, 256, 512]) for name in ("m", "n", "k")}
    t = of_products(PRODUCT, x)
    one = fit(
        "product",
        "here",
        "bf16",
        PRODUCT,
        lambda p, x: product(p, device("h100"), "bf16", x["m"], x["n"], x["k"], 1.0),
        x,
        t,
    )
    path = tmp_path / "c.toml"
    path.write_text(replace(found, fits=(one,)).text())
    read = cluster.load(path).curves["product"]["bf16"]
    assert read.keys() == {*PRODUCT, "spread"}
    assert read["reach"] == pytest.approx(one.values["reach"], rel=1e-3)
    assert text_of([]) == ""


@pytest.mark.parametrize(
    ("table", "said"),
    [
        (3, "write it as a table"),
        ({"gemm": {}}, '"curves.gemm" is not known'),
        ({"product": {"bf17": {}}}, '"curves.product.bf17" is not known'),
        ({"product": {"bf16": 1}}, "write it as a table"),
        ({"product": {"bf16": {}}}, '"start" is missing'),
        ({"moved": {"any": {"start": 1e-6, "reach": 0.5, "spread": 0.1, "speed": 1}}}, '"speed" is not known'),
        ({"moved": {"any": {"start": 0, "reach": 0.5, "spread": 0.1}}}, "a number above 0"),
        ({"moved": {"any": {"start": float("nan"), "reach": 0.5, "spread": 0.1}}}, "a number above 0"),
        ({"moved": {"any": {"start": True, "reach": 0.5, "spread": 0.1}}}, "a number above 0"),
        ({"collective": {"p2p": {}}}, "is not known"),
    ],
)
def test_mistakes_of_a_file_are_named(table: Any, said: str) -> None:
    with pytest.raises(UserError, match="file") as raised:
        curves_in("file", table)
    assert said in str(raised.value)


def test_mistakes_of_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--measure"]) == 2
    assert main(["doctor", "--measure", "--out", str(tmp_path)]) == 2
    assert main(["doctor", "--measure", "--out", str(tmp_path / "x.toml"), "--ranks", "99"]) == 2
    assert "measure for 1 to" in capsys.readouterr().err


def test_one_rank_has_no_collectives_and_is_planned_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in FEW.items():
        monkeypatch.setattr(sweep, name, value)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    out = tmp_path / "one.toml"
    assert main(["doctor", "--measure", "--out", str(out), "--ranks", "1"]) == 0
    here = cluster.load(out)
    assert here.ranks == 1
    assert "collective" not in here.curves
    assert main(["plan", "qwen3-1m", "--cluster", str(out), "--seq", "128", "--tokens-per-batch", "2048"]) == 0


def test_more_ranks_than_accelerators_are_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measured, "accelerators", lambda: [SimpleNamespace(kind="cuda")] * 4)
    with pytest.raises(UserError, match="there are 4 accelerators"):
        measured.measured("cuda", 8)


def test_attention_of_32_bits_has_its_own_curve_where_it_was_measured() -> None:
    h100, sizes = device("h100"), curves.AttentionSizes(1, 4096, 4096, 32, 8, 128)
    slow = {**curves.ATTENTION, "reach": 0.01, "spread": 0.1, "backward": 3.0}
    own = replace(h100, curves={"attention": {"fp32": slow}})

    def slower(kind: str) -> float:
        return float(curves.attention_seconds(own, kind, sizes) / curves.attention_seconds(h100, kind, sizes))

    assert slower("fp32") > 5
    assert slower("bf16") == 1
