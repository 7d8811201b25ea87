"""Two checkpoints of unlike structures differ where they do, and nowhere else."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tangram.checkpoint.saving.save import save as save_own
from tangram.cli import main
from tests.checkpoint.peers.models import save
from tests.checkpoint.test_optimiser_states import stepped


def diff(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, dict[str, Any]]:
    capsys.readouterr()
    code = main(["checkpoint", "diff", *map(str, arguments), "--json"])
    return code, json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("name", ["qwen3", "deepseek_v3"])
def test_a_model_and_what_was_converted_of_it(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save(name, tmp_path / "hf")
    options = ["--to", "torch_dist", "--transformer-impl", "local", "--pad-vocabulary", "96"]
    assert main(["checkpoint", "convert", str(tmp_path / "hf"), str(tmp_path / "core"), *options]) == 0
    count = len(load_file(tmp_path / "hf/model.safetensors"))
    code, found = diff(capsys, tmp_path / "core", tmp_path / "hf")
    assert (code, found["same"], found["equal"]) == (0, True, count)
    code, found = diff(capsys, tmp_path / "hf", tmp_path / "core")
    assert (code, found["same"]) == (0, True)

    (tmp_path / "other").mkdir()
    values = load_file(tmp_path / "hf/model.safetensors")
    moved = "model.layers.1.self_attn.o_proj.weight"
    values[moved][3, 5] += 0.5
    values["model.norm.weight"] = values["model.norm.weight"].double()
    save_file(values, tmp_path / "other/model.safetensors")
    code, found = diff(capsys, tmp_path / "core", tmp_path / "other")
    rows = {one["name"]: one for one in found["tensors"]}
    assert (code, rows.keys()) == (1, {moved, "model.norm.weight"})
    assert (rows[moved]["differing"], round(rows[moved]["largest"], 6)) == (1, 0.5)
    assert (rows["model.norm.weight"]["kind"], rows["model.norm.weight"]["differing"]) == ("dtype", 0)
    assert found["equal"] == count - 2


def test_states_are_compared_where_both_have_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, optimiser = stepped("llama", tmp_path / "hf")
    save_own({"model": model, "optim": optimiser}, tmp_path / "own")
    options = ["--to", "torch_dist", "--config", str(tmp_path / "hf")]
    assert main(["checkpoint", "convert", str(tmp_path / "own"), str(tmp_path / "core"), *options]) == 0
    with torch.no_grad():
        optimiser.state[model.model.layers[0].self_attn.v_proj.weight]["exp_avg"][0, 0] += 1
    save_own({"model": model, "optim": optimiser}, tmp_path / "later")
    assert diff(capsys, tmp_path / "core", tmp_path / "own")[0] == 0
    code, found = diff(capsys, tmp_path / "core", tmp_path / "later")
    assert (code, [one["name"] for one in found["tensors"]]) == (1, ["model.layers.0.self_attn.v_proj.weight.exp_avg"])
    code, found = diff(capsys, tmp_path / "own", tmp_path / "core", "*word_embeddings*")
    more = [(one["kind"], one["name"].rpartition(".")[2]) for one in found["tensors"]]
    assert (code, found["equal"], more) == (1, 4, [("b", "master")])  # the copy that Megatron-core keeps is there only


def test_what_cannot_be_compared_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save("qwen3", tmp_path / "hf")
    for arguments, words in (
        ((tmp_path / "hf", tmp_path / "hf", "nothing*"), "no tensor of either fits"),
        ((tmp_path / "hf", tmp_path / "none"), "is not there"),
    ):
        capsys.readouterr()
        assert main(["checkpoint", "diff", *map(str, arguments)]) == 2
        told = capsys.readouterr().err
        assert words in told
        assert told.count("\n") == 1


def test_paddles_transposed_weights_are_the_same_from_either_side(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save("qwen3", tmp_path / "hf")
    for to in ("paddle", "torch_dist"):
        assert main(["checkpoint", "convert", str(tmp_path / "hf"), str(tmp_path / to), "--to", to]) == 0
    count = len(load_file(tmp_path / "hf/model.safetensors"))
    for sides in (("paddle", "hf"), ("hf", "paddle")):
        code, found = diff(capsys, *(tmp_path / side for side in sides))
        assert (code, found["equal"]) == (0, count), sides
    assert main(["checkpoint", "diff", str(tmp_path / "torch_dist"), str(tmp_path / "paddle")]) == 2
    assert "hf" in capsys.readouterr().err  # by way of which it goes
