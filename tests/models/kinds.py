"""Configurations of some kilobytes of models whose blocks are not all alike, or no usual decoder's."""

from typing import Any

from transformers import AutoConfig, PreTrainedConfig

COMMON: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 128, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
SCANS: dict[str, Any] = {
    "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_n_groups": 1, "mamba_d_state": 16, "mamba_chunk_size": 16,
}  # fmt: skip
EXPERTS: dict[str, Any] = {"num_local_experts": 4, "num_experts_per_tok": 2}
ROUTED: dict[str, Any] = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
GRAPHS: dict[str, dict[str, Any]] = {
    "bamba": {**SCANS, "attn_layer_indices": [1], "mamba_expand": 2},
    "zamba2": {
        "layers_block_type": ["mamba", "mamba", "hybrid"] * 2, "num_hidden_layers": 6, "num_mem_blocks": 1,
        "n_mamba_heads": 8, "mamba_d_state": 16, "chunk_size": 16, "mamba_ngroups": 1, "mamba_headdim": 16,
        "attention_head_dim": 32, "use_shared_attention_adapter": False, "adapter_rank": 8,
    },
    "jamba": {
        "attn_layer_period": 4, "attn_layer_offset": 2, "expert_layer_period": 2, "expert_layer_offset": 1,
        "num_experts": 4, "num_experts_per_tok": 2, "mamba_d_state": 8, "mamba_d_conv": 4, "mamba_expand": 2,
        "mamba_dt_rank": 8, "use_mamba_kernels": False,
    },
    "granitemoehybrid": {
        **SCANS, **EXPERTS, "layer_types": ["mamba", "attention", "mamba", "mamba"], "shared_intermediate_size": 48,
    },
    "falcon_h1": {**SCANS, "mamba_d_ssm": 128, "head_dim": 16, "num_hidden_layers": 2},
    "nemotron_h": {
        "mamba_num_heads": 8, "mamba_head_dim": 16, "n_groups": 1, "ssm_state_size": 16, "chunk_size": 16,
        "head_dim": 16, "hybrid_override_pattern": "M-M*", "layers_block_type": None,
    },
    "qwen3_next": {
        **ROUTED, "head_dim": 16, "shared_expert_intermediate_size": 32, "linear_num_key_heads": 2,
        "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
        "layer_types": ["linear_attention"] * 3 + ["full_attention"],
    },
    "mamba2": {"num_heads": 8, "head_dim": 16, "state_size": 16, "n_groups": 1, "chunk_size": 16, "expand": 2},
    "llama4_text": {
        **EXPERTS, "num_experts_per_tok": 1, "head_dim": 16, "intermediate_size_mlp": 128,
        "interleave_moe_layer_step": 2, "attention_chunk_size": 16,
    },
    "recurrent_gemma": {"num_hidden_layers": 3},
    "bert": {"max_position_embeddings": 256},
    "gpt2": {"n_embd": 64, "n_layer": 4, "n_head": 4, "n_positions": 64},
}  # fmt: skip
"""Those whose outline comes from their graph."""
DECODERS: dict[str, dict[str, Any]] = {
    "llama": {},
    "mixtral": EXPERTS,
    "qwen3_moe": {**ROUTED, "head_dim": 16},
    "gemma3_text": {"head_dim": 16, "sliding_window": 16, "num_hidden_layers": 7},
    "deepseek_v3": {
        "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "q_lora_rank": 24,
        "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16, "n_group": 2,
        "topk_group": 1, "first_k_dense_replace": 1, "num_key_value_heads": 4,
    },
}  # fmt: skip
"""Those that `decoder` makes, too."""


def config_of(kind: str, **changes: Any) -> PreTrainedConfig:
    """The configuration of one of them."""
    return AutoConfig.for_model(kind, **{**COMMON, **(GRAPHS | DECODERS)[kind], **changes})
