"""Regions: the elements that one rank holds, as a union of disjoint products of one set per dim. The ground truth.

A region is kept in a canonical form, so two regions with the same elements are equal and hash alike, however they were
made. A buffer holds the elements of a region in ascending row-major order of the whole tensor.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from tangram.layout import intervals
from tangram.layout.errors import LayoutError
from tangram.layout.grammar import parse_region
from tangram.layout.intervals import IntSet

Box = tuple[IntSet, ...]
"""A product of sets, one per dim; `()` is the one element of a scalar."""


def box_size(box: Box) -> int:
    """The number of elements."""
    return math.prod([intervals.size(s) for s in box])


def box_intersect(x: Box, y: Box) -> Box | None:
    """The common elements, None when there are none. (A scalar's box is `()`, so truth values would lie.)"""
    out = tuple([intervals.intersect(a, b) for a, b in zip(x, y, strict=True)])
    return out if all(out) else None


def box_subtract(x: Box, y: Box) -> list[Box]:
    """The elements of `x` outside `y`, as at most one disjoint box per dim."""
    common = box_intersect(x, y)
    if common is None:
        return [x]
    out: list[Box] = []
    for i in range(len(x)):
        rest = intervals.subtract(x[i], y[i])
        if rest:
            out.append((*common[:i], rest, *x[i + 1 :]))
    return out


@dataclass(frozen=True)
class Region:
    """Elements of a tensor. Make one with `Region.of`, `box`, `full`, `parse` or `tangram.layout.region`.

    `boxes` are disjoint, none empty, in canonical order; the empty region has none.
    """

    boxes: tuple[Box, ...] = ()

    @staticmethod
    def of(boxes: Iterable[Box]) -> Region:
        """The union of any boxes; they may overlap."""
        kept = [b for b in boxes if all(b)]
        if len({len(b) for b in kept}) > 1:
            raise LayoutError("the boxes of a region have different numbers of dims")
        return Region(tuple(kept) if len(kept) < 2 else tuple(_canonical(kept)))

    @staticmethod
    def box(offsets: Sequence[int], sizes: Sequence[int]) -> Region:
        """The block of these sizes at these offsets, as most checkpoints name their shards."""
        if len(offsets) != len(sizes):
            raise LayoutError(f"{len(offsets)} offsets but {len(sizes)} sizes")
        if min((*offsets, *sizes), default=0) < 0:
            raise LayoutError(f"a block of offsets {list(offsets)} and sizes {list(sizes)}: neither is negative")
        return Region.of([tuple(intervals.span(o, o + n) for o, n in zip(offsets, sizes, strict=True))])

    @staticmethod
    def full(shape: Sequence[int]) -> Region:
        """Every element of a tensor of this shape."""
        return _full(tuple(shape))

    @staticmethod
    def flat(shape: Sequence[int], start: int, stop: int) -> Region:
        """Elements `start <= i < stop` of the row-major flattened tensor: what flat ZeRO shards and buckets hold."""
        stop = min(stop, math.prod(shape))
        return Region.of(flat_boxes(tuple(intervals.span(0, n) for n in shape), intervals.span(max(start, 0), stop)))

    @staticmethod
    def parse(text: str) -> Region:
        """The region that `text` writes, `[0:4 0:8] + [4:5 0:2]`; the empty region is `nothing`."""
        return Region() if text.strip() == "nothing" else Region.of(parse_region(text))

    def __str__(self) -> str:
        return " + ".join("[" + " ".join(map(intervals.show, b)) + "]" for b in self.boxes) or "nothing"

    def __bool__(self) -> bool:
        return bool(self.boxes)

    def __and__(self, other: Region) -> Region:
        self._require_dims_of(other)
        found = (box_intersect(x, y) for x in self.boxes for y in other.boxes)
        return Region.of([b for b in found if b is not None])

    def __sub__(self, other: Region) -> Region:
        self._require_dims_of(other)
        left = list(self.boxes)
        for y in other.boxes:
            left = [z for x in left for z in box_subtract(x, y)]
        return Region.of(left)

    def __or__(self, other: Region) -> Region:
        return Region.of([*self.boxes, *other.boxes])

    def _require_dims_of(self, other: Region) -> None:
        if self.boxes and other.boxes and len(self.boxes[0]) != len(other.boxes[0]):
            raise LayoutError(f"regions of {len(self.boxes[0])} and {len(other.boxes[0])} dims: {self} and {other}")

    @property
    def size(self) -> int:
        """The number of elements."""
        return sum(box_size(b) for b in self.boxes)

    def nbytes(self, itemsize: int) -> int:
        """The bytes of a buffer that holds the region."""
        return self.size * itemsize

    @property
    def local_shape(self) -> tuple[int, ...] | None:
        """The shape of the buffer when it is a grid (one box), else None: then it is one-dimensional."""
        return tuple(intervals.size(s) for s in self.boxes[0]) if len(self.boxes) == 1 else None

    @property
    def hull(self) -> tuple[tuple[int, int], ...]:
        """The smallest block around the region, `(start, stop)` per dim. Raises LayoutError when it is empty."""
        if not self.boxes:
            raise LayoutError("the empty region has no hull")
        return tuple((min(s[0][0] for s in dim), max(s[-1][1] for s in dim)) for dim in zip(*self.boxes, strict=True))

    def within(self, shape: Sequence[int]) -> bool:
        """Whether every element lies inside a tensor of this shape."""
        return all(
            len(b) == len(shape) and all(s[0][0] >= 0 and s[-1][1] <= n for s, n in zip(b, shape, strict=True))
            for b in self.boxes
        )

    def runs(self, shape: Sequence[int]) -> IntSet:
        """The region as contiguous runs of the row-major buffer of the whole tensor of this shape, in elements."""
        if not self.within(shape):
            raise LayoutError(f"{self} is outside a tensor of shape {list(shape)}")
        return intervals.normal(run for b in self.boxes for run in intervals.product(b, shape))


@lru_cache(1 << 12)
def _full(shape: tuple[int, ...]) -> Region:
    return Region.box([0] * len(shape), shape)


def _canonical(boxes: Sequence[Box]) -> list[Box]:
    """One form per set of elements: along the first dim, group the places that have the same rest."""
    if not boxes:
        return []
    if not boxes[0]:
        return [()]
    groups: dict[tuple[Box, ...], list[tuple[int, int]]] = {}
    for places, here in _groups([b[0] for b in boxes]):
        groups.setdefault(tuple(_canonical([boxes[i][1:] for i in here])), []).extend(places)
    out = [(intervals.normal(places), *box) for rest, places in groups.items() for box in rest]
    return sorted(out, key=lambda b: tuple(s[0] for s in b))


def flat_boxes(sets: Box, positions: IntSet) -> list[Box]:
    """Positions of the row-major flattened product of `sets`, as boxes: at most `2 * ndim - 1` per interval.

    Those of one interval are not in the order of their positions; `stretch` is.
    """
    counts = [intervals.size(s) for s in sets]
    if 0 in counts or not positions:
        return []
    boxes = _unflatten(positions, counts)
    return [tuple([intervals.take(s, p) for s, p in zip(sets, b, strict=True)]) for b in boxes]


def stretch(sets: Box, start: int, stop: int) -> list[Box]:
    """Positions `start <= i < stop` of the flattened product of `sets` as boxes, one behind the other."""
    if not sets:
        return [()] if start < stop else []
    return sorted(flat_boxes(sets, intervals.span(start, stop)), key=lambda box: [s[0] for s in box])


def _unflatten(positions: IntSet, counts: Sequence[int]) -> list[Box]:
    if len(counts) < 2:
        return [(positions,) if counts else ()] if positions else []
    inner = math.prod(counts[1:])
    return [
        (outer, *rest) for outer, part in intervals.digits(positions, inner) for rest in _unflatten(part, counts[1:])
    ]


@dataclass(frozen=True)
class Coverage:
    """How parts cover a whole: what no part has, what several have, what lies outside."""

    missing: Region
    doubled: Region
    outside: Region

    @property
    def exact(self) -> bool:
        """Whether every element of the whole is in exactly one part, and the parts have nothing else."""
        return not (self.missing or self.doubled or self.outside)


def coverage(whole: Region, parts: Iterable[Region]) -> Coverage:
    """Prove, or refute, that the parts are a partition of the whole.

    Along each dim the places that the same parts touch are handled together, so a grid of parts costs time in the
    number of parts and not in its square.
    """
    parts = list(parts)
    if parts == [whole]:
        return Coverage(Region(), Region(), Region())
    boxes = [(b, 1) for part in parts for b in part.boxes] + [(b, 0) for b in whole.boxes]
    missing: list[Box] = []
    doubled: list[Box] = []
    outside: list[Box] = []

    def sweep(active: Sequence[tuple[Box, int]], prefix: Box) -> None:
        ndim = len(active[0][0])
        if len(prefix) == ndim:
            count = sum(kind for _, kind in active)
            wanted = any(kind == 0 for _, kind in active)
            if wanted and count == 0:
                missing.append(prefix)
            if count > 1:
                doubled.append(prefix)
            if count and not wanted:
                outside.append(prefix)
            return
        for places, here in _groups([box[len(prefix)] for box, _ in active]):
            sweep([active[i] for i in here], (*prefix, places))

    if boxes:
        if len({len(b) for b, _ in boxes}) > 1:
            raise LayoutError("the regions have different numbers of dims")
        sweep(boxes, ())
    return Coverage(Region.of(missing), Region.of(doubled), Region.of(outside))


def _groups(sets: Sequence[IntSet]) -> list[tuple[IntSet, list[int]]]:
    """The places along a dim, grouped by which sets are there: `[(places, numbers of the sets)]`."""
    starts: dict[int, list[int]] = {}
    stops: dict[int, list[int]] = {}
    for i, s in enumerate(sets):
        for a, b in s:
            starts.setdefault(a, []).append(i)
            stops.setdefault(b, []).append(i)
    edges = sorted({*starts, *stops})
    here: set[int] = set()
    groups: dict[frozenset[int], list[tuple[int, int]]] = {}
    for lo, hi in itertools.pairwise(edges):
        here -= set(stops.get(lo, ()))
        here |= set(starts.get(lo, ()))
        if here:
            groups.setdefault(frozenset(here), []).append((lo, hi))
    return [(intervals.normal(places), sorted(key)) for key, places in groups.items()]
