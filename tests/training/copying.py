"""Copies of small modules whose ranks use different parameters: what is summed, and what nobody has a gradient of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tangram.training.parallel import data_parallel
from tangram.training.parallel.data_parallel import Replicas, in_buckets
from tangram.training.run.launch import Rank
from tests.training.oracle.ranks import swapped

Gradients = Mapping[str, list[float] | None]


class Parts(nn.Module):
    """Some parameters, of which each forward uses the named ones; one stands in two places."""

    def __init__(self) -> None:
        super().__init__()
        for name in "abcd":
            setattr(self, name, nn.Parameter(torch.ones(3)))
        self.same = self.a
        self.d.requires_grad_(False)

    def forward(self, used: str, scale: float) -> Tensor:
        """The sum of what is used, `scale` times."""
        found = torch.zeros(())
        for place, name in enumerate(used, 1):
            found = found + place * scale * getattr(self, name).sum()
        return found + scale * self.same.sum()


def gradients(module: nn.Module) -> Gradients:
    """By name."""
    return {name: None if p.grad is None else p.grad.tolist() for name, p in module.named_parameters()}


def summed(rank: Rank, sizes: Sequence[int]) -> dict[int, dict[str, Gradients | str]]:
    """The task of two ranks, for buckets of so many bytes."""
    group = dist.group.WORLD
    assert group is not None
    found: dict[int, dict[str, Gradients | str]] = {}
    for size in sizes:
        with swapped(data_parallel, "FIRST", size), swapped(data_parallel, "BUCKET", size):
            found[size] = _summed(rank.index, group)
    return found


def _summed(index: int, group: dist.ProcessGroup) -> dict[str, Gradients | str]:
    found: dict[str, Gradients | str] = {"buckets": str(len(in_buckets(Parts().parameters())))}

    def made(once: bool = False, in_parts: bool = False) -> tuple[Parts, Replicas]:
        module = Parts()
        return module, Replicas(module, group, once=once, in_parts=in_parts)

    module, _ = made()
    module("ab", 1.0 + index).backward()
    found["both used"] = gradients(module)
    module("b", 10.0).backward()
    found["added to what was summed"] = gradients(module)
    module.zero_grad()
    module("ab" if index else "a", 1.0).backward()
    found["used by one rank"] = gradients(module)
    module("b" if index == 0 else "a", 1.0).backward()
    found["and by the other"] = gradients(module)
    module, sums = made(once=True)
    sums.before(last=False)
    module("b", 1.0 + index).backward()
    found["not yet"] = gradients(module)
    sums.before(last=True)
    module("c", 1.0).backward()
    found["once"] = gradients(module)
    module, sums = made(in_parts=True)
    module("b" if index else "c", 1.0).backward()
    sums.reduce()
    found["in parts"] = gradients(module)
    module("b", 1.0).backward()
    try:
        sums.reduce()
    except RuntimeError as error:
        found["not zeroed"] = str(error)
    return found
