"""The tensors of a Hugging Face directory of any configuration, which no family's own statements make."""

from collections.abc import Mapping
from typing import Any

H, F, Q, C = 5, 3, 4, 6
"""Sizes that nothing depends on: the model's, a gated layer's, latent ones of queries and of keys and values."""
Shapes = dict[str, tuple[int, ...]]

NORMED = {"qwen3", "qwen3_moe", "gemma3"}
BIASED = {"qwen2", "qwen2_moe"}
SANDWICHED = {"gemma2", "gemma3"}
TIED = {"gemma", "gemma2", "gemma3", "smollm3"}
"""Whose configurations mean that embeddings are tied if they do not say so."""
MIXED = {"qwen2_moe", "qwen3_moe", "mixtral", "gpt_oss", "deepseek_v3"}


def invented(name: str, config: Mapping[str, Any], size: int, experts: int, predictor: bool) -> Shapes:
    """Names and shapes. `size` of a head; `predictor`: DeepSeek-V3 with one of a later token."""
    words, latent = config["vocab_size"], name == "deepseek_v3"
    found: Shapes = {"model.embed_tokens.weight": (words, H), "model.norm.weight": (H,)}
    if not config.get("tie_word_embeddings", name in TIED):
        found["lm_head.weight"] = (words, H)
    layers = config["num_hidden_layers"]
    for i in range(layers + (latent and predictor)):
        norms = ["input_layernorm", "post_attention_layernorm"]
        norms += ["pre_feedforward_layernorm", "post_feedforward_layernorm"] if name in SANDWICHED else []
        one: Shapes = {f"{norm}.weight": (H,) for norm in norms}
        one |= _latent(config, size) if latent else _heads(name, config, size)
        dense = name not in MIXED or (latent and i < config["first_k_dense_replace"])
        one |= _gated(name, config, "mlp", ("gate_proj", "up_proj", "down_proj")) if dense else _experts(name, experts)
        found |= {f"model.layers.{i}.{key}": shape for key, shape in one.items()}
    if latent and predictor:
        more: Shapes = {"enorm.weight": (H,), "hnorm.weight": (H,), "eh_proj.weight": (H, 2 * H)}
        more |= {
            "shared_head.norm.weight": (H,),
            "embed_tokens.weight": (words, H),
            "shared_head.head.weight": (words, H),
        }
        found |= {f"model.layers.{layers}.{key}": shape for key, shape in more.items()}
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
    if everywhere:
        out["o_proj.bias"] = (H,)
    if name in NORMED:
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
    mixtral = name == "mixtral"
    at, words = ("block_sparse_moe", ("w1", "w3", "w2")) if mixtral else ("mlp", ("gate_proj", "up_proj", "down_proj"))
    found: Shapes = {f"{at}.gate.weight": (experts, H)}
    for e in range(experts):
        found |= _gated(name, {}, f"{at}.experts.{e}", words)
    if name == "qwen2_moe":
        found |= {"mlp.shared_expert_gate.weight": (1, H), **_gated(name, {}, "mlp.shared_expert", words)}
    if name == "deepseek_v3":
        found |= {"mlp.gate.e_score_correction_bias": (experts,), **_gated(name, {}, "mlp.shared_experts", words)}
    return found
