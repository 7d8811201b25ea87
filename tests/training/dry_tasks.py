"""The steps that a dry run counts, run by real ranks on real tensors."""

from collections.abc import Mapping

import torch
import torch.distributed as dist

from tangram.planner.plan import Plan
from tangram.training import building
from tangram.training.data import BYTES
from tangram.training.dry import Counted, counted_steps
from tangram.training.launch import Rank
from tangram.training.world import make_world


def count_steps(rank: Rank, plans: Mapping[str, Plan]) -> dict[str, list[Counted]]:
    """What each plan's steps take of this rank."""
    found: dict[str, list[Counted]] = {}
    group = dist.group.WORLD
    assert group is not None
    for name, plan in plans.items():
        world = make_world(plan, rank.index, torch.device("cpu"), group)
        model = building.build(plan, building.source_of(plan, BYTES), world, values=True)
        found[name] = counted_steps(model, plan, world)
    return found
