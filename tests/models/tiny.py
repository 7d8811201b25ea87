"""Configurations of some kilobytes, one for each way that a decoder can be built."""

from typing import Any

from transformers import AutoConfig, PreTrainedConfig

FIELDS: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 65,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
}
KINDS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "decoder_sparse_step": 1},
    "gemma3_text": {},
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "resid_pdrop": 0.0, "attn_pdrop": 0.0},
}


def tiny(kind: str, **changes: Any) -> PreTrainedConfig:
    """The configuration of one of KINDS."""
    fields = {} if kind == "gpt2" else FIELDS
    common = {"vocab_size": 65, "bos_token_id": 1, "eos_token_id": 2}
    return AutoConfig.for_model(kind, **{**common, **fields, **KINDS[kind], **changes})
