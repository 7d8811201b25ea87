"""The model, the meshes and the mapping of the trillion-parameter bench, as data."""

from __future__ import annotations

from tangram.layout import Mapping
from tangram.relayout import BoundMapping, Sharding, TensorSpec, shard
from tangram.relayout.mapping.states import SAME, with_states

LAYERS, DENSE, EXPERTS = 61, 1, 384
H, F, DENSE_F, VOCAB = 7168, 2048, 18432, 163840
HEADS, Q_RANK, KV_RANK, NOPE, ROPE, V = 64, 1536, 512, 128, 64, 128

SOURCE_MESH = "pp=16 dp=64 tp=4 | pp=16 edp=4 ep=64"
TARGET_MESH = "pp=8 dp=16 tp=8 | pp=8 edp=2 ep=32 etp=2"
STATES = ("master", "exp_avg", "exp_avg_sq")

ATTENTION = {
    "input_layernorm.weight": (H,),
    "self_attn.q_a_proj.weight": (Q_RANK, H),
    "self_attn.q_a_layernorm.weight": (Q_RANK,),
    "self_attn.q_b_proj.weight": (HEADS * (NOPE + ROPE), Q_RANK),
    "self_attn.kv_a_proj_with_mqa.weight": (KV_RANK + ROPE, H),
    "self_attn.kv_a_layernorm.weight": (KV_RANK,),
    "self_attn.kv_b_proj.weight": (HEADS * (NOPE + V), KV_RANK),
    "self_attn.o_proj.weight": (H, HEADS * V),
    "post_attention_layernorm.weight": (H,),
}
DENSE_MLP = {f"mlp.{x}_proj.weight": (DENSE_F, H) for x in ("gate", "up")} | {"mlp.down_proj.weight": (H, DENSE_F)}
SHARED = {f"mlp.shared_experts.{x}_proj.weight": (F, H) for x in ("gate", "up")} | {
    "mlp.shared_experts.down_proj.weight": (H, F),
    "mlp.gate.weight": (EXPERTS, H),
}
EXPERT = {"gate_proj.weight": (F, H), "up_proj.weight": (F, H), "down_proj.weight": (H, F)}
OUTER = {"model.embed_tokens.weight": (VOCAB, H), "lm_head.weight": (VOCAB, H), "model.norm.weight": (H,)}

ATTENTION_DIMS = {
    "input_layernorm.weight": "h",
    "self_attn.q_a_proj.weight": "q h",
    "self_attn.q_a_layernorm.weight": "q",
    "self_attn.q_b_proj.weight": "o q",
    "self_attn.kv_a_proj_with_mqa.weight": "c h",
    "self_attn.kv_a_layernorm.weight": "c",
    "self_attn.kv_b_proj.weight": "o c",
    "self_attn.o_proj.weight": "h o",
    "post_attention_layernorm.weight": "h",
}


def specs() -> dict[str, TensorSpec]:
    """Every real tensor of the source with its states: shapes of Hugging Face's names."""
    shapes: dict[str, tuple[int, ...]] = dict(OUTER)
    for layer in range(LAYERS):
        names = dict(ATTENTION)
        names |= DENSE_MLP if layer < DENSE else SHARED
        if layer >= DENSE:
            names |= {f"mlp.experts.{e}.{n}": shape for e in range(EXPERTS) for n, shape in EXPERT.items()}
        shapes |= {f"model.layers.{layer}.{n}": shape for n, shape in names.items()}
    out = {name: TensorSpec(shape, "bfloat16") for name, shape in shapes.items()}
    return out | {f"optim.{s}.{name}": TensorSpec(shape) for name, shape in shapes.items() for s in STATES}


def statements() -> list[str]:
    """The parameters' mapping: Hugging Face's names to stacked experts and fused gate/up under Megatron-like names."""
    layers, moe = "model.layers.{l}", "model.layers.{m+1}"
    out = ["model.embed_tokens.weight: v h -> embedding.weight: v h", "lm_head.weight: v h -> output.weight: v h"]
    out += ["model.norm.weight: h -> final_norm.weight: h"]
    out += [f"{layers}.{n}: {dims} -> decoder.{{l}}.{n}: {dims}" for n, dims in ATTENTION_DIMS.items()]
    for prefix, target in (
        ("model.layers.{n=1}.mlp", "decoder.{n}.mlp"),
        (f"{moe}.mlp.shared_experts", "decoder.{m+1}.mlp.shared"),
    ):
        out.append(
            f"{prefix}.gate_proj.weight as gate: f h, {prefix}.up_proj.weight as up: f h "
            f"-> {target}.fc1: ((gate + up) f) h"
        )
        out.append(f"{prefix}.down_proj.weight: h f -> {target}.fc2: h f")
    out.append(f"{moe}.mlp.gate.weight: e h -> decoder.{{m+1}}.mlp.router: e h")
    experts = f"{moe}.mlp.experts.{{e}}"
    out.append(
        f"{experts}.gate_proj.weight as gate: f h, {experts}.up_proj.weight as up: f h "
        "-> decoder.{m+1}.mlp.experts.w13: e ((gate + up) f) h"
    )
    out.append(f"{experts}.down_proj.weight: h f -> decoder.{{m+1}}.mlp.experts.w2: e h f")
    return out


# For each tensor the weight's layout and the states', which the data axes cut where the weight is whole (ZeRO-1).
ATTENTION_LAYOUTS = {
    "input_layernorm.weight": ("h", "h/dp"),
    "self_attn.q_a_proj.weight": ("q h", "q/dp h"),
    "self_attn.q_a_layernorm.weight": ("q", "q/dp"),
    "self_attn.q_b_proj.weight": (f"(heads={HEADS}/tp n) q", f"(heads={HEADS}/tp n)/dp q"),
    "self_attn.kv_a_proj_with_mqa.weight": ("c h", "c/dp h"),
    "self_attn.kv_a_layernorm.weight": ("c", "c/dp"),
    "self_attn.kv_b_proj.weight": (f"(heads={HEADS}/tp k) c", f"(heads={HEADS}/tp k)/dp c"),
    "self_attn.o_proj.weight": (f"h (heads={HEADS}/tp v)", f"h/dp (heads={HEADS}/tp v)"),
    "post_attention_layernorm.weight": ("h", "h/dp"),
}


def _layouts(side: str) -> dict[str, tuple[str, str]]:
    """`{family: (layout of the weight, layout of its states)}` of one side."""
    source = side == "source"
    last = 15 if source else 7
    stages = "[3 4 4 4 4 4 4 4 4 4 4 4 4 4 4 1]" if source else "[7 8 8 8 8 8 8 5]"
    moe = f"m/pp:{stages}"
    layers, outer = ("model.layers", "model.") if source else ("decoder", "")
    out = {
        "model.embed_tokens.weight" if source else "embedding.weight": ("v/tp h @pp=0", "v/tp/dp h @pp=0"),
        "lm_head.weight" if source else "output.weight": (f"v/tp h @pp={last}", f"v/tp/dp h @pp={last}"),
        f"{outer}norm.weight" if source else "final_norm.weight": (f"h @pp={last}", f"h/dp @pp={last}"),
    }
    for name, (weight, state) in ATTENTION_LAYOUTS.items():
        out[f"{layers}.{{l}}.{name}"] = (f"l/pp {weight}", f"l/pp {state}")
    dense, shared = ("n f/tp h @pp=0", "n f/tp/dp h @pp=0"), (f"{moe} f/tp h", f"{moe} f/tp/dp h")
    if source:
        for x in ("gate", "up"):
            out[f"model.layers.{{n=1}}.mlp.{x}_proj.weight"] = dense
            out[f"model.layers.{{m+1}}.mlp.shared_experts.{x}_proj.weight"] = shared
            out[f"model.layers.{{m+1}}.mlp.experts.{{e}}.{x}_proj.weight"] = (f"{moe} e/ep f h", f"{moe} e/ep f/edp h")
        out["model.layers.{n=1}.mlp.down_proj.weight"] = ("n h f/tp @pp=0", "n h/dp f/tp @pp=0")
        out["model.layers.{m+1}.mlp.shared_experts.down_proj.weight"] = (f"{moe} h f/tp", f"{moe} h/dp f/tp")
        out["model.layers.{m+1}.mlp.gate.weight"] = (f"{moe} e h", f"{moe} e/dp h")
        out["model.layers.{m+1}.mlp.experts.{e}.down_proj.weight"] = (f"{moe} e/ep h f", f"{moe} e/ep h/edp f")
        return out
    out["decoder.{n}.mlp.fc1"] = ("n (2 f/tp) h @pp=0", "n (2 f/tp)/dp h @pp=0")
    out["decoder.{n}.mlp.fc2"] = ("n h f/tp @pp=0", "n h/dp f/tp @pp=0")
    out["decoder.{m+1}.mlp.shared.fc1"] = (f"{moe} (2 f/tp) h", f"{moe} (2 f/tp)/dp h")
    out["decoder.{m+1}.mlp.shared.fc2"] = (f"{moe} h f/tp", f"{moe} h/dp f/tp")
    out["decoder.{m+1}.mlp.router"] = (f"{moe} e h", f"{moe} e/dp h")
    out["decoder.{m+1}.mlp.experts.w13"] = (f"{moe} e/ep (2 f/etp) h", f"{moe} e/ep (2 f/etp)/edp h")
    out["decoder.{m+1}.mlp.experts.w2"] = (f"{moe} e/ep h f/etp", f"{moe} e/ep h/edp f/etp")
    return out


def sharding(bound: BoundMapping, side: str) -> Sharding:
    """The source or the target, weights and states, over its mesh."""
    texts: dict[str, str] = {}
    for family, (weight, state) in _layouts(side).items():
        texts[family] = weight
        texts |= {f"optim.{s}.{family}": state for s in STATES}
    source = side == "source"
    return shard(SOURCE_MESH if source else TARGET_MESH, texts, bound.source if source else bound.target)


def mapping(tensors: dict[str, TensorSpec]) -> Mapping:
    """The parameters' statements and, from the state specs, those of their states."""
    return with_states("\n".join(statements()), tensors, dict.fromkeys(STATES, SAME), name="optim.{state}.{param}")
