"""Codes, scales, zero points and orders of columns are looked at, verified and compared as the one weight they are."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file  # pyright: ignore[reportUnknownVariableType]

from tangram.cli import main
from tests.checkpoint.quantising import FLOAT, METHODS, NAME, write

Capture = pytest.CaptureFixture[str]


def answer(capsys: Capture, *words: object, rc: int = 0) -> Any:
    """What a command says to a program."""
    capsys.readouterr()
    assert main(["checkpoint", *map(str, words), "--json"]) == rc
    return json.loads(capsys.readouterr().out)


def repository(folder: Path, method: str) -> Path:
    return write(folder, METHODS[method](np.random.default_rng(3)))


def changed(folder: Path, ending: str, rows: int = 1) -> None:
    """Other bits in the stored tensor whose name ends so."""
    tensors = load_file(folder / "model.safetensors")
    (name,) = (one for one in tensors if one.endswith(ending))
    tensors[name].view(torch.uint8).flatten()[:rows] ^= 1
    save_file(tensors, folder / "model.safetensors")


@pytest.mark.parametrize("method", METHODS)
def test_a_weight_is_one_tensor(method: str, tmp_path: Path, capsys: Capture) -> None:
    made = METHODS[method](np.random.default_rng(3))
    write(tmp_path / "q", made)
    tensors = answer(capsys, "inspect", tmp_path / "q")["tensors"]
    assert len(tensors) == len(made.values) + len(FLOAT) + made.unused
    for name, values in made.values.items():
        row = tensors[name]
        assert tuple(row["shape"]) == values.shape
        stored = {one["name"] for one in row["stored"].values()}
        assert stored <= set(made.tensors)
        assert not stored & (tensors.keys() - {name})
        assert (
            row["bytes"]
            == sum(made.tensors[one].nbytes for one in stored)
            > made.tensors[row["stored"]["codes"]["name"]].nbytes
        )
    (found,) = answer(capsys, "verify", tmp_path / "q")["checkpoints"]
    assert (found["tensors"], found["quantised"]) == (len(tensors), len(made.values))


def test_what_people_read(tmp_path: Path, capsys: Capture) -> None:
    repository(tmp_path / "q", "gptq, 8 bits, columns in an order")
    assert main(["checkpoint", "inspect", str(tmp_path / "q")]) == 0
    shown = capsys.readouterr().out
    assert "gptq, 1 weight of codes and scales, each one tensor here" in shown
    assert "qweight" not in shown
    assert "g_idx" not in shown
    (line,) = (one for one in shown.splitlines() if "q_proj.weight" in one)
    assert line.split()[2:5] == ["gptq", "64", "128"]
    assert main(["checkpoint", "verify", str(tmp_path / "q")]) == 0
    assert "3 tensors (1 of codes and scales)" in capsys.readouterr().out


@pytest.mark.parametrize("to", ["hf", "dcp", "tangram"])
def test_in_every_format_that_keeps_codes(to: str, tmp_path: Path, capsys: Capture) -> None:
    repository(tmp_path / "q", "4 bits, zero points")
    for copy in ("a", "b"):
        answer(capsys, "convert", tmp_path / "q", tmp_path / copy, "--to", to)
    name = f"model.{NAME}.weight" if to == "tangram" else f"{NAME}.weight"
    row = answer(capsys, "inspect", tmp_path / "a")["tensors"][name]
    assert (row["codec"], row["shape"], len(row["stored"])) == ("packed", [36, 96], 4)
    values = answer(capsys, "inspect", tmp_path / "a", "--values", name)
    expected = METHODS["4 bits, zero points"](np.random.default_rng(3)).values[f"{NAME}.weight"]
    assert values["largest"] == pytest.approx(float(expected.max()))
    found = answer(capsys, "diff", tmp_path / "a", tmp_path / "b")
    assert (found["same"], found["equal"]) == (True, 3)


@pytest.mark.parametrize("to", ["hf", "tangram"])
@pytest.mark.parametrize("part", ["_packed", "_scale", "_zero_point"])
def test_a_difference_is_of_the_weight(to: str, part: str, tmp_path: Path, capsys: Capture) -> None:
    for copy in ("a", "b"):
        repository(tmp_path / f"q{copy}", "4 bits, zero points")
    changed(tmp_path / "qb", part)
    for copy in ("a", "b"):
        answer(capsys, "convert", tmp_path / f"q{copy}", tmp_path / copy, "--to", to)
    found = answer(capsys, "diff", tmp_path / "a", tmp_path / "b", rc=1)
    (one,) = found["tensors"]
    name = f"model.{NAME}.weight" if to == "tangram" else f"{NAME}.weight"
    assert (one["name"], one["kind"], one["a"], found["equal"]) == (name, "values", "packed [36, 96]", 2)
    assert 0 < one["differing"] < one["elements"] == 36 * 96
    assert answer(capsys, "diff", tmp_path / "a", tmp_path / "b", name, rc=1)["equal"] == 0
    assert answer(capsys, "diff", tmp_path / "a", tmp_path / "b", "*norm*")["equal"] == 1


def test_other_codes_for_the_same_values(tmp_path: Path, capsys: Capture) -> None:
    for copy in ("a", "b"):
        repository(tmp_path / copy, "fp8 in blocks")
    tensors = load_file(tmp_path / "b/model.safetensors")
    codes = tensors[f"{NAME}.weight"].view(torch.uint8)
    zero = int((codes & 127 == 0).flatten().nonzero()[0])
    codes.view(-1)[zero] ^= 128
    save_file(tensors, tmp_path / "b/model.safetensors")
    (one,) = answer(capsys, "diff", tmp_path / "a", tmp_path / "b", rc=1)["tensors"]
    assert (one["kind"], one["differing"], one["largest"]) == ("values", 1, 0.0)  # 0 and -0: bits of values, too
    repository(tmp_path / "c", "4 bits, columns in an order")
    repository(tmp_path / "d", "4 bits, columns in an order")
    tensors = load_file(tmp_path / "d/model.safetensors")
    tensors[f"{NAME}.weight_shape"] = tensors[f"{NAME}.weight_shape"].to(torch.int32)
    save_file(tensors, tmp_path / "d/model.safetensors")
    (one,) = answer(capsys, "diff", tmp_path / "c", tmp_path / "d", rc=1)["tensors"]
    assert (one["name"], one["kind"]) == (f"{NAME}.weight", "codes")


def test_by_two_methods(tmp_path: Path, capsys: Capture) -> None:
    repository(tmp_path / "a", "fp8 in blocks")
    repository(tmp_path / "b", "fp8 by rows")
    (one,) = answer(capsys, "diff", tmp_path / "a", tmp_path / "b", rc=1)["tensors"]
    assert (one["name"], one["a"], one["b"]) == (f"{NAME}.weight", "fp8_inv [160, 192]", "scaled [160, 192]")
    assert one["differing"] > 0


@pytest.mark.parametrize(("method", "without"), [("fp8 in blocks", "_scale_inv"), ("gptq", ".scales")])
def test_codes_without_scales_are_damage(method: str, without: str, tmp_path: Path, capsys: Capture) -> None:
    repository(tmp_path / "q", method)
    tensors = load_file(tmp_path / "q/model.safetensors")
    save_file({k: one for k, one in tensors.items() if not k.endswith(without)}, tmp_path / "q/model.safetensors")
    (found,) = answer(capsys, "verify", tmp_path / "q", rc=1)["checkpoints"]
    assert "says nothing" in found["findings"][0]
    assert main(["checkpoint", "inspect", str(tmp_path / "q")]) == 0
    assert "codes and scales are shown apart" in capsys.readouterr().out


def test_scales_that_do_not_fit_are_damage(tmp_path: Path, capsys: Capture) -> None:
    repository(tmp_path / "q", "fp8 in blocks")
    tensors = load_file(tmp_path / "q/model.safetensors")
    tensors[f"{NAME}.weight_scale_inv"] = torch.ones(2, 5)
    save_file(tensors, tmp_path / "q/model.safetensors")
    (found,) = answer(capsys, "verify", tmp_path / "q", rc=1)["checkpoints"]
    assert "does not fit" in found["findings"][0]
