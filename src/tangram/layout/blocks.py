"""Layouts of tensors of which one column stands for several of another: bytes of two codes, scales of blocks.

What keeps a quantised weight is cut where the weight is, in whole blocks, so its layout follows from the weight's.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from tangram.layout.errors import LayoutError
from tangram.layout.locate import held
from tangram.layout.mesh import Mesh
from tangram.layout.notation import Layout
from tangram.layout.syntax import VOID, Dim


@lru_cache(maxsize=4096)
def in_blocks(layout: Layout, columns: int, mesh: Mesh) -> Layout:
    """The bound layout of a tensor of which one column stands for so many of a tensor that lies as `layout` says.

    Rows lie alike. Raises LayoutError where a part would have a share of such a column.
    """
    *rows, last = layout.dims
    cuts = tuple(cut for node in last.nodes for cut in node.cuts)
    plain = Dim(VOID, last.n // columns, cuts=cuts)
    for dim in (_narrower(last, columns), plain):
        if dim is not None and _cut_alike(last, dim, columns, mesh):
            return replace(layout, dims=(*rows, dim))
    raise LayoutError(f"it cuts blocks of {columns} columns apart, which nothing that is quantised can be: cut rows")


def _narrower(dim: Dim, columns: int) -> Dim | None:
    """With its innermost factor so many times smaller; None where it is no multiple."""
    if not dim.terms:
        return None if dim.n % columns else replace(dim, size=dim.n // columns)
    if len(dim.terms) > 1:
        return None
    *outer, inner = next(iter(dim.terms))
    narrower = _narrower(inner, columns)
    return None if narrower is None else replace(dim, terms=((*outer, narrower),))


def _cut_alike(wide: Dim, narrow: Dim, columns: int, mesh: Mesh) -> bool:
    """Whether every rank has of the one what its part of the other stands for."""
    if wide.n != narrow.n * columns:
        return False
    axes = tuple((axis, mesh.axes[axis][0]) for axis in sorted(wide.axes))
    small = Mesh((axes or (("one", 1),),))
    for rank in range(small.size):
        at = small.coords(rank)
        spread = tuple((first * columns, last * columns) for first, last in held(narrow, small, at))
        if held(wide, small, at) != spread:
            return False
    return True
