"""The inputs of an operator as their layouts have them, read by the operator's factors.

A dim that is one factor gives it its whole tree of cuts; one that is a product gives each factor what falls on its
borders. What falls on none, and what the operator knows no factor for, is lost: it has to be gathered.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Literal, NamedTuple

from torch import Tensor

from tangram.errors import UserError
from tangram.layout import Layout, Mesh, locate, validate
from tangram.layout.syntax import VOID, Dim
from tangram.sharding.ops import factor_products
from tangram.sharding.ops.bind import BoundOp, Dims
from tangram.sharding.ops.cut_trees import Tree, axes_of, only, tree_of


class State(NamedTuple):
    """What an axis does to one input."""

    kind: Literal["cut", "pending", "at", "lost"]
    """`lost`: it cuts something that is no factor of the operator, and has to be gathered."""
    factor: str = ""
    depth: int = 0
    op: str = ""
    coords: tuple[int, ...] = ()


class PlacedInput:
    """One input as its layout has it, read by the operator's factors."""

    __slots__ = ("dims", "factors", "layout", "nbytes", "place", "trees", "where")

    def __init__(self, place: int, layout: Layout, dims: Dims) -> None:
        self.place, self.layout, self.dims = place, layout, dims
        self.factors = {f for dim in dims for f in dim}
        self.trees: dict[str, Tree] = {}
        self.where: dict[str, State] = {}
        self.nbytes = 0.0
        """What a rank has of it, on average."""


def read(
    place: int, tensor: Tensor, inputs: Layout | None, bound: BoundOp, mesh: Mesh, ones: Collection[str]
) -> PlacedInput:
    """Which axis cuts which factor of an input. Raises UserError or LayoutError where the layout does not fit."""
    shape = tensor.shape
    layout = Layout(tuple([Dim(VOID, n) for n in shape])) if inputs is None else inputs
    if len(layout.dims) != len(shape) or any(map(_unsized, layout.dims)):
        layout = layout.bind(tuple(shape))
    held = PlacedInput(place, layout, bound.inputs[place] or ())
    twice = False
    for dim, factors, n in zip(layout.dims, held.dims, shape, strict=True):
        if (dim.n if dim.terms else dim.size) != n:
            raise UserError(
                f"input {place} has shape {list(shape)}, but its layout {layout} is of {list(layout.shape)}"
            )
        if dim.terms:
            twice = _read_dim(held, dim, factors, bound, mesh, ones) or twice
        elif cuts := dim.cuts:
            if ones or len(factors) != 1 or any([cut.map for cut in cuts]):  # noqa: C419  (a list is faster)
                twice = _read_dim(held, dim, factors, bound, mesh, ones) or twice
                continue
            (f,) = factors  # the usual case, as `_read_dim` has it, only faster
            held.trees[f] = cuts
            for depth, cut in enumerate(cuts):
                twice = twice or cut.axis in held.where
                held.where[cut.axis] = State("cut", f, depth)
    _read_suffixes(held, tensor, bound, mesh, ones)
    if twice or layout.pending or layout.at or layout.flat or len(mesh.views) > 1:
        validate(layout, mesh)
    return held


def _read_suffixes(held: PlacedInput, tensor: Tensor, bound: BoundOp, mesh: Mesh, ones: Collection[str]) -> None:
    """What a layout says beside its dims; and how much a rank has."""
    layout, where = held.layout, held.where
    for cut in layout.flat:
        where[cut.axis] = State("lost")
    share = 1
    for axis in where:
        share *= mesh.axis(axis)[0]
    held.nbytes = tensor.numel() * tensor.element_size() / share
    unread = layout.pending and str(held.place) in (bound.rule.note("unread") or ())
    for op, axis in layout.pending:
        if axis not in ones and not unread:  # else it may stay as it is
            where[axis] = State("pending", op=op)
    for axis, coords in layout.at:
        if axis not in ones:
            where[axis] = State("at", coords=coords)


def _unsized(dim: Dim) -> bool:
    return any(leaf.size is None for leaf in dim.leaves) if dim.terms else dim.size is None


def _read_dim(
    held: PlacedInput, dim: Dim, factors: Sequence[str], bound: BoundOp, mesh: Mesh, ones: Collection[str]
) -> bool:
    """Whether the layout needs a closer look: an axis stands twice, or in a bracket."""
    twice = bool(dim.terms)
    if twice or any(cut.map for cut in dim.cuts):
        for axis in dim.axes:
            mesh.axis(axis)
        locate.indices_of_rank(dim, mesh, dict.fromkeys(dim.axes, 0))  # raises where a map does not fit what it cuts
    for f, tree in _parts(tree_of(dim, mesh, ones), dim, factors, bound, mesh):
        if f:
            held.trees[f] = tree
        for depth, axis in enumerate(axes_of(tree)):
            twice = twice or axis in held.where
            held.where[axis] = State("cut", f, depth) if f else State("lost")
    return twice


def _parts(tree: Tree, dim: Dim, factors: Sequence[str], bound: BoundOp, mesh: Mesh) -> Sequence[tuple[str, Tree]]:
    """The cuts of a dim by its factors; those that do not pass have no factor."""
    if len(factors) < 2:
        return ((factors[0] if factors else "", tree),)
    sizes = [bound.sizes[f] for f in factors]
    if isinstance(tree, tuple):
        found, torn = factor_products.split(tree, sizes, mesh)
    else:
        dealt = factor_products.split_bracket(tree, sizes, mesh)
        if dealt is None:
            return (("", tree),)
        found, torn = [tree_of(x, mesh, ()) for x in dealt[0]], dealt[1]
    return [*zip(factors, found, strict=True), *([("", only(tree, torn))] if torn else [])]
