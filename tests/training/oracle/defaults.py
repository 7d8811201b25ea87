"""Configurations with what is drawn at random in them as published, and the strategies that these are trained under.

GPT-2 with its dropout of 0.1 in embeddings, attention and residuals. The product that gives queries, keys and values at
once is whole, for a parameter is not trained in three blocks; what comes of it is cut by heads.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tangram.schema.schedules import MAKERS
from tests.training.strategies import COPIES, FSDP, Strategy

GPT2: Mapping[str, Any] = {
    "model_type": "gpt2", "vocab_size": 257, "bos_token_id": 256, "eos_token_id": 256, "n_positions": 64, "n_embd": 32,
    "n_layer": 2, "n_head": 4,
}  # fmt: skip
"""In few numbers; all else is transformers' own."""
PHI: Mapping[str, Any] = {
    "model_type": "phi", "vocab_size": 257, "bos_token_id": 256, "eos_token_id": 256, "max_position_embeddings": 64,
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "resid_pdrop": 0.1, "embd_pdrop": 0.1, "attention_dropout": 0.1,
}  # fmt: skip
"""GPT-2 adds two embeddings, and so is no chain that can be cut into stages; this one is, with the same dropouts."""
LAYOUTS = {
    "*.c_fc.weight": "h f/tp",
    "*.c_fc.bias": "f/tp",
    "*.c_proj.weight": "f/tp h",
    "*": "...",
}
SEQUENCE = {"{transformer.drop,transformer.h.*,transformer.ln_f}": "b s/tp h"}
CONTEXT = {"{transformer.drop,transformer.h.*,transformer.ln_f}": "b s/cp h"}
BY_DEFAULT: Mapping[str, tuple[int, Strategy]] = {
    "gpt2 over tensor": (4, Strategy("dp=2 tp=2", ("dp",), ("tp",), LAYOUTS)),
    "gpt2 over tensor, sequence": (4, Strategy("dp=2 tp=2", ("dp",), ("tp",), LAYOUTS, SEQUENCE)),
    "gpt2 over context": (4, Strategy("dp=2 cp=2", ("dp",), (), FSDP, CONTEXT, axes={"context": ("cp",)})),
    "gpt2 over fsdp": (4, Strategy("dp=4", ("dp",), (), FSDP)),
    "gpt2 over copies": (4, Strategy("dp=4", ("dp",), (), COPIES)),
    "gpt2 on one rank": (1, Strategy("dp=1", ("dp",), (), COPIES)),
}
_EMBED, _LAYERS = ("model.embed_tokens", "model.embed_dropout"), ("model.layers.0", "model.layers.1")
_END = ("model.final_layernorm", "lm_head")
HALVES = (*_EMBED, _LAYERS[0]), (_LAYERS[1], *_END)
QUARTERS = _EMBED, (_LAYERS[0],), (_LAYERS[1],), _END
TENSOR = {"{*.q_proj.weight,*.k_proj.weight,*.v_proj.weight,*.fc1.weight}": "o/tp i"}
TENSOR_LAYOUTS = {
    "*.[qkv]_proj.weight": "o/tp i",
    "*.[qkv]_proj.bias": "o/tp",
    "*.dense.weight": "o i/tp",
    "*.fc1.weight": "o/tp i",
    "*.fc1.bias": "o/tp",
    "*.fc2.weight": "o i/tp",
    "*": "...",
}


def _staged(schedule: str) -> Strategy:
    stages = HALVES if schedule in ("1F1B", "GPipe") else QUARTERS
    return Strategy("pp=2 dp=2", ("dp",), (), FSDP, stages=stages, schedule=schedule)


STAGED: Mapping[str, tuple[int, Strategy]] = {
    **{f"phi over {schedule} of fsdp": (4, _staged(schedule)) for schedule in MAKERS if schedule != "table"},
    "phi over stages of tensor": (
        4,
        Strategy("pp=2 one=1 tp=2", ("one",), ("tp",), TENSOR_LAYOUTS, TENSOR, stages=HALVES),
    ),
    "phi over stages inside copies": (4, Strategy("dp=2 pp=2", ("dp",), (), COPIES, stages=HALVES)),
}
QUICK = ("gpt2 over tensor, sequence",)


def add_defaults(text: Path, add: Callable[..., None], base: Callable[..., dict[str, Any]], *, slow: bool) -> None:
    """Cases of what is drawn at random: masks are those of samples, whatever rank and micro-batch has them."""

    def of(kind: str, **changes: Any) -> dict[str, Any]:
        model: dict[str, Any] = {"preset": None, "path": str(text.parent / f"{kind}.json"), "change": {}}
        return base(text, model=model, optimiser={"eps": 1e-3}, **changes)  # biases of keys have hardly a gradient

    again = {"run": {"recompute": ["*.h.*"]}}
    few, one_by_one = {"global_batch": 8, "micro_batch": 2}, {"global_batch": 7, "micro_batch": 1}
    add("by default", BY_DEFAULT if slow else QUICK, of("gpt2", data=few), resume_at=3)
    for strategy in ("gpt2 over fsdp", "gpt2 over copies"):
        add("by default, one by one", (strategy,), of("gpt2", data=one_by_one))
    whole = {"reshard": "after step", "reduce_every": "step", **again["run"]}
    add("by default, whole in a step", ("gpt2 over fsdp",), of("gpt2", data=one_by_one, run=whole))
    staged = STAGED if slow else ("phi over ZBVZeroBubble of fsdp", "phi over stages of tensor")
    add("by default", staged, of("phi", data=one_by_one))
    if slow:
        add("by default, recomputed", BY_DEFAULT, of("gpt2", data=few, **again))
        phi = {"run": {"recompute": ["model.layers.*"]}}
        split = [name for name in STAGED if not any(MAKERS[one].splits for one in MAKERS if one in name)]
        add("by default, recomputed", split, of("phi", data=few, **phi))
