"""The tensors of a Hugging Face directory of any configuration, which no family's own statements make."""

from collections.abc import Mapping
from typing import Any

H, F, Q, C = 5, 3, 4, 6
"""Sizes that nothing depends on: the model's, a gated layer's, latent ones of queries and of keys and values."""
Shapes = dict[str, tuple[int, ...]]

NORMED = {"qwen3", "qwen3_moe", "gemma3", "qwen3_vl", "gemma3_vl"}
NORMED_AT_ONCE = {"olmo2", "minimax_m2"}
"""Whose norms of queries and keys are of all heads at once."""
BIASED = {"qwen2", "qwen2_moe", "qwen2_5_vl"}
SANDWICHED = {"gemma2", "gemma3", "gemma3_vl"}
TIED = {"gemma", "gemma2", "gemma3", "gemma3_vl", "smollm3", "gpt2"}
"""Whose configurations mean that embeddings are tied if they do not say so."""
MIXED = {"qwen2_moe", "qwen3_moe", "mixtral", "gpt_oss", "deepseek_v3", "glm4_moe", "minimax_m2", "qwen3_next"}
LATE = {"deepseek_v3", "glm4_moe"}
"""With dense layers first, and perhaps a predictor of a later token."""
PREFIXES = {
    "qwen2_5_vl": [("model.", "visual."), ("model.language_model.", "model.visual.")],
    "qwen3_vl": [("model.language_model.", "model.visual.")],
    "gemma3_vl": [("language_model.model.", "vision_tower."), ("model.language_model.", "model.vision_tower.")],
}
"""Of models with images: what stands before the decoder's names and the tower's, in one release or another."""


def invented(
    name: str, config: Mapping[str, Any], size: int, experts: int, predictor: bool, release: int = 0
) -> Shapes:
    """Names and shapes. `size` of a head; `predictor`: with one of a later token; `release`: whose prefixes."""
    found = _gpt2(config) if name == "gpt2" else _decoder(name, config, size, experts, predictor)
    if name not in PREFIXES:
        return found
    prefixes = PREFIXES[name]
    model, tower = prefixes[release % len(prefixes)]
    found = {key.replace("model.", model, 1) if key.startswith("model.") else key: one for key, one in found.items()}
    found |= {f"{tower}blocks.{i}.attn.qkv.weight": (2, 3) for i in range(2)} | {f"{tower}patch.proj.bias": (4,)}
    if name == "gemma3_vl":
        projector = tower.replace("vision_tower", "multi_modal_projector")
        found |= {f"{projector}mm_soft_emb_norm.weight": (3,), f"{projector}mm_input_projection_weight": (3, H)}
    return found


def _decoder(name: str, config: Mapping[str, Any], size: int, experts: int, predictor: bool) -> Shapes:
    words, late = config["vocab_size"], name in LATE
    classifier = config["architectures"][0].endswith("Classification")
    found: Shapes = {"model.embed_tokens.weight": (words, H), "model.norm.weight": (H,)}
    if classifier:
        found |= {"score.weight": (3, H), **({"score.bias": (3,)} if predictor else {})}
    elif not config.get("tie_word_embeddings", name in TIED):
        found["lm_head.weight"] = (words, H)
    layers = config["num_hidden_layers"]
    for i in range(layers + (late and predictor)):
        norms = ["input_layernorm", "post_attention_layernorm"]
        norms += ["pre_feedforward_layernorm", "post_feedforward_layernorm"] if name in SANDWICHED else []
        norms = ["post_attention_layernorm", "post_feedforward_layernorm"] if name == "olmo2" else norms
        one: Shapes = {f"{norm}.weight": (H,) for norm in norms}
        one |= _attention(name, config, size, i)
        dense = name not in MIXED or (late and i < config["first_k_dense_replace"])
        one |= _gated(name, config, "mlp", ("gate_proj", "up_proj", "down_proj")) if dense else _experts(name, experts)
        found |= {f"model.layers.{i}.{key}": shape for key, shape in one.items()}
    if late and predictor:
        more: Shapes = {"enorm.weight": (H,), "hnorm.weight": (H,), "eh_proj.weight": (H, 2 * H)}
        more |= {
            "shared_head.norm.weight": (H,),
            "embed_tokens.weight": (words, H),
            "shared_head.head.weight": (words, H),
        }
        found |= {f"model.layers.{layers}.{key}": shape for key, shape in more.items()}
    return found


def _attention(name: str, config: Mapping[str, Any], size: int, layer: int) -> Shapes:
    if name == "deepseek_v3":
        return _latent(config, size)
    if name == "qwen3_next":
        return _delta_net(config) if config["layer_types"][layer] == "linear_attention" else _gated_heads(config, size)
    return _heads(name, config, size)


def _gated_heads(config: Mapping[str, Any], size: int) -> Shapes:
    heads, groups = config["num_attention_heads"] * size, config["num_key_value_heads"] * size
    rows = {"q_proj": 2 * heads, "k_proj": groups, "v_proj": groups}
    out: Shapes = {f"{key}.weight": (n, H) for key, n in rows.items()}
    out |= {"q_norm.weight": (size,), "k_norm.weight": (size,), "o_proj.weight": (H, heads)}
    return {f"self_attn.{key}": shape for key, shape in out.items()}


def _delta_net(config: Mapping[str, Any]) -> Shapes:
    keys = config["linear_num_key_heads"] * config["linear_key_head_dim"]
    heads, size = config["linear_num_value_heads"], config["linear_value_head_dim"]
    out: Shapes = {
        "in_proj_qkvz.weight": (2 * keys + 2 * heads * size, H), "in_proj_ba.weight": (2 * heads, H),
        "conv1d.weight": (2 * keys + heads * size, 1, 4), "A_log": (heads,), "dt_bias": (heads,),
        "norm.weight": (size,), "out_proj.weight": (H, heads * size),
    }  # fmt: skip
    return {f"linear_attn.{key}": shape for key, shape in out.items()}


def _gpt2(config: Mapping[str, Any]) -> Shapes:
    hidden = config["n_head"] * 3
    found: Shapes = {"transformer.wte.weight": (config["vocab_size"], hidden), "transformer.wpe.weight": (7, hidden)}
    found |= {f"transformer.ln_f.{kind}": (hidden,) for kind in ("weight", "bias")}
    inner = {"attn.c_attn": (hidden, 3 * hidden), "attn.c_proj": (hidden, hidden)}
    inner |= {"mlp.c_fc": (hidden, 5), "mlp.c_proj": (5, hidden)}
    for i in range(config["n_layer"]):
        for key, (rows, columns) in inner.items():
            found |= {f"transformer.h.{i}.{key}.weight": (rows, columns), f"transformer.h.{i}.{key}.bias": (columns,)}
        found |= {
            f"transformer.h.{i}.{norm}.{kind}": (hidden,) for norm in ("ln_1", "ln_2") for kind in ("weight", "bias")
        }
    if config["architectures"][0].endswith("Classification"):
        found["score.weight"] = (3, hidden)
    elif not config.get("tie_word_embeddings", True):
        found["lm_head.weight"] = (config["vocab_size"], hidden)
    return found


def _heads(name: str, config: Mapping[str, Any], size: int) -> Shapes:
    heads, groups = config["num_attention_heads"] * size, config["num_key_value_heads"] * size
    out: Shapes = {"o_proj.weight": (H, heads)}
    if name == "phi3":
        return {f"self_attn.{key}": shape for key, shape in {**out, "qkv_proj.weight": (heads + 2 * groups, H)}.items()}
    rows = {"q_proj": heads, "k_proj": groups, "v_proj": groups}
    out |= {f"{key}.weight": (n, H) for key, n in rows.items()}
    everywhere = config.get("attention_bias", name == "gpt_oss")
    if name in BIASED or everywhere:
        out |= {f"{key}.bias": (n,) for key, n in rows.items()}
    if everywhere and name != "glm4_moe":
        out["o_proj.bias"] = (H,)
    if name in NORMED_AT_ONCE:
        out |= {"q_norm.weight": (heads,), "k_norm.weight": (groups,)}
    if name in NORMED or (name == "glm4_moe" and config.get("use_qk_norm")):
        out |= {"q_norm.weight": (size,), "k_norm.weight": (size,)}
    if name == "gpt_oss":
        out["sinks"] = (config["num_attention_heads"],)
    return {f"self_attn.{key}": shape for key, shape in out.items()}


def _latent(config: Mapping[str, Any], size: int) -> Shapes:
    heads = config["num_attention_heads"]
    out = {
        "q_a_proj": (Q, H), "q_a_layernorm": (Q,), "q_b_proj": (heads * size, Q), "kv_a_proj_with_mqa": (C + 2, H),
        "kv_a_layernorm": (C,), "kv_b_proj": (heads * size * 2, C), "o_proj": (H, heads * size),
    }  # fmt: skip
    return {f"self_attn.{key}.weight": shape for key, shape in out.items()}


def _gated(name: str, config: Mapping[str, Any], at: str, words: tuple[str, str, str]) -> Shapes:
    gate, up, down = words
    if name == "phi3":
        return {f"{at}.gate_up_proj.weight": (2 * F, H), f"{at}.{down}.weight": (H, F)}
    found: Shapes = {f"{at}.{gate}.weight": (F, H), f"{at}.{up}.weight": (F, H), f"{at}.{down}.weight": (H, F)}
    if config.get("mlp_bias"):
        found |= {f"{at}.{gate}.bias": (F,), f"{at}.{up}.bias": (F,), f"{at}.{down}.bias": (H,)}
    return found


def _experts(name: str, experts: int) -> Shapes:
    if name == "gpt_oss":
        return {
            "mlp.router.weight": (experts, H), "mlp.router.bias": (experts,),
            "mlp.experts.gate_up_proj": (experts, H, 2 * F), "mlp.experts.gate_up_proj_bias": (experts, 2 * F),
            "mlp.experts.down_proj": (experts, F, H), "mlp.experts.down_proj_bias": (experts, H),
        }  # fmt: skip
    mixtral = name in ("mixtral", "minimax_m2")
    at, words = ("block_sparse_moe", ("w1", "w3", "w2")) if mixtral else ("mlp", ("gate_proj", "up_proj", "down_proj"))
    found: Shapes = {f"{at}.gate.weight": (experts, H)}
    for e in range(experts):
        found |= _gated(name, {}, f"{at}.experts.{e}", words)
    if name == "minimax_m2":
        found[f"{at}.e_score_correction_bias"] = (experts,)
    if name in ("qwen2_moe", "qwen3_next"):
        found |= {"mlp.shared_expert_gate.weight": (1, H), **_gated(name, {}, "mlp.shared_expert", words)}
    if name in LATE:
        found |= {"mlp.gate.e_score_correction_bias": (experts,), **_gated(name, {}, "mlp.shared_experts", words)}
    return found
