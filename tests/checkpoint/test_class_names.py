"""Classes of transformers with other names in files than in modules, other ties, or buffers that they keep.

Each goes from what `save_pretrained` writes through another format and back, tensor by tensor.
"""

from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file  # pyright: ignore[reportUnknownVariableType]
from torch import Tensor
from transformers import PreTrainedModel

from tests.public.test_convert import Capture, convert, same
from tests.sweep.sizes import build, ways


def written(kind: str, folder: Path) -> dict[str, Tensor]:
    """The tensors of a tiny model's own directory."""
    transformers.logging.disable_progress_bar()
    model = next(filter(None, map(built, ways(kind))))
    model.save_pretrained(folder)
    return load_file(folder / "model.safetensors")


def built(way: object) -> PreTrainedModel | None:
    try:
        return build(way)  # pyright: ignore[reportArgumentType]
    except Exception:  # noqa: BLE001  a class that this type has not
        return None


@pytest.mark.parametrize(
    "kind",
    [
        "llava",  # language_model.model.layers in files, model.language_model.layers in the module
        "radio",  # names of another program
        "csm",  # ties embeddings of sounds, and has a head beside those of words that is none of them
        "bigbird_pegasus",  # its causal class ties nothing, whatever the configuration says
        "bros",  # position_ids that the class itself stores
        "clap",  # the same in one of its towers
    ],
)
def test_there_and_back(kind: str, tmp_path: Path) -> None:
    weights = written(kind, tmp_path / "in")
    assert convert(tmp_path / "in", tmp_path / "dcp", to="dcp") == 0
    assert convert(tmp_path / "dcp", tmp_path / "back") == 0
    same(tmp_path / "back", weights)


@pytest.mark.parametrize("beside", [("step",), ("step", "ema"), ("ema", "teacher")])
def test_names_of_files_under_a_programs_keys(beside: tuple[str, ...], tmp_path: Path) -> None:
    """The text of LLaVA's files has, after `language_model.`, a name of its class's head: it is not the model."""
    weights = written("llava", tmp_path / "in")
    others = {key: {name: one + 1 for name, one in weights.items()} for key in beside if key != "step"}
    torch.save({"model": weights, **others, "step": torch.tensor(1)}, tmp_path / "in.pt")
    assert convert(tmp_path / "in.pt", tmp_path / "hf", "--config", tmp_path / "in") == 0
    same(tmp_path / "hf", weights)


def test_two_models_by_other_names(tmp_path: Path, capsys: Capture) -> None:
    weights = written("llava", tmp_path / "in")
    torch.save({"first": weights, "second": weights}, tmp_path / "in.pt")
    assert convert(tmp_path / "in.pt", tmp_path / "hf", "--config", tmp_path / "in") == 2
    assert "are under first. and under second.: say which with --part first" in capsys.readouterr().err
