"""Adapters of peft with biases of their own and rows of embeddings (`trainable_token_indices`); several, merged."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from tangram.cli import main

pytestmark = [
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated"),  # what peft asks for
    pytest.mark.filterwarnings("ignore:Adapter 'default'. 1 LoRA tensor.s. have invalid shape"),  # biases have one dim
]
SIZES = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 40,
}  # fmt: skip
ROWS = [3, 39, 7]


def _written(folder: Path, *, tied: bool) -> Any:
    """peft's model, saved with its base."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    config = AutoConfig.for_model("qwen2", **SIZES, tie_word_embeddings=tied)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder / "base")
    model: Any = AutoModelForCausalLM.from_pretrained(folder / "base")
    options = LoraConfig(r=2, lora_alpha=6, target_modules=["q_proj"], lora_bias=True, trainable_token_indices=ROWS)
    peft: Any = get_peft_model(model, options)
    for parameter in peft.parameters():
        if parameter.requires_grad:
            parameter.data = torch.randn(parameter.shape)
    for name, value in peft.named_parameters():
        if name.endswith("q_proj.base_layer.bias"):
            value.data = torch.zeros_like(value)
    peft.save_pretrained(folder / "adapter")
    return peft.eval()


def _merge(folder: Path, name: str = "adapter") -> int:
    words = ["checkpoint", "convert", str(folder / "base"), str(folder / f"of-{name}"), "--to", "hf"]
    return main([*words, "--adapter", str(folder / name)])


@pytest.mark.parametrize("tied", [False, True])
def test_the_merged_model_is_pefts(tmp_path: Path, tied: bool) -> None:
    peft = _written(tmp_path, tied=tied)
    tokens = torch.tensor([[*ROWS, 0, 1, 2]])
    with torch.no_grad():
        attached = peft(tokens).logits
        assert _merge(tmp_path) == 0
        found: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "of-adapter").eval()
        torch.testing.assert_close(found(tokens).logits, attached, rtol=1e-4, atol=1e-5)
    assert found.config.tie_word_embeddings == tied
    stored, before = (load_file(tmp_path / one / "model.safetensors") for one in ("of-adapter", "base"))
    words = "model.embed_tokens.weight"
    assert [n for n in range(40) if not torch.equal(stored[words][n], before[words][n])] == sorted(ROWS)


def test_what_does_not_fit_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _written(tmp_path, tied=False)
    adapter = tmp_path / "adapter"
    settings = json.loads((adapter / "adapter_config.json").read_text())
    for changed, why in (
        ({"trainable_token_indices": [1, 2]}, "has 3 rows for model.embed_tokens, which do not fit"),
        ({"trainable_token_indices": [1, 2, 40]}, "has 3 rows for model.embed_tokens, which do not fit"),
        ({"trainable_token_indices": "all"}, "does not say trainable_token_indices as numbers"),
        ({"lora_bias": False}, "a bias, and lora_bias is false"),
    ):
        (adapter / "adapter_config.json").write_text(json.dumps({**settings, **changed}))
        assert _merge(tmp_path) == 2, why
        assert why in capsys.readouterr().err.replace("\n", " ")
    (adapter / "adapter_config.json").write_text(json.dumps(settings))
    tensors = load_file(adapter / "adapter_model.safetensors")
    bias = next(name for name in tensors if name.endswith("lora_B.bias"))
    save_file({name: one for name, one in tensors.items() if name != bias}, adapter / "adapter_model.safetensors")
    assert _merge(tmp_path) == 2
    assert "no bias, and lora_bias is true" in capsys.readouterr().err


def test_several_are_the_sum_that_peft_has_of_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from peft import LoraConfig, PeftModel, get_peft_model

    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen2", **SIZES)).save_pretrained(tmp_path / "base")
    for name, targets, rank in (("a", ["q_proj", "up_proj"], 2), ("b", ["q_proj", "o_proj"], 3)):
        model: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
        peft: Any = get_peft_model(model, LoraConfig(r=rank, lora_alpha=5, target_modules=targets))
        for parameter in peft.parameters():
            if parameter.requires_grad:
                parameter.data = torch.randn(parameter.shape)
        peft.save_pretrained(tmp_path / name)
    settings = json.loads((tmp_path / "b" / "adapter_config.json").read_text())
    other = json.dumps({**settings, "base_model_name_or_path": "company/other"})
    (tmp_path / "b" / "adapter_config.json").write_text(other)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    both: Any = PeftModel.from_pretrained(model, str(tmp_path / "a"), "a").eval()
    both.load_adapter(str(tmp_path / "b"), "b")
    both.base_model.set_adapter(["a", "b"])
    for module in both.modules():
        if hasattr(module, "lora_A"):
            module.scaling = {**module.scaling, "b": 5 / 3 * 0.5}
    words = ["checkpoint", "convert", str(tmp_path / "base"), str(tmp_path / "merged"), "--to", "hf"]
    assert main([*words, "--adapter", str(tmp_path / "a"), "--adapter", f"{tmp_path / 'b'}=0.5"]) == 0
    said = capsys.readouterr().out
    assert f'with "{tmp_path}/a" merged into 2 tensors, "{tmp_path}/b" merged into 2 tensors' in said
    assert [line for line in said.splitlines() if "were trained beside" in line] == [
        f'the adapters in "{tmp_path}/b" were trained beside "company/other": beside other weights they give something '
        "else"
    ]
    tokens = torch.arange(40)[None]
    with torch.no_grad():
        found: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
        torch.testing.assert_close(found(tokens).logits, both(tokens).logits, rtol=1e-4, atol=1e-5)
    about = json.loads((tmp_path / "merged" / "provenance.json").read_text())["adapters"]
    assert [(one["folder"], one.get("weight", 1)) for one in about] == [("a", 1), ("b", 0.5)]


def test_what_is_no_sum_is_merged_as_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _written(tmp_path, tied=False)
    words = ["checkpoint", "convert", str(tmp_path / "base"), str(tmp_path / "merged"), "--to", "hf", "--adapter"]
    for number, why in (("0.5", "in full, or its lengths: only A and B can be merged"), ("half", "is no number")):
        assert main([*words, f"{tmp_path / 'adapter'}={number}"]) == 2
        assert why in " ".join(capsys.readouterr().err.split())
