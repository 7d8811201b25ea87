"""Pieces that have some elements of a tensor in common: whether they have the same bits there."""

from collections.abc import Sequence

import torch
from torch import Tensor

from tangram.layout import Region
from tangram.layout.region import box_size, stretch
from tangram.relayout import Piece, TensorSpec, bind, execute, plan

COMPARED = 1 << 20
"""Elements that are compared at once."""


def same_bits(name: str, spec: TensorSpec, common: Region, pieces: Sequence[tuple[Region, Tensor]]) -> bool:
    """Whether two pieces of a tensor have the same bits in the region that both have; in parts of bounded size."""
    bound = bind("{name*} -> {name*}", {name: spec})
    for box in common.boxes:
        size = box_size(box)
        for at in range(0, size, COMPARED):
            wanted = Region.of(stretch(box, at, min(at + COMPARED, size)))
            shape = wanted.local_shape if wanted.local_shape is not None else (wanted.size,)
            got: list[Tensor] = []
            for region, values in pieces:
                into = torch.empty(shape, dtype=values.dtype)
                execute(
                    plan(bound, [Piece(0, name, region)], [Piece(1, name, wanted)]),
                    {(0, name): values},
                    {(1, name): into},
                )
                got.append(into.reshape(-1).view(torch.uint8))
            if not torch.equal(got[0], got[1]):
                return False
    return True
