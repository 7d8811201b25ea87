"""The mesh as one rank sees it: its place, its process group, and the device mesh that torch's own modules want.

A plan's mesh has axes of the user's naming in the user's order. torch's FSDP2, DTensor and pipelines want them in a
fixed order: `pipeline` (stages of the model), `replicate` (the batch is cut, parameters are copies), `shard` (the batch
and the parameters are cut: FSDP), then the model axes one by one (tensor, context, expert), in the order of the mesh:
their ranks share one part of the batch and compute it together. A `DeviceMesh` of these dims, each of at least one
rank, is made over the same ranks. A parameter is a DTensor over the model axes that cut it, of which FSDP2 takes two.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from tangram.errors import UserError
from tangram.layout import Layout, Mesh
from tangram.relayout.exchange.peers import Peers
from tangram.schema.plan import Plan

LONGEST_WAIT = timedelta(hours=1)  # of ranks for one that still writes or reads; one that dies is seen at once
DEVICE_AXES = ("pipeline", "replicate", "shard")
"""The first dims of the device mesh; those of model axes have names of their own."""


@dataclass(frozen=True)
class Axes:
    """The axes of a plan's mesh by what torch calls them."""

    pipeline: tuple[str, ...]
    replicate: tuple[str, ...]
    shard: tuple[str, ...]
    model: tuple[str, ...]
    """In the order of the mesh."""

    @property
    def in_order(self) -> tuple[tuple[str, ...], ...]:
        """As the dims of the device mesh."""
        return (self.pipeline, self.replicate, self.shard, *((axis,) for axis in self.model))


def dim_of(axis: str) -> str:
    """The name of a model axis as a dim of the device mesh."""
    return f"model {axis}"


@dataclass(frozen=True)
class World:
    """All ranks of a job, and this one's place among them."""

    mesh: Mesh
    axes: Axes
    index: int
    device: torch.device
    group: dist.ProcessGroup
    """All ranks."""
    devices: DeviceMesh
    """Dims as in `DEVICE_AXES`, then those of the model axes."""
    peers: Peers
    """All ranks, for a few words on the side: of checkpoints, say."""
    data_index: int
    """The place among the ranks that the batch is cut over."""
    data_size: int
    stage: int
    """The place on the pipeline axis."""
    stages: int
    """How many ranks the pipeline axis has."""

    @property
    def size(self) -> int:
        return self.mesh.size

    def stage_of(self, rank: int) -> int:
        """The place of a rank on the pipeline axis."""
        return self.mesh.coords(rank)[self.axes.pipeline[0]] if self.axes.pipeline else 0

    @property
    def model_size(self) -> int:
        """How many ranks share one part of the batch within a stage."""
        return self.mesh.size // (self.data_size * self.stages)

    def over(self, axes: Iterable[str]) -> DeviceMesh:
        """The device mesh over some of the model axes, in the order of the mesh."""
        some = set(axes)
        return self.devices[tuple(dim_of(axis) for axis in self.axes.model if axis in some)]


def axes_of(plan: Plan) -> Axes:
    """What each axis of the mesh is to torch. Raises UserError for what this version cannot run."""
    cutting: frozenset[str] = frozenset[str]().union(
        *(Layout.parse(text).axes for text in plan.layouts.parameters.values())
    )
    shard = tuple(axis for axis in plan.axes.data if axis in cutting)
    if len(shard) > 1:
        raise UserError(f"parameters are cut over the data axes {', '.join(shard)}: this version cuts them over one")
    copies = tuple(axis for axis in plan.axes.data if axis not in cutting)
    return Axes(plan.axes.pipeline, copies, shard, plan.model_axes)


def make_world(
    plan: Plan, index: int, device: torch.device, group: dist.ProcessGroup, peers: Peers | None = None
) -> World:
    """This rank's view of the plan's mesh. Collective: makes the groups of the axes; all ranks call it.

    `peers`: where the ranks have another way to pass words than a group made for it.
    """
    mesh, axes = Mesh.parse(plan.mesh), axes_of(plan)
    names = [axis for axis, _ in mesh.views[0]]
    sizes = dict(mesh.views[0])
    order = [names.index(axis) for kind in axes.in_order for axis in kind]
    shape = [math.prod(sizes[axis] for axis in kind) for kind in axes.in_order]
    ranks = torch.arange(mesh.size).reshape(list(sizes.values())).permute(order).reshape(shape)
    devices = DeviceMesh(device.type, ranks, mesh_dim_names=(*DEVICE_AXES, *map(dim_of, axes.model)))
    stage, replicate, shard, *_ = (int(n) for n in (ranks == index).nonzero()[0])
    return World(
        mesh=mesh,
        axes=axes,
        index=index,
        device=device,
        group=group,
        devices=devices,
        peers=peers or _peers(group),
        data_index=replicate * shape[2] + shard,
        data_size=shape[1] * shape[2],
        stage=stage,
        stages=shape[0],
    )


def of_stage(world: World) -> dist.ProcessGroup:
    """The ranks that have the same stages as this one; without a pipeline all. Collective over all ranks."""
    if world.stages == 1:
        return world.group
    others = dict(zip(world.devices.mesh_dim_names or (), world.devices.shape, strict=True))
    several = [name for name, ranks in others.items() if name != "pipeline" and ranks > 1]
    if len(several) < 2:  # these ranks have a group already
        return world.devices.get_group((*several, "shard")[0])
    return cast(Any, world.devices[tuple(several)])._flatten().get_group()  # which it keeps


def _peers(group: dist.ProcessGroup) -> Peers:
    """The ranks of a group over one that moves words of the CPU, whatever moves the gradients."""
    if dist.get_world_size(group) == 1:
        return Peers()
    ranks = dist.get_process_group_ranks(group)
    words = dist.new_group(ranks, backend="gloo", timeout=LONGEST_WAIT)
    assert isinstance(words, dist.ProcessGroup)  # every rank is a member
    return Peers(words)
