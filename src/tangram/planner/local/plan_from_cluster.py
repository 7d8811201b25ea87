"""From a strategy that was chosen for a cluster to a plan that `tangram train` runs there.

    zero 0, 1, 2, 3     full replicas; FSDP whose parameters stay gathered and whose gradients are reduced once a step;
                        the same with gradients reduced after each micro-batch; FSDP that gathers again for the backward
    again               the layers that `run.recompute` names
    virtual stages, schedule    as many stages, cut by work

What the trainer has no way for is refused with the reason (`planner.legality.trainer_support`), and so is what the
model at hand does not allow (`planner.legality.check_plan`), since the search knows its outline only.
"""

from __future__ import annotations

from typing import Any

from pydantic import ValidationError

from tangram.errors import UserError
from tangram.models.outlines.outline import Group, Outline
from tangram.planner.legality.engine import facts_of, refusals
from tangram.planner.legality.trainer_support import KINDS, RULES
from tangram.planner.local.derived_layouts import ModelAxis
from tangram.planner.local.model_costs import Counted
from tangram.planner.local.strategies import PIPELINE, TENSOR, Strategy, plan_of
from tangram.planner.search.strategy import Choice
from tangram.planner.space.recompute import again_of, spread
from tangram.schema.files import mistakes
from tangram.schema.job import Job, RunPlan
from tangram.schema.plan import Plan

KEPT: dict[int, tuple[str, str]] = {
    0: ("after forward", "micro-batch"),
    1: ("after step", "step"),
    2: ("after step", "micro-batch"),
    3: ("after forward", "micro-batch"),
}
"""run.reshard and run.reduce_every, by what is divided."""


def plan_to_train(choice: Choice, job: Job, outline: Outline, counted: Counted) -> Plan:
    """The plan. Raises UserError, in a sentence, for a choice that cannot be run, or not on this model."""
    if why := why_not(choice, outline):
        raise UserError(f"tangram train does not run {choice.mesh}: {why}")
    return made(choice, job, counted)


def why_not(choice: Choice, outline: Outline) -> str:
    """Why `tangram train` does not run a choice of a model; "" where it does."""
    if again_of(choice.again)[0] not in (Group.NONE, Group.BLOCK):
        return f"{choice.again} are not recomputed by themselves: layers are"
    return next((one.reason for one in refusals(facts_of(outline), choice.grid(), RULES)), "")


def made(choice: Choice, job: Job, counted: Counted) -> Plan:
    """The plan, whatever the tables of legality say of the choice. Raises UserError where none comes about."""
    strategy = strategy_of(choice, job)
    plan = plan_of(strategy, _with_run(choice, job, counted), counted, choice.micro)
    if plan.data.micro_batch != choice.micro:
        raise UserError(
            f"{choice.mesh}: the schedule {strategy.schedule} takes no micro-batches of {choice.micro} samples, but of "
            f"{plan.data.micro_batch}"
        )
    return plan


def strategy_of(choice: Choice, job: Job) -> Strategy:
    """What each axis of the mesh is for; axes of one rank are left out."""
    at = {name: int(value) for name, value in choice.at.items()}
    copies = at["data"] // at["shard"] if at["zero"] and at["shard"] < at["data"] else 1
    data = [("dp", copies), ("fsdp", at["shard"])] if copies > 1 else [("dp", at["data"])]
    way = "ring" if job.run.attention == "tokens" else "gathered"
    way = "heads" if at["ulysses"] > 1 else way
    model = [(at["context"], ModelAxis("cp", "context", way)), (at["tensor"], TENSOR)]
    model = [(size, axis) for size, axis in model if size > 1]
    if at["data"] == 1 and model:
        data = []
    staged = at["pipeline"] > 1
    stages = [("pp", at["pipeline"])] if staged else []
    farther = [*data, *stages] if at["inner"] else [*stages, *data]
    sizes = [*farther, *((axis.name, size) for size, axis in model)]
    return Strategy(
        name=choice.mesh,
        mesh=" ".join(f"{name}={size}" for name, size in sizes),
        data=tuple(name for name, _ in data),
        model=tuple(axis for _, axis in model),
        shard=data[-1][0] if at["zero"] and data else None,
        stages=at["pipeline"] * at["virtual"] if staged else 1,
        schedule=choice.schedule or PIPELINE,
    )


def _with_run(choice: Choice, job: Job, counted: Counted) -> Job:
    blocks = [part.name for part in counted.costs(1).blocks]
    group, share = again_of(choice.again)
    again = [blocks[at] for at in spread(len(blocks), share if group else 0.0)]
    reshard, reduce = KEPT[0] if choice.at["pipeline"] > 1 else KEPT[choice.zero]
    changes: dict[str, Any] = {"recompute": tuple(again), "reshard": reshard, "reduce_every": reduce}
    if not again:
        changes["recompute_keep"] = ()
    try:
        run = RunPlan.model_validate({**job.run.model_dump(), **changes})
        optimiser = job.optimiser.of_kind(KINDS.get(int(choice.at["optimiser"]), job.optimiser.kind))
        return Job.model_validate({**job.model_dump(), "run": run, "optimiser": optimiser})
    except ValidationError as error:
        raise UserError(mistakes(error)) from None
