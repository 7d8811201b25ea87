"""A data file before it is written: its header, and where each piece comes to lie.

A rank writes one file for each section of the state (`model`, `optim` ...). In a file the pieces stand by the size of
their elements, largest first, so that every one begins at a multiple of it. The key of a piece is the tensor's name
where it is whole, so that other readers of safetensors find it, else name and region: `weight [0:8 0:4]`.
"""

import itertools
import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from tangram.checkpoint.store import digest, safetensors_header
from tangram.checkpoint.store.digest import Bytes, Sums
from tangram.checkpoint.store.manifest import DTYPES, Manifest
from tangram.errors import UserError
from tangram.layout import Region, intervals
from tangram.layout.region import stretch
from tangram.relayout import TensorSpec


@dataclass(frozen=True)
class Outgoing:
    """A piece that this rank writes."""

    name: str
    """Of the tensor, with its section in front."""
    spec: TensorSpec
    """Of the whole tensor."""
    region: Region
    """What the piece is of it; not empty."""
    layout: str = ""
    frozen: bool = False
    """Whether training leaves it as it is: such pieces have a file of their own, which saves share."""

    @property
    def itemsize(self) -> int:
        return DTYPES[self.spec.dtype]

    @cached_property
    def nbytes(self) -> int:
        return self.region.size * self.itemsize

    @property
    def section(self) -> str:
        """What stands before the first dot of the name."""
        return self.name.partition(".")[0]

    @property
    def key(self) -> str:
        """Its name in a file."""
        name = self.name.partition(".")[2] or self.name
        return name if self.region == Region.full(self.spec.shape) else f"{name} {self.region}"

    @property
    def shape(self) -> tuple[int, ...]:
        """Of its buffer; one dim where it is no grid."""
        if self.region == Region.full(self.spec.shape):  # also of a tensor without elements
            return self.spec.shape
        return self.region.local_shape if self.region.local_shape is not None else (self.region.size,)


@dataclass(frozen=True)
class PlacedPiece:
    """A piece and the byte of the file that it begins at."""

    piece: Outgoing
    offset: int

    @cached_property
    def stop(self) -> int:
        """The byte after its last."""
        return self.offset + self.piece.nbytes


@dataclass(frozen=True)
class Image:
    """One file: its name, header and pieces in the order of their places."""

    name: str
    head: bytes
    placed: tuple[PlacedPiece, ...]
    size: int

    @cached_property
    def offsets(self) -> list[int]:
        """Of the pieces, ascending."""
        return [placed.offset for placed in self.placed]


def images(pieces: Iterable[Outgoing], writer: int, writers: int, save_id: str) -> list[Image]:
    """The files of one rank, one for each section and one for what is frozen of it.

    Raises UserError for a type that no file can hold.
    """
    sections: dict[str, list[Outgoing]] = {}
    for piece in pieces:
        if piece.spec.dtype not in DTYPES:
            raise UserError(f"{piece.name} has the dtype {piece.spec.dtype}, which a checkpoint cannot hold")
        sections.setdefault(f"{piece.section}-frozen" if piece.frozen else piece.section, []).append(piece)
    return [
        _image(f"{section}-{writer + 1:05d}-of-{writers:05d}.safetensors", some, save_id)
        for section, some in sections.items()
    ]


def _image(name: str, pieces: Sequence[Outgoing], save_id: str) -> Image:
    ordered = sorted(pieces, key=lambda piece: -piece.itemsize)
    rows = [(piece.key, piece.spec.dtype, piece.shape) for piece in ordered]
    head, slots = safetensors_header.build(rows, {"format": "pt", "tangram_save": save_id})
    placed = tuple(PlacedPiece(piece, slot.offset) for piece, slot in zip(ordered, slots, strict=True))
    return Image(name, head, placed, placed[-1].stop if placed else len(head))


def stored_images(manifest: Manifest) -> dict[str, Image]:
    """The files of a checkpoint, by name, without their headers."""
    placed: dict[str, list[PlacedPiece]] = {name: [] for name in manifest.files}
    for name, tensor in manifest.tensors.items():
        for piece in tensor.pieces:
            placed[piece.file].append(PlacedPiece(Outgoing(name, tensor.spec, piece.region), piece.offset))
    return {
        name: Image(name, b"", tuple(sorted(some, key=lambda one: one.offset)), manifest.files[name].size)
        for name, some in placed.items()
    }


# ---------------------------------------------------------------- the bytes between two offsets


def parts(image: Image, start: int, stop: int) -> Iterator[tuple[PlacedPiece, int, int]]:
    """The pieces that have bytes between two offsets of the file, and those bytes' offsets in the piece."""
    for _, placed, first, last in _numbered(image, start, stop):
        yield placed, first, last


def _numbered(image: Image, start: int, stop: int) -> Iterator[tuple[int, PlacedPiece, int, int]]:
    """The same with each piece's number. A file may have a million pieces, and is looked at block by block."""
    begin = max(0, bisect_right(image.offsets, start) - 1)
    for i in range(begin, bisect_left(image.offsets, stop)):
        placed = image.placed[i]
        first, last = max(start, placed.offset), min(stop, placed.stop)
        if first < last:
            yield i, placed, first - placed.offset, last - placed.offset


def fill(image: Image, values: Sequence[Tensor], start: int, out: Bytes) -> None:
    """Fill `out` with the bytes of the file from `start` on. `values`: the elements of each piece, in their order.

    A block goes through this at a time, so that what is on a device, or lies in strides, needs no second copy.
    """
    head = image.head[start : start + len(out)]
    out[: len(head)] = np.frombuffer(head, np.uint8)
    for i, placed, first, last in _numbered(image, start, start + len(out)):
        begin = placed.offset + first - start
        _copy(values[i], placed.piece.itemsize, first, out[begin : begin + last - first])


def _copy(values: Tensor, itemsize: int, first: int, out: Bytes) -> None:
    """The bytes of a tensor's elements in row-major order, from the byte `first` on."""
    into = torch.from_numpy(out)
    as_it_is = not (values.is_conj() or values.is_neg())  # else its elements are not the bits in memory
    if values.is_contiguous() and values.device.type == "cpu" and as_it_is:
        into.copy_(values.reshape(-1).view(torch.uint8)[first : first + len(out)])
        return
    sets = tuple(intervals.span(0, n) for n in values.shape)
    at = 0
    for box in stretch(sets, first // itemsize, (first + len(out)) // itemsize):
        block = values
        for dim, ((begin, end),) in enumerate(box):
            block = block.narrow(dim, begin, end - begin)
        into[at : at + block.numel() * itemsize].view(values.dtype).view(block.shape).copy_(block)
        at += block.numel() * itemsize


def add_sums(image: Image, start: int, data: Bytes, found: dict[str, Sums]) -> None:
    """Add to each tensor's sums what the file's bytes from `start` on have of it."""
    for alike, group in itertools.groupby(parts(image, start, start + len(data)), _alike):
        some = list(group)
        if alike is not None and some[-1][0].stop - some[0][0].offset == alike.nbytes * len(some):
            begin = some[0][0].offset - start
            rows = data[begin : begin + alike.nbytes * len(some)].reshape(len(some), -1)
            for (placed, _, _), sums in zip(some, digest.sums_of_each(rows), strict=True):
                found[placed.piece.name] = digest.add(found.get(placed.piece.name, digest.NOTHING), sums)
            continue
        for placed, first, last in some:
            begin = placed.offset + first - start
            add_piece(placed.piece, first, data[begin : begin + last - first], found)


class _Alike(NamedTuple):
    """What whole tensors have in common whose sums are taken together: there may be a million of one element."""

    shape: tuple[int, ...]
    nbytes: int


def _alike(part: tuple[PlacedPiece, int, int]) -> _Alike | None:
    piece, first, last = part[0].piece, part[1], part[2]
    shape, itemsize = piece.spec.shape, piece.itemsize
    if first or last != piece.nbytes or not digest.is_one_block(shape, itemsize):
        return None
    return _Alike(shape, last) if last == math.prod(shape) * itemsize else None


def add_piece(piece: Outgoing, first: int, data: Bytes, found: dict[str, Sums]) -> None:
    """Add the sums of a piece's bytes from `first` on to its tensor's."""
    shape, itemsize = piece.spec.shape, piece.itemsize
    start, stop = first // itemsize, (first + len(data)) // itemsize
    if len(piece.region.boxes) == 1:
        some = digest.sums(shape, itemsize, piece.region.boxes[0], start, stop, data)
        found[piece.name] = digest.add(found.get(piece.name, digest.NOTHING), some)
        return
    whole = tuple(intervals.span(0, n) for n in shape)
    for at, low, high in _runs(piece.region, shape):
        begin, end = max(start, at), min(stop, at + high - low)
        if begin < end:
            part = data[(begin - start) * itemsize : (end - start) * itemsize]
            some = digest.sums(shape, itemsize, whole, low + begin - at, low + end - at, part)
            found[piece.name] = digest.add(found.get(piece.name, digest.NOTHING), some)


@lru_cache(1 << 10)
def _runs(region: Region, shape: tuple[int, ...]) -> tuple[tuple[int, int, int], ...]:
    """What is no grid, as runs of the flattened tensor: (place in the buffer, start, stop)."""
    runs = region.runs(shape)
    places = itertools.accumulate((b - a for a, b in runs), initial=0)
    return tuple((at, a, b) for at, (a, b) in zip(places, runs, strict=False))
