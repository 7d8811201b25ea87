"""Strategies over context and expert axes, and the mixtures of experts that are trained so."""

from collections.abc import Mapping
from typing import Any

from tests.training.strategies import (
    COPIES,
    EXPERTS,
    FSDP,
    GATHERED,
    HEADS,
    MARKS,
    TWO_STAGES,
    Strategy,
    derived,
    with_experts,
)

CP, EP = {"context": ("cp",)}, {"expert": ("ep",)}
CONTEXT: Mapping[str, tuple[int, Strategy]] = {
    "context over two": (2, Strategy("one=1 cp=2", ("one",), (), {"*": "_/one ..."}, GATHERED, axes=CP)),
    "context by heads": (4, Strategy("one=1 cp=4", ("one",), (), {"*": "_/one ..."}, HEADS, axes=CP)),
    "context and fsdp": (4, Strategy("dp=2 cp=2", ("dp",), (), FSDP, GATHERED, axes=CP)),
    "context over two axes": (
        4,
        Strategy(
            "cp=2 one=1 cq=2",
            ("one",),
            (),
            {"*": "_/one ..."},
            dict.fromkeys(GATHERED, "b s/cp/cq h"),
            axes={"context": ("cp", "cq")},
        ),
    ),
    "context by heads inside copies": (4, Strategy("cp=2 dp=2", ("dp",), (), COPIES, HEADS, axes=CP)),
    "context and derived": (
        4,
        Strategy("cp=2 tp=2", (), ("tp",), derived(""), {**MARKS, **GATHERED}, axes=CP),
    ),
    "context and derived inside fsdp": (
        8,
        Strategy("dp=2 cp=2 tp=2", ("dp",), ("tp",), derived("dp"), {**MARKS, **GATHERED}, axes=CP),
    ),
    "stages of context": (
        4,
        Strategy("pp=2 one=1 cp=2", ("one",), (), {"*": "_/one ..."}, GATHERED, stages=TWO_STAGES, axes=CP),
    ),
}
CONTEXT_QUICK = ("context and fsdp",)
BY_TOKENS: Mapping[str, Mapping[str, str]] = {
    "by tokens": {},
    "balanced": {"order": "balanced"},
    "in a ring": {"keys": "ring"},
    "in a ring, balanced": {"keys": "ring", "order": "balanced"},
}
"""Attention by documents and places: what is done over context axes."""
BY_TOKENS_QUICK = ("in a ring, balanced",)
WITH_EXPERTS: Mapping[str, tuple[int, Strategy]] = {
    "experts over two": (2, Strategy("one=1 ep=2", ("one",), (), with_experts("one"), EXPERTS, axes=EP)),
    "experts and fsdp": (4, Strategy("dp=2 ep=2", ("dp",), (), with_experts("dp"), EXPERTS, axes=EP)),
    "experts over four": (4, Strategy("one=1 ep=4", ("one",), (), with_experts("one"), EXPERTS, axes=EP)),
}
WITH_EXPERTS_QUICK = ("experts and fsdp",)
OVER_AXES = {**CONTEXT, **WITH_EXPERTS}

OF_ROUTERS = ("fsdp", "copies", "derived over two", "derived inside fsdp", "context over two", "context and fsdp")
"""Others under which the loss of routers is that of all ranks' tokens."""
_ROUTERS = {"router_loss": 0.5}
ROUTERS: Mapping[str, Mapping[str, Any]] = {
    "routers": {"run": _ROUTERS, "data": {"micro_batch": 2}},
    "routers, recomputed": {"run": {**_ROUTERS, "recompute": ["model.layers.*"]}},
    "routers, compiled": {"run": {**_ROUTERS, "compile": True, "recompute": ["model.layers.0"]}},
    "routers, in a ring, balanced": {"run": {**_ROUTERS, "attention": "tokens"}},
}
"""Of micro-batches of two rows over DP ranks that have five or ten, the last is half empty."""
ROUTERS_QUICK = {"routers": ("experts and fsdp",)}

_CAPACITY = {"expert_capacity": 0.8}
CAPACITY: Mapping[str, Mapping[str, Any]] = {
    "capacity": {"run": _CAPACITY, "data": {"micro_batch": 2}},
    "capacity by position": {"run": {**_CAPACITY, "drop_by": "position"}, "data": {"micro_batch": 2}},
    "capacity, recomputed": {"run": {**_CAPACITY, "recompute": ["model.layers.*"]}},
    "capacity by position, recomputed": {
        "run": {**_CAPACITY, "drop_by": "position", "recompute": ["model.layers.*"]},
    },
    "capacity, compiled": {"run": {**_CAPACITY, "compile": True, "recompute": ["model.layers.0"]}},
    "capacity and routers": {"run": {**_CAPACITY, **_ROUTERS}},
    "capacity by position, in a ring, balanced": {
        "run": {**_CAPACITY, "drop_by": "position", "attention": "tokens"},
    },
}
"""Experts with less room than an even share needs, so that some of each are dropped."""
CAPACITY_QUICK = {"capacity": ("experts and fsdp",), "capacity by position": ("derived inside fsdp",)}

EXPERTS_STAGED: Mapping[str, tuple[int, Strategy]] = {
    "stages of derived": (
        4,
        Strategy("pp=2 one=1 tp=2", ("one",), ("tp",), derived(""), MARKS, stages=TWO_STAGES),
    ),
    "stages of experts": (
        4,
        Strategy("pp=2 one=1 ep=2", ("one",), (), with_experts("one"), EXPERTS, stages=TWO_STAGES, axes=EP),
    ),
}
"""Pipelines around model axes that see a part of the tokens each, beside those of every schedule."""
STAGED_QUICK: Mapping[str, tuple[str, ...]] = {
    "routers": ("ZBVZeroBubble of fsdp", "stages of derived", "Interleaved1F1B"),
    "capacity by position, recomputed": ("stages of fsdp",),
    "capacity and routers": ("InterleavedZeroBubble of derived",),
}
"""Of stages some have no routers."""

MIXTURES: Mapping[str, Mapping[str, Any]] = {
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    "deepseek_v3": {
        "num_key_value_heads": 4,
        "head_dim": 4,
        "q_lora_rank": 16,
        "kv_lora_rank": 8,
        "qk_rope_head_dim": 4,
        "qk_nope_head_dim": 8,
        "v_head_dim": 8,
        "n_routed_experts": 4,
        "n_group": 2,
        "topk_group": 1,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "first_k_dense_replace": 1,
    },
}
"""Mixtures of experts by their type, in few numbers."""
