"""Checkpoints of given tensors, cut into given pieces, without ranks: each writer has its file."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tangram.checkpoint.loading import between_nodes, block_source, exchange, scatter
from tangram.checkpoint.saving import file_writer, rank_parts
from tangram.checkpoint.saving.file_layout import Outgoing, images
from tangram.checkpoint.saving.file_writer import Ring, write_image
from tangram.checkpoint.store import commits, manifest
from tangram.checkpoint.store.manifest import Manifest
from tangram.layout import Region
from tangram.relayout import TensorSpec

Array = np.ndarray[Any, Any]
SAVE = "0123456789abcdef0123456789abcdef"


def store(
    path: Path,
    tensors: Mapping[str, Tensor],
    cuts: Mapping[str, Sequence[Region]],
    save_id: str = SAVE,
    objects: Mapping[str, Any] | None = None,
) -> Manifest:
    """The checkpoint `path`, in which piece `i` of a tensor is written by writer `i`; what has no cuts lies whole."""
    writers = max([1, *map(len, cuts.values())])
    partial = commits.begin(path, save_id)
    found: list[rank_parts.RankPart] = []
    for writer in range(writers):
        mine: list[tuple[Outgoing, Tensor]] = []
        for name, tensor in tensors.items():
            regions = cuts.get(name, [Region.full(tensor.shape)])
            if writer < len(regions) and regions[writer]:
                spec = TensorSpec(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
                mine.append((Outgoing(name, spec, regions[writer]), elements(tensor, regions[writer])))
        files = images([piece for piece, _ in mine], writer, writers, save_id)
        values = {piece.name: value for piece, value in mine}
        ring = Ring()
        written = [write_image(partial, image, [values[p.piece.name] for p in image.placed], ring) for image in files]
        empty = {
            name: TensorSpec(tuple(t.shape), str(t.dtype).removeprefix("torch."))
            for name, t in tensors.items()
            if not t.numel()
        }
        found.append(rank_parts.part_of(rank_parts.tensors_of(files, empty), written, objects))
    made = rank_parts.merged(found, id=save_id, step=7, created="2026-01-01T00:00:00+00:00")
    commits.commit(partial, path, made)
    return made


def bits(tensor: Tensor) -> Array:
    """The bytes of each element, as a last dim."""
    flat = tensor.detach().clone(memory_format=torch.contiguous_format).reshape(-1)
    return flat.view(torch.uint8).numpy().reshape(*tensor.shape, tensor.itemsize)


def same(a: Tensor, b: Tensor) -> bool:
    """Bit for bit."""
    return a.shape == b.shape and a.dtype == b.dtype and np.array_equal(bits(a), bits(b))


def elements(tensor: Tensor, region: Region) -> Tensor:
    """The elements of a region by numpy's own indexing: a grid as a grid, anything else flat and in order."""
    if not region:
        return torch.empty(0, dtype=tensor.dtype)
    array = bits(tensor)
    if len(region.boxes) == 1:
        sets = [np.concatenate([np.arange(a, b) for a, b in s]) for s in region.boxes[0]]
        picked = array[np.ix_(*sets)] if sets else array
    else:
        mask = np.zeros(tuple(tensor.shape), bool)
        for box in region.boxes:
            mask[np.ix_(*[np.concatenate([np.arange(a, b) for a, b in s]) for s in box])] = True
        picked = array[mask]
    shape = picked.shape[:-1]
    return torch.from_numpy(picked.reshape(-1).copy()).view(tensor.dtype).reshape(shape)


def random_tensor(shape: Sequence[int], dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Any bits at all, where the type has all of them."""
    if not math.prod(shape):
        return torch.empty(tuple(shape), dtype=dtype)
    made = np.random.default_rng(seed).integers(0, 256, math.prod(shape) * dtype.itemsize, np.uint8)
    if dtype == torch.bool:
        made &= 1
    return torch.from_numpy(made).view(dtype).reshape(tuple(shape))


MODULES = (between_nodes, exchange, manifest, scatter, block_source, file_writer)


def with_small_blocks(patch: pytest.MonkeyPatch, size: int = 4096) -> None:
    """Blocks so small that small tensors lie in many."""
    for module in MODULES:
        patch.setattr(module, "BLOCK", size)
