"""The outline of a Hugging Face model, from its configuration, checked against the model itself.

A configuration says sizes under names that types of models share (`FIELDS`); what it does not say (whether an MLP is
gated) is seen on the model, built without memory. The outline then has to have the model's parameters, to a part in
two hundred: a type of model with blocks that are not known here is refused and never guessed.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from tangram.errors import UserError
from tangram.models.build import build_on_meta, presets
from tangram.models.outline import Dims, Outline, decoder
from tangram.models.source import read_source

__all__ = ["dims_of", "outline_of", "outlined"]

FIELDS: Mapping[str, tuple[str, ...]] = {
    "layers": ("num_hidden_layers", "n_layer", "num_layers"),
    "hidden": ("hidden_size", "n_embd", "d_model"),
    "heads": ("num_attention_heads", "n_head", "num_heads"),
    "vocab": ("vocab_size",),
    "ffn": ("intermediate_size", "n_inner", "ffn_dim"),
    "kv_heads": ("num_key_value_heads",),
    "head_dim": ("head_dim",),
    "experts": ("n_routed_experts", "num_local_experts", "num_experts"),
    "per_token": ("num_experts_per_tok",),
    "expert_ffn": ("moe_intermediate_size",),
    "shared_ffn": ("shared_expert_intermediate_size",),
    "dense_layers": ("first_k_dense_replace",),
    "q_rank": ("q_lora_rank",),
    "kv_rank": ("kv_lora_rank",),
    "rope_dim": ("qk_rope_head_dim",),
    "value_dim": ("v_head_dim",),
}
"""What fields of configurations are called; the first that is there counts."""
POSITIONS = ("wpe.weight", "embed_positions.weight")
TOLERATED = 0.005
"""By which share parameters may differ: norms of heads, biases, sinks."""


def outlined(name: str) -> Outline:
    """Of a preset, or of a Hugging Face directory or configuration. Raises UserError."""
    known = name in presets()
    source = read_source(name, None, {}) if known else read_source(None, str(_existing(name)), {})
    return outline_of(source.config, name if known else Path(name).stem)


def _existing(name: str) -> Path:
    path = Path(name)
    if not path.exists():
        raise UserError(
            f'there is no model "{name}": give a preset ({", ".join(presets())}), or a Hugging Face directory or '
            "config.json"
        )
    return path


def outline_of(config: Any, name: str) -> Outline:
    """Of a configuration. Raises UserError where the model is made of other blocks."""
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    model = build_on_meta(config)
    sizes = {key: tuple(one.shape) for key, one in model.named_parameters()}
    found = decoder(dims_of(text, sizes), name)
    numbers = sum(one.numel() for one in model.parameters())
    if abs(found.numbers / numbers - 1) > TOLERATED:
        raise UserError(
            f"{name} has {numbers:,} parameters, and blocks as the planner knows them would have {found.numbers:,}: "
            f"{text.model_type} models are made of others, which are not planned yet"
        )
    return found


def dims_of(config: Any, sizes: Mapping[str, tuple[int, ...]]) -> Dims:
    """The dims that a configuration says, and what the shapes of parameters by name show beyond it."""
    said = {
        name: int(next((value for key in keys if isinstance(value := getattr(config, key, None), int)), 0))
        for name, keys in FIELDS.items()
    }
    if said["kv_rank"]:
        said["head_dim"] = int(config.qk_nope_head_dim)
    else:
        said["value_dim"] = 0
    said["ffn"] = said["ffn"] or 4 * said["hidden"]  # GPT-2's, where none is given
    experts = said["experts"] > 1
    expert_ffn = said["expert_ffn"] or said["ffn"]
    if experts and not said["shared_ffn"]:
        said["shared_ffn"] = int(getattr(config, "n_shared_experts", 0) or 0) * expert_ffn
    windows = cast("list[str]", list(getattr(config, "layer_types", None) or ()))
    window = getattr(config, "sliding_window", None)
    return Dims(
        **{**said, "per_token": max(said["per_token"], 1), "expert_ffn": expert_ffn if experts else 0},
        gated=any(".gate_proj." in key or "gate_up" in key or ".w1." in key or ".w3." in key for key in sizes),
        tied=bool(getattr(config, "tie_word_embeddings", False)),
        bias=sum(".bias" in key for key in sizes) > said["layers"],
        positions=next((shape[0] for key, shape in sizes.items() if key.endswith(POSITIONS)), 0),
        window=int(window) if window and windows else 0,
        windowed=sum(kind == "sliding_attention" for kind in windows) if window else 0,
    )
