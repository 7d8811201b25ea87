"""Checkpoints for tests: tensors cut as one likes and written as several ranks would, in one process."""

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tangram.checkpoint.saving import rank_parts
from tangram.checkpoint.saving.file_layout import Outgoing, images
from tangram.checkpoint.saving.file_writer import Ring, write_image
from tangram.checkpoint.saving.rank_parts import About, finish, new_id
from tangram.checkpoint.store import commits
from tangram.checkpoint.store.manifest import Manifest
from tangram.layout import Layout, Mesh, Region, region
from tangram.relayout import TensorSpec

RING = Ring(2)


def part(tensor: Tensor, of: Region) -> Tensor:
    """The elements of a region, as a rank would hold them."""
    flat = tensor.reshape(-1)
    runs = [flat[a:b] for a, b in of.runs(tuple(tensor.shape))]
    buffer = torch.cat(runs) if runs else flat[:0]
    return buffer.reshape(of.local_shape if of.local_shape is not None else (of.size,))


def regions(shape: Sequence[int], layout: str, mesh: str) -> list[Region]:
    """What the ranks of a mesh hold; of what several hold only one is listed."""
    over = Mesh.parse(mesh)
    found = [region(Layout.parse(layout).bind(tuple(shape)), over, rank) for rank in range(over.size)]
    return [one for one in dict.fromkeys(found) if one]


def make(
    path: Path,
    tensors: Mapping[str, Tensor],
    cuts: Mapping[str, Sequence[Region]] | None = None,
    *,
    writers: int = 1,
    objects: Mapping[str, Any] | None = None,
    about: About | None = None,
    layouts: Mapping[str, str] | None = None,
    node: tuple[str, int, int] | None = None,
) -> Manifest:
    """Write a checkpoint; the regions of a tensor go to the writers in turn, one that is not in `cuts` is whole.

    `node`: the id of a save, and which of how many nodes this is: what its writers have of it is written as its share.
    """
    save_id, number, nodes = node or (new_id(), 0, 1)
    each = writers // nodes
    partial = commits.begin(path, save_id)
    for writer in range(number * each, (number + 1) * each):
        own: list[Outgoing] = []
        values: dict[tuple[str, Region], Tensor] = {}
        for turn, (name, tensor) in enumerate(tensors.items()):
            spec = TensorSpec(tuple(tensor.shape), str(tensor.dtype))
            some = (cuts or {}).get(name) or [Region.full(tensor.shape)]
            shift = turn if len(some) == 1 else 0
            for at, here in enumerate(some):
                if (at + shift) % writers == writer and math.prod(tensor.shape):
                    own.append(Outgoing(name, spec, here, (layouts or {}).get(name, "")))
                    values[name, here] = part(tensor, here)
        files = images(own, writer, writers, save_id)
        done = [write_image(partial, f, [values[p.piece.name, p.piece.region] for p in f.placed], RING) for f in files]
        empty = {n: TensorSpec(tuple(t.shape), str(t.dtype)) for n, t in tensors.items() if not t.numel()}
        rank_parts.leave_part(partial, writer, rank_parts.part_of(rank_parts.tensors_of(files, empty), done, objects))
    parts = rank_parts.complete_parts(partial, range(number * each, (number + 1) * each))
    return finish(partial, path, each, save_id, about or About(), parts, (number, nodes) if node else None)


def recommit(path: Path, change: Callable[[Manifest], Manifest]) -> None:
    """Commit a checkpoint anew with another manifest, as a faulty writer would."""
    changed = change(commits.read_manifest(path))
    (path / commits.MARKER).unlink()
    (path / commits.MANIFEST).unlink()
    path.rename(path.with_name(".again"))
    commits.commit(path.with_name(".again"), path, changed)


def flip(file: Path, at: int, bit: int = 0) -> None:
    """Turn over one bit of a file."""
    with file.open("r+b") as stream:
        stream.seek(at)
        byte = stream.read(1)[0]
        stream.seek(at)
        stream.write(bytes([byte ^ (1 << bit)]))
