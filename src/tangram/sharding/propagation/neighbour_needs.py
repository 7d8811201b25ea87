"""What parts of a cut factor need of each other: which cuts allow it, and how many bytes pass.

    halo    what a part's windows read and other parts hold (`tangram.sharding.propagation.halo`), all at once
    scan    the totals of the other parts, one slice of the results for each stretch
            (`tangram.sharding.propagation.halo`)

Bytes are exact averages over the ranks: sets are counted, rank by rank of the axes that cut the factor, whatever their
maps. Over several axes each counts what passes between ranks of which it is the first axis that tells them apart; of
what those of the others hold together, a scan tells the total.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

from torch import Tensor

from tangram.layout import Mesh
from tangram.layout.intervals import IntSet, intersect, size, subtract, union
from tangram.layout.locate import indices_of_rank
from tangram.sharding.ops.bind import BoundOp
from tangram.sharding.ops.calls import OpCall
from tangram.sharding.ops.cut_trees import Tree, axes_of, dim_of, only
from tangram.sharding.ops.rank_part import of_result
from tangram.sharding.ops.read_inputs import PlacedInput
from tangram.sharding.ops.windows import SlidingWindow
from tangram.sharding.propagation.op_cost import results


def refusal(bound: BoundOp, factor: str, tree: Tree) -> str:
    """Why a factor whose parts need each other cannot be cut so; nothing where it can."""
    window = bound.windows.get(factor)
    if window is not None and of_result(tree, window.n, bound.sizes[factor]) is None:
        return (
            f"no layout cuts the {bound.sizes[factor]} elements of the result as these cut the {window.n} that are read"
        )
    return ""


class Read(NamedTuple):
    """How many elements of a dim a rank reads, on average."""

    needed: float
    local: float
    """Of those, that it holds itself."""
    missing: Mapping[str, float]
    """By axis: of those that are left, between which of its ranks they pass."""


@lru_cache(1 << 12)
def read(window: SlidingWindow, m: int, tree: Tree, mesh: Mesh) -> Read:
    """What windows over a dim read whose result has `m` elements, where the input is cut like this."""
    made, axes = of_result(tree, window.n, m), axes_of(tree)
    assert made is not None, "`refusal` says so"
    ranks = [mesh.axes[axis][0] for axis in axes]
    needed = held_ = 0
    missing = dict.fromkeys(axes, 0)
    for at in itertools.product(*map(range, ranks)):
        there = dict(zip(axes, at, strict=True))
        wanted = union(*(window.reads((one,)) for one in indices_of_rank(dim_of(made, m), mesh, there)))
        needed += size(wanted)
        own = _stages(window.n, tree, mesh, there)
        held_ += size(intersect(wanted, own[-1]))
        for axis, (outer, inner) in zip(axes, itertools.pairwise(own), strict=True):
            missing[axis] += size(intersect(wanted, subtract(outer, inner)))
    count = math.prod(ranks)
    return Read(needed / count, held_ / count, {axis: n / count for axis, n in missing.items()})


@lru_cache(1 << 12)
def totals_heard(n: int, tree: Tree, mesh: Mesh) -> Mapping[str, float]:
    """By axis, how many stretches the other parts have of `n` elements: a rank hears the total of each."""
    axes = axes_of(tree)
    ranks = [mesh.axes[axis][0] for axis in axes]
    found = dict.fromkeys(axes, 0)
    for at in itertools.product(*map(range, ranks)):
        stages = _stages(n, tree, mesh, dict(zip(axes, at, strict=True)))
        for i, axis in enumerate(axes):  # each part of an axis is met once for all those of the axes behind it
            found[axis] += len(stages[i + 1]) * (ranks[i] - 1)
    count = math.prod(ranks)
    return {axis: n / count for axis, n in found.items()}


def _stages(n: int, tree: Tree, mesh: Mesh, at: dict[str, int]) -> list[IntSet]:
    """What a rank holds before the first cut and after that of each axis."""
    axes = axes_of(tree)
    return [indices_of_rank(dim_of(only(tree, axes[:i]), n), mesh, at) for i in range(len(axes) + 1)]


def price(
    call: OpCall, bound: BoundOp, inputs: Sequence[PlacedInput], axis: str, factor: str, tree: Tree, mesh: Mesh
) -> float:  # fmt: skip
    """What passes over an axis when a factor is cut, by the inputs' own layouts."""
    window = bound.windows.get(factor)
    place = 0 if window is None else window.place
    own, tensor = next((one, call.tensors[place]) for one in inputs if one.place == place)
    assert tensor is not None
    ways = math.prod(
        mesh.axes[a][0] for a, state in own.where.items() if state.kind == "cut" and state.factor != factor
    )
    if window is None:
        slices = tensor.numel() / bound.sizes[factor] / ways
        return slices * _itemsize(call, bound, factor) * totals_heard(bound.sizes[factor], tree, mesh)[axis]
    return tensor.nbytes / window.n / ways * read(window, bound.sizes[factor], tree, mesh).missing[axis]


def halos(call: OpCall, bound: BoundOp, trees: Mapping[str, Tree], mesh: Mesh) -> dict[int, list[tuple[str, float]]]:
    """What a rank receives of each input that windows read, by axis."""
    found: dict[int, list[tuple[str, float]]] = {}
    reads = {f: read(w, bound.sizes[f], trees[f], mesh) for f, w in bound.windows.items() if f in trees}
    for factor, one in reads.items():
        place = bound.windows[factor].place
        tensor = call.tensors[place]
        assert tensor is not None
        nbytes, before = float(tensor.element_size()), True
        for n, factors in zip(tensor.shape, bound.inputs[place] or (), strict=True):
            other = reads.get(factors[0]) if len(factors) == 1 else None
            if factors == (factor,):
                before = False
            elif other is not None:  # what is read of a corner is counted with the dim that comes first
                nbytes *= other.local if before else other.needed
            else:
                nbytes *= n / _ways(factors, trees, mesh)
        found.setdefault(place, []).extend((axis, nbytes * n) for axis, n in one.missing.items())
    return found


def scans(call: OpCall, bound: BoundOp, trees: Mapping[str, Tree], mesh: Mesh) -> list[tuple[str, float]]:
    """What a rank receives of the totals of other parts, by axis."""
    found: list[tuple[str, float]] = []
    for factor in bound.scans:
        if factor in trees:
            others = [f for factors in bound.outputs[0] for f in factors if f != factor]
            tensor = call.tensors[0]
            assert tensor is not None
            slices = tensor.numel() / bound.sizes[factor] / _ways(others, trees, mesh)
            nbytes = slices * _itemsize(call, bound, factor)
            found += [(axis, nbytes * n) for axis, n in totals_heard(bound.sizes[factor], trees[factor], mesh).items()]
    return found


def _ways(factors: Sequence[str], trees: Mapping[str, Tree], mesh: Mesh) -> int:
    return math.prod(mesh.axes[axis][0] for f in factors for axis in axes_of(trees.get(f, ())))


def _itemsize(call: OpCall, bound: BoundOp, factor: str) -> int:
    """Bytes of one element of all results that have a factor."""
    made = [
        one
        for one, dims in zip(results(call) or call.tensors[:1], bound.outputs, strict=False)
        if any(factor in factors for factors in dims)
    ]
    return sum(one.element_size() for one in made if isinstance(one, Tensor))
