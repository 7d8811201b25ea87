"""Whether ranks of a model axis agree on the gradients of what each of them holds whole.

A derived program sums what it has to. That this was so is not believed but compared, once, after the first backward:
a gradient of each rank's own part only would train on, without a word, into weights that differ from rank to rank.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tangram.errors import UserError
from tangram.training.mesh.world import World, dim_of

UNLIKE = 1e-3  # relative: replicated arithmetic gives the same gradient but for the order of sums


def refuse_unlike_gradients(model: nn.Module, world: World) -> None:
    """Raise UserError where ranks of a model axis have other gradients of a weight that they all hold whole.

    Collective over all ranks; call it after a backward.
    """
    for axis in world.axes.model:
        _refuse_unlike(model, axis, world)


def _refuse_unlike(model: nn.Module, axis: str, world: World) -> None:
    group = world.devices.get_group(dim_of(axis))
    names: list[str] = []
    marks: list[Tensor] = []
    for name, parameter in model.named_parameters():
        if parameter.grad is None or _cut_over(parameter, axis):
            continue
        grad = parameter.grad.to_local() if isinstance(parameter.grad, DTensor) else parameter.grad
        names.append(name)
        marks += [grad.double().sum(), grad.double().square().sum().sqrt()]
    if not marks:
        return
    mine = torch.stack(marks)
    highest, lowest = mine.clone(), mine.clone()
    dist.all_reduce(highest, dist.ReduceOp.MAX, group=group)
    dist.all_reduce(lowest, dist.ReduceOp.MIN, group=group)
    size = torch.maximum(highest[1::2], torch.tensor(1e-30, dtype=torch.float64, device=mine.device))
    apart = torch.maximum(highest[1::2] - lowest[1::2], highest[0::2] - lowest[0::2])
    worst = int((apart / size).argmax())
    if float(apart[worst] / size[worst]) > UNLIKE:
        raise UserError(
            f'the ranks of the axis {axis} have different gradients of "{names[worst]}", which each holds whole: '
            "what the model computes follows from more than was captured (values, random numbers, state of its own); "
            "make it a data axis"
        )


def _cut_over(parameter: Tensor, axis: str) -> bool:
    """Whether ranks of a model axis hold different parts."""
    if not isinstance(parameter, DTensor):
        return False
    names = parameter.device_mesh.mesh_dim_names or ()
    return dim_of(axis) in names and not parameter.placements[names.index(dim_of(axis))].is_replicate()
