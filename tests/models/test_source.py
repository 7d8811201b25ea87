"""A model comes from a preset, a configuration file or a directory; what is none is refused with one sentence."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from tangram.errors import UserError
from tangram.models.building.build import read_source

SMALL = {"vocab_size": 11, "num_hidden_layers": 1, "hidden_size": 16, "intermediate_size": 8}


def write(folder: Path, fields: dict[str, Any]) -> Path:
    (folder / "config.json").write_text(json.dumps(fields))
    return folder


def test_a_preset_has_no_weights() -> None:
    source = read_source("qwen3-2m", None, {"vocab_size": 11})
    assert (source.name, source.weights, source.config.get_text_config().vocab_size) == ("qwen3-2m", None, 11)


@pytest.mark.parametrize("kind", ["llama", "gpt2", "gemma3_text", "qwen3_moe"])
def test_a_directory_and_its_configuration_file_are_the_same_model(kind: str, tmp_path: Path) -> None:
    AutoConfig.for_model(kind).save_pretrained(tmp_path)
    folder, file = read_source(None, str(tmp_path), {}), read_source(None, str(tmp_path / "config.json"), {})
    assert folder.config.to_dict() == file.config.to_dict()
    assert (folder.config.model_type, folder.weights, file.weights) == (kind, None, None)
    (tmp_path / "model.safetensors").touch()
    assert read_source(None, str(tmp_path), {}).weights == tmp_path
    assert read_source(None, str(tmp_path / "config.json"), {}).weights is None  # the file alone: from scratch


def test_fields_are_changed(tmp_path: Path) -> None:
    folder = write(tmp_path, {"model_type": "llama", "hidden_size": 32, "vocab_size": 7})
    config = read_source(None, str(folder), {"vocab_size": 9}).config
    assert (config.hidden_size, config.vocab_size) == (32, 9)
    with pytest.raises(UserError, match='no field "hiden_size" to change; did you mean "hidden_size"'):
        read_source(None, str(folder), {"hiden_size": 3})


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"model_type": "lama"}', 'has the model_type "lama", which .* did you mean "llama"'),
        ('{"model_type": "t5"}', "no causal language model for: tangram.parallelize takes such a model in a loop"),
        ('{"model_type": "qwen2_5_vl"}', "no causal language model for: tangram.parallelize"),
        ('{"hidden_size": 3}', "names no model_type"),
        ("{", "is no configuration of a model"),
        ("[]", "is no configuration of a model: it is JSON, but no table of fields"),
        ("5", "is no configuration of a model: it is JSON, but no table of fields"),
        ('{"model_type": "llama", "hidden_size": "wide"}', "cannot configure a llama model"),
    ],
)
def test_what_is_no_model_is_refused(text: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(UserError, match=words):
        read_source(None, str(tmp_path), {})


def test_paths_that_hold_no_model_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"has no config\.json"):
        read_source(None, str(tmp_path), {})
    with pytest.raises(UserError, match="does not exist"):
        read_source(None, str(tmp_path / "nowhere"), {})


def test_a_pickle_of_weights_is_refused(tmp_path: Path) -> None:
    torch.save({}, write(tmp_path, {"model_type": "llama"}) / "pytorch_model.bin")
    with pytest.raises(UserError, match=r"are in pytorch_model\.bin, a pickle"):
        read_source(None, str(tmp_path), {})
