"""torchtitan's configuration of a strategy: the TOML file of its versions to 0.2, and the options of 0.3 and later.

Keys and what they mean are those of `torchtitan/config/job_config.py` of torchtitan 0.2.2, and of
`torchtitan/config/configs.py` of 0.3.0, where a model's Python configuration is given by name and options change it.
Both have the same sections; in 0.3 selective recomputation has no layers, experts have no TP ranks of their own,
and 8-bit matmuls are in Python.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import tomli_w

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
    uneven_words,
)
from tangram.planner.space.recompute import BY_OPERATOR

SHARES = tuple(1 / every for every in (8, 6, 5, 4, 3, 2))
"""Of layers that are recomputed: every second, third ... one."""
Sections = dict[str, dict[str, Any]]
FULL_PRECISION = {"fp32": "float32", "bf16": "bfloat16", "fp8": "bfloat16"}


def torchtitan(one: Numbers, outline: Outline, cluster: Cluster) -> Written:
    """The TOML file (0.2). Raises UserError for what torchtitan has no key for."""
    told: list[str] = []
    tables = sections(one, outline, told, "eager")
    group, share = recomputed(one)
    modes: Mapping[tuple[Group, float], dict[str, Any]] = {
        (Group.NONE, 1.0): {"mode": "none"},
        (Group.BLOCK, 1.0): {"mode": "full"},
        **{(Group.BLOCK, of): {"mode": "selective", "selective_ac_option": f"{1 / of:.0f}"} for of in SHARES},
        (BY_OPERATOR, 1.0): {"mode": "selective", "selective_ac_option": "op"},
    }
    if (group, share) not in modes:
        raise UserError(f"torchtitan has no key for recomputing: {one.again}")
    tables["activation_checkpoint"] = modes[group, share]
    if experts_of(outline) and one.expert > 1:
        tables["parallelism"]["expert_tensor_parallel_degree"] = one.expert_tensor
    tables["compile"] = {"enable": True, "components": ["loss"]} if one.loss == "compiled" else {"enable": False}
    if one.precision == "fp8":
        tables["model"] = {"converters": ["quantize.linear.float8"]}
        tables["quantize"] = {"linear": {"float8": {"recipe_name": "tensorwise"}}}
    head = (
        f"{outline.name} on {one.ranks} devices of {cluster.name}, as `tangram plan` found it, for torchtitan 0.2:",
        "./run_train.sh with CONFIG_FILE, after the model's own tables ([model], [optimizer] ...).",
        *told,
    )
    return Written(comment(head) + "\n" + tomli_w.dumps(tables), tuple(told))


def options(one: Numbers, outline: Outline, cluster: Cluster) -> Written:
    """Options after `--module M --config C` (0.3): all that a strategy is, whatever the configuration says. Raises
    UserError for what torchtitan has none for."""
    told: list[str] = []
    if one.precision == "fp8":
        raise UserError("torchtitan 0.3 has 8-bit matmuls in Python configurations only: plan with --precision bf16")
    if experts_of(outline) and one.expert > 1 and one.expert_tensor > 1:
        raise UserError(f"torchtitan 0.3 has no TP ranks of experts, and the plan has {one.expert_tensor}")
    modes = {Group.NONE: "none", Group.BLOCK: "full", BY_OPERATOR: "selective"}
    group, share = recomputed(one)
    if group not in modes or share != 1:
        raise UserError(f"torchtitan 0.3 has no option for recomputing: {one.again}")
    tables = sections(one, outline, told, "chunked")
    flags = ["parallelism.enable_sequence_parallel"] if one.tensor > 1 else []
    if one.pipeline > 1 or (experts_of(outline) and one.expert > 1):  # torchtitan captures neither
        flags.append("training.disable_cuda_graphs")
    lines = [f"  --{name}.{key} {value}" for name, table in tables.items() for key, value in table.items()]
    compiled = ("enable", "components loss") if one.loss == "compiled" else ("no_enable",)
    lines += [f"  --{name}" for name in (*flags, *(f"compile.{each}" for each in compiled))]
    head = (
        f"{outline.name} on {one.ranks} devices of {cluster.name}, as `tangram plan` found it, for torchtitan 0.3:",
        'take it in with `source` and start: torchrun ... -m torchtitan.train --module M --config C "${PLAN_ARGS[@]}".',
        *told,
    )
    policy = f"  activation-checkpoint:{modes[group]}"
    return Written(comment(head) + "PLAN_ARGS=(\n" + "\n".join([*lines, policy]) + "\n)\n", tuple(told))


def sections(one: Numbers, outline: Outline, told: list[str], usual_loss: str) -> Sections:
    """What both versions have. Raises UserError."""
    if one.loss not in ("", "compiled", usual_loss):
        raise UserError(f"torchtitan's loss is in its Python configuration where it is {one.loss}: plan without --loss")
    if one.precision not in FULL_PRECISION:
        raise UserError(f"torchtitan computes matmuls in bfloat16, float32 or 8 bits, and not in {one.precision}")
    if one.tensor > 1 and not one.sequence_parallel:
        raise UserError("torchtitan's TP ranks divide tokens, too, which this plan's do not")
    if one.sequence % (parts := one.tensor * (2 * one.context if one.context > 1 else 1)):
        raise UserError(
            f"torchtitan divides a sample by {parts}, and one of {one.sequence} tokens is not so many parts"
        )
    if outline.tied and one.pipeline > 1:
        raise UserError("torchtitan has no stages of a model whose embedding is its head, too: plan without stages")
    training = {
        "local_batch_size": one.micro * (one.micros if one.pipeline > 1 else 1),
        "global_batch_size": one.batch,
        "seq_len": one.sequence,
        "mixed_precision_param": FULL_PRECISION[one.precision],
    }
    return {
        "training": training,
        "parallelism": {
            **_divided(one),
            "tensor_parallel_degree": one.tensor,
            "context_parallel_degree": one.context,
            **_stages(one, outline, told),
            **_experts(one, outline),
        },
    }


def _divided(one: Numbers) -> dict[str, Any]:
    """Full replicas, or parts of parameters, gathered until the forward or the backward ends."""
    together = one.data * one.context
    if one.zero == 0 or one.shard == 1:
        if together > 1 and one.ranks > one.data:
            raise UserError("torchtitan has full replicas of parameters with DP ranks alone: divide something")
        return {"data_parallel_replicate_degree": one.data, "data_parallel_shard_degree": 1}
    if one.zero == 1:
        raise UserError(
            "torchtitan divides gradients wherever it divides the optimiser's states: take a plan that divides "
            "gradients (and parameters)"
        )
    if one.shard % one.context:
        raise UserError(
            f"torchtitan divides states over all {one.context} CP ranks, and the plan over {one.shard} ranks"
        )
    return {
        "data_parallel_replicate_degree": one.copies,
        "data_parallel_shard_degree": one.shard // one.context,
        "fsdp_reshard_after_forward": "always" if one.zero == 3 else "never",
    }


def _stages(one: Numbers, outline: Outline, told: list[str]) -> dict[str, Any]:
    found: dict[str, Any] = {"pipeline_parallel_degree": one.pipeline}
    if one.pipeline == 1:
        return found
    if split_alone(one.schedule, one.virtual):
        raise UserError(
            f"torchtitan runs {one.schedule} with two virtual stages of each rank or more, and the plan has one"
        )
    chunks = chunk_blocks(one, outline)
    blocks = outline.layers + one.ahead + one.behind
    each = -(-blocks // len(chunks))
    usual = one.virtual == usual_chunks(one.schedule)
    if not usual and -(-blocks // each) != len(chunks):
        raise UserError(
            f"torchtitan cuts {blocks} layers by how many a virtual stage has, which never makes {len(chunks)} of them"
        )
    if len(set(chunks)) > 1:
        told.append(uneven_words(one, outline))
    return found | {
        "pipeline_parallel_schedule": one.schedule,
        "pipeline_parallel_microbatch_size": one.micro,
        **({} if usual else {"pipeline_parallel_layers_per_stage": each}),
        "pipeline_parallel_first_stage_less_layers": one.ahead,
        "pipeline_parallel_last_stage_less_layers": one.behind,
    }


def usual_chunks(schedule: str) -> int:
    """Virtual stages of a rank where a file does not say how many layers one has."""
    return 1 if schedule in ("1F1B", "GPipe") else 2


def split_alone(schedule: str, chunks: int) -> bool:
    """Whether it is a schedule of several virtual stages a rank with one."""
    return chunks == 1 and schedule not in ("", "1F1B", "GPipe")


def _experts(one: Numbers, outline: Outline) -> dict[str, Any]:
    if not experts_of(outline):
        return {}
    if one.expert == 1 and one.expert_tensor != one.tensor:
        raise UserError("torchtitan cuts experts over the TP ranks where there are no EP ranks")
    if one.expert > 1 and one.expert_tensor not in (1, one.tensor):
        raise UserError(f"torchtitan has 1 or {one.tensor} TP ranks of experts, and not {one.expert_tensor}")
    inner = one.shard * one.tensor
    if one.expert > 1 and inner % (one.expert * one.expert_tensor):
        raise UserError(
            f"torchtitan makes EP ranks of those that divide parameters and of TP ranks, and {one.expert} x "
            f"{one.expert_tensor} are no part of {inner}"
        )
    return {"expert_parallel_degree": one.expert}
