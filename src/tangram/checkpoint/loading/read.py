"""Read wanted regions from a checkpoint: every needed block once, proved before a byte of it is used.

    plan and proof of coverage -> threads: read a block, compare its checksum, copy from it -> done

A thread does all three for one block while another waits for the disk, so disk, checksum and copies overlap; memory is
a block for each thread, however large the model is. With `peers` the ranks of a node read each block once for all of
them (`exchange`). What fails, fails before the elements of a damaged block are written; those of others may be.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from tangram.checkpoint.loading.block_source import MEMORY, DamagedError, read_blocks
from tangram.checkpoint.loading.exchange import read_together
from tangram.checkpoint.loading.scatter import Want, block_copies
from tangram.checkpoint.store.manifest import DTYPES, Manifest, StoredTensor
from tangram.errors import UserError
from tangram.layout import Region
from tangram.relayout import TensorSpec
from tangram.relayout.exchange.peers import Peers

__all__ = ["MEMORY", "DamagedError", "Want", "read_wants", "tensor"]


def read_wants(
    path: Path,
    manifest: Manifest,
    wants: Sequence[Want],
    *,
    peers: Peers | None = None,
    memory: int = MEMORY,
    cast: bool = False,
) -> None:
    """Fill the memory of all wants from the checkpoint in the folder `path`, whose manifest is `manifest`.

    `peers`: collective over them; without, this process reads by itself. `memory`: bytes to read through; a block is
    the least. `cast`: memory may have another dtype than the stored one. Raises UserError before any byte changes where
    a want does not fit the manifest, and DamagedError, which names tensor and file, for what is not as it was written.
    """
    if peers is None or peers.size == 1:
        read_blocks(path, manifest, block_copies(manifest, wants, cast=cast), memory)
    else:
        read_together(path, manifest, lambda: block_copies(manifest, wants, cast=cast), peers, memory)


def tensor(path: Path, manifest: Manifest, name: str, region: Region | None = None) -> Tensor:
    """A stored tensor, or a region of it (flat where it is no grid). Raises as `read_wants` does."""
    if name not in manifest.tensors:
        raise UserError(f'the checkpoint "{path}" has no tensor {name}')
    spec = manifest.tensors[name].spec
    wanted = Region.full(spec.shape) if region is None else region
    shape = wanted.local_shape if wanted.local_shape is not None else (wanted.size,)
    shape = spec.shape if region is None else shape
    into = torch.empty(shape, dtype=getattr(torch, spec.dtype))
    read_wants(path, manifest, [Want(name, wanted, into)])
    return into


@dataclass(frozen=True)
class ElementSpan:
    """Elements `start <= i < stop` of a tensor in row-major order."""

    name: str
    start: int
    stop: int


def in_file_order(tensors: Iterable[StoredTensor]) -> list[StoredTensor]:
    """By the first byte of the first piece, so that reading them in turn reads each file from its beginning."""
    return sorted(tensors, key=lambda t: min(((p.file, p.offset) for p in t.pieces), default=("", 0)))


def spans(spec: TensorSpec, name: str, nbytes: int) -> Iterator[ElementSpan]:
    """All elements of a tensor, in parts of so many bytes."""
    size = math.prod(spec.shape)
    step = max(1, nbytes // DTYPES[spec.dtype])
    return (ElementSpan(name, start, min(start + step, size)) for start in range(0, size, step))


def batches(tensors: Iterable[StoredTensor], nbytes: int) -> Iterator[list[ElementSpan]]:
    """All elements of the tensors, in their order, in lists of at most so many bytes."""
    batch: list[ElementSpan] = []
    room = nbytes
    for tensor in tensors:
        itemsize, size = tensor.itemsize, math.prod(tensor.spec.shape)
        start = 0
        while start < size:
            if room < itemsize:
                yield batch
                batch, room = [], max(nbytes, itemsize)
            stop = min(size, start + room // itemsize)
            batch.append(ElementSpan(tensor.name, start, stop))
            room -= (stop - start) * itemsize
            start = stop
    if batch:
        yield batch


def read_spans(path: Path, manifest: Manifest, wanted: Sequence[ElementSpan]) -> list[Tensor]:
    """The elements of each span, as one dim, every byte proved by its block's checksum. Raises as `read_wants` does."""
    wants: list[Want] = []
    for span in wanted:
        spec = manifest.tensors[span.name].spec
        into = torch.empty(span.stop - span.start, dtype=getattr(torch, spec.dtype))
        wants.append(Want(span.name, Region.flat(spec.shape, span.start, span.stop), into))
    read_wants(path, manifest, wants)
    return [want.into for want in wants]
