"""Ranks that load a model whose vocabulary is larger than that of its weights."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from tangram.schema.plan import Plan
from tangram.training.data import load_tokens
from tangram.training.mesh.world import make_world
from tangram.training.run.launch import Rank
from tangram.training.state.build_model import build, source_of


def load_grown(rank: Rank, plans: Mapping[str, Plan]) -> dict[str, dict[str, npt.NDArray[Any]]]:
    """Every parameter, whole, of each plan's model."""
    group = dist.group.WORLD
    assert group is not None
    found: dict[str, dict[str, npt.NDArray[Any]]] = {}
    for key, plan in plans.items():
        world = make_world(plan, rank.index, rank.device, group)
        model = build(plan, source_of(plan, load_tokens(plan.data, plan.model.path)), world, values=True)
        whole = {n: p.full_tensor() if isinstance(p, DTensor) else p for n, p in model.module.named_parameters()}
        found[key] = {name: np.array(tensor.detach()) for name, tensor in whole.items()}
    return found
