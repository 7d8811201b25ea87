"""Where one rank stands in a call that is cut: what it holds of each factor, and so of each tensor.

The cuts of a result whose input is cut, where the two have different numbers of elements: by the same map.

Windows make `m` elements of `n`. A map that counts parts, blocks or strides says of `m` elements what it says of `n`;
one that lists how many elements there are (`[3 5]`, `zigzag[3 5]`) is scaled, so that a part of the result lies about
where its part of the input does. Whatever the result's parts are, windows read what they need: this says which of many
right ways is taken, so that all ask here.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tangram.layout import Layout, Mesh, region
from tangram.layout.intervals import IntSet, elements
from tangram.layout.locate import indices_of_rank
from tangram.layout.syntax import Cut, Dim
from tangram.sharding.ops.bind import BoundOp, Dims
from tangram.sharding.ops.cut_trees import Tree, axes_of, dim_of

LISTED = ("sizes", "zigzag")
"""Maps whose arguments, where they have some, count all elements that there are."""


def of_result(tree: Tree, n: int, m: int) -> Tree | None:
    """The cuts of `m` elements that are made of `n`, which lie as `tree`; None where no layout says it."""
    if n == m:
        return tree
    if isinstance(tree, Dim):
        return _of_blocks(tree)
    if any(cut.map in LISTED and cut.args for cut in tree[1:]):  # they count what is left on each rank
        return None
    return tuple([_scaled(cut, n, m) if cut.map in LISTED and cut.args else cut for cut in tree])


def made_of(bound: BoundOp, factor: str, tree: Tree) -> Tree:
    """The cuts of a factor in the results, where what they are made of lies as `tree`."""
    window = bound.windows.get(factor)
    if window is None:
        return tree
    found = of_result(tree, window.n, bound.sizes[factor])
    assert found is not None, "`links.refusal` lets nothing else be chosen"
    return found


def in_chunks(tree: Tree) -> tuple[Cut, ...]:
    """Cuts over the same axes, each in chunks."""
    return tuple([Cut(axis) for axis in axes_of(tree)])


def _scaled(cut: Cut, n: int, m: int) -> Cut:
    listed = cut.args
    assert not isinstance(listed, str)
    ends = [0, *((2 * end * m + n) // (2 * n) for end in itertools.accumulate(listed))]
    return replace(cut, args=tuple([b - a for a, b in itertools.pairwise(ends)]))


def _of_blocks(dim: Dim) -> Tree | None:
    """`(2 f/x)`: strided over as many blocks; None of other brackets."""
    if len(dim.terms) != 1 or dim.cuts:
        return None
    *outer, last = dim.terms[0]
    if any(x.axes for x in outer) or last.terms:
        return None
    if any(cut.map for cut in last.cuts):
        return None
    blocks = math.prod(x.n for x in outer)
    return tuple([Cut(cut.axis, "strided", (blocks,)) for cut in last.cuts])


Cuts = Mapping[str, tuple[Cut, ...]]
"""The cuts of each factor that is cut, major axis first."""


def factor_dim(factor: str, n: int, bound: BoundOp, cuts: Cuts) -> Dim:
    """A factor of `n` elements as a dim of a layout, with its cuts, which are those of what it is read of."""
    own = tuple(cuts.get(factor, ()))
    if factor in bound.windows:
        made = of_result(own, bound.windows[factor].n, n)
        assert isinstance(made, tuple), f"{factor} cannot be cut so: see `links.refusal`"
        own = made
    return Dim(factor, n, cuts=own)


def layout_of(dims: Dims, shape: Sequence[int], bound: BoundOp, cuts: Cuts) -> Layout:
    """How a tensor lies when factors are cut. What is read by windows is cut as the result is, whatever its size."""
    found: list[Dim] = []
    for factors, n in zip(dims, shape, strict=True):
        if not any(f in cuts for f in factors):
            found.append(Dim("_", n))
            continue
        made = [
            factor_dim(f, n if f in bound.windows and len(factors) == 1 else bound.sizes[f], bound, cuts)
            for f in factors
        ]
        found.append(made[0] if len(made) == 1 else Dim(terms=(tuple(made),)))
    return Layout(tuple(found))


@dataclass(frozen=True)
class RankPart:
    """Where one rank stands: what it holds of each factor, and its coordinates on the axes that cut each."""

    mesh: Mesh
    rank: int
    indices: Mapping[str, IntSet]
    cuts: Mapping[str, Tree]
    """Of what is read by windows, those of the input."""

    def first_along(self, factor: str) -> bool:
        """Whether it is the first of the ranks that a factor is cut over."""
        own = self.mesh.coords(self.rank)
        return all(own[axis] == 0 for axis in axes_of(self.cuts.get(factor, ())))


def part_of(bound: BoundOp, cuts: Cuts, mesh: Mesh, rank: int) -> RankPart:
    """What a rank holds of the cut factors."""
    held: dict[str, IntSet] = {}
    for factor in cuts:
        found = region(Layout((factor_dim(factor, bound.sizes[factor], bound, cuts),)), mesh, rank)
        held[factor] = found.boxes[0][0] if found else ()
    return RankPart(mesh, rank, held, cuts)


def piece(tensor: Tensor, dims: Dims, part: RankPart, bound: BoundOp) -> Tensor:
    """A rank's part of a whole tensor, where all factors are cut one after the other."""
    cuts = {f: tree for f, tree in part.cuts.items() if isinstance(tree, tuple)}
    assert len(cuts) == len(part.cuts)
    for dim, factors in enumerate(dims):
        cut = [f for f in factors if f in part.indices]
        if cut:
            n = tensor.shape[dim]
            found = region(layout_of((factors,), (n,), bound, cuts), part.mesh, part.rank)
            index = elements(found.boxes[0][0]) if found else []
            tensor = tensor.index_select(dim, torch.tensor(index, dtype=torch.int64))
    return tensor


def peers(parts: Sequence[RankPart], factor: str) -> list[list[int]]:
    """Which of some ranks share a factor among each other: by their places in `parts`, in the order of what they hold.

    Ranks that hold nothing of it are with the others, first.
    """
    groups: dict[tuple[tuple[str, int], ...], list[int]] = {}
    for i, part in enumerate(parts):
        axes = axes_of(part.cuts[factor])
        key = tuple((axis, at) for axis, at in part.mesh.coords(part.rank).items() if axis not in axes)
        groups.setdefault(key, []).append(i)
    return [sorted(some, key=lambda i: parts[i].indices[factor]) for some in groups.values()]


def stands(part: RankPart, factor: str, n: int) -> IntSet:
    """What a rank holds of a dim of `n` elements that is cut as a factor is."""
    return indices_of_rank(dim_of(part.cuts[factor], n), part.mesh, part.mesh.coords(part.rank))
