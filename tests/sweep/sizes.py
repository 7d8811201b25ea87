"""A tiny model of any type of transformers, from its own configuration: sizes shrunk, nothing else changed.

Each number is shrunk by what its name says, in configurations within configurations alike; dropout, flags and kinds of
layers stay as the class has them. What does not go together then is in `OWN`.
"""

# ruff: noqa: RUF024  tables of constants

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from transformers import CONFIG_MAPPING, PreTrainedModel
from transformers.models.auto import modeling_auto

VOCABULARY = 96
LARGEST = 20_000_000
"""Parameters: what is larger was not shrunk."""

_RULES: Sequence[tuple[str, int]] = (
    (r"num_feat_extract_layers|num_conv.*layers|num_groups|groups", 0),
    (r"num_channels|in_channels|in_chans|num_encoder_blocks|num_labels|n_groups|mamba_n_groups|ngroups", 0),
    (r"n_group|num_expert_group", 2),
    (r"topk_group", 1),
    (r"num_pos_feats", 16),
    (r"dim_bbox_projection|latent_query_num", 8),
    (r"index_topk|qk_head_dim", 16),
    (r"(num|n)_filters|image_embedding_size|num_self_attends_per_block|visual_prompt_size", 4),
    (
        r"upsample_groups|d_latents|vector_quantization_hidden_dimension|fpn_feature_size|mask_feature_size|hidden_size_global",
        32,
    ),
    (r"block_size", 128),
    (r"(?!type_).*vocab_size(_per_layer_input)?|encoder_hash_byte_group_vocab", VOCABULARY),
    (r"type_vocab_size|.*conv_kernel.*|.*stride.*|.*_bits|.*dilation.*|num_codebooks|num_quantizers", 0),
    (r".*(first_k_dense_replace|num_dense_layers|n_shared_experts|num_shared_experts|num_kv_shared_layers)", 1),
    (r".*(num_experts_per_tok|num_experts_per_token|moe_topk|top_k_experts|moe_k|top_k|topk)", 2),
    (r".*(num_experts|num_local_experts|n_routed_experts|moe_num_experts|num_experts_|experts)", 4),
    (r".*(num_key_value_heads|n_head_kv|num_kv_heads|kv_heads|key_heads|multi_query_group_num)", 2),
    (r".*(attention_heads|num_heads|n_heads|n_head|value_heads|encoder_heads|decoder_heads|mamba_heads|nheads)", 4),
    (r".*(mamba_n_heads|mamba_num_heads)", 8),
    (r".*(head_dim|head_size|mamba_d_head|d_kv|mamba_d_state|state_size|d_state|dim_head|size_per_head|d_head)", 8),
    (r".*(q_lora_rank|kv_lora_rank|index_head_dim|lora_rank)", 16),
    (r".*(moe_intermediate_size|shared_expert_intermediate_size|expert_ffn_hidden_size)", 16),
    (r".*(image_size|img_size|crop_size|input_size)", 32),
    (r".*(max_.*position.*|n_positions|max_seq_len.*|max_length|max_2d_position.*|max_source_positions)", 128),
    (r".*(max_target_positions|seq_length|n_ctx|max_window_layers)", 128),
    (r"(.*_)?(num_hidden_layers|num_layers|n_layers?|.*_layers|num_.*_blocks|num_blocks|depth|n_blocks|layers)", 2),
    (r"patch_size|vision_patch_size", 8),
    (r"encoder_hidden_dim|attention_dim", 32),
    (r".*(intermediate_size|ffn_dim|inner_dim|d_ff|d_inner|n_inner|mlp_dim|hidden_dim|feedforward.*|ffn_.*)", 64),
    (r".*(hidden_size|d_model|n_embd|embed_dim|embedding_size|embedding_dim|projection_dim|width|lru_width)", 32),
    (r".*(out_hidden_size|projector_hidden_size|hidden_sizes|embed_dims|model_dim|dim|channels|hidden)", 32),
    (r".*(out_channels|feature_size|proj_size|_dim|d_embed|code_size|latent_size|embd|codebook_size)", 32),
    (r"mm_tokens_per_image|image_seq_length|image_seq_len", 4),
    (r".*(num_queries|num_query_tokens|num_latents)", 8),
    (r"input_feat_per_channel", 16),
    (r".*(num_mel_bins|num_features|n_mels)", 16),
)
"""By name, the first that fits; 0: as it is. Numbers that are smaller already stay."""

_TURNED = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}

OWN: Mapping[str, Mapping[str, Any]] = {
    "bit": {"num_groups": 8},
    "cohere_compass_text": {"rope_parameters": {"full_attention": _TURNED}},
    "cvt": {"depth": [1, 2, 3]},
    "dbrx": {"attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0}},
    "diffusion_gemma_text": {"num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 16},
    "efficientloftr": {"out_features": [32, 32, 32, 32]},
    "ernie4_5_vl_moe_text": {"rope_parameters": _TURNED},
    "fun_asr_nano": {
        "adaptor_config": {
            "hidden_size": 32,
            "intermediate_size": 8,
            "num_attention_heads": 4,
            "projector_hidden_size": 32,
        }
    },
    "hunyuan_vl_text": {
        "head_dim": 8,
        "num_key_value_heads": 2,
        "rope_parameters": _TURNED | {"mrope_section": [1, 1, 1, 1]},
    },
    "instructblip": {"image_token_index": 90},
    "instructblipvideo": {"video_token_index": 90},
    "lw_detr": {"projector_scale_factors": [1.0], "projector_in_channels": [32]},
    "molmo2_adapter": {"vision_feature_layer": [1, 0]},
    "moonshine_streaming": {"num_key_value_heads": 4},
    "moonshine_streaming_encoder": {"num_key_value_heads": 4},
    "muse_spark_audio": {"num_hidden_layers": 4},
    "blip-2": {"image_token_index": 90},
    **dict.fromkeys(("bridgetower", "bridgetower_text_model", "bridgetower_vision_model"), {"hidden_size": 64}),
    **dict.fromkeys(("chameleon", "emu3"), {"vocabulary_map": {"<image>": 95}}),
    "deepseek_v2": {"num_experts_per_tok": 2},
    "lilt": {"hidden_size": 48},
    "lw_detr_vit": {"image_size": 64},
    "bamba": {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_expand": 2},
    "falcon_h1": {"mamba_d_ssm": 64, "mamba_n_heads": 8, "mamba_d_head": 8},
    "gemma3n_text": {"intermediate_size": 64, "num_kv_shared_layers": 0},
    "glm5_next_text": {"num_key_value_heads": 4},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "granitemoehybrid": {
        "mamba_n_heads": 8,
        "mamba_d_head": 8,
        "mamba_d_state": 8,
        "layer_types": ["mamba", "attention"],
    },
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "mamba2": {"num_heads": 8, "head_dim": 8},
    "minimax": {"layer_types": ["linear_attention", "full_attention"]},
    "qwen3_next": {"layer_types": ["linear_attention", "full_attention"]},
    **dict.fromkeys(("codegen", "gptj"), {"rotary_dim": 4}),
    **dict.fromkeys(
        ("glm4v_text", "glm4v_moe_text", "glm_image_text"),
        {"head_dim": 16, "rope_parameters": _TURNED | {"partial_rotary_factor": 0.5}},
    ),
    **dict.fromkeys(("qwen2_vl_text", "qwen2_5_vl_text", "qwen2_5_omni_text"), {"rope_parameters": _TURNED}),
    "mobilebert": {"embedding_size": 32, "intra_bottleneck_size": 32, "true_hidden_size": 32},
    "led": {"attention_window": [8, 8]},
    "xmod": {"default_language": "en_XX"},
    "glm_ocr_text": {"head_dim": 16, "rope_parameters": _TURNED | {"mrope_section": [4, 2, 2]}},
    "zamba": {"attention_head_dim": 16, "attention_hidden_size": 64, "num_hidden_layers": 3},
    "zamba2": {
        "attention_head_dim": 16,
        "attention_hidden_size": 64,
        "n_mamba_heads": 4,
        "mamba_headdim": 16,
        "num_hidden_layers": 3,
    },
    "nemotron_h": {
        "mamba_num_heads": 8,
        "mamba_head_dim": 8,
        "n_groups": 2,
        "layers_block_type": ["mamba", "attention"],
    },
    "reformer": {"is_decoder": True, "axial_pos_embds_dim": [16, 16], "axial_pos_shape": [4, 4], "hidden_size": 32},
    **dict.fromkeys(
        ("ministral", "hunyuan_v1_moe", "hunyuan_v1_dense", "nemotron"),
        {"head_dim": 8, "num_key_value_heads": 2},
    ),
    "dots1": {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1, "n_group": 1, "topk_group": 1},
    "dots3_note_text": {"num_key_value_heads": 4},
    "esm": {"vocab_size": 96, "pad_token_id": 1, "mask_token_id": 32},
    "qwen3_asr_encoder": {"n_window": 16},
    "qwen4_exp_text": {
        "indexer_budget": 8,
        "indexer_compress_ratio": 2,
        "indexer_head_dim": 8,
        "indexer_kv_heads": 1,
        "indexer_n_heads": 4,
    },
    "sam2_hiera_det_model": {"embed_dim_per_stage": [32, 64, 128, 256]},
    "sam2_vision_model": {"backbone_channel_list": [256, 128, 64, 32]},
    "t5gemma2_text": {"dropout_rate": 0.0},
    "tvp": {"num_frames": 4, "max_img_size": 64, "visual_prompt_size": 8},
    **dict.fromkeys(("wav2vec2-bert", "wav2vec2-conformer"), {"vocab_size": 96}),
    "moonshine": {"encoder_num_key_value_heads": 4, "decoder_num_key_value_heads": 4},
}
"""What a type needs beside."""

_HEADS = (
    "FOR_IMAGE_TEXT_TO_TEXT", "FOR_MULTIMODAL_LM", "FOR_CAUSAL_LM", "FOR_SEQ_TO_SEQ_CAUSAL_LM", "FOR_MASKED_LM",
    "FOR_SPEECH_SEQ_2_SEQ", "FOR_CTC", "FOR_IMAGE_CLASSIFICATION", "FOR_AUDIO_CLASSIFICATION",
    "FOR_OBJECT_DETECTION", "FOR_UNIVERSAL_SEGMENTATION", "FOR_SEMANTIC_SEGMENTATION", "FOR_DEPTH_ESTIMATION",
    "FOR_VIDEO_CLASSIFICATION", "FOR_SEQUENCE_CLASSIFICATION", "",
)  # fmt: skip
"""Of transformers' tables of models, in this order."""


def kinds() -> list[str]:
    """Every type of model that one of the tables has."""
    known = {kind for head in _HEADS for kind in _table(head)}
    return sorted(known & {*CONFIG_MAPPING.keys()})


def classes_of(kind: str) -> list[type[PreTrainedModel]]:
    """The model's classes with a head, then the one without."""
    names = [name for head in _HEADS if (name := _table(head).get(kind))]
    firsts = [name if isinstance(name, str) else name[0] for name in names]
    return [getattr(transformers, name) for name in dict.fromkeys(firsts) if hasattr(transformers, name)]


def _table(head: str) -> Mapping[str, Any]:
    return getattr(modeling_auto, f"MODEL_{head}_MAPPING_NAMES".replace("__", "_"))


@dataclass(frozen=True)
class Way:
    """A class of a type, and fields of its configuration."""

    kind: str
    made: type[PreTrainedModel]
    fields: Mapping[str, Any]


def ways(kind: str) -> Iterator[Way]:
    """Classes and sizes to try, the best first."""
    for made in classes_of(kind):
        before: list[Mapping[str, Any]] = []
        for left in _LEFT:
            whole = _config_class(kind, made)(**_START.get(kind, {})).to_dict() | {"model_type": kind}
            fields = _shrunk(whole, left, top=True)
            if fields not in before:
                before.append(fields)
                yield Way(kind, made, fields)


def _config_class(kind: str, made: type[PreTrainedModel]) -> Any:
    """A type's, or the one of a part that a class is."""
    return made.config_class or CONFIG_MAPPING[kind]


def build(way: Way, seed: int = 0) -> PreTrainedModel:
    """The model on the CPU, its weights as its class begins them, and a little beside: zeros hide things.

    Raises ValueError where it is large, and whatever its class raises where sizes do not go together.
    """
    made: Any = way.made
    config = _config_class(way.kind, way.made)(**copy.deepcopy({**way.fields}))
    with torch.device("meta"):
        size = sum(p.numel() for p in made._from_config(copy.deepcopy(config)).parameters())
    if size > LARGEST:
        raise ValueError(f"{size} parameters are not tiny")
    torch.manual_seed(seed)
    return _stirred(made._from_config(config), seed)


DERIVED, LISTS, SECTIONS = "what is derived", "lists", "sections"
_LEFT = (
    (),
    (DERIVED,),
    (LISTS,),
    (LISTS, DERIVED),
    (SECTIONS,),
    ("head_dim",),
    ("layer_types",),
    ("head_dim", "layer_types"),
    ("num_key_value_heads",),
    ("num_attention_heads",),
    (DERIVED, "head_dim"),
    (DERIVED, "layer_types"),
    (DERIVED, "num_key_value_heads"),
)
"""Fields that are left as the class has them, as more and more does not go together.

`DERIVED`: all that no rule changes, which a class may make of the others; `LISTS`: those of several sizes, as
convolutions have; `SECTIONS`: of rotary embeddings, for heads twice as wide.
"""
_START: Mapping[str, Mapping[str, Any]] = {
    "gemma4_assistant": {
        "text_config": {
            "model_type": "gemma4_text",
            "hidden_size_per_layer_input": 0,
            "vocab_size_per_layer_input": 0,
            "num_kv_shared_layers": 30,
        }
    },
    **dict.fromkeys(("autoformer", "informer", "time_series_transformer"), {"prediction_length": 4}),
}
"""What a configuration cannot be made without."""


def _stirred(model: PreTrainedModel, seed: int) -> PreTrainedModel:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.is_floating_point():
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return model


def _shrunk(fields: Mapping[str, Any], left: Sequence[str], *, top: bool = False) -> dict[str, Any]:
    drop = {"transformers_version", "architectures", "per_layer_config", *_STAGES, *left}
    drop |= {"model_type"} if top else set()
    found = {name: _one(name, value, fields, left) for name, value in fields.items() if name not in drop}
    found |= _stages(fields, found)
    for name, rule in _PER_LAYER.items():
        if isinstance(fields.get(name), list) and fields[name] and name in found:
            found[name] = rule(fields[name])
    if found.get("kv_lora_rank") and "num_attention_heads" in found:  # latent attention: keys and values for each head
        found["num_key_value_heads"] = found["num_attention_heads"]
    if fields.get("num_kv_shared_layers", 0) == fields.get("num_hidden_layers"):  # all of them
        found["num_kv_shared_layers"] = found["num_hidden_layers"]
    if DERIVED in left:
        found = {n: x for n, x in found.items() if n == "model_type" or x != fields.get(n)}
    found |= dict(OWN.get(fields.get("model_type", ""), {}))
    if SECTIONS in left and "mrope_section" in (found.get("rope_parameters") or {}):
        found["rope_parameters"] = found["rope_parameters"] | {"mrope_section": [4, 2, 2]}
    return found


_STAGES = ("out_features", "out_indices", "stage_names", "_out_features", "_out_indices")


def _stages(fields: Mapping[str, Any], found: Mapping[str, Any]) -> dict[str, Any]:
    """Which stages of a backbone give something: as many as before, of as many layers as that takes."""
    given, names = fields.get("out_indices"), fields.get("stage_names")
    if not given or not names:
        return {}
    if "num_hidden_layers" not in fields or "depths" in fields or len(names) != fields["num_hidden_layers"] + 1:
        return {"out_indices": given}
    count = max(len(given), found["num_hidden_layers"])
    return {"num_hidden_layers": count, "out_indices": [*range(count - len(given) + 1, count + 1)]}


def _first_two(kinds: list[Any]) -> list[Any]:
    """Two that differ, where there are."""
    other = next((kind for kind in kinds if kind != kinds[0]), kinds[-1])
    return [kinds[0], other, other] if other == "hybrid" else [kinds[0], other]  # layers that share their weights


_PER_LAYER = dict.fromkeys(
    (
        "layer_types",
        "mlp_layer_types",
        "no_rope_layers",
        "layers_block_type",
        "activation_sparsity_pattern",
        "num_attention_heads_per_layer",
        "kv_source_layers",
    ),
    _first_two,
)


def _one(name: str, value: Any, beside: Mapping[str, Any], left: Sequence[str]) -> Any:
    if isinstance(value, dict):
        section = {"mrope_section": [2, 1, 1]} if "mrope_section" in value else {}
        return _shrunk(value, left) if "config" in name or value.get("model_type") else value | section
    if isinstance(value, bool) or not isinstance(value, (int, list, tuple)):
        return value
    if re.fullmatch(r".*token_(id|index)|.*token_ids?|.*_idx", name):
        return _token(name, value, beside)
    size = next((size for pattern, size in _RULES if re.fullmatch(pattern, name)), None)
    if name == "in_channels" and not isinstance(value, int):
        size = 32
    if not size:
        return value
    if isinstance(value, int):
        return min(value, size) if value > 0 else value
    if not all(isinstance(x, int) for x in value) or LISTS in left:
        return value
    if name in ("depths", "num_layers", "layers_per_stage"):
        return [1 for _ in value]
    if "heads" in name:  # so that they divide widths
        return [1 << min(x, size).bit_length() - 1 for x in value]
    return [min(x, size) for x in value]


_TOKENS = ("image", "video", "audio", "vision_start", "vision_end", "boi", "eoi", "boa", "eoa")


def _token(name: str, value: Any, beside: Mapping[str, Any]) -> Any:
    """Ids of special tokens: each its own, at the end of the vocabulary."""
    if not isinstance(value, int):
        return [_token(name, x, beside) for x in value] if value else value
    if value < VOCABULARY - 40:
        return value
    names = [own for own in sorted(beside) if re.fullmatch(r".*token_(id|index)|.*_idx", own)]
    return VOCABULARY - 1 - names.index(name) if name in names else VOCABULARY - 1


def special(config: Any) -> Iterator[int]:
    """Ids that text must not have by chance."""
    for name, value in config.to_dict().items():
        if isinstance(value, dict) and hasattr(getattr(config, name), "to_dict"):
            yield from special(getattr(config, name))
        elif "token" in name and isinstance(value, int):
            yield value
