"""Make a model parallel as its plan says: FSDP2 over the mesh, each parameter cut where its layout text cuts it.

A layout becomes an FSDP placement only by comparison: the region that the layout gives every rank must be the one that
cutting a single dim gives, else it is refused. Afterwards the shards that torch made are checked against the regions.

Gradients are summed over ranks, not averaged: the loss is already divided by the tokens of the whole global batch, and
FSDP2 left alone would divide by the number of ranks once more.
"""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from transformers import PreTrainedModel

from tangram.errors import UserError
from tangram.layout import Layout, Mesh, Region, region


def parallelise(model: PreTrainedModel, layout_of: Callable[[str], str], mesh: Mesh, devices: DeviceMesh) -> None:
    """Cut every parameter of a model on meta as `layout_of(name)` says; `devices` are the ranks of `mesh`."""
    dim_of = shard_dims(model, layout_of, mesh)

    def place(parameter: nn.Parameter) -> Shard:
        return Shard(dim_of[parameter])

    for block in _blocks(model):
        fully_shard(block, mesh=devices, shard_placement_fn=place)
    fully_shard(model, mesh=devices, shard_placement_fn=place)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo has no pre-multiplied sum, even by one


def shard_dims(model: nn.Module, layout_of: Callable[[str], str], mesh: Mesh) -> dict[nn.Parameter, int]:
    """The dim on which each parameter is cut. Raises UserError for a layout that this version cannot train."""
    return {
        parameter: shard_dim(name, layout_of(name), tuple(parameter.shape), mesh)
        for name, parameter in model.named_parameters()
    }


def _blocks(model: PreTrainedModel) -> Iterable[nn.Module]:
    """The repeated blocks, which Hugging Face names as the modules not to be split."""
    names = set(model._no_split_modules or ())  # pyright: ignore[reportPrivateUsage]  read by every HF trainer
    return [module for module in model.modules() if type(module).__name__ in names]


def shard_dim(name: str, text: str, shape: tuple[int, ...], mesh: Mesh) -> int:
    """The one dim that a layout cuts over all ranks, in chunks as torch cuts; any other layout is refused."""
    layout = Layout.parse(text).bind(shape)
    regions = [region(layout, mesh, rank) for rank in range(mesh.size)]
    for dim in range(len(shape)):
        if all(regions[rank] == chunk_region(shape, dim, mesh.size, rank) for rank in range(mesh.size)):
            if dim > 0 and shape[dim] % mesh.size:
                break  # FSDP2 itself takes uneven cuts on the first dim only
            return dim
    raise UserError(
        f'the layout "{text}" of {name}, of shape {shape}, is not one that this version can train: it must cut one dim '
        f"over all {mesh.size} ranks, evenly unless it is the first"
    )


def chunk_region(shape: tuple[int, ...], dim: int, parts: int, part: int) -> Region:
    """The region of one part when `dim` is cut as torch.chunk does."""
    chunk = -(-shape[dim] // parts)
    first = min(part * chunk, shape[dim])
    offsets = [first if d == dim else 0 for d in range(len(shape))]
    sizes = [min(chunk, n - first) if d == dim else n for d, n in enumerate(shape)]
    return Region.box(offsets, sizes)


def materialise(model: PreTrainedModel, device: torch.device, values: Iterable[tuple[str, Tensor]]) -> None:
    """Give a model on meta storage and the given whole tensors, of which each rank keeps its shard."""
    model.to_empty(device=device)
    model.tie_weights()  # giving storage makes two of what was one
    tensors = dict(model.named_parameters()) | dict(model.named_buffers())
    waiting = set(tensors)
    with torch.no_grad():
        for name, whole in values:
            put(tensors[name], whole)
            waiting.discard(name)
    if waiting:
        raise RuntimeError(f"these tensors got no value: {', '.join(sorted(waiting))}")


def put(target: Tensor, whole: Tensor) -> None:
    """Copy a whole tensor into a parameter or buffer, or this rank's part of it into a shard."""
    if target.shape != whole.shape:
        raise RuntimeError(f"a tensor of shape {tuple(whole.shape)} does not fit one of {tuple(target.shape)}")
    if isinstance(target, DTensor):
        # Every rank has the same whole tensor, so nothing needs to be sent.
        part = distribute_tensor(whole.to(target.device), target.device_mesh, target.placements, src_data_rank=None)
        target.to_local().copy_(part.to_local())
    else:
        target.copy_(whole)
