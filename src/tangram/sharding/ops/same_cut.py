"""The cuts of a result whose input is cut, where the two have different numbers of elements: by the same map.

Windows make `m` elements of `n`. A map that counts parts, blocks or strides says of `m` elements what it says of `n`;
one that lists how many elements there are (`[3 5]`, `zigzag[3 5]`) is scaled, so that a part of the result lies about
where its part of the input does. Whatever the result's parts are, windows read what they need: this says which of many
right ways is taken, so that all ask here.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

from tangram.layout.syntax import Cut, Dim
from tangram.sharding.ops.bind import BoundOp
from tangram.sharding.ops.cut_trees import Tree, axes_of

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
