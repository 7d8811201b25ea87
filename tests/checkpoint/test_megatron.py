"""Hugging Face to Megatron-core and back, by way of megatron-core itself: it loads, computes, trains, saves."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from tangram.checkpoint.formats.detect import open_any
from tangram.cli import main
from tests.checkpoint.peers.models import save

ROOT = Path(__file__).parents[2]
FAMILIES = ["qwen3", "deepseek_v3", pytest.param("qwen3_moe", marks=pytest.mark.slow)]
COMPUTED = ("qwen3", "qwen3_moe")
"""Whose attention megatron-core has without Transformer Engine."""


def megatron(name: str, folder: Path, *options: object) -> None:
    experts = 1 if name == "qwen3" else 2
    command = [
        sys.executable,
        "-W",
        "ignore",
        "-m",
        "tests.checkpoint.peers.megatron",
        name,
        "--tp",
        2,
        "--ep",
        experts,
    ]
    command += ["--meet", folder / "meet", *options]
    done = subprocess.run([str(one) for one in command], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.parametrize("name", FAMILIES)
def test_there_trained_by_megatron_and_back(name: str, tmp_path: Path) -> None:
    model = save(name, tmp_path / "hf")
    there = ["checkpoint", "convert", str(tmp_path / "hf"), str(tmp_path / "core")]
    assert main([*there, "--to", "torch_dist", "--transformer-impl", "local"]) == 0
    computes = ["--logits", tmp_path / "logits.pt"] if name in COMPUTED else []
    megatron(
        name, tmp_path, "--load", tmp_path / "core", "--save", tmp_path / "trained", "--train", *computes
    )  # fmt: skip
    back = ["checkpoint", "convert", str(tmp_path / "trained"), str(tmp_path / "back"), "--to", "hf"]
    assert main([*back, "--config", str(tmp_path / "hf")]) == 0

    if computes:
        ids = torch.arange(24).reshape(2, 12) * 5 % 127
        with torch.no_grad():
            expected = model(ids).logits
        assert (torch.load(tmp_path / "logits.pt") - expected).abs().max() < 2e-6 * expected.abs().max()

    before, after = load_file(tmp_path / "hf/model.safetensors"), load_file(tmp_path / "back/model.safetensors")
    assert before.keys() == after.keys()
    trained = [key for key in before if key.endswith("o_proj.weight") or ".experts." in key]
    assert len(trained) > 1
    for key in before:
        # A step of 1/8 against the weight's sign: exact in what megatron-core computes, and so here.
        expected = before[key] - 0.125 * before[key].sign() if key in trained else before[key]
        assert same(after[key], expected), key
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "back")
    moved = {key for key, value in loaded.state_dict().items() if not same(value, model.state_dict()[key])}
    assert moved == {key for key in model.state_dict() if "o_proj" in key or ".experts." in key}


def same(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)


def test_what_megatron_stacked_is_taken_apart(tmp_path: Path) -> None:
    save("qwen3", tmp_path / "hf")
    assert main(["checkpoint", "convert", str(tmp_path / "hf"), str(tmp_path / "core"), "--to", "torch_dist"]) == 0
    megatron("qwen3", tmp_path, "--load", tmp_path / "core", "--save", tmp_path / "saved")
    ours, theirs = open_any(tmp_path / "core"), open_any(tmp_path / "saved")
    assert ours.specs == theirs.specs
    assert set(theirs.skipped) <= set(ours.skipped)  # what it asks for when it loads is there
    for one in (ours, theirs):
        assert one.format == "torch_dist"
        assert all(tuple(one.read(p.place, p.tensor).shape) == p.region.local_shape for p in one.pieces)
