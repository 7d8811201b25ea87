"""What is read where, and where it goes: wanted regions as strided moves from files into memory.

`relayout` plans the copies from stored pieces to wanted ones and proves that each wanted element comes exactly once. A
copy is lowered to moves, as for memory; only that the source is a place in a file. Bytes arrive in blocks, and a block
has whole elements, so of each move the part that lies in a block is a few smaller moves: along each dim the whole rows
together, and the cut ones at both ends.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tangram.checkpoint.store.digest import Bytes
from tangram.checkpoint.store.manifest import BLOCK, Manifest, StoredTensor
from tangram.errors import UserError
from tangram.layout import Region, intervals
from tangram.layout.intervals import IntSet
from tangram.relayout import BoundMapping, Copy, CoverageError, Piece, PieceIndex, bind, plan
from tangram.relayout.copies.lower import StridedBlock, View, blocks, view

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}
"""A type that numpy has, by the bytes of an element: only bits are moved."""
_ARRAYS = {1: np.uint8, 2: np.int16, 4: np.int32, 8: np.int64, 16: np.complex128}


@dataclass(frozen=True, eq=False)
class Want:
    """Elements of a stored tensor that are wanted in memory."""

    tensor: str
    """Its name in the manifest."""
    region: Region
    into: Tensor
    """Where they go: of the region's local shape, or with one dim; of any strides, on any device."""


Item = tuple[str, int]
"""A block: its file and its number."""
Dims = tuple[tuple[int, int, int], ...]
"""Of a move: (elements, step in bytes of the file, step in elements of the memory), outermost first."""


@dataclass(frozen=True, eq=False)
class BlockCopy:
    """A strided block of elements from a file into memory."""

    start: int
    """The byte of the file where the first of them lies."""
    dims: Dims
    target: "RequestMemory"
    at: int
    """The place of the first of them in the target's storage."""


class RequestMemory:
    """The memory of one want."""

    def __init__(self, want: Want, stored: StoredTensor, cast: bool) -> None:
        self.name = want.tensor
        self.itemsize = stored.itemsize
        self._dtype: torch.dtype = getattr(torch, stored.spec.dtype)
        shape = want.region.local_shape if want.region.local_shape is not None else (want.region.size,)
        into = want.into.detach()
        self._refuse(into, shape, want, stored, cast)
        self.tensor = into.view(shape) if tuple(into.shape) != shape and want.region else into
        self._array = _ARRAYS[self.itemsize]
        plain = into.device.type == "cpu" and into.dtype == self._dtype and not into.is_conj() and not into.is_neg()
        self._bits = self.tensor.view(_BITS[self.itemsize]) if plain else None

    def _refuse(self, into: Tensor, shape: tuple[int, ...], want: Want, stored: StoredTensor, cast: bool) -> None:
        if into.is_meta:
            raise UserError(
                f"{self.name} is to be read into a tensor on meta, which has no memory: call model.to_empty(device=) "
                "before, and set the buffers that no checkpoint has, as RoPE's frequencies"
            )
        if into.layout != torch.strided:
            raise UserError(f"{self.name} cannot be read into a {into.layout} tensor: give a dense one")
        if into.dtype != self._dtype and not cast:
            own = str(into.dtype).removeprefix("torch.")
            raise UserError(
                f"{self.name} is stored as {stored.spec.dtype} but wanted as {own}: say cast=True to convert"
            )
        fits = tuple(into.shape) in (shape, (want.region.size,)) or not want.region
        if into.numel() != want.region.size or not fits:
            raise UserError(f"{self.name}: {list(shape)} is wanted of it, into memory of shape {list(into.shape)}")
        if any(n > 1 and step == 0 for n, step in zip(into.shape, into.stride(), strict=True)):
            raise UserError(f"{self.name}: the memory that it is wanted in has elements that share memory")
        if not want.region.within(stored.spec.shape):
            raise UserError(f"{self.name} has shape {list(stored.spec.shape)}; {want.region} is outside of it")

    def put(self, data: Bytes, first: int, dims: Dims, at: int) -> None:
        """Take elements that lie in `data`, the first of them at the byte `first`, into the place `at`."""
        shape = tuple([n for n, _, _ in dims])
        source: Any = np.ndarray(shape, self._array, data.data, first, tuple([step for _, step, _ in dims]))
        strides = [step for _, _, step in dims]
        if self._bits is not None:
            self._bits.as_strided(shape, strides, at).numpy()[...] = source
        else:
            cast_into(self.name, torch.from_numpy(source).view(self._dtype), self.tensor.as_strided(shape, strides, at))


@dataclass(frozen=True, eq=False)
class BlockCopies:
    """All that is read of a checkpoint: for each file and each block of it that is needed, what goes where."""

    by_block: dict[str, dict[int, list[BlockCopy]]] = field(default_factory=dict[str, dict[int, list[BlockCopy]]])

    @property
    def items(self) -> list[Item]:
        """The blocks that are needed, in the order of their places."""
        return [(file, block) for file, table in sorted(self.by_block.items()) for block in sorted(table)]

    @property
    def blocks(self) -> dict[str, IntSet]:
        """The same, as sets by file."""
        return {file: intervals.normal((b, b + 1) for b in table) for file, table in self.by_block.items()}

    def has(self, item: Item) -> bool:
        """Whether something of a block is wanted."""
        return item[1] in self.by_block.get(item[0], ())

    def names(self, file: str, block: int | None) -> list[str]:
        """The tensors that are wanted of a block, or of a whole file."""
        table = self.by_block.get(file, {})
        some = table.values() if block is None else [table.get(block, [])]
        return list(dict.fromkeys(move.target.name for moves in some for move in moves))

    def put(self, file: str, block: int, data: Bytes) -> None:
        """Take from a block what is wanted of it."""
        start = block * BLOCK
        for move in self.by_block.get(file, {}).get(block, ()):
            itemsize = move.target.itemsize
            for first, dims, at in cut(move.start, move.dims, move.at, itemsize, start, start + len(data)):
                move.target.put(data, first - start, dims, at)


def block_copies(manifest: Manifest, wants: Sequence[Want], *, cast: bool = False) -> BlockCopies:
    """The moves that fill what is wanted. Nothing is read or written.

    Raises UserError where a tensor is not in the manifest or does not fit, or its coverage cannot be proved.
    """
    for want in wants:
        if want.tensor not in manifest.tensors:
            raise UserError(f"the checkpoint has no tensor {want.tensor}")
    targets = [RequestMemory(want, manifest.tensors[want.tensor], cast) for want in wants]
    shapes = {manifest.tensors[want.tensor].spec: f"shape {i}" for i, want in enumerate(wants) if want.region}
    specs = {name: spec for spec, name in shapes.items()}  # an identity knows shapes only; most tensors share theirs
    if not specs:
        return BlockCopies()
    bound = bind("{name*} -> {name*}", specs, specs)
    holders: dict[str, PieceIndex] = {}
    found = BlockCopies()
    for want, target in zip(wants, targets, strict=True):
        if want.region:
            stored = manifest.tensors[want.tensor]
            name = shapes[stored.spec]
            if want.tensor not in holders:
                pieces = (Piece(i, name, piece.region) for i, piece in enumerate(stored.pieces))
                holders[want.tensor] = PieceIndex(tuple(pieces), bound.source)
            try:
                copies = plan(bound, holders[want.tensor], [Piece("here", name, want.region)]).copies
            except CoverageError:
                raise UserError(f"{want.tensor}: the stored pieces do not have each element of it once") from None
            for copy in copies:
                _add(found, copy, stored, target, bound)
    return found


def _add(found: BlockCopies, copy: Copy, stored: StoredTensor, target: RequestMemory, bound: BoundMapping) -> None:
    """Add the moves of a copy to those of all blocks that it touches."""
    source, part = copy.source, copy.cell.source
    if source is None or part is None or not isinstance(source.place, int):
        raise TypeError("an identity copies from pieces by their numbers")
    piece = stored.pieces[source.place]
    have = view(part, source.region, bound.source.families[source.tensor])
    want = view(copy.cell.target, copy.target.region, bound.target.families[copy.target.tensor])
    table = found.by_block.setdefault(piece.file, {})
    for box in copy.boxes:
        for _, _, extents, a, b in blocks(have, want, box):
            move = _move(target, piece.offset, have, extents, a, b)
            for block in _touched(move.start, move.dims, target.itemsize):
                table.setdefault(block, []).append(move)


def _move(
    target: RequestMemory, offset: int, have: View, extents: tuple[int, ...], a: StridedBlock, b: StridedBlock
) -> BlockCopy:
    strides = [math.prod(have.local_shape[i + 1 :]) * target.itemsize for i in range(len(have.local_shape))]
    start = offset + sum(base * step for base, step in zip(a.base, strides, strict=True))
    tensor = target.tensor
    at = int(tensor.storage_offset()) + sum(base * step for base, step in zip(b.base, tensor.stride(), strict=True))
    rows = [
        (n, strides[i] * p if i >= 0 else 0, tensor.stride(j) * q if j >= 0 else 0)
        for n, i, p, j, q in zip(extents, a.dims, a.steps, b.dims, b.steps, strict=True)
    ]
    return BlockCopy(start, _joined(rows), target, at)


def _joined(rows: Sequence[tuple[int, int, int]]) -> Dims:
    """Dims of one element left out, and those that lie without gaps on both sides made one."""
    out: list[tuple[int, int, int]] = []
    for n, step, place in rows:
        if n == 1:
            continue
        if out and out[-1][1] == n * step and out[-1][2] == n * place:
            out[-1] = (out[-1][0] * n, step, place)
        else:
            out.append((n, step, place))
    return tuple(out)


def _reach(dims: Dims, itemsize: int) -> int:
    """The bytes of the file from the first element to the end of the last."""
    return sum((n - 1) * step for n, step, _ in dims) + itemsize


def _touched(start: int, dims: Dims, itemsize: int) -> Iterator[int]:
    """The blocks that have something of a move, each once, in order."""
    last = -1
    for first, stop in _stretches(start, dims, itemsize):
        for block in range(max(last + 1, first // BLOCK), (stop - 1) // BLOCK + 1):
            yield block
            last = block


def _stretches(start: int, dims: Dims, itemsize: int) -> Iterator[tuple[int, int]]:
    """A move's bytes as stretches of the file whose gaps are smaller than a block, so that no block lies in one."""
    inner = [step - _reach(dims[i + 1 :], itemsize) for i, (_, step, _) in enumerate(dims)]
    if max(inner, default=0) < BLOCK:
        yield start, start + _reach(dims, itemsize)
        return
    n, step, _ = dims[0]
    for i in range(n):
        yield from _stretches(start + i * step, dims[1:], itemsize)


def cut(start: int, dims: Dims, at: int, itemsize: int, low: int, high: int) -> Iterator[tuple[int, Dims, int]]:
    """The elements of a move that lie in the bytes `low <= b < high` of the file: (first byte, dims, place)."""
    stop = start + _reach(dims, itemsize)
    if stop <= low or start >= high:
        return
    if low <= start and stop <= high:
        yield start, dims, at
        return
    n, step, place = dims[0]  # there is one: an element does not lie across a border
    inner = _reach(dims[1:], itemsize)
    begin = max(0, -(-(low - start) // step))  # the first row that begins inside
    end = min(n, (high - start - inner) // step + 1)  # the row after the last that ends inside
    ahead = max(0, (low - start - inner) // step + 1)  # the first row that ends after low
    behind = min(n, -(-(high - start) // step))  # the row after the last that begins before high
    for row in range(ahead, min(begin, behind)):
        yield from cut(start + row * step, dims[1:], at + row * place, itemsize, low, high)
    if begin < end:
        yield start + begin * step, ((end - begin, step, place), *dims[1:]), at + begin * place
    for row in range(max(begin, end, ahead), behind):
        yield from cut(start + row * step, dims[1:], at + row * place, itemsize, low, high)


def cast_into(name: str, values: Tensor, out: Tensor) -> None:
    """Copy values of a tensor into memory of its shape and any type.

    Raises UserError for numbers beyond the largest of that type, which would become that or infinite: rounding was
    asked for, and no more.
    """
    out.copy_(values)
    own, was = (str(one.dtype).removeprefix("torch.") for one in (out, values))
    if own != was and is_float(own) and is_float(was) and not holds(own, was):
        limit, infinite = _limit(out.dtype)
        # torch rounds twice on its way from float64 to half precision.
        sizes = (values.float() if values.itemsize == 1 or out.itemsize < 4 else values).abs()
        beyond = sizes >= limit
        if lost := int((beyond & sizes.isfinite() if infinite else beyond).sum()):
            raise UserError(f"{name}: {lost:,} of its numbers are too large for {own}: take a wider type, as bfloat16")


@lru_cache
def _limit(dtype: torch.dtype) -> tuple[float, bool]:
    """From which size on numbers are rounded beyond the largest of a type, and whether it has infinity."""
    kind = torch.finfo(dtype)
    half_a_step = kind.eps / 2 * 2.0 ** math.floor(math.log2(kind.max))
    return kind.max + half_a_step, bool(torch.tensor(math.inf).to(dtype).float().isinf())


@lru_cache(maxsize=256)
def holds(wide: str, narrow: str) -> bool:
    """Whether a floating-point type has every number of another: tried with all of them where they are few.

    `torch.finfo` does not tell: its eps of float8_e5m2fnuz is another type's.
    """
    large, small = getattr(torch, wide), getattr(torch, narrow)
    if small.itemsize > 2:
        return large.itemsize >= small.itemsize
    bits = torch.arange(256**small.itemsize).to(torch.uint8 if small.itemsize == 1 else torch.uint16)
    numbers = bits.view(small).double()
    numbers = numbers[~numbers.isnan()]
    return torch.equal(numbers.view(torch.int64), numbers.to(large).double().view(torch.int64))  # -0 is not 0


def is_float(dtype: str) -> bool:
    """Whether a type is one of floating-point numbers."""
    return getattr(torch, dtype).is_floating_point
