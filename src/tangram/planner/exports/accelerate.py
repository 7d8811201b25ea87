"""Hugging Face accelerate's configuration of a strategy, for `accelerate launch --config_file`: FSDP2 or full replicas.

Keys are those of `ClusterConfig` and of the options that `accelerate launch` makes of its tables (accelerate 1.15).
Samples of a micro-batch, how many are summed and their tokens are the program's: they are told.
"""

from __future__ import annotations

from typing import Any

import yaml

from tangram.errors import UserError
from tangram.hardware.catalogue.cluster import Cluster
from tangram.models.outlines.outline import Group, Outline
from tangram.planner.exports.numbers import Numbers, Written, comment, experts_of, recomputed
from tangram.planner.search.strategy import node

PRECISIONS = {"fp32": "no", "fp16": "fp16", "bf16": "bf16"}


def accelerate(one: Numbers, outline: Outline, cluster: Cluster) -> Written:
    """The YAML. Raises UserError for what it cannot say."""
    if one.pipeline > 1:
        raise UserError("accelerate has no pipelines beside FSDP: plan without stages")
    if one.precision not in PRECISIONS:
        raise UserError(f"accelerate's configuration is not written with {one.precision} matmuls: plan with bf16")
    if one.tensor > 1 and one.sequence_parallel:
        raise UserError("accelerate's TP ranks do not divide tokens, as the plan's do: plan without TP ranks")
    if experts_of(outline) and (one.expert > 1 or one.expert_tensor > 1):
        raise UserError("accelerate has no EP ranks: plan without them")
    group, share = recomputed(one)
    if group and (group, share) != (Group.BLOCK, 1.0):
        raise UserError(f"accelerate recomputes all layers or none, and not: {one.again}")
    told = (
        f"the program takes micro-batches of {one.micro} samples of {one.sequence} tokens and sums up {one.micros}: "
        f"{one.batch} samples a step",
        "machine_rank differs by machine, and main_process_ip is that of the first",
    )
    found: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE",
        "mixed_precision": PRECISIONS[one.precision],
        "num_machines": -(-one.ranks // node(cluster)),
        "num_processes": one.ranks,
        "machine_rank": 0,
        "main_training_function": "main",
        **_divided(one, again=bool(group)),
    }
    head = comment((f"{outline.name} on {one.ranks} devices of {cluster.name}, as `tangram plan` found it.", *told))
    return Written(head + yaml.safe_dump(found, sort_keys=False), told)


def _divided(one: Numbers, *, again: bool) -> dict[str, Any]:
    if one.zero == 0 and one.ranks == one.data:
        if again:
            raise UserError("accelerate recomputes layers where FSDP divides parameters: plan with them divided")
        return {"distributed_type": "MULTI_GPU" if one.data > 1 else "NO"}
    if one.zero < 2:
        raise UserError(
            "accelerate divides gradients wherever it divides the optimiser's states: take a plan that divides "
            "gradients (and parameters)"
        )
    if one.shard % one.context:
        raise UserError(f"accelerate divides states over all {one.context} CP ranks, and the plan does not")
    if one.copies > 1 and one.shard == one.context:
        raise UserError(
            "accelerate copies only what DP ranks divide, and the plan's divide nothing: take a plan that divides "
            "states over all ranks"
        )
    return {
        "distributed_type": "FSDP",
        "fsdp_config": {
            "fsdp_version": 2,
            "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "fsdp_reshard_after_forward": one.zero == 3,
            "fsdp_activation_checkpointing": again,
            "fsdp_state_dict_type": "SHARDED_STATE_DICT",
        },
        "parallelism_config": {
            "parallelism_config_dp_replicate_size": one.copies,
            "parallelism_config_dp_shard_size": one.shard // one.context,
            "parallelism_config_tp_size": one.tensor,
            "parallelism_config_cp_size": one.context,
        },
    }
