"""Public reports about tensors that are missing, or are there twice under two names: what a conversion does with it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file, save_file  # pyright: ignore[reportUnknownVariableType]
from torch import Tensor

from tangram.models.building.build import build_on_meta, config_of
from tests.checkpoint.peers.models import save
from tests.public.test_convert import Capture, beside, convert, same, saved

SMALL: Mapping[str, Any] = {
    "hidden_size": 8, "intermediate_size": 12, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 4,
    "num_hidden_layers": 2, "vocab_size": 16,
}  # fmt: skip
HEAD, WORDS = "lm_head.weight", "model.embed_tokens.weight"


def model_of(kind: str, architecture: str, **fields: Any) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """A configuration, and weights by the names of its module, a head of its own among them."""
    known = {**SMALL, **fields}
    torch.manual_seed(0)
    shapes = build_on_meta(config_of(kind, {**known, "tie_word_embeddings": False})).state_dict()
    return {"model_type": kind, "architectures": [architecture], **known}, {
        name: torch.randn(one.shape) for name, one in shapes.items()
    }


@pytest.fixture(scope="module")
def qwen() -> tuple[dict[str, Any], dict[str, Tensor]]:
    return model_of("qwen3", "Qwen3ForCausalLM", tie_word_embeddings=False)


@pytest.mark.parametrize("through", ["dcp", "tangram"])
def test_a_head_that_is_missing(
    qwen: tuple[dict[str, Any], dict[str, Tensor]], tmp_path: Path, capsys: Capture, through: str
) -> None:
    """glorgao/SelectiveDPO#7: a trained model was published without its output layer, which was drawn anew."""
    fields, weights = qwen
    own = {name: one for name, one in weights.items() if name != HEAD}
    source, config = saved({"model": own, "step": torch.tensor(1)}, tmp_path / "in"), beside(tmp_path / "c", fields)
    if through == "tangram":
        assert convert(source, tmp_path / "own", "--config", config, to="tangram") == 0
        source = tmp_path / "own"
    assert convert(source, tmp_path / "hf", "--config", config) == 2
    assert f"1 of the configuration's tensors (Qwen3ForCausalLM) are not there, and transformers would draw them " \
        f"anew: {HEAD}" in capsys.readouterr().err  # fmt: skip
    assert not (tmp_path / "hf").exists()


def test_a_layer_that_is_missing(
    qwen: tuple[dict[str, Any], dict[str, Tensor]], tmp_path: Path, capsys: Capture
) -> None:
    """allenai/OLMo#586: names that a reader does not find are initialised, one line among others says so."""
    fields, weights = qwen
    own = {name: one for name, one in weights.items() if "layers.1.mlp" not in name}
    assert convert(saved(own, tmp_path / "in"), tmp_path / "hf", "--config", beside(tmp_path / "c", fields)) == 2
    assert "3 of the configuration's tensors" in capsys.readouterr().err


def test_names_of_another_program_by_way_of_tangram(
    qwen: tuple[dict[str, Any], dict[str, Tensor]], tmp_path: Path, capsys: Capture
) -> None:
    """karpathy/llama2.c#321: a program's own names are to become those of transformers."""
    fields, weights = qwen
    own = {name.replace("self_attn.q_proj", "attention.wq"): one for name, one in weights.items()}
    config = beside(tmp_path / "c", fields)
    assert convert(saved(own, tmp_path / "in"), tmp_path / "own", "--config", config, to="tangram") == 0
    assert convert(tmp_path / "own", tmp_path / "hf") == 2
    assert "2 of 25 names are not those of the configuration" in capsys.readouterr().err


@pytest.mark.parametrize("to", ["hf", "torch_dist"])
def test_a_class_that_ties_without_being_told(tmp_path: Path, capsys: Capture, to: str) -> None:
    """NVIDIA-NeMo/Automodel#2512: Gemma ties by default, and its published configurations do not say it."""
    fields, weights = model_of("gemma2", "Gemma2ForCausalLM")
    config = beside(tmp_path / "c", fields)
    both = {**weights, HEAD: weights[WORDS].clone()}
    assert convert(saved(both, tmp_path / "in"), tmp_path / "out", "--config", config, to=to) == 0
    assert f"{HEAD} is {WORDS}, bit for bit" in capsys.readouterr().out
    if to == "hf":
        same(tmp_path / "out", {name: one for name, one in weights.items() if name != HEAD})
    assert convert(saved(weights, tmp_path / "two"), tmp_path / "unlike", "--config", config, to=to) == 2
    assert "128 of 128 elements differ" in capsys.readouterr().err


def test_tied_behind_a_tower_of_images(tmp_path: Path) -> None:
    """verl#7835: (and Automodel#2512) embeddings of a model with images lie a level deeper; FSDP saves both."""
    from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

    tower = {"depth": 1, "hidden_size": 8, "num_heads": 2, "intermediate_size": 8, "out_hidden_size": 8}
    tower |= {"deepstack_visual_indexes": [0], "num_position_embeddings": 16, "patch_size": 4}
    config: Any = Qwen3VLConfig(text_config=dict(SMALL), vision_config=tower, tie_word_embeddings=True)
    torch.manual_seed(0)
    model: Any = Qwen3VLForConditionalGeneration(config)
    model.save_pretrained(tmp_path / "plain")
    source = saved({"model": dict(model.state_dict()), "step": torch.tensor(1)}, tmp_path / "in")
    assert convert(source, tmp_path / "core", "--config", tmp_path / "plain", to="torch_dist") == 0
    assert convert(tmp_path / "core", tmp_path / "back") == 0
    same(tmp_path / "back", load_file(tmp_path / "plain/model.safetensors"))


@pytest.mark.parametrize("to", ["hf", "torch_dist"])
def test_the_head_of_a_tied_pair_alone(
    qwen: tuple[dict[str, Any], dict[str, Tensor]], tmp_path: Path, capsys: Capture, to: str
) -> None:
    """huggingface/transformers#34759: (and #38870) of a tied pair the head was stored; the embeddings were drawn."""
    fields, weights = qwen
    own = {name: one for name, one in weights.items() if name != WORDS}
    source = beside(tmp_path / "in", {**fields, "tie_word_embeddings": True})
    save_file(own, source / "model.safetensors")
    assert convert(source, tmp_path / "out", to=to) == 0
    assert f"{HEAD} alone is there of two that are tied: it gets the name {WORDS}" in capsys.readouterr().out
    expected = {WORDS if name == HEAD else name: one for name, one in own.items()}
    if to != "hf":
        assert convert(tmp_path / "out", tmp_path / "back") == 0
    same(tmp_path / ("out" if to == "hf" else "back"), expected)


def test_experts_as_a_module_has_them(tmp_path: Path, capsys: Capture) -> None:
    """PrimeIntellect-ai/prime-rl#1812, vllm-project/vllm#36997: FSDP saves experts put together, as transformers 5 has
    them in memory; in a directory other programs look for them one by one."""
    model: Any = save("qwen3_moe", tmp_path / "plain")
    source = saved({"model": dict(model.state_dict())}, tmp_path / "in")
    assert convert(source, tmp_path / "out", "--config", tmp_path / "plain") == 0
    assert "4 tensors are experts put together, as model.layers.0.mlp.experts.gate_up_proj" in capsys.readouterr().out
    loaded = cast(Any, type(model)).from_pretrained(tmp_path / "out").state_dict()
    assert all(torch.equal(loaded[name], one) for name, one in model.state_dict().items())
    assert convert(source, tmp_path / "core", "--config", tmp_path / "plain", to="torch_dist") == 0
    assert convert(tmp_path / "core", tmp_path / "back") == 0
    assert "put together" not in capsys.readouterr().out
    same(tmp_path / "back", load_file(tmp_path / "plain/model.safetensors"))
    assert convert(tmp_path / "plain", tmp_path / "again") == 0
    assert "put together" not in capsys.readouterr().out
