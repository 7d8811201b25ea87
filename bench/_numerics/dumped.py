"""Queries, keys, values and gradients of attention in a small model that is trained here for some steps.

A Llama of two layers reads the bytes of this project's licence, a text that does not change. What its last layer's
attention is given in the last step, and the gradient of what it returns, is one more input beside the laws.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM

from bench._numerics.cases import Case, Mask, shared
from bench._numerics.inputs import case_of

TOKENS, STEPS, LAYERS = 160, 40, 2
SIZES = {
    "vocab_size": 256, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": LAYERS,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
}  # fmt: skip
NAME = "tangram-dumped"
TEXT = Path(__file__).parents[2] / "LICENSE"


def dumped() -> Case:
    """The case; gradients are made of the size of one, which a loss scale does."""
    tensors = _trained()
    q, k, v, grad = (tensors[name].double() for name in ("q", "k", "v", "grad"))
    return case_of(q, k, v, grad / grad.square().mean().sqrt(), Mask())


def _trained() -> dict[str, Tensor]:
    torch.manual_seed(0)
    kept: dict[str, Tensor] = {}
    AttentionInterface.register(NAME, _keeping(kept))
    config = AutoConfig.for_model("llama", **SIZES)
    model: Any = cast(Any, AutoModelForCausalLM).from_config(config, attn_implementation=NAME, dtype=torch.float32)
    text = torch.frombuffer(bytearray(TEXT.read_bytes()), dtype=torch.uint8).long()
    adam = torch.optim.AdamW(cast("nn.Module", model).parameters(), lr=3e-3)
    for step in range(STEPS):
        start = step * 8 * TOKENS % (len(text) - 8 * TOKENS)
        ids = text[start : start + 8 * TOKENS].view(8, TOKENS)
        adam.zero_grad()
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        adam.step()
    grad = kept["out"].grad
    assert grad is not None
    return {name: kept[name][:1].detach().contiguous() for name in ("q", "k", "v")} | {"grad": grad[:1].contiguous()}


def _keeping(kept: dict[str, Tensor]) -> Callable[..., tuple[Tensor, None]]:
    """Causal attention that keeps what the last call was given."""

    def attention(module: nn.Module, q: Tensor, k: Tensor, v: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
        heads = q.shape[1]
        out = nn.functional.scaled_dot_product_attention(q, shared(k, heads), shared(v, heads), is_causal=True)
        out.retain_grad()
        kept.update(q=q, k=k, v=v, out=out)
        return out.transpose(1, 2), None

    return attention
