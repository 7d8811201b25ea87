"""The memory-to-memory executor: a plan's copies on torch tensors and numpy arrays, without intermediate copies.

Every block is one strided copy from one buffer into another. A buffer has the local shape of its piece (or is flat
with as many elements) and may be any view: its own strides are used, never the order of its storage.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor

from tangram.relayout.copies.buffers import Buffers, Side, bits, check_fill, coded, refuse_shared
from tangram.relayout.copies.lower import NOWHERE, blocks
from tangram.relayout.copies.plan import Copy, CopyPlan, TieCheck
from tangram.relayout.mapping.codecs import Codec, fill_value
from tangram.relayout.mapping.errors import RelayoutError

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
