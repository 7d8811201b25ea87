"""Public reports about families of models between Hugging Face and Megatron-core, rebuilt small."""

from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file, save_file  # pyright: ignore[reportUnknownVariableType]
from torch import Tensor

from tangram.checkpoint.formats.detect import open_any
from tests.checkpoint.peers.models import HF, save
from tests.public.test_convert import convert, same

LAYER = "decoder.layers.self_attention"


def there_and_back(folder: Path, *options: str) -> set[str]:
    """Converted to Megatron-core and back, with the same bits; the names that it has there."""
    expected = load_file(folder / "hf/model.safetensors")
    assert convert(folder / "hf", folder / "core", *options, to="torch_dist") == 0
    assert convert(folder / "core", folder / "back") == 0
    same(folder / "back", expected)
    return set(open_any(folder / "core").specs)


@pytest.mark.parametrize("predictor", [False, True])
def test_queries_that_are_not_compressed(tmp_path: Path, predictor: bool) -> None:
    """NVIDIA-NeMo/Megatron-Bridge#5294: (and #5261) of DeepSeek models whose q_lora_rank is null the norm before
    attention was not mapped, and one of queries was made up."""
    save("deepseek_v3", tmp_path / "hf", q_lora_rank=None, head_dim=4)
    if predictor:
        with_predictor(tmp_path / "hf/model.safetensors")
    names = {name.replace(".0.", ".") for name in there_and_back(tmp_path)}
    assert {f"{LAYER}.linear_q_proj.weight", "decoder.layers.input_layernorm.weight"} <= names
    assert not {name for name in names if "q_down_proj" in name or name.endswith("linear_q_proj.layer_norm_weight")}


def with_predictor(file: Path) -> None:
    """A predictor's layer behind the others, as DeepSeek publishes it."""
    own = load_file(file)
    layer = {name.replace("layers.2.", "layers.3."): one + 1 for name, one in own.items() if "layers.2." in name}
    layer |= {f"model.layers.3.{name}.weight": torch.randn(32) for name in ("enorm", "hnorm", "shared_head.norm")}
    layer["model.layers.3.eh_proj.weight"] = torch.randn(32, 64)
    layer["model.layers.3.embed_tokens.weight"] = own["model.embed_tokens.weight"].clone()
    layer["model.layers.3.shared_head.head.weight"] = own["lm_head.weight"].clone()
    save_file({**own, **layer}, file)


def test_a_predictor_that_is_no_layer_of_the_model(tmp_path: Path) -> None:
    """THUDM/slime#1503: (and Megatron-Bridge#1934) Qwen3-Next has its predictor of a later token under `mtp`, as an own
    model of one layer of full attention; it was left out."""
    model: Any = save("qwen3_next", tmp_path / "hf")
    own = load_file(tmp_path / "hf/model.safetensors")
    first = "model.layers.1."  # of full attention
    more: dict[str, Tensor] = {f"mtp.layers.0.{name.removeprefix(first)}": one + 1
                               for name, one in own.items() if name.startswith(first)}  # fmt: skip
    more |= {f"mtp.{name}.weight": torch.randn(32) for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")}
    more["mtp.fc.weight"] = torch.randn(32, 64)
    save_file({**own, **more}, tmp_path / "hf/model.safetensors")
    names = there_and_back(tmp_path)
    assert {"mtp.layers.0.eh_proj.weight", "mtp.layers.0.enorm.weight"} <= names
    assert "mtp.layers.0.transformer_layer.mlp.shared_experts.gate_weight" in names
    loaded, report = type(model).from_pretrained(tmp_path / "back", output_loading_info=True)
    assert not report["missing_keys"]
    assert torch.equal(loaded.lm_head.weight, model.lm_head.weight)


def test_a_norm_that_is_kept_less_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """modelscope/ms-swift#7102: the norm of Qwen3-Next's delta nets loses bits on the way to Megatron-core and back,
    and nothing said so. How far a value is off is printed; float32 keeps it."""
    save("qwen3_next", tmp_path / "hf", torch.bfloat16)
    own = load_file(tmp_path / "hf/model.safetensors")
    norms = [name for name in own if name.endswith("linear_attn.norm.weight")]
    own |= {name: torch.full_like(own[name], 0.1) for name in norms}
    save_file(own, tmp_path / "hf/model.safetensors", metadata={"format": "pt"})
    assert convert(tmp_path / "hf", tmp_path / "core", to="torch_dist") == 0
    assert "2 tensors rounded by the mapping's add or mul, a value by up to 0.015 of itself" in capsys.readouterr().out
    assert convert(tmp_path / "core", tmp_path / "back") == 0
    back = load_file(tmp_path / "back/model.safetensors")
    off = {name: float((back[name].double() / own[name].double() - 1).abs().max()) for name in own}
    assert {name for name, some in off.items() if some} == set(norms)
    assert max(off.values()) == pytest.approx(0.0146, abs=1e-3)
    capsys.readouterr()
    assert convert(tmp_path / "hf", tmp_path / "wide", "--dtype", "float32") == 0
    assert convert(tmp_path / "wide", tmp_path / "core32", to="torch_dist") == 0
    assert convert(tmp_path / "core32", tmp_path / "back32") == 0
    assert "rounded" not in capsys.readouterr().out
    same(tmp_path / "back32", {name: one.float() for name, one in own.items()})


@pytest.mark.parametrize("kind", ["qwen2_5_vl", "qwen3_vl", "gemma3_vl"])
def test_tied_embeddings_below_another_prefix(kind: str, tmp_path: Path) -> None:
    """NVIDIA-NeMo/Megatron-Bridge#4883: tied embeddings were known by one name, which models with images have not, so
    the head of an export was not written; and it is not to be written twice."""
    text = {**dict(HF[kind][1]["text_config"]), "tie_word_embeddings": True}
    model: Any = save(kind, tmp_path / "hf", text_config=text, tie_word_embeddings=True)
    there_and_back(tmp_path)
    assert not any("lm_head" in name for name in load_file(tmp_path / "back/model.safetensors"))
    loaded, report = cast(Any, type(model)).from_pretrained(tmp_path / "back", output_loading_info=True)
    assert not report["missing_keys"]
    assert loaded.get_output_embeddings().weight is loaded.get_input_embeddings().weight
    assert torch.equal(loaded.get_output_embeddings().weight, model.get_input_embeddings().weight)


def test_a_predictor_that_training_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """areal-project/AReaL#1403: a model trained without its predictor lost every file of the export that was to hold a
    tensor of it, with other layers and the head. All else is written, and one sentence tells what is not there."""
    save("deepseek_v3", tmp_path / "hf", num_nextn_predict_layers=1)
    own = load_file(tmp_path / "hf/model.safetensors")
    assert convert(tmp_path / "hf", tmp_path / "core", to="torch_dist") == 0
    assert convert(tmp_path / "core", tmp_path / "back", "--shard-size", "20KB") == 0
    assert "num_nextn_predict_layers 1, but no weights of it are there" in capsys.readouterr().out
    made = [load_file(file) for file in sorted((tmp_path / "back").glob("*.safetensors"))]
    assert len(made) > 4
    found = {name: one for file in made for name, one in file.items()}
    assert set(found) == set(own)
    assert all(torch.equal(found[name], one) for name, one in own.items())
