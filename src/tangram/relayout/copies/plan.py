"""Copy plans: which elements go from which piece to which. Pure and deterministic; nothing moves here.

A plan is made for the pieces that one asks for, so every rank computes its own part. Before it is returned, coverage is
proved: each wanted element is written exactly once, from a source that exists. The proof is by counting disjoint boxes:
cells tile their tensor (`cells.match`), sources give disjoint sub-boxes (`Holders.find`), and the numbers add up.

The memory-to-memory executor: a plan's copies on torch tensors and numpy arrays, without intermediate copies.

Every block is one strided copy from one buffer into another. A buffer has the local shape of its piece (or is flat
with as many elements) and may be any view: its own strides are used, never the order of its storage.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tangram.layout import Region
from tangram.layout.region import Box, box_size, box_subtract
from tangram.relayout.copies.buffers import Buffers, Side, bits, check_fill, coded, refuse_shared
from tangram.relayout.copies.lower import NOWHERE, blocks
from tangram.relayout.copies.pieces import Holders, Piece, PieceIndex, Sharding, stands_there
from tangram.relayout.mapping.bind import BoundMapping
from tangram.relayout.mapping.cells import Cell, CellPart
from tangram.relayout.mapping.codecs import Codec, fill_value
from tangram.relayout.mapping.errors import CoverageError, RelayoutError
from tangram.relayout.mapping.names import TensorFamily


@dataclass(frozen=True)
class Copy:
    """Elements of a cell from one piece to another. `source` is None where they are created with the `fill` option.

    `boxes` are over the cell's factors; the pieces are of families, with regions in the families' coordinates.
    """

    cell: Cell
    source: Piece | None
    target: Piece
    boxes: tuple[Box, ...]

    @property
    def size(self) -> int:
        """The number of elements."""
        return sum(box_size(b) for b in self.boxes)


@dataclass(frozen=True)
class TieCheck:
    """Elements that a tied copy must have equal, bit for bit, to the copy that is read."""

    cell: Cell
    source: Piece
    other: Piece
    part: CellPart
    boxes: tuple[Box, ...]


@dataclass(frozen=True)
class CopyPlan:
    """The copies that fill the wanted pieces, and the checks of tied copies."""

    bound: BoundMapping
    copies: tuple[Copy, ...]
    checks: tuple[TieCheck, ...]

    @property
    def size(self) -> int:
        """The number of elements written."""
        return sum(copy.size for copy in self.copies)


def plan(
    bound: BoundMapping, source: Holders | Iterable[Piece], wanted: Iterable[Piece], *, check_tied: bool = True
) -> CopyPlan:
    """The copy plan that fills `wanted` from `source`.

    `source` is a `Sharding`, pieces, or anything with `find`. `check_tied`: also compare the tied copies that are not
    read. Raises CoverageError, naming tensor and region, when an element would not be written exactly once.
    """
    holders = source if not isinstance(source, Iterable) else PieceIndex(tuple(source), bound.source)
    _refuse_foreign(bound, holders)
    copies: list[Copy] = []
    checks: list[TieCheck] = []
    seen: set[tuple[Hashable, str]] = set()
    for want in wanted:
        family, region = bound.target.lift(want.tensor, want.region)
        if stands_there(seen, want, family):
            raise RelayoutError(f"{want.tensor} is wanted twice at {want.place!r}: each element is written once")
        target = Piece(want.place, family.name, region)
        # Cells of a mapping do not overlap, so what they write adds up to the region exactly where nothing is missing.
        total = 0
        for cell in bound.cells[family.name]:
            boxes = [b for box in region.boxes for b in cell.target.boxes(box)]
            total += sum(map(box_size, boxes))
            if boxes:
                copies += _copies(bound, cell, holders, target, boxes)
                if check_tied:
                    checks += _checks(bound, cell, holders, target, boxes)
        if total != region.size:
            raise CoverageError(
                want.tensor, region, f"{want.tensor}: the mapping writes {total} of {region.size} elements"
            )
    return CopyPlan(bound, tuple(copies), tuple(checks))


def _refuse_foreign(bound: BoundMapping, source: Holders) -> None:
    """Refuse a sharding of tensors that have the names of the mapping's source but other shapes: of the target, say."""
    if not isinstance(source, Sharding) or source.tensors is bound.source:
        return
    for name, family in bound.source.families.items():
        other = source.tensors.families.get(name)
        if other is not None and other.spec.shape != family.spec.shape:
            shape, found = list(family.spec.shape), list(other.spec.shape)
            raise RelayoutError(f"{name} has shape {shape}, but in the sharding {found}; make it from bound.source")


def _copies(bound: BoundMapping, cell: Cell, holders: Holders, target: Piece, boxes: Sequence[Box]) -> list[Copy]:
    if cell.source is None:
        return [Copy(cell, None, target, tuple(boxes))]
    found = _holders(bound, cell.source, holders, target, boxes)
    return [Copy(cell, piece, target, tuple(got)) for piece, got in found]


def _holders(
    bound: BoundMapping, part: CellPart, holders: Holders, target: Piece, boxes: Sequence[Box]
) -> list[tuple[Piece, list[Box]]]:
    """Which pieces hold these boxes of a part, all of them, or CoverageError."""
    found: dict[int, tuple[Piece, list[Box]]] = {}  # by identity: hashing a region costs more than finding it
    for box in boxes:
        # A holder gives each element from one piece. Fewer are missing, more would have two sources: both are refused.
        size = 0
        for piece, got in holders.find(part, box, target.place):
            found.setdefault(id(piece), (piece, []))[1].append(got)
            size += box_size(got)
        if size != box_size(box):
            raise _missing(bound, part, target, box, [b for _, got in found.values() for b in got])
    return list(found.values())


def _missing(bound: BoundMapping, part: CellPart, target: Piece, box: Box, got: Sequence[Box]) -> CoverageError:
    left = [box]
    for b in got:
        left = [z for x in left for z in box_subtract(x, b)]
    family = bound.source.families[part.tensor]
    name, region = first_member(family, Region.of([part.indices(b) for b in left]))
    if not left:
        return CoverageError(name, region, f"{target.tensor} at {target.place!r}: some elements have several sources")
    return CoverageError(name, region, f"{target.tensor} at {target.place!r}: no source holds {region} of {name}")


def first_member(family: TensorFamily, region: Region) -> tuple[str, Region]:
    """The first real tensor that a region of a family touches, and the region inside it."""
    if not family.family_dims or not region:
        return family.name, region
    n = family.family_dims
    index = tuple(s[0][0] for s in region.boxes[0][:n])
    inside = [
        b[n:] for b in region.boxes if all(any(a <= i < z for a, z in s) for s, i in zip(b[:n], index, strict=True))
    ]
    return family.member(index), Region.of(inside)


def _checks(bound: BoundMapping, cell: Cell, holders: Holders, target: Piece, boxes: Sequence[Box]) -> list[TieCheck]:
    if cell.source is None or not cell.tied:
        return []
    read = _holders(bound, cell.source, holders, target, boxes)
    return [
        TieCheck(cell, piece, other, part, tuple(common))
        for part in cell.tied
        for piece, got in read
        for other, common in _holders(bound, part, holders, target, got)
    ]


Step = tuple[Copy, Tensor | None, Tensor]
"""A copy, and one block of it in the source and in the target; no source where elements are created."""


def execute(plan: CopyPlan, source: Buffers, target: Buffers) -> None:
    """Move the bytes: write every wanted element of the target buffers.

    All buffers are looked at before the first byte moves: RelayoutError when one is missing, has another shape or dtype
    than its piece, cannot be written, or shares memory with another that it must not. Tied copies are compared then
    too; when they differ, RelayoutError names them and nothing is written.
    """
    sources, targets = Side(plan.bound.source, source, False, {}), Side(plan.bound.target, target, True, {})
    moves = [step for copy in plan.copies for step in steps(copy, sources, targets)]
    for check in plan.checks:
        compare(check, sources)
    refuse_shared(plan.bound, sources, targets)
    write(moves, plan.bound.codecs)


def write(moves: Iterable[Step], codecs: Mapping[str, Codec]) -> None:
    """Copy or create every block."""
    for copy, source_block, target_block in moves:
        if source_block is None:
            target_block.fill_(fill_value(copy.cell.options))
        else:
            target_block.copy_(coded(source_block, copy.cell.options, codecs))


def steps(copy: Copy, sources: Side, targets: Side) -> Iterator[Step]:
    """A copy as blocks, with all buffers that it touches looked at."""
    to = targets.view(copy.cell.target, copy.target)
    if copy.source is None or copy.cell.source is None:
        for box in copy.boxes:
            for _, name, extents, _, block in blocks(NOWHERE, to, box):
                blank = targets.block(to, copy.target, name, extents, block)
                check_fill(copy.cell.options, blank, f"{name} at {copy.target.place!r}")
                yield copy, None, blank
        return
    have = sources.view(copy.cell.source, copy.source)
    for box in copy.boxes:
        for source_name, name, extents, a, b in blocks(have, to, box):
            read = sources.block(have, copy.source, source_name, extents, a)
            yield copy, read, targets.block(to, copy.target, name, extents, b)


def compare(check: TieCheck, sources: Side) -> None:
    """Refuse tied copies that differ in any bit."""
    if check.cell.source is None:
        return
    a, b = sources.view(check.cell.source, check.source), sources.view(check.part, check.other)
    for box in check.boxes:
        for name_a, name_b, extents, block_a, block_b in blocks(a, b, box):
            x = bits(sources.block(a, check.source, name_a, extents, block_a))
            y = bits(sources.block(b, check.other, name_b, extents, block_b))
            if not torch.equal(x, y):
                n = int((x != y).sum())
                raise RelayoutError(
                    f"{name_a} at {check.source.place!r} and {name_b} at {check.other.place!r} are tied, "
                    f"but {n} of the {x.numel()} elements compared differ"
                )
