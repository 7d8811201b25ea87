"""What four ranks round stochastically of parameters of which each has a part, beside the whole of each on one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tangram.training.run.launch import Rank
from tangram.training.updates.ruled_optimiser import RuledOptimiser
from tangram.training.updates.update_rules import ParameterShards
from tests.training.optimiser_tasks import PARTS, part_of, shards_at

SETTINGS: Mapping[str, Any] = {
    "lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1, "momentum": 0.9, "adjust_lr": "original",
    "rounding": "stochastic",
}  # fmt: skip
RULES = ("adamw", "sgd", "sgd-momentum")
"""Those of which an update is the same to the bit, however a parameter is cut: no sums are made."""


def unlike(rank: Rank, rules: Sequence[str]) -> dict[tuple[str, str], int]:
    """By rule and part how many numbers of this rank, and of its states, are not those of an update of the whole."""
    at = {"a": rank.index % 2, "b": rank.index // 2}
    found: dict[tuple[str, str], int] = {}
    groups = {axis: cast(dist.ProcessGroup, dist.group.WORLD) for axis in at}  # these rules use none
    for rule in rules:
        torch.manual_seed(1)
        wholes = {name: nn.Parameter(torch.randn(shape).bfloat16()) for name, (shape, _) in PARTS.items()}
        parts = {name: nn.Parameter(part_of(one.detach(), PARTS[name][1], at)) for name, one in wholes.items()}
        named: dict[Tensor, ParameterShards] = {p: ParameterShards(tuple(p.shape), name=n) for n, p in wholes.items()}
        cut: dict[Tensor, ParameterShards] = {p: replace(shards_at(n, at, groups), name=n) for n, p in parts.items()}
        one = RuledOptimiser([*wholes.values()], torch.bfloat16, named, rule=rule, **SETTINGS)
        ours = RuledOptimiser([*parts.values()], torch.bfloat16, cut, rule=rule, **SETTINGS)
        for step in range(5):
            for name, whole in wholes.items():
                whole.grad = torch.randn(whole.shape).bfloat16()
                parts[name].grad = part_of(whole.grad, PARTS[name][1], at)
            for some in (one, ours):
                some.round_for(f"{step}")
                some.step()
        for name, part in parts.items():
            wanted = {"": wholes[name].detach(), **one.state[wholes[name]]}
            for state, own in {"": part.detach(), **ours.state[part]}.items():
                whole = wanted[state] if own.ndim == 0 else part_of(wanted[state], PARTS[name][1], at)
                found[rule, f"{name} {state}"] = int((own != whole).sum())
    return found
