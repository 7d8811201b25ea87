"""DeepSpeed's JSON of a strategy: how states are divided, the batch, TP and EP ranks of its automatic ways.

Keys are those that `deepspeed.runtime.config.DeepSpeedConfig` of DeepSpeed 0.19.8 reads. Stages of a pipeline, context
ranks as rings, and what is recomputed are in a program's own code there: the first two are refused, the last told.
"""

from __future__ import annotations

import json
from typing import Any

from tangram.errors import UserError
from tangram.hardware.catalogue.cluster import Cluster
from tangram.models.outlines.outline import Group, Outline
from tangram.planner.exports.numbers import Numbers, Written, experts_of, recomputed

PRECISIONS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "fp16": {"fp16": {"enabled": True}},
    "bf16": {"bf16": {"enabled": True}},
}


def deepspeed(one: Numbers, outline: Outline, cluster: Cluster) -> Written:
    """The JSON. Raises UserError for what it cannot say."""
    if one.pipeline > 1:
        raise UserError(
            "DeepSpeed's JSON says nothing of pipelines, those are in a program's code: plan without stages"
        )
    if one.context > 1:
        raise UserError("DeepSpeed's file says nothing of CP ranks, its program does: plan without them")
    if one.tensor > 1 and one.sequence_parallel:
        raise UserError("DeepSpeed's TP ranks do not divide tokens, as the plan's do: plan without TP ranks")
    if one.zero and one.copies > 1:
        raise UserError(f"DeepSpeed's JSON divides states over all {one.data} DP ranks, the plan over {one.shard}")
    if one.precision not in PRECISIONS:
        raise UserError(f"DeepSpeed's JSON has no {one.precision} matmuls: plan with --precision bf16")
    told: list[str] = []
    found: dict[str, Any] = {
        "train_batch_size": one.batch,
        "train_micro_batch_size_per_gpu": one.micro,
        "gradient_accumulation_steps": one.micros,
        "zero_optimization": {"stage": one.zero, "overlap_comm": True, "contiguous_gradients": True},
        **PRECISIONS[one.precision],
    }
    if one.tensor > 1:
        found["tensor_parallel"] = {"autotp_size": one.tensor}
    if experts_of(outline):
        if one.expert_tensor > 1:
            raise UserError("DeepSpeed does not cut experts over TP ranks: plan with one TP rank of experts")
        if one.expert > 1:
            found["expert_parallel"] = {"enabled": True, "autoep_size": one.expert}
            told.append("EP ranks are those of AutoEP, which has to know the model")
    group, share = recomputed(one)
    if group == Group.BLOCK and share == 1:
        told.append("layers are recomputed, which the JSON does not say: call model.gradient_checkpointing_enable()")
    elif group:
        raise UserError(f"DeepSpeed recomputes all layers or none, and not: {one.again}")
    told.append(f"samples have {one.sequence} tokens, and {one.ranks} ranks are started, which the JSON does not say")
    return Written(json.dumps(found, indent=2) + "\n", tuple(told))
