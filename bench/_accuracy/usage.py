"""Which operators models call: decoders of each supported family, captured forward and backward, counted.

The models are small and have no memory; what they call does not depend on their size. Parameters are bfloat16.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tangram.errors import UserError
from tangram.models.building.build import build_on_meta, config_of
from tangram.models.capturing.capture import capture

COMMON: Mapping[str, Any] = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 16,
    "num_key_value_heads": 2, "vocab_size": 128, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
EXPERTS: Mapping[str, Any] = {"num_local_experts": 4, "num_experts_per_tok": 2}
ROUTED: Mapping[str, Any] = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
SCANS: Mapping[str, Any] = {
    "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_n_groups": 1, "mamba_d_state": 16, "mamba_chunk_size": 16,
}  # fmt: skip
FAMILIES: Mapping[str, Mapping[str, Any]] = {
    "llama": {},
    "mixtral": EXPERTS,
    "qwen2": {},
    "qwen2_moe": {**ROUTED, "shared_expert_intermediate_size": 32},
    "qwen3": {},
    "qwen3_moe": ROUTED,
    "qwen3_next": {
        **ROUTED, "shared_expert_intermediate_size": 32, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
        "linear_key_head_dim": 16, "linear_value_head_dim": 16, "layer_types": ["linear_attention", "full_attention"],
    },
    "gemma": {},
    "gemma2": {},
    "gemma3_text": {"sliding_window": 16},
    "gpt_oss": {
        **EXPERTS, "sliding_window": 16, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
    "phi3": {},
    "smollm3": {},
    "deepseek_v3": {
        "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "q_lora_rank": 24,
        "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16, "n_group": 2,
        "topk_group": 1, "first_k_dense_replace": 1, "num_key_value_heads": 4, "head_dim": 8,
    },
    "llama4_text": {
        **EXPERTS, "num_experts_per_tok": 1, "intermediate_size_mlp": 128, "interleave_moe_layer_step": 2,
        "attention_chunk_size": 16,
    },
    "gpt2": {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64},
    "bamba": {**SCANS, "attn_layer_indices": [1], "mamba_expand": 2},
    "falcon_h1": {**SCANS, "mamba_d_ssm": 128},
    "mamba2": {
        "num_heads": 8, "head_dim": 16, "state_size": 16, "n_groups": 1, "chunk_size": 16, "expand": 2,
    },
}  # fmt: skip
"""By transformers' name; the sizes that a decoder of the usual kind has not."""
PLAIN = frozenset({
    "ones_like.default", "zeros_like.default", "empty_like.default", "full_like.default", "arange.default",
    "ones.default", "zeros.default", "scalar_tensor.default", "new_ones.default", "new_zeros.default",
    "new_empty.default", "new_empty_strided.default", "bitwise_not.default", "logical_and_.default",
    "floor_divide.default", "histc.default", "bitwise_and.Tensor", "le.Tensor", "eq.Tensor", "gt.Tensor", "ne.Scalar",
    "ge.Scalar", "le.Scalar", "eq.Scalar",
})  # fmt: skip
"""Operators that make constants, compare, or compute with whole numbers: nothing is rounded."""
TOKENS = 32


@dataclass(frozen=True)
class Use:
    """Of an operator: the families that call it, and how often all of them do."""

    families: tuple[str, ...]
    forward: int
    backward: int


def used(families: Mapping[str, Mapping[str, Any]] = FAMILIES) -> dict[str, Use]:
    """By overload, as "mm.default", the most widely used first. UserError where a family cannot be captured."""
    counts: dict[str, Counter[bool]] = {}
    callers: dict[str, list[str]] = {}
    with _quiet():
        for family, sizes in families.items():
            for operator, backward in _calls(family, sizes):
                counts.setdefault(operator, Counter())[backward] += 1
                own = callers.setdefault(operator, [])
                if family not in own:
                    own.append(family)
    found = {name: Use(tuple(callers[name]), own[False], own[True]) for name, own in counts.items()}
    return dict(sorted(found.items(), key=lambda pair: (-len(pair[1].families), pair[0])))


def _calls(family: str, sizes: Mapping[str, Any]) -> list[tuple[str, bool]]:
    try:
        model = build_on_meta(config_of(family, {**COMMON, **sizes}))
        ids = torch.zeros(2, TOKENS, dtype=torch.long)
        graph = capture(
            model, {"input_ids": ids, "labels": ids, "use_cache": False}, loss=_loss, dtype=torch.bfloat16
        )  # fmt: skip
    except UserError as error:
        raise UserError(f"of the family {family}: {error}") from error
    return [(str(node.operator).removeprefix("aten."), node.backward) for node in graph.nodes]


def _loss(output: Any) -> Tensor:
    return output.loss


@contextmanager
def _quiet() -> Generator[None]:
    """Without transformers' remarks on libraries that a scan would be faster with."""
    log = logging.getLogger("transformers")
    before = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(before)
