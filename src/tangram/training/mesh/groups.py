"""The ranks that compute one model together, by the axes of a mesh: their groups over one axis and over several."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import _disable_current_modes  # pyright: ignore[reportPrivateUsage]

from tangram.checkpoint.state.replicated import contents
from tangram.errors import UserError
from tangram.layout import Mesh
from tangram.models.building.aliases import refuse_aliases
from tangram.models.capturing.opened import plain
from tangram.sharding.derivation import mesh_from
from tangram.sharding.discover.own_rules import OwnRules, rules_text

T = TypeVar("T")


@dataclass(frozen=True)
class Devices:
    """The ranks that compute one thing together, by the axes of a mesh."""

    over: Callable[[Sequence[str]], DeviceMesh]
    """The device mesh over some of the axes, in the order of the mesh."""
    groups: Mapping[str, dist.ProcessGroup]
    made: dict[tuple[str, ...], dist.ProcessGroup] = field(default_factory=dict[tuple[str, ...], dist.ProcessGroup])
    """Those over several axes that were needed so far."""

    def together(self, axes: tuple[str, ...]) -> dist.ProcessGroup:
        """The ranks of this one's group over some axes, in the order of the mesh. Collective over them at first."""
        if len(axes) == 1:
            return self.groups[axes[0]]
        if axes not in self.made:
            with _disable_current_modes():  # of a run without memory, in which a mesh has no numbers
                ranks = cast("list[int]", self.over(axes).mesh.flatten().tolist())
            # of the ranks of a stage, say: others have programs of their own, and know nothing of it
            group = dist.new_group(ranks, use_local_synchronization=True)
            self.made[axes] = cast(dist.ProcessGroup, group)
        return self.made[axes]


def devices_of(devices: DeviceMesh) -> Devices:
    """Those of a device mesh whose dims are named as the axes."""
    names = devices.mesh_dim_names or ()
    return Devices(lambda axes: devices[tuple(axes)], {name: devices.get_group(name) for name in names})


def add_up(grads: Sequence[Tensor], group: dist.ProcessGroup) -> None:
    """Sum gradients over a group, in place, in one all-reduce for each type of numbers. Collective."""
    for dtype in dict.fromkeys(grad.dtype for grad in grads):
        some = [grad for grad in grads if grad.dtype == dtype]
        for grad, total in zip(some, summed(some, [(group,)] * len(some)), strict=True):
            grad.copy_(total)


def summed(values: Sequence[Tensor], groups: Sequence[tuple[dist.ProcessGroup, ...]]) -> list[Tensor]:
    """Each value added up over its groups, in one all-reduce for each group. Collective: ranks give as many."""
    found = list(values)
    for group in dict.fromkeys(one for own in groups for one in own):
        some = [i for i, own in enumerate(groups) if group in own]
        flat = torch.cat([found[i].reshape(-1) for i in some])
        dist.all_reduce(flat, group=group)
        parts = cast("Sequence[Tensor]", torch.split(flat, [found[i].numel() for i in some]))
        for i, part in zip(some, parts, strict=True):
            found[i] = part.view_as(found[i])
    return found


def proved_rules(rules: Path | str | OwnRules | None, devices: DeviceMesh) -> str:
    """The text of op rules of one's own; those of a file are proved by the mesh's first rank alone, for all of it.

    Collective where there is a file. Raises UserError, the same on all ranks.
    """
    if rules is None or isinstance(rules, OwnRules):
        return rules_text(rules)
    return on_first(devices_of(devices).groups.values(), lambda: rules_text(rules))


def on_first(groups: Iterable[dist.ProcessGroup], make: Callable[[], T]) -> T:
    """What the first rank of a mesh makes, on all of its ranks; a UserError on all where it raises one. Collective.

    `groups`: those of this rank over each axis.
    """
    groups = [*groups]
    found: list[Any] = [None, ""]
    if all(dist.get_rank(group) == 0 for group in groups):
        try:
            found = [make(), ""]
        except UserError as error:
            found = [None, str(error)]
    for group in groups:
        dist.broadcast_object_list(found, group=group, group_src=0)
    if found[1]:
        raise UserError(found[1])
    return found[0]


def unlike(tensors: Mapping[str, Tensor], groups: Iterable[dist.ProcessGroup]) -> list[str]:
    """The names of those that some ranks of groups have otherwise than others. Collective: all ranks give as many."""
    if not tensors:
        return []
    device = max((one.device for one in tensors.values()), key=lambda one: one.type != "cpu")  # where its groups are
    digests = torch.tensor([number >> 1 for number in contents(tensors.values())], device=device)
    both = torch.cat([digests, -digests])
    for group in groups:
        dist.all_reduce(both, dist.ReduceOp.MAX, group)
    differ = both[: len(tensors)] != -both[len(tensors) :]
    flags = cast("list[bool]", differ.tolist())
    return [name for name, one in zip(tensors, flags, strict=True) if one]


def refuse_unlike_weights(model: nn.Module, groups: Iterable[dist.ProcessGroup]) -> None:
    """Raise UserError on all ranks where a parameter or buffer has other values on one. Collective.

    What is on meta has none. Also where a parameter is kept beside its name, as all that cut parameters come by here.
    """
    refuse_aliases(model)
    buffers = cast("Iterable[tuple[str, Tensor]]", model.named_buffers())
    tensors: list[tuple[str, Tensor]] = [*model.named_parameters(), *buffers]
    own = {name: one for name, one in tensors if not one.is_meta and not isinstance(one, DTensor)}
    if names := unlike(own, groups):
        more = f" (and {len(names) - 1} more)" if len(names) > 1 else ""
        raise UserError(
            f"{names[0]}{more} has other values on some ranks: give torch.manual_seed the same number on all "
            "before the model is built, or load the same weights"
        )


def refuse_unlike_inputs(inputs: Mapping[str, Any], device: torch.device, groups: Sequence[dist.ProcessGroup]) -> None:
    """Raise UserError on all ranks where one gives a model other inputs than another. Collective."""
    own = {name: x for name, x in inputs.items() if isinstance(x, Tensor) and not x.is_meta and plain(x)}
    kinds = repr([(name, tuple(x.shape), x.dtype) if isinstance(x, Tensor) else name for name, x in inputs.items()])
    if unlike({"kinds": torch.tensor(list(kinds.encode()), device=device)}, groups):
        raise UserError(f"the ranks give the model other inputs, or of other sizes: {_ALL}")
    if names := unlike({name: x.to(device) for name, x in own.items()}, groups):
        raise UserError(f"the ranks give the model other values of {names[0]}: {_ALL}")


_ALL = "each gives all of the batch, and marks say what it computes of it; for batches of their own use DDP or FSDP"


def device_mesh_of(model: nn.Module, mesh: DeviceMesh | Mesh | str) -> DeviceMesh:
    """The devices of a mesh; one that is text is over all ranks of the process group. Raises UserError."""
    if isinstance(mesh, DeviceMesh):
        if not mesh.mesh_dim_names:
            raise UserError("the dims of the DeviceMesh have no names, which marks use: give mesh_dim_names")
        return mesh
    if not dist.is_initialized():
        raise UserError(
            "no process group was begun: start ranks with torchrun and call torch.distributed.init_process_group"
        )
    mesh = mesh_from(mesh)
    if not mesh.axes or mesh.size != dist.get_world_size():
        raise UserError(f'the mesh "{mesh}" has {mesh.size} ranks and the process group {dist.get_world_size()}')
    kinds = {p.device.type for p in model.parameters()} - {"meta"}
    kind = kinds.pop() if kinds else "cpu"
    return init_device_mesh(kind, tuple(n for n, _ in mesh.axes.values()), mesh_dim_names=tuple(mesh.axes))
