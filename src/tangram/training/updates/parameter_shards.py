"""How the ranks of a mesh have cut a parameter, for updates that need more of it than a rank has: sums, whole matrices.

By the plan's layouts, as checkpoints are, and over exactly the axes that cut a dim: copies have the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from tangram.layout.locate import indices_of_rank
from tangram.planner.legality.check_plan import bound_layout
from tangram.training.mesh.world import dim_of
from tangram.training.parallel.model import ParallelModel


@dataclass(frozen=True)
class ParameterShards:
    """Of one parameter."""

    shape: tuple[int, ...]
    """Of the whole."""
    places: tuple[Tensor, ...] = ()
    """By dim that is cut, which of it this rank has: int64."""
    groups: tuple[tuple[dist.ProcessGroup, ...], ...] = ()
    """By dim, the ranks between which it is cut."""
    name: str = ""

    def over(self, dims: Iterable[int]) -> tuple[dist.ProcessGroup, ...]:
        """The ranks that have the other parts of some dims."""
        return tuple(group for dim in dims for group in self.groups[dim]) if self.groups else ()

    def joined(self, part: Tensor, dims: Sequence[int]) -> Tensor:
        """A tensor cut like the parameter, with all of some dims. Collective over the ranks that have parts of it."""
        for dim in dims:
            if groups := self.over((dim,)):
                shape = list(part.shape)
                shape[dim] = self.shape[dim]
                part = part.new_zeros(shape).index_copy_(dim, self.places[dim].to(part.device), part)
                for group in groups:
                    dist.all_reduce(part, group=group)
        return part

    def own(self, full: Tensor, dims: Sequence[int]) -> Tensor:
        """This rank's part of a tensor that has all of these dims."""
        for dim in dims:
            if self.over((dim,)):
                full = full.index_select(dim, self.places[dim].to(full.device))
        return full


def shards_of(model: ParallelModel) -> dict[Tensor, ParameterShards]:
    """Of each parameter that is trained."""
    plan, world = model.plan, model.world
    at = world.mesh.coords(world.index)
    found: dict[Tensor, ParameterShards] = {}
    for name, parameter in model.module.named_parameters():
        if not parameter.requires_grad:
            continue
        shape = model.plain[name].shape if name in model.plain else tuple(parameter.shape)
        layout = replace(bound_layout(plan, name, shape), at=())
        places, groups = list[Tensor](), list[tuple[dist.ProcessGroup, ...]]()
        for dim in layout.dims:
            cutting = [axis for axis in dim.axes if world.mesh.axes[axis][0] > 1]
            kept = indices_of_rank(dim, world.mesh, at) if cutting else ()
            places.append(torch.cat([torch.arange(0), *(torch.arange(first, stop) for first, stop in kept)]))
            names = ["shard" if axis in world.axes.shard else dim_of(axis) for axis in sorted(cutting)]
            groups.append(tuple(world.devices.get_group(name) for name in names))
        found[parameter] = ParameterShards(shape, tuple(places), tuple(groups), name)
    return found
