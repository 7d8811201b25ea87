"""A plan of Tangram's own as a strategy of the joint space: what `tangram plan explain plan.toml` reads.

The other way of `planner.local.plan_from_cluster`, which tests hold it to. What layers are recomputed is seen by
names that end in a number; modules inside of layers are told and taken as kept.
"""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from itertools import groupby
from math import prod
from pathlib import Path

from tangram.errors import UserError
from tangram.layout import Mesh
from tangram.models.outlines.outline import Group, Outline
from tangram.planner.exports.numbers import Numbers
from tangram.planner.imports.words import ReadStrategy
from tangram.planner.search.explain import ordered
from tangram.planner.space.recompute import again_name, spread
from tangram.planner.space.schedule_formulas import code
from tangram.planner.space.setting import Precision
from tangram.schema.files import load
from tangram.schema.parallelism import marked
from tangram.schema.plan import Plan

TYPES: dict[str, Precision] = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
"""What a job's precision is called by the search."""
DIVIDED = {("after step", "step"): 1, ("after step", "micro-batch"): 2, ("after backward", "micro-batch"): 2}
"""What DP ranks divide beside copies, by run.reshard and run.reduce_every; else all of it."""


def tangram(path: Path, outline: Outline, devices: int) -> ReadStrategy:
    """The strategy of a plan's file. Raises UserError for a job, and for what the space has no numbers for."""
    plan = load(path)
    if not isinstance(plan, Plan):
        raise UserError(f"{path} is a job without a strategy: plan it for a --cluster instead")
    if devices and devices != plan.ranks:
        raise UserError(f"{path} is for {plan.ranks} ranks, and {devices} devices are asked for: leave --gpus out")
    sizes = {axis: size for axis, (size, _) in Mesh.parse(plan.mesh).axes.items()}
    if prod(sizes[axis] for axis in plan.axes.expert) > 1:
        raise UserError(f"{path} has EP ranks of an axis of their own, which the planner's model of time has not")
    name = plan.pipeline.schedule if plan.pipeline else "1F1B"
    if code(name) < 0:
        raise UserError(f"{path}: the planner's model of time knows no schedule {name}")
    told: list[str] = []
    if plan.optimiser.kind != "adamw":
        told.append(f"optimiser: its states are counted with --optimiser {plan.optimiser.kind}")
    tensor, over = prod(sizes[axis] for axis in plan.axes.tensor), plan.shard_ranks
    one = Numbers(
        pipeline=plan.stage_ranks,
        virtual=len(plan.pipeline.stages) // plan.stage_ranks if plan.pipeline else 1,
        schedule=name if plan.pipeline else "",
        tensor=tensor,
        sequence_parallel=tensor > 1 and _cut(plan, plan.axes.tensor, "s"),
        context=plan.context_ranks,
        ulysses=plan.context_ranks if _cut(plan, plan.axes.context, "out") else 1,
        expert=1,
        expert_tensor=tensor,
        data=plan.data_ranks,
        zero=_zero(plan) if over > 1 else 0,
        shard=over if over > 1 else plan.data_ranks * plan.context_ranks,
        micro=plan.data.micro_batch,
        batch=plan.data.global_batch,
        sequence=plan.data.sequence,
        again=_again(plan, outline, told),
        precision=TYPES[plan.precision.compute],
        inner=_inner(plan, sizes),
    )
    return ReadStrategy(one, "tangram", tuple(told), ())


ROLES = {"pipeline": "pp", "data": "dp", "context": "cp", "tensor": "tp"}
"""What axes of a role are called where a strategy is given by its mesh."""


def _inner(plan: Plan, sizes: Mapping[str, int]) -> bool:
    """Whether stages lie within DP ranks. Raises UserError for an order of the mesh's axes that is not priced."""
    roles = {axis: name for role, name in ROLES.items() for axis in getattr(plan.axes, role)}
    names = [roles[axis] for axis, size in sizes.items() if size > 1]
    return ordered(plan.mesh, [name for name, _ in groupby(names)])


def _cut(plan: Plan, axes: tuple[str, ...], dim: str) -> bool:
    """Whether marks cut a dim that is called so over one of the axes."""
    return any(
        f"{dim}/{axis}" in text.split() for text in plan.layouts.marks.values() for axis in axes if marked(text).axes
    )


def _zero(plan: Plan) -> int:
    if plan.pipeline is not None:  # gathered and reduced once a step
        return 1
    return DIVIDED.get((plan.run.reshard, plan.run.reduce_every), 3)


def _again(plan: Plan, outline: Outline, told: list[str]) -> str:
    blocks: set[int] = set()
    for pattern in plan.run.recompute:
        stem = pattern.rpartition(".")[0]
        found = {at for at in range(outline.layers) if fnmatchcase(f"{stem}.{at}", pattern)}
        if not found:
            told.append(f"run.recompute: {pattern} is taken as kept")
        blocks |= found
    if plan.run.recompute_keep and blocks:
        told.append(f"run.recompute_keep: {', '.join(plan.run.recompute_keep)} are taken to be recomputed")
    each = -(-outline.layers // (len(plan.pipeline.stages) if plan.pipeline else 1))
    shares = [count / each for count in range(1, each + 1)]  # of a chunk's blocks, as the search has them
    like = (share for share in shares if set(spread(outline.layers, share)) == blocks)
    share = next(like, len(blocks) / outline.layers)
    return again_name(int(Group.BLOCK if blocks else Group.NONE), share)
