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
HF: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "llama": ("llama", _DENSE),
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
}  # fmt: skip
_CORE = {
    "num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "num_query_groups": 2, "kv_channels": 16,
    "ffn_hidden_size": 48, "vocabulary": 128,
}  # fmt: skip
_MIXED = {"num_moe_experts": 4, "moe_ffn_hidden_size": 24, "moe_router_topk": 2}
CORE: Mapping[str, Mapping[str, Any]] = {
    "qwen3": _CORE,
    "qwen3_moe": {**_CORE, **_MIXED},
    "deepseek_v3": {
        "num_layers": 3, "hidden_size": 32, "num_attention_heads": 4, "ffn_hidden_size": 48, "vocabulary": 128,
        **_MIXED, "moe_layer_freq": [0, 1, 1], "moe_shared_expert_intermediate_size": 24,
        "moe_router_enable_expert_bias": True, "moe_router_score_function": "sigmoid", "q_lora_rank": 24,
        "kv_lora_rank": 16, "qk_head_dim": 8, "qk_pos_emb_head_dim": 4, "v_head_dim": 8, "multi_latent_attention": True,
    },
}  # fmt: skip


def save(name: str, folder: Path, dtype: torch.dtype = torch.float32, **changes: Any) -> nn.Module:
    """transformers' own model of a family with random weights, and a directory that it has written."""
    from transformers import AutoConfig, AutoModelForCausalLM

    kind, fields = HF[name]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **{**fields, **changes}), dtype=dtype).eval()
    with torch.no_grad():
        for tensor in model.state_dict().values():
            tensor.copy_(torch.randn(tensor.shape) * 0.25)
    model.save_pretrained(folder)
    return model
