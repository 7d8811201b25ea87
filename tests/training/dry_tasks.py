"""The steps that a dry run counts, run by real ranks on real tensors."""

from collections.abc import Mapping

import torch
import torch.distributed as dist

from tangram.schema.plan import Plan
from tangram.training.data import BYTES
from tangram.training.mesh.world import make_world
from tangram.training.run.launch import Rank
from tangram.training.state import build_model
from tangram.training.trials.dry_run import CountedStep, counted_steps


def count_steps(rank: Rank, plans: Mapping[str, Plan]) -> dict[str, list[CountedStep]]:
    """What each plan's steps take of this rank."""
    found: dict[str, list[CountedStep]] = {}
    group = dist.group.WORLD
    assert group is not None
    for name, plan in plans.items():
        world = make_world(plan, rank.index, torch.device("cpu"), group)
        model = build_model.build(plan, build_model.source_of(plan, BYTES), world, values=True)
        found[name] = counted_steps(model)
    return found
