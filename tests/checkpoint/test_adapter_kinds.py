"""DoRA, embeddings, tied heads, modules in full, biases, GPT-2's transposed layers: what peft's model computes.

The oracle is peft's model with the adapter beside its weights: the merged directory, loaded by transformers, has its
logits. Where nothing is tied that is its own `merge_and_unload`, too, tensor by tensor.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tangram.cli import main
from tests.checkpoint.peers.models import save

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*tie_word_embeddings"),
    pytest.mark.filterwarnings("ignore:.*fan_in_fan_out"),
    pytest.mark.filterwarnings("ignore:.*tied"),
    pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers`"),
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated"),
]
TIED = {"tie_word_embeddings": True}
CASES: Mapping[str, tuple[str, Mapping[str, Any], Mapping[str, Any], bool | None]] = {
    # model, changes of its configuration, of LoraConfig, whether the head is tied at the end (None: it never was)
    "dora": ("llama", {}, {"target_modules": "all-linear", "use_dora": True, "use_rslora": True}, None),
    "dora of embeddings": ("llama", {}, {"target_modules": ["embed_tokens", "v_proj"], "use_dora": True}, None),
    "embeddings": ("qwen3", {}, {"target_modules": ["embed_tokens", "q_proj", "lm_head"]}, None),
    "modules in full": (
        "llama", {},
        {"target_modules": ["q_proj"], "modules_to_save": ["lm_head", "model.embed_tokens", "model.norm"]}, None,
    ),
    "biases": ("llama-biases", {}, {"target_modules": ["q_proj", "down_proj"], "bias": "all"}, None),
    "a head of classes": ("llama-reward", {}, {"target_modules": ["q_proj"], "task_type": "SEQ_CLS"}, None),
    "gpt2": ("gpt2", {}, {"target_modules": ["c_attn", "c_proj", "c_fc"], "fan_in_fan_out": True}, True),
    "gpt2 under dora, biases": (
        "gpt2", {},
        {"target_modules": ["c_attn", "c_proj"], "fan_in_fan_out": True, "use_dora": True, "bias": "lora_only"}, True,
    ),
    "a tied head": ("llama", TIED, {"target_modules": ["q_proj", "lm_head"]}, False),
    "tied embeddings": ("llama", TIED, {"target_modules": ["q_proj", "embed_tokens"]}, False),
    "a tied head in full": ("llama", TIED, {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}, False),
    "both, kept tied": (
        "llama", TIED, {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"], "ensure_weight_tying": True},
        True,
    ),
    "pairs of both, kept tied": (
        "llama", TIED, {"target_modules": ["q_proj", "embed_tokens"], "ensure_weight_tying": True}, True,
    ),
}  # fmt: skip


def adapted(folder: Path, case: str) -> Any:
    """peft's model with trained-looking tensors, saved as peft saves it, beside the base in `hf`."""
    from peft import LoraConfig, get_peft_model

    name, changes, options, _ = CASES[case]
    model = save(name, folder / "hf", **changes)
    peft: Any = get_peft_model(model, LoraConfig(r=3, lora_alpha=5, **options))
    torch.manual_seed(1)
    with torch.no_grad():
        for key, value in peft.named_parameters():
            if value.requires_grad and "magnitude" in key:
                value.mul_(torch.rand(value.shape) + 0.5)
            elif value.requires_grad:
                value.copy_(torch.randn(value.shape) * 0.3)
        if options.get("ensure_weight_tying") and "embed_tokens" in options["target_modules"]:
            inner = (
                peft.base_model.model
            )  # tied pairs share what they are made of, as peft ties them when it makes them
            embedding, head = inner.model.embed_tokens, inner.lm_head
            head.lora_A["default"].weight.copy_(embedding.lora_embedding_B["default"].T)
            head.lora_B["default"].weight.copy_(embedding.lora_embedding_A["default"].T)
    peft.save_pretrained(folder / "adapter")
    return peft.eval()


def merged(folder: Path) -> Any:
    import transformers

    arguments = [folder / "hf", folder / "merged", "--to", "hf", "--adapter", folder / "adapter"]
    assert main(["checkpoint", "convert", *map(str, arguments)]) == 0
    (architecture,) = json.loads((folder / "merged/config.json").read_text())["architectures"]
    kind = getattr(transformers, architecture)
    model, report = kind.from_pretrained(folder / "merged", output_loading_info=True)
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), report
    return model.eval()


@pytest.mark.parametrize("case", CASES)
def test_the_merged_model_computes_what_pefts_does(case: str, tmp_path: Path) -> None:
    tied = CASES[case][3]
    peft = adapted(tmp_path, case)
    tokens = torch.arange(40).view(2, 20)
    with torch.no_grad():
        expected = peft(tokens).logits
        ours = merged(tmp_path)
        torch.testing.assert_close(ours(tokens).logits, expected, rtol=2e-5, atol=2e-5)
    if tied is not None:
        config = json.loads((tmp_path / "merged/config.json").read_text())
        assert config.get("tie_word_embeddings", True) == tied
        assert ("lm_head.weight" in load_file(tmp_path / "merged/model.safetensors")) != tied
    if tied is not False and case != "pairs of both, kept tied":  # which peft's merge adds twice to the one tensor
        theirs, own = peft.merge_and_unload().state_dict(), ours.state_dict()
        assert own.keys() == theirs.keys()
        for name, value in own.items():
            torch.testing.assert_close(value, theirs[name], rtol=2e-6, atol=2e-6, msg=name)


def test_added_tokens_come_with_their_embeddings(tmp_path: Path) -> None:
    """A vocabulary that was resized before training: peft saves embeddings of more rows, and the head."""
    from peft import LoraConfig, get_peft_model

    for tied in (False, True):
        folder = tmp_path / str(tied)
        model: Any = save("llama", folder / "hf", tie_word_embeddings=tied)
        model.resize_token_embeddings(131, mean_resizing=False)
        peft: Any = get_peft_model(
            model,
            LoraConfig(
                r=2,
                target_modules=["q_proj"],
                modules_to_save=["embed_tokens"] if tied else ["embed_tokens", "lm_head"],
                ensure_weight_tying=tied,
            ),
        )
        torch.manual_seed(1)
        with torch.no_grad():
            for value in peft.parameters():
                if value.requires_grad:
                    value.copy_(torch.randn(value.shape) * 0.3)
        peft.save_pretrained(folder / "adapter")
        tokens = torch.tensor([[1, 130, 5, 128]])
        with torch.no_grad():
            torch.testing.assert_close(merged(folder)(tokens).logits, peft.eval()(tokens).logits, rtol=2e-5, atol=2e-5)
        config = json.loads((folder / "merged/config.json").read_text())
        assert (config["vocab_size"], config["tie_word_embeddings"]) == (131, tied)


def test_lengths_are_of_whole_rows_however_the_weight_is_cut(tmp_path: Path) -> None:
    """DoRA's length of a row is over all of its columns, also where pieces and blocks have some of them."""
    from tangram.checkpoint.conversion.lora_adapters import with_adapter
    from tangram.layout import Region
    from tests.checkpoint.test_adapters import opened, values_of, written

    torch.manual_seed(0)
    weight, a, b = torch.randn(6, 8), torch.randn(2, 8), torch.randn(6, 2)
    magnitude = torch.rand(6) + 0.5
    tensors = {"x.lora_A.weight": a, "x.lora_B.weight": b, "x.lora_magnitude_vector": magnitude}
    folder = written(tmp_path / "adapter", tensors, use_dora=True)
    total = weight.double() + 2 * b.double() @ a.double()
    expected = total / total.norm(dim=1, keepdim=True) * magnitude.double()[:, None]
    pieces = [Region.box((0, 0), (6, 3)), Region.box((0, 3), (2, 5)), Region.box((2, 3), (4, 5))]
    source = with_adapter(opened("x.weight", weight, pieces), folder, block=40)
    torch.testing.assert_close(values_of(source)["x.weight"].double(), expected, rtol=1e-6, atol=1e-6)
    without = {name: one for name, one in tensors.items() if "magnitude" not in name}
    plain = with_adapter(opened("x.weight", weight, pieces), written(tmp_path / "plain", without), block=40)
    assert not torch.allclose(values_of(plain)["x.weight"].double(), expected, rtol=1e-2)


def test_both_names_of_tied_weights_are_told_apart(tmp_path: Path) -> None:
    """A directory that stores the head although it is tied: what becomes of one becomes of the other, or they part."""
    adapted(tmp_path, "a tied head")
    tensors: dict[str, Tensor] = load_file(tmp_path / "hf/model.safetensors")
    save_file(
        {**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"].clone()}, tmp_path / "hf/model.safetensors"
    )
    merged(tmp_path)
    after = load_file(tmp_path / "merged/model.safetensors")
    assert torch.equal(after["model.embed_tokens.weight"], tensors["model.embed_tokens.weight"])
    assert not torch.equal(after["lm_head.weight"], tensors["model.embed_tokens.weight"])
    assert json.loads((tmp_path / "merged/config.json").read_text())["tie_word_embeddings"] is False
