"""PaddleFormers' YAML of a strategy, for `paddleformers-cli train`.

Keys are those of `paddleformers/trainer/training_args.py` and of its examples (PaddleFormers 1.2.0), and so is what
goes together: stages with the optimiser's states divided alone, CP ranks made of those that divide, EP ranks
without TP ranks of their own and without copies.
"""

from __future__ import annotations

from typing import Any

import yaml

from tangram.errors import UserError
from tangram.hardware.catalogue.cluster import Cluster
from tangram.models.outlines.outline import Group, Outline
from tangram.planner.exports.numbers import Numbers, Written, chunk_blocks, comment, experts_of, recomputed, some_blocks

SCHEDULES = ("", "1F1B", "Interleaved1F1B", "DualPipeV")
PRECISIONS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "fp16": {"fp16": True, "fp16_opt_level": "O2", "amp_master_grad": True},
    "bf16": {"bf16": True, "fp16_opt_level": "O2", "amp_master_grad": True},
}


def paddleformers(one: Numbers, outline: Outline, cluster: Cluster) -> Written:
    """The YAML. Raises UserError for what PaddleFormers cannot run."""
    if one.precision not in PRECISIONS:
        raise UserError(f"PaddleFormers' configuration is not written with {one.precision} matmuls: plan with bf16")
    told: list[str] = []
    found: dict[str, Any] = {
        "per_device_train_batch_size": one.micro,
        "gradient_accumulation_steps": one.micros,
        "max_seq_len": one.sequence,
        "tensor_model_parallel_size": one.tensor,
        "sequence_parallel": one.sequence_parallel and one.tensor > 1,
        **_stages(one, outline),
        **_divided(one),
        **_experts(one, outline),
        **_again(one, outline, told),
        **PRECISIONS[one.precision],
    }
    head = (
        f"{outline.name} on {one.ranks} devices of {cluster.name}, as `tangram plan` found it, for PaddleFormers:",
        "paddleformers-cli train FILE, after the keys of model, data and optimiser.",
        *told,
    )
    return Written(comment(head) + yaml.safe_dump(found, sort_keys=False), tuple(told))


def _stages(one: Numbers, outline: Outline) -> dict[str, Any]:
    if one.schedule not in SCHEDULES:
        raise UserError(f"PaddleFormers runs 1F1B, Interleaved1F1B and DualPipeV, and no {one.schedule}")
    found: dict[str, Any] = {"pipeline_model_parallel_size": one.pipeline}
    if one.pipeline == 1:
        return found
    if len(set(chunk_blocks(one, outline))) > 1:
        raise UserError(
            f"{outline.layers} layers are uneven over {one.pipeline * one.virtual} virtual stages: plan even ones"
        )
    if one.zero > 1:
        raise UserError("PaddleFormers divides the optimiser's states alone in a pipeline, and the plan more than them")
    if one.schedule == "DualPipeV":
        return found | {"use_dualpipev": True}
    return found | ({"virtual_pipeline_model_parallel_size": one.virtual} if one.virtual > 1 else {})


def _divided(one: Numbers) -> dict[str, Any]:
    if one.zero == 0:
        if one.context > 1:
            raise UserError("PaddleFormers makes CP ranks of those that divide states: plan with states divided")
        return {"sharding": ""}
    if one.shard % one.context:
        raise UserError(f"{one.shard} ranks that divide states are no multiple of {one.context} CP ranks")
    context = {"context_parallel_size": one.context} if one.context > 1 else {}
    return {"sharding": f"stage{one.zero}", "sharding_parallel_size": one.shard, **context}


def _experts(one: Numbers, outline: Outline) -> dict[str, Any]:
    if not experts_of(outline):
        return {}
    if one.expert_tensor > 1:
        raise UserError("PaddleFormers does not cut experts over TP ranks: plan with one TP rank of experts")
    if one.expert == 1:
        return {}
    inner = one.data * one.context * one.tensor // one.expert
    if one.zero == 0 or one.copies > 1 or one.shard % max(inner, 1):
        raise UserError(
            f"PaddleFormers takes {one.expert} EP ranks beside states divided by all ranks, a multiple of {inner}, "
            f"and the plan divides them over {one.shard if one.zero else 1}"
        )
    return {"use_expert_parallel": True, "expert_model_parallel_size": one.expert}


def _again(one: Numbers, outline: Outline, told: list[str]) -> dict[str, Any]:
    group, share = recomputed(one)
    if group == Group.NONE:
        return {}
    full = {"recompute_granularity": "full"}
    if (group, share) == (Group.BLOCK, 1.0):
        return full | {"recompute_method": "uniform", "recompute_num_layers": 1}
    if group != Group.BLOCK or one.virtual > 1:
        raise UserError(f"PaddleFormers cannot be told to recompute: {one.again}")
    count = some_blocks(one, chunk_blocks(one, outline), told)
    return full | {"recompute_method": "block", "recompute_num_layers": count}
