"""Small models of each family, as transformers' configurations and as megatron-core's."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

_DENSE = {
    "num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "intermediate_size": 48, "vocab_size": 128, "tie_word_embeddings": False, "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
}  # fmt: skip
_OLD = {**{key: value for key, value in _DENSE.items() if key != "head_dim"}, "num_key_value_heads": 4}
"""As many key heads as heads, and no word of their size."""
_WINDOWS = {"sliding_window": 16, "query_pre_attn_scalar": 16, "tie_word_embeddings": True}
_UNCAPPED = {"attn_logit_softcapping": None, "final_logit_softcapping": None}
_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_LONG = {
    "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip
_PLAIN = {"rope_parameters": _ROPE}
_ENDS = {"bos_token_id": 1, "eos_token_id": 2}
_TOWER = {
    "depth": 2, "hidden_size": 32, "num_heads": 2, "intermediate_size": 48, "patch_size": 4, "out_hidden_size": 32,
}  # fmt: skip
_IMAGES = {
    "mm_tokens_per_image": 4,
    "vision_config": {
        "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
        "image_size": 16, "patch_size": 4,
    },
}  # fmt: skip
HF: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "llama": ("llama", {**_DENSE, "rope_parameters": _LONG}),
    "llama-2": ("llama", _OLD),
    "llama-biases": ("llama", {**_DENSE, "attention_bias": True, "mlp_bias": True}),
    "mistral": ("mistral", {**_DENSE, "sliding_window": 16}),
    "ministral": ("ministral", {**_DENSE, "sliding_window": 16}),
    "smollm3": ("smollm3", {**_DENSE, "tie_word_embeddings": True, "pad_token_id": 0}),
    "qwen2": ("qwen2", _OLD | {"num_key_value_heads": 2}),
    "qwen2-tied": ("qwen2", _OLD | {"num_key_value_heads": 2, "tie_word_embeddings": True}),
    "qwen2_moe": (
        "qwen2_moe",
        {
            **_OLD, "num_key_value_heads": 2, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 40,
            "num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": True,
        },
    ),
    "mixtral": ("mixtral", {**_DENSE, **_EXPERTS, "intermediate_size": 24}),
    "gemma": ("gemma", {**_DENSE, "tie_word_embeddings": True}),
    "gemma2": ("gemma2", {**_DENSE, **_WINDOWS, **_UNCAPPED}),
    "gemma3": (
        "gemma3_text",
        {**_DENSE, **_WINDOWS, "rope_parameters": {"full_attention": _ROPE, "sliding_attention": _ROPE}},
    ),
    "gpt_oss": ("gpt_oss", {**_DENSE, **_EXPERTS, **_PLAIN, "intermediate_size": 24, "sliding_window": 16}),
    "phi3": ("phi3", _OLD | {"num_key_value_heads": 2, "pad_token_id": 0}),
    "qwen3": ("qwen3", _DENSE),
    "qwen3_moe": (
        "qwen3_moe",
        {**_DENSE, "moe_intermediate_size": 24, "num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": True},
    ),
    "deepseek_v3": (
        "deepseek_v3",
        {
            **_DENSE, "num_hidden_layers": 3, "num_key_value_heads": 4, "moe_intermediate_size": 24,
            "n_routed_experts": 4, "num_experts_per_tok": 2, "first_k_dense_replace": 1, "q_lora_rank": 24,
            "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8, "n_group": 2,
            "topk_group": 1,
        },
    ),
    "gpt2": ("gpt2", {"n_layer": 2, "n_embd": 32, "n_head": 4, "n_positions": 64, "vocab_size": 128}),
    "glm4_moe": (
        "glm4_moe",
        {
            **_DENSE, **_EXPERTS, "moe_intermediate_size": 24, "n_routed_experts": 4, "first_k_dense_replace": 1,
            "use_qk_norm": True, "attention_bias": True, "pad_token_id": 0,
        },
    ),
    "olmo2": ("olmo2", {**_DENSE, "pad_token_id": 0}),
    "olmo3": ("olmo3", {**_DENSE, "pad_token_id": 0}),
    "minimax_m2": ("minimax_m2", {**_DENSE, **_EXPERTS, "intermediate_size": 24, **_ENDS}),
    "qwen3_next": (
        "qwen3_next",
        {
            **_DENSE, "num_hidden_layers": 3, "moe_intermediate_size": 24, "num_experts": 4, "num_experts_per_tok": 2,
            "shared_expert_intermediate_size": 24, "linear_num_value_heads": 4, "linear_num_key_heads": 2,
            "linear_key_head_dim": 8, "linear_value_head_dim": 8,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        },
    ),
    "qwen2_5_vl": ("qwen2_5_vl", {"text_config": _OLD | {"num_key_value_heads": 2}, "vision_config": _TOWER}),
    "qwen3_vl": (
        "qwen3_vl",
        {
            "text_config": _DENSE,
            "vision_config": {**_TOWER, "deepstack_visual_indexes": [0], "num_position_embeddings": 16},
        },
    ),
    "gemma3_vl": ("gemma3", {"text_config": {**_DENSE, **_WINDOWS}, **_IMAGES}),
    "llama-reward": ("llama", {**_DENSE, "num_labels": 1, "pad_token_id": 0}),
    "gpt2-classes": (
        "gpt2",
        {"n_layer": 2, "n_embd": 32, "n_head": 4, "n_positions": 64, "vocab_size": 128, "pad_token_id": 0},
    ),
    "gpt2-tokens": ("gpt2", {"n_layer": 2, "n_embd": 32, "n_head": 4, "n_positions": 64, "vocab_size": 128}),
    "gemma3-classes": ("gemma3_text", {**_DENSE, **_WINDOWS, "pad_token_id": 0}),
    "gemma3_vl-classes": ("gemma3", {"text_config": {**_DENSE, **_WINDOWS}, **_IMAGES}),
}  # fmt: skip
CLASSES: Mapping[str, str] = {
    "qwen2_5_vl": "Qwen2_5_VLForConditionalGeneration", "qwen3_vl": "Qwen3VLForConditionalGeneration",
    "gemma3_vl": "Gemma3ForConditionalGeneration", "llama-reward": "LlamaForSequenceClassification",
    "gpt2-classes": "GPT2ForSequenceClassification", "gpt2-tokens": "GPT2ForTokenClassification",
    "gemma3-classes": "Gemma3TextForSequenceClassification", "gemma3_vl-classes": "Gemma3ForSequenceClassification",
}  # fmt: skip
"""Of rows that are no causal language model."""
_CORE = {
    "num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "num_query_groups": 2, "kv_channels": 16,
    "ffn_hidden_size": 48,
}  # fmt: skip
_NORMED = {"qk_layernorm": True}
_EIGHTHS = {**_CORE, "kv_channels": 8}
_MIXED = {"num_moe_experts": 4, "moe_ffn_hidden_size": 24, "moe_router_topk": 2}
_TIED = {"share_embeddings_and_output_weights": True}
_GEMMA = {"core": _CORE, "model": _TIED, "activation": "gelu", "less_one": True}
CORE: Mapping[str, Mapping[str, Any]] = {
    "llama": {"core": _CORE, "model": {"rotary_base": 500000, "rope_scaling": True, "rope_scaling_factor": 8.0}},
    "llama-2": {"core": {**_EIGHTHS, "num_query_groups": 4}},
    "llama-biases": {"core": {**_CORE, "add_bias_linear": True}},
    "mistral": {"core": _CORE},
    "ministral": {"core": _CORE},
    "smollm3": {"core": _CORE, "model": {**_TIED, "rotary_base": 2000000}},
    "qwen2": {"core": {**_EIGHTHS, "add_qkv_bias": True}},
    "qwen2-tied": {"core": {**_EIGHTHS, "add_qkv_bias": True}, "model": _TIED},
    "qwen2_moe": {
        "core": {
            **_EIGHTHS, **_MIXED, "add_qkv_bias": True, "moe_shared_expert_intermediate_size": 40,
            "moe_shared_expert_gate": True,
        }
    },
    "mixtral": {"core": {**_CORE, **_MIXED}, "model": {"rotary_base": 1000000}},
    "gemma": _GEMMA,
    "gemma2": {**_GEMMA, "post_norms": True},
    "gemma3": {**_GEMMA, "core": {**_CORE, **_NORMED}, "post_norms": True},
    "gpt_oss": {
        "core": {
            **_CORE, **_MIXED, "add_bias_linear": True, "softmax_type": "learnable", "glu_linear_offset": 1.0,
            "activation_func_clamp_value": 7.0,
        },
        "activation": "quick_gelu",
    },
    "phi3": {"core": _EIGHTHS},
    "qwen3": {"core": {**_CORE, **_NORMED}},
    "qwen3_moe": {"core": {**_CORE, **_MIXED, **_NORMED}},
    "deepseek_v3": {
        "core": {
            "num_layers": 3, "hidden_size": 32, "num_attention_heads": 4, "ffn_hidden_size": 48, **_MIXED, **_NORMED,
            "moe_layer_freq": [0, 1, 1], "moe_shared_expert_intermediate_size": 24,
            "moe_router_enable_expert_bias": True, "moe_router_score_function": "sigmoid", "q_lora_rank": 24,
            "kv_lora_rank": 16, "qk_head_dim": 8, "qk_pos_emb_head_dim": 4, "v_head_dim": 8,
            "multi_latent_attention": True,
        },
        "computes": False,
    },
    "gpt2": {
        "core": {
            "num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "ffn_hidden_size": 128,
            "gated_linear_unit": False, "add_bias_linear": True, "normalization": "LayerNorm",
            "layernorm_epsilon": 1e-5,
        },
        "model": {"position_embedding_type": "learned_absolute", **_TIED},
        "activation": "gelu",
    },
    "glm4_moe": {
        "core": {
            **_CORE, **_MIXED, **_NORMED, "add_qkv_bias": True, "moe_layer_freq": [0, 1],
            "moe_shared_expert_intermediate_size": 24, "moe_router_enable_expert_bias": True,
            "moe_router_score_function": "sigmoid",
        },
        "model": {"rotary_percent": 0.5},
    },
}  # fmt: skip
"""By row: megatron-core's configuration, what its model takes beside it, and what it has only with Transformer Engine
(latent attention, norms whose weights are `less_one`) or not at all (norms after a product)."""


def save(name: str, folder: Path, dtype: torch.dtype = torch.float32, **changes: Any) -> nn.Module:
    """transformers' own model of a row with random weights, and a directory that it has written."""
    import transformers

    kind, fields = HF[name]
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind, **{**fields, **changes})
    if name in CLASSES:
        model = getattr(transformers, CLASSES[name])(config).to(dtype).eval()
    else:
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    with torch.no_grad():
        for key, tensor in model.state_dict().items():
            values = torch.randn(tensor.shape) * 0.25
            # Megatron-core has the norm of a delta net less one: of multiples of 1 / 64 that loses nothing in bfloat16.
            tensor.copy_(values.mul(64).round().div(64) if key.endswith("linear_attn.norm.weight") else values)
    model.save_pretrained(folder)
    return model
