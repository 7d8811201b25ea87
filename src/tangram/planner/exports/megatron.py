"""Megatron-LM's command-line arguments of a strategy, as a bash array that a launch script takes in.

What each argument means is said in `megatron/training/arguments.py` and in the configuration classes of
`megatron/core` that it makes arguments of (NVIDIA/Megatron-LM@d98e8a6); tests hold every name to a stored list of them.
The model's own arguments (layers, heads, vocabulary ...) are not a strategy's and stay with the script.
"""

from __future__ import annotations

from collections.abc import Mapping

from tangram.errors import UserError
from tangram.hardware.catalogue.cluster import Cluster
from tangram.models.outlines.outline import Group, Outline
from tangram.planner.exports.numbers import (
    Numbers,
    Written,
    chunk_blocks,
    comment,
    experts_of,
    recomputed,
    some_blocks,
    uneven_words,
)

Arguments = dict[str, object]
"""By name without dashes; True for one without a value."""

STRATEGIES = {0: "no_shard", 1: "optim", 2: "optim_grads", 3: "optim_grads_params"}
"""What Megatron-FSDP calls what is divided."""
LOSSES: Mapping[str, Arguments] = {"": {}, "parallel": {}, "parallel-fused": {"cross-entropy-loss-fusion": True}}
PRECISIONS: Mapping[str, Arguments] = {
    "fp32": {},
    "fp16": {"fp16": True},
    "bf16": {"bf16": True},
    "fp8": {"bf16": True, "fp8-format": "hybrid", "fp8-recipe": "tensorwise"},
    "fp4": {"bf16": True, "fp4-format": "e2m1"},
}


def megatron(one: Numbers, outline: Outline, cluster: Cluster) -> Written:
    """The arguments. Raises UserError for what Megatron-LM has no argument for."""
    told: list[str] = []
    if one.loss not in LOSSES:
        raise UserError(f"Megatron-LM has no argument for the loss {one.loss}: plan with --loss parallel, or without")
    arguments: Arguments = {
        "tensor-model-parallel-size": one.tensor,
        # Exchanges run beside matmuls, as the prediction has it (`frameworks.toml`).
        **({"sequence-parallel": True, "tp-comm-overlap": True} if one.sequence_parallel and one.tensor > 1 else {}),
        **_context(one),
        **_stages(one, outline, told),
        **_order(one),
        **_experts(one, outline),
        **_divided(one),
        "micro-batch-size": one.micro,
        "global-batch-size": one.batch,
        "seq-length": one.sequence,
        **PRECISIONS[one.precision],
        **LOSSES[one.loss],
        **_again(one, outline, told),
    }
    lines = [f"  --{name}" if value is True else f"  --{name} {value}" for name, value in arguments.items()]
    fsdp = one.zero > 1
    serial = not fsdp and one.tensor * one.context > 1
    head = comment((
        f"{outline.name} on {one.ranks} devices of {cluster.name}, as `tangram plan` found it, for Megatron-LM:",
        'take it in with `source` and start torchrun ... pretrain_gpt.py "${MODEL_ARGS[@]}" "${PLAN_ARGS[@]}".',
        *told,
    ))  # fmt: skip
    exports = "export CUDA_DEVICE_MAX_CONNECTIONS=1\n" if serial else ""
    exports = "unset CUDA_DEVICE_MAX_CONNECTIONS\n" if fsdp else exports
    return Written(head + exports + "PLAN_ARGS=(\n" + "\n".join(lines) + "\n)\n", tuple(told))


def layout_text(chunks: list[int], predictors: int = 0) -> str:
    """Blocks of each virtual stage as Megatron's layout of a pipeline: E the embedding, t a block, m one that predicts
    a further token, which is the last virtual stage's, L the loss."""
    parts = [f"t*{count}" if count > 1 else "t" * count for count in chunks]
    return "E" + "|".join(parts) + "m" * predictors + "L"


def _context(one: Numbers) -> Arguments:
    """CP ranks: in a ring, exchanging heads (a2a), or rings of such groups, whose ranks are next to each other."""
    found: Arguments = {"context-parallel-size": one.context}
    if one.ulysses == 1:
        return found
    if one.ulysses == one.context:
        return {**found, "cp-comm-type": "a2a"}
    sizes = f"{one.ulysses} {one.context // one.ulysses}"
    return {**found, "cp-comm-type": "a2a+p2p", "hierarchical-context-parallel-sizes": sizes}


def _stages(one: Numbers, outline: Outline, told: list[str]) -> Arguments:
    if one.schedule not in ("", "1F1B", "Interleaved1F1B"):
        raise UserError(f"Megatron-LM runs 1F1B and Interleaved1F1B, and no {one.schedule}")
    found: Arguments = {"pipeline-model-parallel-size": one.pipeline}
    if one.pipeline == 1:
        return found
    chunks = chunk_blocks(one, outline, alone=True)
    if len(set(chunks)) > 1:
        if (
            not outline.predictors
            and max(one.ahead, one.behind) <= 1
            and len({*chunks[1:-1], chunks[0] + one.ahead, chunks[-1] + one.behind}) == 1
        ):
            accounted = {"embedding": one.ahead, "loss": one.behind}
            found |= {f"account-for-{what}-in-pipeline-split": True for what, blocks in accounted.items() if blocks}
        else:
            told.append(uneven_words(one, outline))
            return found | {"pipeline-model-parallel-layout": f"'{layout_text(chunks, outline.predictors)}'"}
    if one.virtual > 1:
        found["num-virtual-stages-per-pipeline-rank"] = one.virtual
    return found


def _order(one: Numbers) -> Arguments:
    return {"use-tp-pp-dp-mapping": True} if one.inner and one.pipeline > 1 else {}


def _experts(one: Numbers, outline: Outline) -> Arguments:
    if not experts_of(outline):
        return {}
    return {
        "expert-model-parallel-size": one.expert,
        "expert-tensor-parallel-size": one.expert_tensor,
        "moe-grouped-gemm": True,
        **({"moe-token-dispatcher-type": "alltoall"} if one.expert * one.expert_tensor > 1 else {}),
    }


def _divided(one: Numbers) -> Arguments:
    over = {"num-distributed-optimizer-instances": one.copies} if one.zero and one.copies > 1 else {}
    if one.zero == 0:
        return {"overlap-grad-reduce": True}
    found: Arguments = {"use-distributed-optimizer": True, "overlap-grad-reduce": True, "overlap-param-gather": True}
    if one.zero == 1:
        return found | over
    if one.pipeline > 1:
        raise UserError(
            "Megatron-LM divides gradients and parameters by Megatron-FSDP, whose pages name no pipelines beside it: "
            "take a plan that divides the optimiser's states alone, or has no stages"
        )
    return found | over | {
        "use-megatron-fsdp": True,
        "init-model-with-meta-device": True,
        "data-parallel-sharding-strategy": STRATEGIES[one.zero],
        "no-gradient-accumulation-fusion": True,
        "ckpt-format": "fsdp_dtensor",
    }  # fmt: skip


def _again(one: Numbers, outline: Outline, told: list[str]) -> Arguments:
    group, share = recomputed(one)
    if group == Group.NONE:
        return {}
    if group == Group.BLOCK:
        return _blocks(one, outline, share, told)
    modules = {
        Group.SCORES: "core_attn",
        Group.NORM | Group.ACTIVATION: "layernorm moe_act",
        Group.LATENT: "mla_up_proj",
    }
    if group not in modules:
        raise UserError(f"Megatron-LM has no argument for recomputing: {one.again}")
    if group == Group.LATENT and not any(one.group & group for block, _ in outline.runs for one in block.kept):
        raise UserError(f"{outline.name} has no latent attention whose up-projections Megatron-LM could recompute")
    if group & Group.ACTIVATION and not all(block.experts for block, _ in outline.runs):
        raise UserError(
            f"Megatron-LM computes activations of dense MLPs again only with all of the MLP, and {outline.name} has "
            f"such: it cannot be given {one.again}"
        )
    return {"recompute-granularity": "selective", "recompute-modules": modules[group]}


def _blocks(one: Numbers, outline: Outline, share: float, told: list[str]) -> Arguments:
    chunks = chunk_blocks(one, outline, alone=True)
    full: Arguments = {"recompute-granularity": "full"}
    if share == 1:
        return full | {"recompute-method": "uniform", "recompute-num-layers": 1}
    return full | {"recompute-method": "block", "recompute-num-layers": some_blocks(one, chunks, told)}
