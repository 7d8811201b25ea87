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
GPT2_UNTIED: Mapping[str, Any] = {**GPT2, "tie_word_embeddings": False}
PHI: Mapping[str, Any] = {
    "model_type": "phi", "vocab_size": 257, "bos_token_id": 256, "eos_token_id": 256, "max_position_embeddings": 64,
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "resid_pdrop": 0.1, "embd_pdrop": 0.1, "attention_dropout": 0.1,
}  # fmt: skip
"""With another order of residuals, queries, keys and values apart, and the dropouts of GPT-2."""
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


_GPT2_EMBED, _GPT2_END = ("transformer.wte", "transformer.wpe"), ("transformer.ln_f", "lm_head")
GPT2_HALVES = (*_GPT2_EMBED, "transformer.h.0"), ("transformer.h.1", *_GPT2_END)
"""Positions are added and embeddings dropped in the first stage, by code and a module that no stage has."""
GPT2_QUARTERS = (*_GPT2_EMBED, "transformer.drop"), ("transformer.h.0",), ("transformer.h.1",), _GPT2_END


def _staged(schedule: str, halves: Any = HALVES, quarters: Any = QUARTERS) -> Strategy:
    stages = halves if schedule in ("1F1B", "GPipe") else quarters
    return Strategy("pp=2 dp=2", ("dp",), (), FSDP, stages=stages, schedule=schedule)


STAGED: Mapping[str, tuple[int, Strategy]] = {
    **{f"phi over {schedule} of fsdp": (4, _staged(schedule)) for schedule in MAKERS if schedule != "table"},
    "phi over stages of tensor": (
        4,
        Strategy("pp=2 one=1 tp=2", ("one",), ("tp",), TENSOR_LAYOUTS, TENSOR, stages=HALVES),
    ),
    "phi over stages inside copies": (4, Strategy("dp=2 pp=2", ("dp",), (), COPIES, stages=HALVES)),
}
GPT2_STAGED: Mapping[str, tuple[int, Strategy]] = {
    **{
        f"gpt2 over {schedule} of fsdp": (4, _staged(schedule, GPT2_HALVES, GPT2_QUARTERS))
        for schedule in ("1F1B", "ZBVZeroBubble")
    },
    "gpt2 over stages of tensor, sequence": (
        4,
        Strategy("pp=2 one=1 tp=2", ("one",), ("tp",), LAYOUTS, SEQUENCE, stages=GPT2_HALVES),
    ),
    "gpt2 over stages of context": (
        4,
        Strategy("pp=2 one=1 cp=2", ("one",), (), COPIES, CONTEXT, stages=GPT2_HALVES, axes={"context": ("cp",)}),
    ),
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
    add("by default", STAGED if slow else ("phi over stages of tensor",), of("phi", data=one_by_one))
    quick = ("gpt2 over 1F1B of fsdp", "gpt2 over stages of tensor, sequence", "gpt2 over stages of context")
    add("by default", GPT2_STAGED if slow else quick, of("gpt2-untied", data=one_by_one))
    if slow:
        add("by default, recomputed", BY_DEFAULT, of("gpt2", data=few, **again))
        phi = {"run": {"recompute": ["model.layers.*"]}}
        split = [name for name in STAGED if not any(MAKERS[one].splits for one in MAKERS if one in name)]
        add("by default, recomputed", split, of("phi", data=few, **phi))
