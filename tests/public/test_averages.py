"""Public reports about moving averages and pairs of LoRA that are saved beside the weights they are of."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file  # pyright: ignore[reportUnknownVariableType]
from torch import Tensor

from tangram.cli import main

Capture = pytest.CaptureFixture[str]
WEIGHTS = {"embed.weight": torch.ones(4, 2), "out.weight": torch.zeros(2, 2)}


def converted(tensors: dict[str, Tensor], folder: Path) -> None:
    (folder / "in").mkdir()
    save_file(tensors, folder / "in/model.safetensors")
    assert main(["checkpoint", "convert", str(folder / "in"), str(folder / "out"), "--to", "dcp"]) == 0


@pytest.mark.parametrize("front", ["ema", "ema_model.module", "model_ema", "averaged_model"])
@pytest.mark.parametrize("own", ["", "model."])
def test_an_average_beside_the_weights(front: str, own: str, tmp_path: Path, capsys: Capture) -> None:
    """lightly-ai/lightly-train#516, facebookresearch/DiT#83: which of the two a checkpoint has is not plain."""
    averages = {f"{front}.{name}": value + 1 for name, value in WEIGHTS.items()}
    converted({**{f"{own}{name}": value.clone() for name, value in WEIGHTS.items()}, **averages}, tmp_path)
    assert f"2 tensors of {front.split('.')[0]} are named as others" in capsys.readouterr().out


@pytest.mark.parametrize("front", ["ema_model.", "decoder.", ""])
def test_no_average_beside_weights(front: str, tmp_path: Path, capsys: Capture) -> None:
    """SWivid/F5-TTS#1292: an average alone is the model, and nothing is said of it."""
    converted({**{f"{front}{name}": value for name, value in WEIGHTS.items()}, "ema.step": torch.ones(1)}, tmp_path)
    assert "named as others" not in capsys.readouterr().out


def test_pairs_of_lora_beside_the_weights(tmp_path: Path, capsys: Capture) -> None:
    """verl-project/verl#4761, axolotl-ai-cloud/axolotl#3294: a saved model has an adapter in it, unmerged."""
    pair = {f"out.lora_{side}.default.weight": torch.ones(2, 2) for side in "AB"}
    base = {"embed.weight": WEIGHTS["embed.weight"], "out.base_layer.weight": WEIGHTS["out.weight"]}
    converted({f"base_model.model.{name}": value for name, value in {**base, **pair}.items()}, tmp_path)
    assert "not merged: 1 of the weights has a pair of LoRA beside it" in capsys.readouterr().out
