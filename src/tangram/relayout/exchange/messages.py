"""What passes between two ranks: boxes of cells, packed one after the other, in the order in which they were asked for.

A box on its way is row-major over its cell's factors, which both sides know without knowing the other's buffers: each
lowers it against its own. Of a rank that wants something only the boxes travel, as numbers; who holds them finds its
own pieces. So what ranks say to each other is as much as their overlaps.

A message may be cut at any element, so that it fits into rounds of bounded memory: where, follows from its length.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from tangram.layout import intervals
from tangram.layout.intervals import IntSet
from tangram.layout.region import Box, box_intersect, box_size
from tangram.relayout.copies.buffers import Side, coded, strided
from tangram.relayout.copies.lower import StridedBlock, blocks, packed
from tangram.relayout.copies.pieces import Piece
from tangram.relayout.mapping.bind import BoundMapping
from tangram.relayout.mapping.cells import Cell, CellPart
from tangram.relayout.mapping.codecs import Codec

ALIGNED = 16
"""Bytes of the longest element; all others are as long as a part of it. Segments of a message are sorted by the length
of their elements, longest first, so none lies across a multiple of this."""


# ---------------------------------------------------------------- requests


@dataclass(frozen=True)
class BoxRequest:
    """A box that a rank wants of another: its elements, or, of a copy that is tied, a digest of them.

    `part` counts the cell's copies: 0 is the one that is read, i the i-th tied to it.
    """

    cell: int
    box: Box
    part: int
    digest: bool


def encoded(requests: Sequence[BoxRequest]) -> list[int]:
    """Requests as numbers."""
    out: list[int] = []
    for r in requests:
        out += (r.cell, r.part, r.digest)
        for s in r.box:
            out.append(len(s))
            out += itertools.chain.from_iterable(s)
    return out


def decoded(numbers: Sequence[int], cells: Sequence[Cell]) -> list[BoxRequest]:
    """The requests that these numbers are."""
    out: list[BoxRequest] = []
    at = 0
    while at < len(numbers):
        cell, part, digest = numbers[at : at + 3]
        at += 3
        box: list[IntSet] = []
        for _ in cells[cell].factors:
            end = at + 1 + 2 * numbers[at]
            box.append(tuple(zip(numbers[at + 1 : end : 2], numbers[at + 2 : end : 2], strict=True)))
            at = end
        out.append(BoxRequest(cell, tuple(box), part, bool(digest)))
    return out


# ---------------------------------------------------------------- boxes on their way


@dataclass(frozen=True)
class Wire:
    """How the elements of a cell travel: after their codecs where that makes them shorter, else before."""

    before: torch.dtype
    after: torch.dtype
    early: bool

    @staticmethod
    def of(bound: BoundMapping, cell: Cell) -> Wire:
        """What both sides work out alike."""
        if cell.source is None:
            raise TypeError("what is created does not travel")
        before = _dtype(bound.source.families[cell.source.tensor].spec.dtype)
        after = _dtype(bound.target.families[cell.target.tensor].spec.dtype)
        return Wire(before, after, after.itemsize < before.itemsize)

    @property
    def dtype(self) -> torch.dtype:
        """On the way."""
        return self.after if self.early else self.before

    @property
    def raw(self) -> Wire:
        """The same elements as they lie in the source."""
        return Wire(self.before, self.after, False)


def _dtype(name: str) -> torch.dtype:
    return getattr(torch, name)


Lowered = list[tuple[Tensor, tuple[int, ...], StridedBlock]]
"""Blocks of the buffers, and where each lies in the packed box: extents and block."""


@dataclass(frozen=True, eq=False)
class Segment:
    """A box, and where its elements lie in this rank's buffers: `lies` are disjoint sub-boxes of it."""

    cell: Cell
    box: Box
    wire: Wire
    side: Side
    part: CellPart
    pieces: Sequence[tuple[Piece, Box]]
    size: int
    _all: Lowered

    @staticmethod
    def of(cell: Cell, box: Box, wire: Wire, side: Side, part: CellPart, lies: Sequence[tuple[Piece, Box]]) -> Segment:
        """With all buffers that it touches looked at: raises RelayoutError."""
        made = Segment(cell, box, wire, side, part, lies, box_size(box), [])
        made._all.extend(made._lowered(box))
        return made

    @property
    def nbytes(self) -> int:
        """On its way."""
        return self.size * self.wire.dtype.itemsize

    def _lowered(self, box: Box) -> Iterator[tuple[Tensor, tuple[int, ...], StridedBlock]]:
        into = packed(box)
        for piece, inside in self.pieces:
            common = box_intersect(inside, box)
            if common is None:
                continue
            lie = self.side.view(self.part, piece)
            for name, _, extents, here, there in blocks(lie, into, common):
                yield self.side.block(lie, piece, name, extents, here), extents, there

    def pairs(self, first: int, stop: int, data: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Blocks of the buffers and the same of `data`, which has the elements `first <= i < stop` of the box."""
        whole = (first, stop) == (0, self.size)
        at = 0
        for box in [self.box] if whole else cut(self.box, first, stop):
            n = box_size(box)
            part = data[at : at + n].view(tuple(map(intervals.size, box)))
            for buffer, extents, block in self._all if whole else self._lowered(box):
                yield buffer, strided(part, extents, block)
            at += n


def cut(box: Box, first: int, stop: int) -> list[Box]:
    """The elements `first <= i < stop` of a box in row-major order, as boxes one after the other."""
    sizes = [intervals.size(s) for s in box]
    if first >= stop:
        return []
    if (first, stop) == (0, math.prod(sizes)):
        return [box]
    row = math.prod(sizes[1:])
    # A range of row-major elements is the end of a row, whole rows, and the begin of a row, each of which is a box.
    a, b = -(-first // row), stop // row  # the whole rows
    if a > b:  # inside one row
        return _rows(box, b, b + 1, first - b * row, stop - b * row)
    ahead = _rows(box, a - 1, a, first - (a - 1) * row, row) if first < a * row else []
    middle = [(_between(box[0], a, b), *box[1:])] if a < b else []
    return ahead + middle + (_rows(box, b, b + 1, 0, stop - b * row) if stop > b * row else [])


def _rows(box: Box, a: int, b: int, first: int, stop: int) -> list[Box]:
    return [(_between(box[0], a, b), *rest) for rest in cut(box[1:], first, stop)]


def _between(s: IntSet, a: int, b: int) -> IntSet:
    """The elements of a set from place `a` to `b`."""
    out: list[tuple[int, int]] = []
    before = 0
    for lo, hi in s:
        start, end = max(lo, lo + a - before), min(hi, lo + b - before)
        if start < end:
            out.append((start, end))
        before += hi - lo
    return tuple(out)


# ---------------------------------------------------------------- messages and rounds


@dataclass(frozen=True)
class Message:
    """All that goes from one rank to another, in order."""

    segments: Sequence[Segment]

    @cached_property
    def starts(self) -> list[int]:
        """The byte at which each segment starts, and the end."""
        return [0, *itertools.accumulate(s.nbytes for s in self.segments)]

    @property
    def nbytes(self) -> int:
        """Of all rounds."""
        return self.starts[-1]

    def span(self, k: int, rounds: int) -> tuple[int, int]:
        """The bytes that move in a round, about as many in all; no element of a sorted message lies across a cut."""
        low, high = (self.nbytes * i // rounds // ALIGNED * ALIGNED for i in (k, k + 1))
        return low, self.nbytes if k + 1 == rounds else high

    def turn(self, k: int, rounds: int) -> Iterator[tuple[Segment, int, int]]:
        """What of it moves in a round: segments with the places of their first element and the one after the last."""
        low, high = self.span(k, rounds)
        for i in range(max(0, bisect_right(self.starts, low) - 1), len(self.segments)):
            if self.starts[i] >= high:
                break
            segment, start, width = self.segments[i], self.starts[i], self.segments[i].wire.dtype.itemsize
            first, stop = max(0, low - start) // width, min(segment.nbytes, high - start) // width
            if first < stop:
                yield segment, first, stop

    def length(self, k: int, rounds: int) -> int:
        """How many bytes move in a round."""
        low, high = self.span(k, rounds)
        return high - low


def pack(message: Message, k: int, rounds: int, into: Tensor, codecs: Mapping[str, Codec]) -> None:
    """Write what moves in a round into bytes that are just as many."""
    for segment, first, stop, data, aligned in _stretches(message, k, rounds, into):
        for buffer, block in segment.pairs(first, stop, data):
            block.copy_(coded(buffer, segment.cell.options, codecs) if segment.wire.early else buffer)
        if aligned is not None:
            aligned.copy_(data.view(torch.uint8))


def unpack(message: Message, k: int, rounds: int, data: Tensor, codecs: Mapping[str, Codec]) -> None:
    """Write what came in a round into the buffers."""
    for segment, first, stop, found, aligned in _stretches(message, k, rounds, data):
        if aligned is not None:
            found.view(torch.uint8).copy_(aligned)
        for buffer, block in segment.pairs(first, stop, found):
            buffer.copy_(block if segment.wire.early else coded(block, segment.cell.options, codecs))


def _stretches(
    message: Message, k: int, rounds: int, data: Tensor
) -> Iterator[tuple[Segment, int, int, Tensor, Tensor | None]]:
    """Each segment with its elements of `data`; where these lie on an odd byte, a copy of them, and the bytes."""
    at = 0
    for segment, first, stop in message.turn(k, rounds):
        dtype = segment.wire.dtype
        end = at + (stop - first) * dtype.itemsize
        some = data[at:end]
        if (data.storage_offset() + at) % dtype.itemsize:
            yield segment, first, stop, torch.empty(stop - first, dtype=dtype), some
        else:
            yield segment, first, stop, some.view(dtype), None
        at = end


DIGEST = 16
"""Bytes of a digest."""


def digest(segment: Segment, memory: int) -> bytes:
    """A digest of the bits of a box's elements; they are packed a part at a time."""
    found = hashlib.blake2b(digest_size=DIGEST)
    step = max(1, memory // segment.wire.dtype.itemsize)
    for first in range(0, segment.size, step):
        stop = min(first + step, segment.size)
        data = torch.empty(stop - first, dtype=segment.wire.dtype)
        for buffer, block in segment.pairs(first, stop, data):
            block.copy_(buffer)
        found.update(data.view(torch.uint8).numpy().data)
    return found.digest()
