"""The marks that come with Tangram: four lines at most, and what follows from them is what the model gives."""

from __future__ import annotations

from importlib import resources
from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    AutoModelForSeq2SeqLM,
)

from tangram.errors import UserError
from tangram.layout import Layout, Mesh
from tangram.models.capturing.capture import capture
from tangram.models.capturing.fold import folded
from tangram.models.outlines.costs import block_names
from tangram.sharding.derive.derive import derive
from tangram.sharding.derive.layouts import moved, value_layout
from tangram.sharding.derive.marking.marks import marks_of, states
from tangram.sharding.proof.derived import check

HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
TINY = {"num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 64, "vocab_size": 64, **HEADS}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
GPT = {"n_layer": 2, "n_embd": 32, "n_head": 4, "vocab_size": 64, "n_positions": 32}
MODELS: dict[str, dict[str, Any]] = {
    "llama": TINY,
    "qwen3": {"head_dim": 8, **TINY},
    "gemma3_text": {"head_dim": 8, **TINY},
    "qwen3_moe": {"head_dim": 8, "num_experts": 4, **EXPERTS, **TINY},
    "gpt_oss": {"head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2, **TINY},
    "deepseek_v3": {
        "first_k_dense_replace": 1, "n_routed_experts": 8, "n_group": 2, "topk_group": 1, **EXPERTS, "q_lora_rank": 16,
        "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8, **TINY,
        "num_key_value_heads": 4,
    },
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, **TINY},
    "mamba2": {
        "num_hidden_layers": 2, "hidden_size": 32, "num_heads": 8, "head_dim": 8, "state_size": 8, "n_groups": 2,
        "vocab_size": 64, "chunk_size": 8,
    },
    "gpt2": GPT,
    "gpt_bigcode": GPT,
    "gptj": {**GPT, "rotary_dim": 4},
    "gpt_neo": {
        "num_layers": 2, "hidden_size": 32, "num_heads": 4, "vocab_size": 64, "max_position_embeddings": 32,
        "attention_types": [[["global", "local"], 1]],
    },
    "gpt_neox": {**TINY, "max_position_embeddings": 32},
    "bloom": {"n_layer": 2, "hidden_size": 32, "n_head": 4, "vocab_size": 64},
    "mpt": {"n_layers": 2, "d_model": 32, "n_heads": 4, "vocab_size": 64, "max_seq_len": 32},
    "falcon": {
        "num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "num_kv_heads": 2, "vocab_size": 64,
        "new_decoder_architecture": True,
    },
    "opt": {
        "num_hidden_layers": 2, "hidden_size": 32, "ffn_dim": 64, "num_attention_heads": 4, "vocab_size": 64,
        "max_position_embeddings": 32, "word_embed_proj_dim": 32,
    },
    "bert": {**TINY, "is_decoder": True, "max_position_embeddings": 32},
    "vit": {
        "num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "image_size": 32,
        "patch_size": 8, "num_labels": 10,
    },
    "t5": {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "vocab_size": 64},
    "clip": {
        "text_config": {**TINY, "eos_token_id": 63, "bos_token_id": 0},
        "vision_config": {**TINY, "image_size": 32, "patch_size": 8},
    },
}  # fmt: skip

IMAGES = ("embeddings", "classifier")
BY_QUERIES = {
    "bert": ("self.key", "self.value", "dense", "embeddings"),
    "gpt_bigcode": ("attn", "c_proj"),
    "t5": ("EncDec",),
}
"""What stays whole at this size, where attention goes by queries."""


def tiny(kind: str) -> nn.Module:
    """A model of a kind, with weights."""
    torch.manual_seed(0)
    makes: dict[str, Any] = {"vit": AutoModelForImageClassification, "t5": AutoModelForSeq2SeqLM, "clip": AutoModel}
    make: Any = makes.get(kind, AutoModelForCausalLM)
    return make.from_config(AutoConfig.for_model(kind, **MODELS[kind]), dtype=torch.float32).eval()


def test_every_file_has_four_marks_at_most() -> None:
    files = [f.name for f in resources.files("tangram.sharding.marks").iterdir() if f.name.endswith(".marks")]
    assert {name.removesuffix(".marks") for name in files} == MODELS.keys()
    assert all(0 < len(marks_of(kind) or ()) <= 4 for kind in MODELS)
    assert marks_of("xglm") is None


@pytest.mark.parametrize("kind", MODELS)
def test_what_follows_is_what_the_model_gives(kind: str) -> None:
    model = tiny(kind)
    # A batch that cannot be cut: at this size attention would go by samples. Images' marks cut them.
    images, ids = {"pixel_values": torch.randn(4, 3, 32, 32)}, {"input_ids": torch.randint(63, (3, 16))}
    given: dict[str, torch.Tensor] = {
        "vit": images,
        "clip": {**images, "input_ids": torch.randint(63, (4, 16))},
        "t5": {**ids, "decoder_input_ids": torch.randint(63, (3, 16))},
    }.get(kind, ids)
    more = {} if kind in ("vit", "clip") else {"use_cache": False}
    graph = folded(capture(model, {**given, **more}), block_names(model))
    found = derive(graph, marks_of(kind) or [], Mesh.parse("tp=2"))
    ran = check(found, {**dict(model.named_parameters()), **dict(model.named_buffers()), **given})
    assert ran.wrong == ""
    assert ran.operators == len(graph.nodes)
    parameters = [(v, value) for v, value in graph.of_kind("parameter") if len(value.shape) > 1]
    whole = [value.name for v, value in parameters if "tp" not in str(value_layout(found, v))]
    allowed = (
        "gate.weight",
        "router",
        "kv_a_proj",
        "kv_b_proj",
        "q_a_proj",
        "mixer",
        "sinks",
        "bias",
        "wpe",
        "embed_positions",
        *IMAGES,
        *BY_QUERIES.get(kind, ()),
    )  # at this size
    assert [name for name in whole if not any(word in name for word in allowed)] == []
    assert sum(one.nbytes for one in moved(found)) > 0


@pytest.mark.parametrize(("text", "what"), [("v/tp h @tp=0", "places it on some"), ("v h //tp", "cuts what a rank")])
def test_what_a_derivation_cannot_follow_is_refused(text: str, what: str) -> None:
    with pytest.raises(UserError, match=what):
        states(Layout.parse(text), (8, 8), Mesh.parse("tp=2"))
