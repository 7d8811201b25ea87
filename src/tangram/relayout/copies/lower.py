"""Lowering: boxes over factors as strided blocks of two buffers, which any memory can copy.

A buffer holds a region in row-major order, so its index along a dim is the rank of the tensor's index among those held.
Where that is affine in the factors over a block, the block is one strided copy. It nearly always is; where it is not (a
ragged index map), the block is halved until it is.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from tangram.layout import Region, intervals
from tangram.layout.intervals import IntSet
from tangram.layout.region import Box
from tangram.relayout.mapping.cells import CellPart, DimIndex
from tangram.relayout.mapping.errors import RelayoutError
from tangram.relayout.mapping.names import TensorFamily, TensorSpec

Range = tuple[int, int]
Grid = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True)
class _Axis:
    """One dim of a buffer: what is held there, and the tensor's index as `const + sum(stride * factor)`."""

    indices: IntSet
    const: int
    slots: tuple[int, ...]
    strides: tuple[int, ...]


@dataclass(frozen=True)
class View:
    """A part of a cell in the buffers of one piece: family indices first (they choose the buffer), then its dims."""

    family: TensorFamily
    index: tuple[_Axis, ...]
    axes: tuple[_Axis, ...]
    local_shape: tuple[int, ...]

    @property
    def name_slots(self) -> frozenset[int]:
        """The factors that choose a member of the family."""
        return frozenset(slot for axis in self.index for slot in axis.slots)

    def member(self, ranges: Sequence[Range]) -> str:
        """The real name, given ranges in which every name factor has one value."""
        at = [a.const + sum(st * ranges[k][0] for k, st in zip(a.slots, a.strides, strict=True)) for a in self.index]
        return self.family.member(tuple(at))


NOWHERE = View(TensorFamily("", ("",), (), TensorSpec(())), (), (), ())
"""The other side of elements that are created: no buffer, no factors."""


def packed(box: Box) -> View:
    """The elements of a box as a buffer of their own, row-major over the cell's factors."""
    axes = tuple(_Axis(s, 0, (k,), (1,)) for k, s in enumerate(box))
    return View(NOWHERE.family, (), axes, tuple(map(intervals.size, box)))


@lru_cache(1 << 12)
def view(part: CellPart, region: Region, family: TensorFamily) -> View:
    """How a part lies in buffers that hold `region`. Raises RelayoutError where members hold different regions."""
    n = family.family_dims
    leads = {box[:n] for box in region.boxes}
    if len(leads) > 1:
        raise RelayoutError(f"{family.name}: the members hold different regions; give each its own piece")
    axes = [_axis(d, s, slots) for d, s, slots in zip(part.dims, region.boxes[0], part.slots, strict=True)]
    if len(region.boxes) == 1:
        shape = tuple(intervals.size(a.indices) for a in axes[n:])
        return View(family, tuple(axes[:n]), tuple(axes[n:]), shape)
    inner = Region.of([box[n:] for box in region.boxes])
    flat = _flattened(axes[n:], family.member_shape, inner.runs(family.member_shape))
    return View(family, tuple(axes[:n]), (flat,), (inner.size,))


def _axis(dim: DimIndex, held: IntSet, slots: tuple[int, ...]) -> _Axis:
    return _Axis(held, dim.tail + sum(d.offset for d in dim.digits), slots, tuple(d.stride for d in dim.digits))


def _flattened(axes: Sequence[_Axis], shape: Sequence[int], runs: IntSet) -> _Axis:
    """All dims as one: for regions that are no grid, whose buffers are one-dimensional."""
    const, slots, strides, weight = 0, list[int](), list[int](), 1
    for axis, n in zip(reversed(axes), reversed(shape), strict=True):
        const += axis.const * weight
        slots = [*axis.slots, *slots]
        strides = [*(s * weight for s in axis.strides), *strides]
        weight *= n
    return _Axis(runs, const, tuple(slots), tuple(strides))


@dataclass(frozen=True)
class StridedBlock:
    """A strided block of a buffer: `base` per buffer dim; per factor the buffer dim it moves along and its step."""

    base: tuple[int, ...]
    dims: tuple[int, ...]
    steps: tuple[int, ...]


def blocks(a: View, b: View, box: Box) -> Iterator[tuple[str, str, tuple[int, ...], StridedBlock, StridedBlock]]:
    """`(name in a, name in b, extents, block of a, block of b)` of everything in `box`, over the cell's factors."""
    chosen = a.name_slots | b.name_slots
    choices = [[(i, i + 1) for i in intervals.elements(s)] if k in chosen else list(s) for k, s in enumerate(box)]
    for ranges in itertools.product(*choices):
        names = a.member(ranges), b.member(ranges)
        for outer, block_a in _blocks(a.axes, ranges):
            for inner, block_b in _blocks(b.axes, outer):
                extents = tuple(hi - lo for lo, hi in inner)
                yield *names, extents, _moved(block_a, outer, inner), block_b


def _moved(block: StridedBlock, outer: Sequence[Range], inner: Sequence[Range]) -> StridedBlock:
    base = list(block.base)
    for (start, _), (lo, _), dim, step in zip(outer, inner, block.dims, block.steps, strict=True):
        if dim >= 0:
            base[dim] += (lo - start) * step
    return StridedBlock(tuple(base), block.dims, block.steps)


def _blocks(axes: Sequence[_Axis], ranges: Sequence[Range]) -> Iterator[tuple[tuple[Range, ...], StridedBlock]]:
    """Sub-ranges on which every buffer index is affine. A factor moves along one dim, so dims split on their own."""
    per_axis = [_affine(axis, tuple(ranges[k] for k in axis.slots)) for axis in axes]
    for combo in itertools.product(*per_axis):
        inner = list(ranges)
        dims, steps = [-1] * len(ranges), [0] * len(ranges)
        for at, (axis, (subs, _, moves)) in enumerate(zip(axes, combo, strict=True)):
            for slot, sub, step in zip(axis.slots, subs, moves, strict=True):
                inner[slot], dims[slot], steps[slot] = sub, at, step
        yield tuple(inner), StridedBlock(tuple(base for _, base, _ in combo), tuple(dims), tuple(steps))


_Affine = tuple[tuple[Range, ...], int, tuple[int, ...]]
"""(sub-range per factor, buffer index at their start, step per factor)."""


@lru_cache(1 << 14)
def _affine(axis: _Axis, ranges: tuple[Range, ...]) -> tuple[_Affine, ...]:
    first = axis.const + sum(st * lo for st, (lo, _) in zip(axis.strides, ranges, strict=True))
    last = axis.const + sum(st * (hi - 1) for st, (_, hi) in zip(axis.strides, ranges, strict=True))
    run, before = _run_at(axis.indices, first)
    if last < run[1]:
        return ((ranges, before + first - run[0], axis.strides),)
    found = _regular(axis, ranges)
    if found is not None:
        return ((ranges, *found),)
    widest = next(i for i, (lo, hi) in enumerate(ranges) if hi - lo > 1)
    lo, hi = ranges[widest]
    mid = (lo + hi) // 2
    halves = [(*ranges[:widest], half, *ranges[widest + 1 :]) for half in ((lo, mid), (mid, hi))]
    return tuple(sub for half in halves for sub in _affine(axis, half))


@lru_cache(1 << 12)
def _table(held: IntSet) -> tuple[list[int], list[int]]:
    """The starts of the runs, and how many elements stand before each."""
    counts = [0, *itertools.accumulate(b - a for a, b in held)]
    return [a for a, _ in held], counts[:-1]


def _run_at(held: IntSet, x: int) -> tuple[Range, int]:
    starts, before = _table(held)
    i = bisect_right(starts, x) - 1
    return held[i], before[i]


def _regular(axis: _Axis, ranges: tuple[Range, ...]) -> tuple[int, tuple[int, ...]] | None:
    """`(base, steps)` when the buffer index is affine in the factors though the block spans several runs, else None."""
    starts, before = (np.asarray(t, np.int64) for t in _table(axis.indices))

    def place(x: Grid) -> tuple[Grid, Grid]:
        run = np.searchsorted(starts, x, "right") - 1
        return run, before[run] + x - starts[run]

    def grid(upto: int) -> Grid:
        start = axis.const + sum(st * lo for st, (lo, _) in zip(axis.strides, ranges, strict=True))
        return _plane(start, axis.strides[:upto], [hi - lo for lo, hi in ranges[:upto]])

    n = len(ranges)
    innermost = (ranges[-1][1] - ranges[-1][0] - 1) * axis.strides[-1]
    outer = grid(n - 1)
    (run, index), (end_run, _) = place(outer), place(outer + innermost)
    whole = bool((run == end_run).all())
    if not whole:
        _, index = place(grid(n))
    steps = [_first_step(index, i) for i in range(index.ndim)]
    straight = _plane(int(index.flat[0]), steps, index.shape)
    if not bool((straight == index).all()):
        return None
    return int(index.flat[0]), (*steps, axis.strides[-1]) if whole else tuple(steps)


def _plane(base: int, steps: Sequence[int], shape: Sequence[int]) -> Grid:
    """`base + sum(step * index)` at every index of a grid."""
    out: Grid = np.full((1,) * len(shape), base, np.int64)
    for i, (step, n) in enumerate(zip(steps, shape, strict=True)):
        out = out + (np.arange(n, dtype=np.int64) * step).reshape([-1 if j == i else 1 for j in range(len(shape))])
    return out


def _first_step(index: Grid, i: int) -> int:
    if index.shape[i] < 2:
        return 0
    return int(np.take(index, 1, axis=i).flat[0] - index.flat[0])
