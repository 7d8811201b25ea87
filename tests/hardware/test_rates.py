"""Rates of the machine at hand: measured, kept, and not believed when the file is broken."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tangram.errors import UserError
from tangram.hardware.host.machine import Accelerator
from tangram.hardware.measuring import rates as module
from tangram.hardware.measuring.rates import Curve, Rates, catalogue, measure, rates


@pytest.fixture(scope="module")
def measured() -> Rates:
    return measure("cpu", 2)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "tangram" / "rates.json"


def test_what_is_measured_is_plausible(measured: Rates) -> None:
    threads = torch.get_num_threads()
    assert (measured.device, measured.processes, measured.source) == ("cpu", 2, "measured")
    assert measured.peak_flops("float32") > 1e8
    for curve in (*measured.products.values(), measured.moves, measured.links):
        sizes = [size for size, _ in curve.points]
        assert sizes == sorted(set(sizes))
        assert all(rate > 0 for _, rate in curve.points)
    assert len(measured.links.points) == 3
    assert 0 < measured.call_seconds < 1e-2
    assert 0 < measured.latency < 1
    assert measured.memory > 1e6
    assert torch.get_num_threads() == threads


def test_a_curve_between_and_beyond_its_points() -> None:
    curve = Curve(((10.0, 1.0), (1000.0, 100.0)))
    assert [curve.at(size) for size in (1, 10, 1000, 5000)] == [1.0, 1.0, 100.0, 100.0]
    assert curve.at(100) == pytest.approx(10.0)
    assert curve.seconds(100) == pytest.approx(10.0)
    assert curve.seconds(0) == 0
    assert curve.peak == 100.0
    assert Curve(((5.0, 7.0),)).at(1) == Curve(((5.0, 7.0),)).at(50) == 7.0


def test_rates_are_kept_until_they_are_asked_for_anew(
    cache: Path, measured: Rates, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs: list[int] = []

    def counted(device: str, processes: int) -> Rates:
        runs.append(processes)
        return dataclasses.replace(measured, processes=processes)

    monkeypatch.setattr(module, "measure", counted)  # what is tested is the keeping
    first = rates("cpu", 2)
    again = rates("cpu", 2)
    assert dataclasses.replace(again, memory=first.memory) == first
    assert rates("cpu", 1).processes == 1
    assert rates("cpu", 2).processes == 2
    assert runs == [2, 1]
    assert rates("cpu", 2, anew=True) == first
    assert runs == [2, 1, 2]
    assert list(cache.parent.iterdir()) == [cache]
    monkeypatch.setattr(module, "VERSION", 99)
    rates("cpu", 2)
    assert runs == [2, 1, 2, 2]


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: "",
        lambda text: "[]",
        lambda text: text[:-40],
        lambda text: json.dumps(dict.fromkeys(json.loads(text), 3)),
        lambda text: json.dumps({key: {**value, "moves": {"points": []}} for key, value in json.loads(text).items()}),
        lambda text: json.dumps({key: {**value, "other": 1} for key, value in json.loads(text).items()}),
    ],
)
def test_a_broken_cache_is_measured_again(
    damage: Callable[[str], str], cache: Path, measured: Rates, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "measure", lambda device, processes: measured)
    rates("cpu", 2)
    cache.write_text(damage(cache.read_text()))
    assert rates("cpu", 2) == measured
    assert dataclasses.replace(rates("cpu", 2), memory=measured.memory) == measured


def test_a_cache_folder_that_cannot_be_made(tmp_path: Path, measured: Rates, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setattr(module, "measure", lambda device, processes: measured)
    assert rates("cpu", 2) == measured


def test_bad_input() -> None:
    for call in (rates, measure):
        with pytest.raises(UserError, match="0 processes cannot be measured"):
            call("cpu", 0)
        with pytest.raises(UserError, match='no device of the kind "abacus"'):
            call("abacus", 1)


def test_the_catalogue_is_whole() -> None:
    assert {"a100", "h100", "h200", "b200", "mi300x"} <= set(catalogue())
    for figures in catalogue().values():
        assert set(figures) >= {
            *("names", "bf16", "fp32", "memory_bytes", "memory_bandwidth", "link_bandwidth", "source"),
        }
        assert figures["bf16"] > figures["fp32"] > 1e12
        assert figures["source"].startswith("https://")


@pytest.mark.parametrize(("name", "known"), [("NVIDIA H100 80GB HBM3", 989e12), ("Abacus 3000", None)])
def test_an_accelerator_is_found_by_its_name(name: str, known: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    # "meta" stands for a kind of device that is there without being an accelerator.
    monkeypatch.setattr(module, "accelerators", lambda: (Accelerator("meta", name, 10**9),))
    found = module._from_catalogue("meta")
    assert (None if found is None else found[0]["bf16"]) == known
    assert module._memory("meta", 4) == 1e9
