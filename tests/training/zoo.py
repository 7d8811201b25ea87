"""A tiny model of random values for every type of causal language model that the installed transformers has."""

from collections.abc import Mapping
from typing import Any, cast

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tangram.errors import UserError
from tangram.models.building.build import build_on_meta

SIZES: Mapping[str, Any] = {
    "vocab_size": 64,
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "lru_width", "attention_hidden_size"), 32),
    **dict.fromkeys(("d_inner",), 64),
    **dict.fromkeys(("intermediate_size", "intermediate_size_mlp", "n_inner", "d_ff", "ffn_dim", "hidden_dim"), 24),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim", "ffn_hidden_size", "shared_intermediate_size"), 24),
    **dict.fromkeys(("num_hidden_layers", "num_layers", "n_layer", "encoder_layers", "decoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "num_heads"), 4),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads",), 2),
    **dict.fromkeys(("head_dim", "global_head_dim", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"), 8),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "zero_expert_num"), 2),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "expert_ffn_hidden_size"), 12),
    **dict.fromkeys(("moe_shared_expert_intermediate_size", "moe_ffn_hidden_size"), 12),
    **dict.fromkeys(("n_shared_experts", "num_shared_experts", "n_group", "topk_group", "num_dense_layers"), 1),
    **dict.fromkeys(("first_k_dense_replace", "moe_layer_end_index", "mamba_n_groups", "n_groups"), 1),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "index_head_dim", "moe_latent_size"), 16),
    **dict.fromkeys(("index_n_heads", "linear_num_key_heads", "mamba_expand"), 2),
    **dict.fromkeys(("index_topk", "linear_num_value_heads", "time_step_rank", "rotary_dim"), 4),
    **dict.fromkeys(("mamba_num_heads", "mamba_head_dim", "mamba_n_heads", "mamba_d_head", "mamba_d_state"), 8),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim", "ssm_state_size", "state_size"), 8),
    **dict.fromkeys(("hidden_size_per_layer_input", "router_hidden_size"), 8),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "vocab_size_per_layer_input"), 64),
    **dict.fromkeys(("num_kv_shared_layers", "moe_layer_start_index", "pad_token_id"), 0),
    "bos_token_id": 1,
    "eos_token_id": 2,
    "mlp_only_layers": [],
    "moe_layers": [0, 1],
}
"""By what configurations call them; each takes those that it knows."""

PER_LAYER = ("mlp_layer_types", "no_rope_layers", "layers_block_type", "activation_sparsity_pattern")
OPEN = ("q_lora_rank", "d_inner", "n_inner", "mlp_only_layers")
"""Fields that stay None where they are."""

OWN: Mapping[str, Mapping[str, Any]] = {
    "dots3_note": {"num_key_value_heads": 4},
    "dots3_note_text": {"num_key_value_heads": 4},
    "falcon_h1": {"mamba_d_ssm": 64},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "mamba2": {"num_heads": 8},
    "zaya": {"num_experts_per_tok": 1},
}

ELSEWHERE: Mapping[str, str] = {
    "blt": "its size is in four configurations inside its own",
    "cohere_compass_text": "its class makes none of two layers",
    "dbrx": "its class makes none of its own default configuration",
    "gemma4_assistant": "its configuration is refused by its own class",
    "git": "its vision tower keeps its size",
    "musicgen": "its decoder is no field of its configuration",
    "musicgen_melody": "its decoder is no field of its configuration",
    "phi4_multimodal": "its vision and audio towers keep their sizes",
    "reformer": "its positions are factors of its width",
    "xlm": "its size has names of its own",
}
"""Types that these sizes make no tiny model of. None of them has a conversion."""

KINDS = [kind for kind in sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) if kind not in ELSEWHERE]
LEAVE_OUT = ((), ("layer_types",), ("head_dim",), ("layer_types", "head_dim"), ("intermediate_size",))
LARGEST = 30_000_000


def tiny(kind: str, seed: int) -> PreTrainedModel:
    """The model: of the sizes above, without some that its class does not take together."""
    base = AutoConfig.for_model(kind)
    text: Any = base.get_text_config()
    fields = _fitted(text) | dict(OWN.get(kind, {}))
    refusals: list[str] = []
    for some in LEAVE_OUT:
        left = {name: value for name, value in fields.items() if name not in some}
        try:
            known = text.model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
            config = (
                AutoConfig.for_model(text.model_type, **left) if known else AutoConfig.for_model(kind, text_config=left)
            )
            if sum(parameter.numel() for parameter in build_on_meta(config).parameters()) > LARGEST:
                raise ValueError("too large")
            torch.manual_seed(seed)
            return _random(cast(PreTrainedModel, AutoModelForCausalLM.from_config(config)))
        except (UserError, ValueError, KeyError, TypeError) as error:
            refusals.append(f"without {some}: {error}")
    raise ValueError(f"no tiny {kind}: {'; '.join(refusals)}")


def _fitted(config: Any) -> dict[str, Any]:
    known = config.to_dict()
    fields = {name: SIZES[name] for name in SIZES if name in known and not (known[name] is None and name in OPEN)}
    fields = {
        name: fields[name] for name in fields if isinstance(fields[name], list) or not isinstance(known[name], list)
    }
    fields |= {name: known[name][:1] + known[name][-1:] for name in PER_LAYER if isinstance(known.get(name), list)}
    if kinds := known.get("layer_types"):  # two that differ, where there are
        fields["layer_types"] = kinds[:2] if len(set(kinds[:2])) == 2 else [kinds[0], kinds[-1]]
    return fields


def _random(model: PreTrainedModel) -> PreTrainedModel:
    with torch.no_grad():
        for tensor in model.state_dict().values():
            if tensor.is_floating_point():
                tensor.uniform_(-1, 1)
    return model
