"""The cuts on one factor as a value: taken from a dim of a layout, compared axis by axis, put together again.

A tree is a tuple of cuts, `a/x/y`, wherever that says it all; a bracket with cuts inside, `(heads/tp d)/dp`, stays a
dim, without its names. What a rank holds by an axis depends on the cuts that were made before, and on those only: two
tensors agree on an axis when these are the same (`context`).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from tangram.layout import Mesh
from tangram.layout.syntax import VOID, Cut, Dim
from tangram.sharding.ops import factor_products

Tree = tuple[Cut, ...] | Dim
"""Cuts of a factor, major first; or a bracket with cuts inside, its factors without names."""


def tree_of(dim: Dim, mesh: Mesh, ones: Collection[str]) -> Tree:
    """The cuts of a dim, but for axes of one rank (`ones`), which cut nothing."""
    if not dim.terms:
        return tuple([c for c in dim.cuts if c.axis not in ones]) if ones and dim.cuts else dim.cuts
    plain = pruned(dim, dim.axes.difference(ones))
    chain = factor_products.flat(plain, mesh)
    return plain if chain is None else chain


def axes_of(tree: Tree) -> Sequence[str]:
    """The axes that cut, those that cut first before the others."""
    return [cut.axis for cut in tree] if isinstance(tree, tuple) else list(dict.fromkeys(_order(tree)))


def _order(dim: Dim) -> list[str]:
    return [
        *(axis for term in dim.terms for x in term for axis in _order(x)),
        *(cut.axis for cut in dim.cuts),
    ]


def pruned(dim: Dim, axes: Collection[str]) -> Dim:
    """A dim without its names and with the cuts over these axes only; brackets without a cut inside are one factor."""
    terms = tuple(tuple(pruned(x, axes) for x in term) for term in dim.terms)
    cuts = tuple(c for c in dim.cuts if c.axis in axes)
    if any(x.axes for term in terms for x in term):
        return Dim(terms=terms, cuts=cuts)
    return Dim(VOID, dim.n, cuts=cuts)


def only(tree: Tree, axes: Collection[str]) -> Tree:
    """The tree with the cuts over these axes only."""
    if isinstance(tree, tuple):
        return tuple([c for c in tree if c.axis in axes])
    left = pruned(tree, axes)
    return left if left.terms else left.cuts


def context(tree: Tree, axis: str) -> Tree:
    """The cuts that say what a rank holds by an axis: its own and those made before on the same elements."""
    if isinstance(tree, tuple):
        for i, cut in enumerate(tree):
            if cut.axis == axis:
                return tree[: i + 1]
    else:
        return only(tree, {axis, *_before(tree, axis)})
    raise KeyError(axis)


def _before(dim: Dim, axis: str) -> set[str]:
    """The axes that cut what this one cuts, before it."""
    found: set[str] = set()
    for term in dim.terms:
        for x in term:
            found |= _before(x, axis)
    for cut in dim.cuts:
        if cut.axis == axis:
            found.update(dim.inner_axes)
            found.update(c.axis for c in dim.cuts[: dim.cuts.index(cut)])
    return found


def with_axis(tree: Tree, source: Tree, axis: str, depth: int) -> Tree | None:
    """A tree with one more axis, cut as another tree has it; None where the two cannot stand together.

    `depth`: the place of the axis among those of the other tree.
    """
    if isinstance(tree, tuple) and isinstance(source, tuple):
        if len(source) == depth + 1 and tree == source[:depth]:
            return source  # the very same, which is quick to compare
        return (*tree, source[depth])
    own = only(source, {*axes_of(tree), axis})
    if only(own, axes_of(tree)) == tree:
        return own
    root = source if isinstance(source, tuple) else source.cuts
    cut = next((c for c in root if c.axis == axis), None)
    if cut is None or isinstance(tree, tuple):  # a cut inside a bracket, of which the rest is cut already
        return None
    return replace(tree, cuts=(*tree.cuts, cut))


def dim_of(tree: Tree, n: int) -> Dim:
    """A tree as a dim of a layout."""
    return Dim(VOID, n, (), tree) if isinstance(tree, tuple) else tree
