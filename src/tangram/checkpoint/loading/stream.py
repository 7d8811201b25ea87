"""A checkpoint's tensors in parts of bounded size, in the order in which they lie in its files.

What looks at more than fits in memory goes through here: parts of one tensor, or several small tensors together, are
read with one request, so that no block is read for each of the many tensors that lie in it.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from tangram.checkpoint.loading.read import Want, read_wants
from tangram.checkpoint.store.manifest import DTYPES, Manifest, StoredTensor
from tangram.layout import Region
from tangram.relayout import TensorSpec


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
