"""A part in several stretches, where parts need each other: the operator runs on each stretch, one after the other.

By a map such as `zigzag` or `strided[2]` a rank holds of a dim what lies in several places of the whole. Windows do not
reach from one stretch into the next, and a scan of one begins anew: so each is run as the part in one stretch that it
would be on a rank of its own, and the results are put side by side. Over two dims it is each stretch of the one with
each of the other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from tangram.layout.intervals import IntSet, rank, size
from tangram.sharding.ops.bind import BoundOp, Dims
from tangram.sharding.ops.rank_part import RankPart
from tangram.sharding.propagation.halo import needed

Run = Callable[[RankPart, Sequence[Tensor | None]], tuple[Any, ...]]
"""An operator on a part in one stretch."""


def each(bound: BoundOp, part: RankPart, local: Sequence[Tensor | None], run: Run) -> tuple[Any, ...]:
    """The results of a part; `local`: its tensors, of what windows read all that it needs."""
    factor = next((f for f, held in part.held.items() if f in bound.linked and len(held) > 1), None)
    if factor is None:
        return run(part, local)
    found: list[tuple[Any, ...]] = []
    for one in part.held[factor]:
        own = replace(part, held={**part.held, factor: (one,)})
        found.append(each(bound, own, _narrowed(bound, part, local, factor, (one,)), run))
    return tuple(
        _side_by_side(some, dims, factor, bound, part)
        for some, dims in zip(zip(*found, strict=True), bound.outputs, strict=True)
    )


def _narrowed(
    bound: BoundOp, part: RankPart, local: Sequence[Tensor | None], factor: str, one: IntSet
) -> list[Tensor | None]:
    """The tensors of one stretch."""
    found = list(local)
    window = bound.windows.get(factor)
    for i, (tensor, dims) in enumerate(zip(local, bound.inputs, strict=True)):
        if tensor is None or dims is None or (factor,) not in dims:
            continue
        at = rank(part.held[factor], one) if window is None else rank(needed(bound, part, factor), window.reads(one))
        start, stop = at[0] if at else (0, 0)
        found[i] = tensor.narrow(dims.index((factor,)), start, stop - start)
    return found


def _side_by_side(some: Sequence[Any], dims: Dims, factor: str, bound: BoundOp, part: RankPart) -> Any:
    """One result of all stretches; in a dim that is a product the factor is put together by itself."""
    at = next(i for i, factors in enumerate(dims) if factor in factors)
    inside = dims[at].index(factor)
    before = math.prod(size(part.held[f]) if f in part.held else bound.sizes[f] for f in dims[at][:inside])
    opened = [one.unflatten(at, (before, one.shape[at] // max(1, before))) for one in some]
    return torch.cat(opened, at + 1).flatten(at, at + 1)
