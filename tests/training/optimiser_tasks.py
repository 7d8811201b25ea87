"""What four ranks do to update parameters of which each has a part, beside the whole of each on one."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tangram.schema.plan import Plan
from tangram.training.data import Batch, open_corpus, step_batches, tokens_of
from tangram.training.mesh.local_parts import local
from tangram.training.objective.step_guard import Guard
from tangram.training.run.launch import Rank
from tangram.training.run.rank import RankJob, begin
from tangram.training.step import loop
from tangram.training.updates.ruled_optimiser import RuledOptimiser
from tangram.training.updates.update_rules import ParameterShards

Cuts = tuple[tuple[int, str, int], ...]
"""Dims, the axis that cuts each, and how many of it that axis's first rank has."""
PARTS: Mapping[str, tuple[tuple[int, ...], Cuts]] = {
    "rows": ((7, 12), ((0, "a", 4),)),
    "columns": ((12, 7), ((1, "b", 4),)),
    "rows and columns": ((8, 10), ((0, "a", 4), (1, "b", 5))),
    "unevenly": ((9, 6), ((0, "a", 8), (1, "b", 1))),
    "nothing on one": ((2, 9), ((0, "a", 2),)),
    "whole": ((6, 5), ()),
    "experts": ((4, 6, 5), ((0, "a", 2),)),
    "rows of experts": ((3, 6, 5), ((1, "a", 2), (2, "b", 3))),
    "a vector": ((13,), ((0, "b", 7),)),
}
STEPS = 5


def differences(rank: Rank, work: Mapping[str, dict[str, Any]]) -> dict[tuple[str, str], float]:
    """By rule and part how far what this rank has lies from the same of an update of the whole."""
    groups: dict[str, dist.ProcessGroup] = {}
    for axis, members in (("a", ((0, 1), (2, 3))), ("b", ((0, 2), (1, 3)))):
        for ranks in members:
            made = dist.new_group(ranks)
            if rank.index in ranks:
                groups[axis] = cast(dist.ProcessGroup, made)
    at = {"a": rank.index % 2, "b": rank.index // 2}
    found: dict[tuple[str, str], float] = {}
    for rule, settings in work.items():
        torch.manual_seed(1)
        names = [name for name, (shape, _) in PARTS.items() if rule != "muon" or len(shape) > 1]
        wholes = {name: nn.Parameter(torch.randn(PARTS[name][0])) for name in names}
        parts = {name: nn.Parameter(part_of(one.detach(), PARTS[name][1], at)) for name, one in wholes.items()}
        shards: dict[Tensor, ParameterShards] = {part: shards_at(name, at, groups) for name, part in parts.items()}
        one = RuledOptimiser([*wholes.values()], torch.float32, **settings)
        ours = RuledOptimiser([*parts.values()], torch.float32, shards, **settings)
        for _ in range(STEPS):
            for name, whole in wholes.items():
                whole.grad = torch.randn(whole.shape)
                parts[name].grad = part_of(whole.grad, PARTS[name][1], at)
            one.step()
            ours.step()
        for name, part in parts.items():
            wanted = part_of(wholes[name].detach(), PARTS[name][1], at)
            found[rule, name] = float((part.detach() - wanted).abs().max()) if part.numel() else 0.0
    return found


def _places(n: int, first: int, index: int) -> Tensor:
    return torch.arange(first) if not index else torch.arange(first, n)


def part_of(x: Tensor, cuts: Cuts, at: Mapping[str, int]) -> Tensor:
    for dim, axis, first in cuts:
        x = x.index_select(dim, _places(x.shape[dim], first, at[axis]))
    return x.clone()


def shards_at(name: str, at: Mapping[str, int], groups: Mapping[str, dist.ProcessGroup]) -> ParameterShards:
    shape, cuts = PARTS[name]
    by_dim = {dim: (axis, first) for dim, axis, first in cuts}
    places = [
        _places(n, by_dim[d][1], at[by_dim[d][0]]) if d in by_dim else torch.arange(0) for d, n in enumerate(shape)
    ]
    own = [(groups[by_dim[d][0]],) if d in by_dim else () for d in range(len(shape))]
    return ParameterShards(shape, tuple(places), tuple(own))


@dataclass(frozen=True)
class Astray:
    """A step whose loss was no number on one rank."""

    reason: str | None
    kept: bool
    """Whether parameters and states are as they were before it, bit for bit."""
    goes_on: bool
    """Whether the next step was applied."""


def with_a_bad_step(rank: Rank, work: tuple[Mapping[str, Plan], Path]) -> dict[str, Astray]:
    """The second of three steps is one, on the last rank."""
    return {key: _astray(rank, plan, work[1] / key) for key, plan in work[0].items()}


def _astray(rank: Rank, plan: Plan, folder: Path) -> Astray:
    corpus = open_corpus(plan.data, tokens_of(plan))
    begun = begin(rank, RankJob(plan, folder, corpus.digest, loop.StepCosts()))
    optimiser, world, guard = begun.state.optimiser, begun.model.world, Guard(plan)
    assert optimiser is not None

    def step(at: int, factor: float) -> loop.StepResult:
        batches = step_batches(
            corpus, plan.data, seed=plan.seed, first_sample=at * plan.data.global_batch, index=world.data_index,
            size=world.data_size, micro_steps=plan.micro_steps, device=rank.device,
        )  # fmt: skip

        def loss(module: nn.Module, batch: Batch) -> Tensor:
            logits = module(input_ids=batch.inputs_BS, use_cache=False).logits.flatten(0, 1)
            return factor * nn.functional.cross_entropy(logits, batch.labels_BS.flatten(), reduction="sum")

        return loop.train_step(begun.model, optimiser, batches, lr=plan.optimiser.lr, loss_sum=loss, guard=guard)

    def kept() -> list[Tensor]:
        states = [value for of_one in optimiser.state.values() for value in of_one.values()]
        return [local(one).detach().clone() for one in (*begun.model.module.parameters(), *states)]

    first, before = step(0, 1.0), kept()
    assert first.skipped is None
    bad = step(1, math.nan if rank.index else 1.0)
    same, last = all(map(torch.equal, before, kept())), step(2, 1.0)
    return Astray(bad.skipped, same, last.skipped is None and not all(map(torch.equal, before, kept())))
