"""Public reports about checkpoints that have states of an optimiser where their readers look for weights."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

from tangram.checkpoint.inspect.foreign import Reading, verify
from tangram.cli import main

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
Capture = pytest.CaptureFixture[str]


@pytest.fixture
def states() -> dict[str, Any]:
    """Of AdamW after a step, by the parameters' names."""
    module = torch.nn.Linear(4, 3)
    optimiser = torch.optim.AdamW(module.parameters())
    module(torch.ones(2, 4)).sum().backward()
    optimiser.step()
    return get_optimizer_state_dict(module, optimiser)


def saved(state: dict[str, Any], folder: Path) -> Path:
    state_dict_saver.save(state, checkpoint_id=folder, no_dist=True)
    return folder


@pytest.mark.parametrize("kind", ["dcp", "torch"])
def test_states_alone(states: dict[str, Any], kind: str, tmp_path: Path, capsys: Capture) -> None:
    """accelerate#2772: a folder has the model's shards or the optimiser's, and its name alone says which."""
    path = tmp_path / "optimizer.bin"
    if kind == "dcp":
        path = saved({"optimizer": states}, tmp_path / "optimizer_0")
    else:
        torch.save(states, path)
    assert main(["checkpoint", "inspect", str(path)]) == 0
    shown = capsys.readouterr().out
    assert "exp_avg_sq" in shown
    assert "not the model's" not in shown
    found = verify(path)
    assert isinstance(found, Reading)
    assert (found.tensors, found.nbytes, found.sound) == (6, 2 * 4 * 15 + 2 * 4, True)
    for to in ("hf", "dcp", "tangram"):
        assert main(["checkpoint", "convert", str(path), str(tmp_path / to), "--to", to]) == 2
        assert "states of an optimiser and no weights" in capsys.readouterr().err


def test_what_is_not_the_models_is_read_too(states: dict[str, Any], tmp_path: Path) -> None:
    """accelerate#4171: a file of a save is cut off, and what is in it is found missing at the resume."""
    weights = {"weight": torch.ones(3, 4), "bias": torch.ones(3)}
    numbered = {"state": {"0": states["state"]["weight"]}}
    path = saved({"model": weights, "optim": numbered, "epoch": torch.tensor(1)}, tmp_path / "all")
    assert verify(path).sound
    (file,) = path.glob("*.distcp")
    data = file.read_bytes()
    at = data.rindex(b"PK\x03\x04")  # the last of the archives that are one behind the other
    file.write_bytes(data[:at])
    assert not verify(path).sound


def test_a_full_state_beside_its_optimiser(states: dict[str, Any], tmp_path: Path, capsys: Capture) -> None:
    """accelerate#3527: FSDP2 with FULL_STATE_DICT writes two files by names of its own."""
    torch.save({"weight": torch.ones(3, 4)}, tmp_path / "pytorch_model_fsdp.bin")
    torch.save(states, tmp_path / "optimizer.bin")
    assert main(["checkpoint", "inspect", str(tmp_path)]) == 2
    assert "pytorch_model_fsdp.bin is a file of torch.save: give that" in capsys.readouterr().err
