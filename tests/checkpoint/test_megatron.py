"""Hugging Face to Megatron-core and back, by way of megatron-core itself: it loads, computes, trains, saves."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from tangram.checkpoint.formats.detect import open_any
from tangram.cli import main
from tests.checkpoint.peers.models import CORE, HF, save

ROOT = Path(__file__).parents[2]
ROWS = [
    ("gpt_oss", "deepseek_v3"),
    ("llama", "llama-2", "llama-biases", "mistral", "ministral", "smollm3"),
    ("qwen2", "qwen2-tied", "qwen3", "phi3", "gemma", "gemma2", "gemma3"),
    ("mixtral", "qwen2_moe", "qwen3_moe", "gpt2", "glm4_moe"),
]

OUT = ("o_proj.weight", "attn.c_proj.weight")
"""What leads out of attention, by the names of transformers."""


def test_every_row_goes_through_megatron() -> None:
    assert {row for rows in ROWS for row in rows} == CORE.keys() <= HF.keys()


@pytest.mark.slow  # all of them are a section of the CI: make peers
@pytest.mark.parametrize("rows", ROWS, ids=" ".join)
def test_there_trained_by_megatron_and_back(rows: tuple[str, ...], tmp_path: Path) -> None:
    models: dict[str, nn.Module] = {}
    for row in rows:
        models[row] = save(row, tmp_path / row / "hf")
        there = ["checkpoint", "convert", str(tmp_path / row / "hf"), str(tmp_path / row / "core")]
        assert main([*there, "--to", "torch_dist", "--transformer-impl", "local"]) == 0
    command = [sys.executable, "-W", "ignore", "-m", "tests.checkpoint.peers.megatron", str(tmp_path), *rows]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    for row in rows:
        same_tensors(row, tmp_path / row)
        if CORE[row].get("computes", True):
            same_logits(row, models[row], tmp_path / row)
        trained_alone(row, models[row], tmp_path / row)


def same_tensors(row: str, folder: Path) -> None:
    """What megatron-core saves is what was written for it, and what it asks for when it loads is there."""
    ours, theirs = open_any(folder / "core"), open_any(folder / "trained")
    assert ours.specs == theirs.specs, row
    assert set(theirs.skipped) <= set(ours.skipped), row
    for one in (ours, theirs):
        assert one.format == "torch_dist"
        assert all(tuple(one.read(p.place, p.tensor).shape) == p.region.local_shape for p in one.pieces), row


def same_logits(row: str, model: nn.Module, folder: Path) -> None:
    with torch.no_grad():
        expected = model(torch.arange(24).reshape(2, 12) * 5 % 127).logits
    assert (torch.load(folder / "logits.pt") - expected).abs().max() < 2e-6 * expected.abs().max(), row


def trained_alone(row: str, model: nn.Module, folder: Path) -> None:
    """What was trained is what it should be, all else has the same bits, and transformers loads it."""
    back = ["checkpoint", "convert", str(folder / "trained"), str(folder / "back"), "--to", "hf"]
    assert main([*back, "--config", str(folder / "hf")]) == 0
    before, after = load_file(folder / "hf/model.safetensors"), load_file(folder / "back/model.safetensors")
    assert before.keys() == after.keys(), row
    trained = [key for key in before if key.endswith(OUT) or ".experts." in key]
    assert len(trained) > 1, row
    for key in before:
        # A step of 1/8 against the weight's sign: exact in what megatron-core computes, and so here.
        expected = before[key] - 0.125 * before[key].sign() if key in trained else before[key]
        assert same(after[key], expected), (row, key)
    loaded = AutoModelForCausalLM.from_pretrained(folder / "back")
    moved = {key for key, value in loaded.state_dict().items() if not same(value, model.state_dict()[key])}
    assert moved == {key for key in model.state_dict() if key.endswith(OUT) or ".experts." in key}, row


def same(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)
