"""The memory-to-memory executor: a plan's copies on torch tensors and numpy arrays, without intermediate copies.

Every block is one strided copy from one buffer into another. A buffer has the local shape of its piece (or is flat
with as many elements) and may be any view: its own strides are used, never the order of its storage.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from tangram.relayout.bind import Tensors
from tangram.relayout.cells import Part
from tangram.relayout.codecs import Codec, arithmetic, fill_value
from tangram.relayout.errors import RelayoutError
from tangram.relayout.lower import NOWHERE, Block, View, blocks, view
from tangram.relayout.pieces import Piece
from tangram.relayout.plan import Check, Copy, Plan

Key = tuple[Hashable, str]
Buffers = Mapping[Any, Any] | Callable[[Hashable, str], Any]
"""Tensors or arrays by `(place, real name)`, or a function of both."""


def execute(plan: Plan, source: Buffers, target: Buffers) -> None:
    """Move the bytes: write every wanted element of the target buffers.

    All buffers are looked at before the first byte moves: RelayoutError when one is missing, has another shape or dtype
    than its piece, cannot be written, or shares memory with another that it must not. Tied copies are compared then
    too; when they differ, RelayoutError names them and nothing is written.
    """
    sources, targets = _Side(plan.bound.source, source, False, {}), _Side(plan.bound.target, target, True, {})
    moves = [move for copy in plan.copies for move in _moves(copy, sources, targets)]
    for check in plan.checks:
        _compare(check, sources)
    _refuse_shared(plan, sources, targets)
    for copy, source_block, target_block in moves:
        if source_block is None:
            target_block.fill_(fill_value(copy.cell.options))
        else:
            target_block.copy_(_coded(source_block, copy, plan.bound.codecs))


@dataclass(frozen=True)
class _Side:
    """The buffers of one side as torch tensors of their pieces' local shapes, looked at once each."""

    tensors: Tensors
    buffers: Buffers
    written: bool
    ready: dict[Key, Tensor]

    def view(self, part: Part, piece: Piece) -> View:
        return view(part, piece.region, self.tensors.families[piece.tensor])

    def block(self, at: View, piece: Piece, name: str, extents: tuple[int, ...], block: Block) -> Tensor:
        """A block as a strided view of its buffer, one dim per factor."""
        t = self.ready.get((piece.place, name))
        if t is None:
            t = self.ready[piece.place, name] = self._look(piece.place, name, at)
        offset = t.storage_offset() + sum(b * st for b, st in zip(block.base, t.stride(), strict=True))
        strides = [t.stride(d) * step if d >= 0 else 0 for d, step in zip(block.dims, block.steps, strict=True)]
        return t.as_strided(extents, strides, offset)

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


def _moves(copy: Copy, sources: _Side, targets: _Side) -> Iterator[tuple[Copy, Tensor | None, Tensor]]:
    to = targets.view(copy.cell.target, copy.target)
    if copy.source is None or copy.cell.source is None:
        for box in copy.boxes:
            for _, name, extents, _, block in blocks(NOWHERE, to, box):
                blank = targets.block(to, copy.target, name, extents, block)
                _check_fill(copy, blank, f"{name} at {copy.target.place!r}")
                yield copy, None, blank
        return
    have = sources.view(copy.cell.source, copy.source)
    for box in copy.boxes:
        for source_name, name, extents, a, b in blocks(have, to, box):
            read = sources.block(have, copy.source, source_name, extents, a)
            yield copy, read, targets.block(to, copy.target, name, extents, b)


def _check_fill(copy: Copy, target: Tensor, what: str) -> None:
    value = fill_value(copy.cell.options)
    try:
        torch.full((2,), value, dtype=target.dtype)  # of one element torch would make inf of what is too large
    except RuntimeError:
        dtype = str(target.dtype).removeprefix("torch.")
        raise RelayoutError(f"{what}: fill={value:g} is no value of {dtype}") from None


def _coded(x: Tensor, copy: Copy, codecs: Mapping[str, Codec]) -> Tensor:
    for name, value in arithmetic(copy.cell.options):
        x = codecs[name].apply(x, value)
    return x


# ---------------------------------------------------------------- tied copies and shared memory


def _compare(check: Check, sources: _Side) -> None:
    if check.cell.source is None:
        return
    a, b = sources.view(check.cell.source, check.source), sources.view(check.part, check.other)
    for box in check.boxes:
        for name_a, name_b, extents, block_a, block_b in blocks(a, b, box):
            x = _bits(sources.block(a, check.source, name_a, extents, block_a))
            y = _bits(sources.block(b, check.other, name_b, extents, block_b))
            if not torch.equal(x, y):
                n = int((x != y).sum())
                raise RelayoutError(
                    f"{name_a} at {check.source.place!r} and {name_b} at {check.other.place!r} are tied, "
                    f"but {n} of the {x.numel()} elements compared differ"
                )


def _bits(x: Tensor) -> Tensor:
    """The same memory as integers, so that NaN equals NaN and 0.0 differs from -0.0."""
    x = torch.view_as_real(x) if x.is_complex() else x
    return x.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()])


def _refuse_shared(plan: Plan, sources: _Side, targets: _Side) -> None:
    """Refuse a target that shares memory with a source, or with another target that it is not tied to.

    Looks at the whole span of each buffer, so interleaved views of one tensor are refused too: copy one of them first.
    """
    groups = [group for s in plan.bound.mapping.statements for group in s.target if len(group) > 1]
    tied = {t.name: i for i, group in enumerate(groups) for t in group}
    spans = sorted(
        [(*_span(t), 0, key) for key, t in sources.ready.items() if t.numel()]
        + [(*_span(t), 1, key) for key, t in targets.ready.items() if t.numel()],
        key=lambda s: s[:4],
    )
    last: dict[int, tuple[str, int, int, int, Key]] = {}
    for span in spans:
        device, start, stop, side, key = span
        for other in last.values():
            if (
                other[0] == device
                and start < other[2]
                and (side or other[3])
                and not _same_tie(tied, plan, key, other[4])
            ):
                raise RelayoutError(
                    f"{key[1]} at {key[0]!r} and {other[4][1]} at {other[4][0]!r} share memory: "
                    "copy one of them first, or tie them with `=` when they are one tensor"
                )
        if side not in last or last[side][0] != device or last[side][2] < stop:
            last[side] = span


def _same_tie(tied: Mapping[str, int], plan: Plan, x: Key, y: Key) -> bool:
    if not tied or any(name not in plan.bound.target for name in (x[1], y[1])):
        return False
    (a, i), (b, j) = [plan.bound.target.locate(name) for name in (x[1], y[1])]
    alike = x[0] == y[0] and a != b and (i == j or None in (i, j))  # other members and places hold other elements
    return alike and a.name in tied and tied[a.name] == tied.get(b.name)


def _span(t: Tensor) -> tuple[str, int, int]:
    reach = sum((n - 1) * st for n, st in zip(t.shape, t.stride(), strict=True)) + 1
    return str(t.device), t.data_ptr(), t.data_ptr() + reach * t.element_size()
