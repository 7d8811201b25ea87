"""Public reports about moving averages and pairs of LoRA that are saved beside the weights they are of."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file  # pyright: ignore[reportUnknownVariableType]
from torch import Tensor
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

from tangram.cli import main
from tests.checkpoint.peers.models import save

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


TWO = [("model", "ema"), ("student", "ema_model"), ("net", "a_teacher"), ("policy", "actor_ref"), ("", "ema")]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("trained", [True, False])
@pytest.mark.parametrize(("own", "other"), TWO)
def test_an_average_that_comes_first(own: str, other: str, trained: bool, tmp_path: Path) -> None:
    """Sense-X/UniFormer#87, pytorch/torchtitan#3985: which of the two is read where weights and their average are
    saved side by side. What an optimiser trains is the model, whichever comes first by its name."""
    module = save("llama", tmp_path / "hf")
    weights = {name: value.detach().clone() for name, value in module.state_dict().items()}
    state: dict[str, object] = {**(weights if own == "" else {own: weights})}
    state[other] = {name: value + 1 for name, value in weights.items()}
    if trained:
        optimiser = torch.optim.AdamW(module.parameters(), lr=0.0, weight_decay=0.0)
        sum(one.sum() for one in module.parameters()).backward()  # pyright: ignore[reportAttributeAccessIssue]
        optimiser.step()
        state["optim"] = get_optimizer_state_dict(module, optimiser)
    state_dict_saver.save(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    config = ["--config", str(tmp_path / "hf")]
    rc = main(["checkpoint", "convert", str(tmp_path / "dcp"), str(tmp_path / "out"), "--to", "hf", *config])
    if own == "" and not trained:
        assert rc == 2  # names that are not the configuration's
        return
    assert rc == 0
    made = load_file(tmp_path / "out/model.safetensors")
    assert set(made) == set(weights)
    assert all(torch.equal(made[name], value) for name, value in weights.items())
    average = ["--part", other, *config]
    assert main(["checkpoint", "convert", str(tmp_path / "dcp"), str(tmp_path / "mean"), "--to", "hf", *average]) == 0
    made = load_file(tmp_path / "mean/model.safetensors")
    assert set(made) == set(weights)
    assert all(torch.equal(made[name], value + 1) for name, value in weights.items())


@pytest.mark.parametrize("key", ["opt", "optimizer"])
@pytest.mark.parametrize("average", ["ema", "state_dict"])
def test_an_average_in_a_file_of_torch_save(average: str, key: str, tmp_path: Path, capsys: Capture) -> None:
    """facebookresearch/DiT#83: files have a model, its average, what an optimiser keeps and settings."""
    module = save("llama", tmp_path / "hf")
    weights = module.state_dict()
    optimiser = torch.optim.AdamW(module.parameters())
    sum(one.sum() for one in module.parameters()).backward()  # pyright: ignore[reportAttributeAccessIssue]
    optimiser.step()
    state = {"model": weights, average: {name: value + 1 for name, value in weights.items()}, "args": {"lr": 1e-4}}
    torch.save({**state, key: optimiser.state_dict()}, tmp_path / "one.pt")
    command = ["checkpoint", "convert", str(tmp_path / "one.pt"), str(tmp_path / "out"), "--to", "hf"]
    command += ["--config", str(tmp_path / "hf"), "--part"]
    assert main([*command, "lost"]) == 2
    assert f"has no tensor under lost. but under model, {average}, {key}" in capsys.readouterr().err
    assert main([*command, average]) == 0
    made = load_file(tmp_path / "out/model.safetensors")
    assert set(made) == set(weights)
    assert all(torch.equal(made[name], value + 1) for name, value in weights.items())


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_two_of_which_neither_is_named_as_a_model(tmp_path: Path, capsys: Capture) -> None:
    """Sense-X/UniFormer#87: of two nets by names of their own none is read unasked."""
    weights = save("llama", tmp_path / "hf").state_dict()
    two = {"left": weights, "right": {name: value + 1 for name, value in weights.items()}}
    state_dict_saver.save(two, checkpoint_id=tmp_path / "dcp", no_dist=True)
    command = ["checkpoint", "convert", str(tmp_path / "dcp"), str(tmp_path / "out"), "--to", "hf"]
    assert main([*command, "--config", str(tmp_path / "hf")]) == 2
    assert (
        "the configuration's tensors are under left. and under right.: say which with --part left"
        in capsys.readouterr().err
    )
    given = [*command, "--config", str(tmp_path / "hf"), "--part"]
    assert main([*given, "lost"]) == 2
    assert "has no tensor under lost. but under left, right" in capsys.readouterr().err
    assert main([*given, "right"]) == 0
    made = load_file(tmp_path / "out/model.safetensors")
    assert all(torch.equal(made[name], value + 1) for name, value in weights.items())
