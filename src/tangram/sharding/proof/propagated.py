"""Proof of a propagation: run every rank's part of the call as it says, put the results together as it says, compare.

Every rank takes its inputs by the layouts that the operator is said to need, pending ones as random parts that add up,
and runs the operator on them. What it gives must be what the whole operator gives at the elements that the predicted
layout of the result names, once what is pending is reduced. The elements come from `tangram.layout.region`, which
knows nothing of rules.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from tangram.layout import Layout, Mesh, region, validate
from tangram.layout.intervals import IntSet, elements
from tangram.layout.locate import indices_of_rank
from tangram.sharding.local_ops.local_call import RankPart, run_all
from tangram.sharding.ops.cut_trees import dim_of
from tangram.sharding.ops.rank_part import made_of
from tangram.sharding.proof.execute import EXPECTED_ERRORS, REDUCE, Failure, differs, undefined
from tangram.sharding.propagation.propagate import Propagation


def check(found: Propagation, expected: Sequence[Any]) -> Failure | None:
    """Compare a propagation with the results of the whole operator. None: they agree."""
    mesh = found.mesh
    shown = f"inputs {', '.join(map(str, found.inputs))} over {mesh}"

    def failure(where: str, what: str) -> Failure:
        return Failure(str(found.call), shown, where, what)

    if len(found.outputs) != len(expected):
        return failure("the propagation", f"has {len(found.outputs)} results, the operator {len(expected)}")
    for layout in (*found.inputs, *found.outputs):
        if layout is not None:
            validate(layout, mesh)
    sources = [
        _Source(t, layout, mesh, i) for i, (t, layout) in enumerate(zip(found.call.tensors, found.inputs, strict=True))
    ]
    ranks = list(_running(found))
    parts = [part_of(found, rank) for rank in ranks]
    try:
        local = [[None if source.tensor is None else source.take(rank) for source in sources] for rank in ranks]
        results = dict(zip(ranks, run_all(found.call, found.bound, parts, local), strict=True))
    except EXPECTED_ERRORS as error:
        return failure("some rank", f"raises {type(error).__name__}: {str(error).partition(chr(10))[0]}")
    for i, (want, layout) in enumerate(zip(expected, found.outputs, strict=True)):
        if isinstance(want, Tensor) and not undefined(found.bound, i):
            wrong = _compared({rank: some[i] for rank, some in results.items()}, want, layout, mesh)
            if wrong:
                return failure(f"output {i}", wrong)
    return None


def _running(found: Propagation) -> Iterator[int]:
    """The ranks that run the operator: all, but where its results are held by some."""
    at = [(one.axis, one.coords) for one in found.choices.values() if one.kind == "at"]
    for rank in range(found.mesh.size):
        own = found.mesh.coords(rank)
        if all(own[axis] in coords for axis, coords in at):
            yield rank


def part_of(found: Propagation, rank: int) -> RankPart:
    """Where a rank stands: what it holds of each factor that the propagation cuts."""
    mesh, sizes = found.mesh, found.bound.sizes
    at = mesh.coords(rank)
    sets = {
        f: indices_of_rank(dim_of(made_of(found.bound, f, tree), sizes[f]), mesh, at) for f, tree in found.trees.items()
    }
    return RankPart(mesh, rank, sets, found.trees)


class _Source:
    """An input, whole: each rank's part of it by a layout."""

    def __init__(self, tensor: Tensor | None, layout: Layout | None, mesh: Mesh, seed: int) -> None:
        self.tensor, self.mesh = tensor, mesh
        self.layout = layout
        self.pending = [axis for _, axis in layout.pending if mesh.axes[axis][0] > 1] if layout else []
        self.shares: dict[tuple[int, ...], Tensor] = {}
        if tensor is not None and layout is not None and self.pending:
            self.shares = _shares(tensor, [mesh.axes[a][0] for a in self.pending], dict(layout.pending), seed)

    def take(self, rank: int) -> Tensor:
        """A rank's part. Raises AssertionError where the rank is said to hold none."""
        assert self.tensor is not None
        assert self.layout is not None
        own = self.mesh.coords(rank)
        whole = self.shares[tuple(own[a] for a in self.pending)] if self.pending else self.tensor
        found = region(self.layout, self.mesh, rank)
        sets = found.boxes[0] if found else tuple(indices_of_rank(dim, self.mesh, own) for dim in self.layout.dims)
        return _at(whole, sets)


def _shares(tensor: Tensor, sizes: Sequence[int], ops: dict[str, str], seed: int) -> dict[tuple[int, ...], Tensor]:
    """Parts that add up to a tensor (of an average: whose mean it is), one for each place on the pending axes."""
    places = list(itertools.product(*map(range, sizes)))
    generator = torch.Generator().manual_seed(seed)
    # Random parts, not a whole and zeros: what is not linear in its parts would pass with those.
    drawn = [torch.randn(tensor.shape, generator=generator, dtype=torch.float64).to(tensor.dtype) for _ in places[1:]]
    parts = [tensor - sum(drawn), *drawn] if drawn else [tensor]
    times = len(places) if "avg" in ops else 1
    return {place: part * times for place, part in zip(places, parts, strict=True)}


def _at(tensor: Tensor, sets: Sequence[IntSet]) -> Tensor:
    for dim, s in enumerate(sets):
        if s != ((0, tensor.shape[dim]),):
            tensor = tensor.index_select(dim, torch.tensor(elements(s), dtype=torch.int64))
    return tensor


def _compared(found: dict[int, Any], want: Tensor, layout: Layout, mesh: Mesh) -> str:
    """What is wrong with parts that by their layout should be `want`; nothing when they are it."""
    if layout.shape != tuple(want.shape):
        return f"has shape {list(want.shape)}, by the layout {list(layout.shape)}"
    pending = [axis for _, axis in layout.pending]
    groups: dict[tuple[tuple[str, int], ...], list[int]] = {}
    for rank in found:
        own = tuple((axis, i) for axis, i in mesh.coords(rank).items() if axis not in pending)
        groups.setdefault(own, []).append(rank)
    for ranks in groups.values():
        here = region(layout, mesh, ranks[0])
        sets = here.boxes[0] if here else tuple(indices_of_rank(d, mesh, mesh.coords(ranks[0])) for d in layout.dims)
        expected = _at(want, sets)
        values = [found[rank] for rank in ranks]
        for rank, value in zip(ranks, values, strict=True):
            if not isinstance(value, Tensor) or value.dtype != want.dtype:
                return f"is {getattr(value, 'dtype', type(value).__name__)} on rank {rank}, not {want.dtype}"
            if value.shape != expected.shape:
                return f"has shape {list(value.shape)} on rank {rank}, not {list(expected.shape)}"
        ops = {op for op, _ in layout.pending}
        if ops == {"sum", "avg"}:
            return "is a sum of averages"
        made = functools.reduce(REDUCE["sum" if not ops or "avg" in ops else ops.pop()], values)
        wrong = differs(made / len(values) if "avg" in ops else made, expected)
        if wrong:
            return wrong
    return ""
