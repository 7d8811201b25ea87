"""The buffers that an executor reads and writes: looked at before the first byte moves, then seen as strided blocks.

A buffer is a torch tensor or a numpy array with the local shape of its piece (or flat, with as many elements) and may
be any view: its own strides are used, never the order of its storage.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from tangram.layout.syntax import Option
from tangram.relayout.copies.lower import StridedBlock, View, view
from tangram.relayout.copies.pieces import Piece
from tangram.relayout.mapping.bind import BoundMapping
from tangram.relayout.mapping.cells import CellPart
from tangram.relayout.mapping.codecs import Codec, arithmetic, fill_value
from tangram.relayout.mapping.errors import RelayoutError
from tangram.relayout.mapping.names import Tensors

Key = tuple[Hashable, str]
Buffers = Mapping[Any, Any] | Callable[[Hashable, str], Any]
"""Tensors or arrays by `(place, real name)`, or a function of both."""


@dataclass(frozen=True)
class Side:
    """The buffers of one side as torch tensors of their pieces' local shapes, looked at once each."""

    tensors: Tensors
    buffers: Buffers
    written: bool
    ready: dict[Key, Tensor]

    def view(self, part: CellPart, piece: Piece) -> View:
        """How a part lies in the buffers of a piece."""
        return view(part, piece.region, self.tensors.families[piece.tensor])

    def block(self, at: View, piece: Piece, name: str, extents: tuple[int, ...], block: StridedBlock) -> Tensor:
        """A block as a strided view of its buffer, one dim per factor."""
        t = self.ready.get((piece.place, name))
        if t is None:
            t = self.ready[piece.place, name] = self._look(piece.place, name, at)
        return strided(t, extents, block)

    def _look(self, place: Hashable, name: str, at: View) -> Tensor:
        what = f"{name} at {place!r}"
        raw = self._get(place, name, what)
        t = _as_tensor(raw, what, self.written)
        dtype, shape = at.family.spec.dtype, at.local_shape
        if str(t.dtype).removeprefix("torch.") != dtype:
            raise RelayoutError(f"{what} has dtype {t.dtype}, but the mapping says {dtype}; name the change with cast=")
        if tuple(t.shape) != shape:
            if t.ndim != 1 or t.numel() != math.prod(shape):
                raise RelayoutError(f"{what} has shape {list(t.shape)}, but its piece holds {list(shape)}")
            t = t.view(shape)
        if self.written and _overlaps_itself(t):
            raise RelayoutError(f"{what} is a view in which elements share memory; it cannot be written")
        return t

    def _get(self, place: Hashable, name: str, what: str) -> Any:
        if callable(self.buffers):
            return self.buffers(place, name)
        if (place, name) not in self.buffers:
            raise RelayoutError(f"there is no buffer for {what}")
        return self.buffers[place, name]


def strided(t: Tensor, extents: tuple[int, ...], block: StridedBlock) -> Tensor:
    """A block as a view of its tensor, one dim per factor."""
    offset = t.storage_offset() + sum(b * st for b, st in zip(block.base, t.stride(), strict=True))
    strides = [t.stride(d) * step if d >= 0 else 0 for d, step in zip(block.dims, block.steps, strict=True)]
    return t.as_strided(extents, strides, offset)


def _as_tensor(raw: Any, what: str, written: bool) -> Tensor:
    if hasattr(raw, "to_local"):
        raise RelayoutError(f"{what} is a DTensor; pass its local tensor")
    if isinstance(raw, np.ndarray | np.generic):
        array = np.asarray(cast("Any", raw))
        if written and isinstance(raw, np.generic):
            raise RelayoutError(f"{what} is a numpy scalar, which cannot be written; pass an array of shape ()")
        if written and not array.flags.writeable:
            raise RelayoutError(f"{what} is read-only")
        with warnings.catch_warnings():  # torch warns of read-only arrays; this one is only read
            warnings.simplefilter("ignore", UserWarning)
            try:
                return torch.from_numpy(array)
            except (TypeError, ValueError) as error:
                raise RelayoutError(f"{what}: {error}") from None
    if not isinstance(raw, Tensor):
        raise RelayoutError(f"{what} is a {type(raw).__name__}, not a torch tensor or a numpy array")
    if raw.layout != torch.strided:
        raise RelayoutError(f"{what} is a {str(raw.layout).removeprefix('torch.')} tensor; pass a dense one")
    if raw.is_meta:
        raise RelayoutError(f"{what} is on the meta device and has no values")
    t = raw.detach()
    return t if written else t.resolve_conj().resolve_neg()


def _overlaps_itself(t: Tensor) -> bool:
    reach = 1
    for stride, n in sorted((t.stride(i), t.shape[i]) for i in range(t.ndim) if t.shape[i] > 1):
        if stride < reach:
            return True
        reach += stride * (n - 1)
    return False


def check_fill(options: tuple[Option, ...], target: Tensor, what: str) -> None:
    """Refuse a value of `fill` that the target's dtype does not have."""
    value = fill_value(options)
    try:
        torch.full((2,), value, dtype=target.dtype)  # of one element torch would make inf of what is too large
    except RuntimeError:
        dtype = str(target.dtype).removeprefix("torch.")
        raise RelayoutError(f"{what}: fill={value:g} is no value of {dtype}") from None


def coded(x: Tensor, options: tuple[Option, ...], codecs: Mapping[str, Codec]) -> Tensor:
    """Elements after the codecs of their cell."""
    for name, value in arithmetic(options):
        x = codecs[name].apply(x, value)
    return x


def bits(x: Tensor) -> Tensor:
    """The same memory as integers, so that NaN equals NaN and 0.0 differs from -0.0."""
    x = torch.view_as_real(x) if x.is_complex() else x
    return x.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()])


def refuse_shared(bound: BoundMapping, sources: Side, targets: Side) -> None:
    """Refuse a target that shares memory with a source, or with another target that it is not tied to.

    Looks at the whole span of each buffer, so interleaved views of one tensor are refused too: copy one of them first.
    """
    spans = sorted(
        [(*_span(t), 0, key) for key, t in sources.ready.items() if t.numel()]
        + [(*_span(t), 1, key) for key, t in targets.ready.items() if t.numel()],
        key=lambda s: s[:4],
    )
    last: dict[int, tuple[str, int, int, int, Key]] = {}
    for span in spans:
        device, start, stop, side, key = span
        for other in last.values():
            if other[0] == device and start < other[2] and (side or other[3]) and not _same_tie(bound, key, other[4]):
                raise RelayoutError(
                    f"{key[1]} at {key[0]!r} and {other[4][1]} at {other[4][0]!r} share memory: "
                    "copy one of them first, or tie them with `=` when they are one tensor"
                )
        if side not in last or last[side][0] != device or last[side][2] < stop:
            last[side] = span


def _same_tie(bound: BoundMapping, x: Key, y: Key) -> bool:
    tied = bound.tied
    if not tied or any(name not in bound.target for name in (x[1], y[1])):
        return False
    (a, i), (b, j) = [bound.target.locate(name) for name in (x[1], y[1])]
    alike = x[0] == y[0] and a != b and (i == j or None in (i, j))  # other members and places hold other elements
    return alike and a.name in tied and tied[a.name] == tied.get(b.name)


def _span(t: Tensor) -> tuple[str, int, int]:
    reach = sum((n - 1) * st for n, st in zip(t.shape, t.stride(), strict=True)) + 1
    return str(t.device), t.data_ptr(), t.data_ptr() + reach * t.element_size()
