"""Live DTensors as layouts and back: the one place where relayout touches torch's own mesh and placement objects.

Reading is exact; `layout_of` asks for the local shapes of all ranks because torch's own description of a tensor that
FSDP2 cut unevenly inside tensor parallelism is wrong (docs/notation.md). Process groups are passed in, never made.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement as TorchPlacement
from torch.distributed.tensor.placement_types import _StridedShard  # pyright: ignore[reportPrivateUsage]

from tangram.layout import Layout, LayoutError, Mesh
from tangram.layout.placements import Placement, from_placements, to_placements

_meshes: WeakKeyDictionary[DeviceMesh, tuple[Mesh, tuple[int, ...]]] = WeakKeyDictionary()


def mesh_of(device_mesh: DeviceMesh) -> tuple[Mesh, tuple[int, ...]]:
    """A device mesh as a mesh, and the global rank at each of its positions.

    Dims without names, as in the mesh that FSDP2 makes when it is given none, are called dim0, dim1 ...
    """
    found = _meshes.get(device_mesh)
    if found is None:
        places = device_mesh.mesh  # torch makes it anew each time, and a model asks for each of its tensors
        names = device_mesh.mesh_dim_names or tuple(f"dim{i}" for i in range(places.ndim))
        sizes = tuple(int(n) for n in places.shape)
        ranks = cast("list[int]", places.flatten().tolist())
        found = _meshes[device_mesh] = Mesh((tuple(zip(names, sizes, strict=True)),)), tuple(ranks)
    return found


def local_shapes(tensor: DTensor, group: dist.ProcessGroup) -> dict[int, tuple[int, ...]]:
    """The local shape at every position of the tensor's mesh. Collective over `group`, which has all ranks of the mesh.

    Raises LayoutError when a rank of the mesh is not in the group.
    """
    _, ranks = mesh_of(tensor.device_mesh)
    found: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, (dist.get_rank(), tuple(tensor.to_local().shape)), group=group)
    shapes: dict[int, tuple[int, ...]] = dict(found)
    missing = [r for r in ranks if r not in shapes]
    if missing:
        raise LayoutError(f"rank {missing[0]} of the tensor's mesh is not in the group")
    return {position: shapes[rank] for position, rank in enumerate(ranks)}


def layout_of(tensor: DTensor, shapes: Mapping[int, tuple[int, ...]]) -> tuple[Mesh, Layout]:
    """The mesh and the bound layout of a DTensor, checked against the local shapes of all ranks (`local_shapes`).

    Raises LayoutError for what is no layout, and where the shapes fit no reading of the placements.
    """
    mesh, _ = mesh_of(tensor.device_mesh)
    return mesh, _layout(tuple(tensor.placements), mesh, tuple(tensor.shape), tuple(shapes.items()))


@lru_cache(1 << 10)
def _layout(
    placements: tuple[TorchPlacement, ...],
    mesh: Mesh,
    shape: tuple[int, ...],
    shapes: tuple[tuple[int, tuple[int, ...]], ...],
) -> Layout:
    """The tensors of a model have few shapes, so each is worked out once."""
    return from_placements(placements, mesh, shape, dict(shapes))


def placements_of(layout: Layout, mesh: Mesh) -> tuple[TorchPlacement, ...]:
    """torch placements that hold the same elements as a bound layout on every rank, or LayoutError."""
    return tuple(_torch_placement(p) for p in to_placements(layout, mesh))


def _torch_placement(p: Placement) -> TorchPlacement:
    match p.kind:
        case "replicate":
            return Replicate()
        case "shard":
            return Shard(p.dim)
        case "strided":
            return _StridedShard(p.dim, split_factor=p.split_factor)
        case "partial":
            return Partial(p.op)
