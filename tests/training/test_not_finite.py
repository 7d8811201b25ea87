"""Weights with NaN or infinity are named and counted before training, and not called a model that is not causal."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from tangram.errors import UserError
from tangram.training.objective.packing import settle, why_not_causal
from tangram.training.objective.step_guard import is_finite
from tangram.training.state.load_weights import load_pretrained
from tests.training.saving import plan_of
from tests.training.test_weights import FILE, SMALL, build, export

PLAN = plan_of(ranks=1)
NORM = "model.norm.weight"


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_the_tensor_is_named_and_its_values_are_counted(bad: float, tmp_path: Path) -> None:
    folder = export(build("qwen3", SMALL, 0), tmp_path / "model")
    tensors = load_file(folder / FILE)
    tensors["model.layers.1.mlp.up_proj.weight"][3, 2:5] = bad
    save_file(tensors, folder / FILE, metadata={"format": "pt"})
    with pytest.raises(UserError, match=r"^model\.layers\.1\.mlp\.up_proj\.weight in .* has 3 values that are not"):
        load_pretrained(folder, build("qwen3", SMALL, 1), PLAN, None)


def test_a_number_that_the_type_here_cannot_hold(tmp_path: Path) -> None:
    folder = export(build("qwen3", SMALL, 0), tmp_path / "model")
    tensors = load_file(folder / FILE)
    tensors[NORM][0] = 1e6
    save_file(tensors, folder / FILE, metadata={"format": "pt"})
    with pytest.raises(UserError, match=r"model\.norm\.weight has values in .* that its type here cannot hold"):
        load_pretrained(folder, build("qwen3", SMALL, 1).half(), PLAN, None)
    load_pretrained(folder, build("qwen3", SMALL, 1), PLAN, None)


def test_a_probe_says_so_of_a_model_from_anywhere() -> None:
    model = build("qwen3", SMALL, 0)
    assert why_not_causal(model) == ""
    with torch.no_grad():
        model.get_parameter(NORM)[2] = float("nan")
    with pytest.raises(UserError, match=r"model\.norm\.weight has 1 of 16 values here that are not finite"):
        settle(model, "auto", None, lambda mine: mine)
    with torch.no_grad():
        model.get_parameter(NORM).fill_(1e38)
    assert "logits or gradients are not finite, though its parameters here are" in why_not_causal(model)


def test_finite() -> None:
    assert is_finite(torch.empty(0))
    assert is_finite(torch.arange(3))
    assert is_finite(torch.full((9,), 3e38))  # whose sum is infinite
    for bad in ("nan", "inf", "-inf"):
        assert not is_finite(nn.Parameter(torch.tensor([1.0, float(bad)])))
