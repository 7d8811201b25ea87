"""Configurations with what is drawn at random in them as published, and the strategies that these are trained under.

GPT-2 with its dropout of 0.1 in embeddings, attention and residuals. The product that gives queries, keys and values at
once is whole, for a parameter is not trained in three blocks; what comes of it is cut by heads.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tests.training.small import SMALL_MODEL
from tests.training.strategies import FSDP, Strategy

GPT2: Mapping[str, Any] = {
    "model_type": "gpt2", "vocab_size": 257, "bos_token_id": 256, "eos_token_id": 256, "n_positions": 64, "n_embd": 32,
    "n_layer": 2, "n_head": 4,
}  # fmt: skip
"""In few numbers; all else is transformers' own."""
LAYOUTS = {
    "*.c_fc.weight": "h f/tp",
    "*.c_fc.bias": "f/tp",
    "*.c_proj.weight": "f/tp h",
    "*": "...",
}
SEQUENCE = {"{transformer.drop,transformer.h.*,transformer.ln_f}": "b s/tp h"}
BY_DEFAULT: Mapping[str, tuple[int, Strategy]] = {
    "gpt2 over tensor": (4, Strategy("dp=2 tp=2", ("dp",), ("tp",), LAYOUTS)),
    "gpt2 over tensor, sequence": (4, Strategy("dp=2 tp=2", ("dp",), ("tp",), LAYOUTS, SEQUENCE)),
    "gpt2 over fsdp": (4, Strategy("dp=4", ("dp",), (), FSDP)),
}
QUICK = ("gpt2 over tensor",)


def add_defaults(text: Path, add: Callable[..., None], base: Callable[..., dict[str, Any]], *, slow: bool) -> None:
    """Cases of what is drawn at random: masks are drawn for the samples of a micro-batch, whatever rank has them."""
    change = {**SMALL_MODEL, "attention_dropout": 0.2}
    one_by_one = base(text, model={"change": change}, data={"global_batch": 8, "micro_batch": 1})
    others = ("copies", "hsdp", "derived inside fsdp", "tensor inside fsdp", "context and fsdp")
    add("dropout", ("fsdp", *(others if slow else ())), one_by_one)
    model = {"preset": None, "path": str(text.parent / "gpt2.json"), "change": {}}
    sizes = {"global_batch": 8, "micro_batch": 2}
    few = {"model": model, "data": sizes, "optimiser": {"eps": 1e-3}}  # biases of keys have hardly a gradient
    add("by default", BY_DEFAULT if slow else QUICK, base(text, **few), resume_at=3)
    if slow:
        add("by default, recomputed", BY_DEFAULT, base(text, **few, run={"recompute": ["*.h.*"]}))
