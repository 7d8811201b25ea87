"""Layouts that follow from another tensor's: of what has some of its factors, or one number for several of it.

`follow` is of scales, factored states, LoRA; the others are of bytes of two codes and of scales of blocks.

What keeps a quantised tensor is cut where that is, in whole blocks: of columns of a row
(`in_blocks`), or of consecutive numbers of all rows (`flat_blocks`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from math import prod

from tangram.layout.errors import LayoutError
from tangram.layout.intervals import span
from tangram.layout.locate import indices_of_rank, region
from tangram.layout.mesh import Mesh
from tangram.layout.notation import Layout
from tangram.layout.region import Box, Region
from tangram.layout.syntax import VOID, Cut, Dim


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
    small = _only(mesh, wide.axes)
    for rank in range(small.size):
        at = small.coords(rank)
        spread = tuple((first * columns, last * columns) for first, last in indices_of_rank(narrow, small, at))
        if indices_of_rank(wide, small, at) != spread:
            return False
    return True


def shape_of_blocks(shape: Sequence[int], count: int) -> tuple[int, ...]:
    """The shape of what has a number for each `count` consecutive ones of a tensor: rows of blocks where these fill the
    tensor's rows, else all blocks in one row, of which the last may be of fewer."""
    if shape and shape[-1] % count == 0:
        return (*shape[:-1], shape[-1] // count)
    return (-(-prod(shape) // count),)


def flat_blocks(part: Region, shape: Sequence[int], count: int) -> Region:
    """What a rank has of `shape_of_blocks`, of its part of the tensor. Raises LayoutError where that has some of a
    block and not all."""
    return Region.of([_blocks_of(box, tuple(shape), count) for box in part.boxes])


@lru_cache(maxsize=4096)
def refuse_cut_blocks(layout: Layout, shape: tuple[int, ...], count: int, mesh: Mesh) -> None:
    """Raise LayoutError where a bound layout gives any rank some of a block and not all."""
    small = _only(mesh, layout.axes)
    for rank in range(small.size):
        flat_blocks(region(replace(layout, at=()), small, rank), shape, count)


def _blocks_of(box: Box, shape: tuple[int, ...], count: int) -> Box:
    if shape and shape[-1] % count == 0:
        *rows, last = box
        if all(first % count == 0 and stop % count == 0 for first, stop in last):
            return (*rows, tuple((first // count, stop // count) for first, stop in last))
    elif box[1:] == tuple(span(0, n) for n in shape[1:]):
        inner, whole = prod(shape[1:]), prod(shape)
        flat = [(first * inner, stop * inner) for first, stop in box[0]]
        if all(first % count == 0 and (stop % count == 0 or stop == whole) for first, stop in flat):
            return (tuple((first // count, -(-stop // count)) for first, stop in flat),)
    raise LayoutError(f"it cuts blocks of {count} consecutive numbers apart")


def _only(mesh: Mesh, axes: frozenset[str] | set[str]) -> Mesh:
    """The part of a mesh that some axes make."""
    return Mesh((tuple((axis, mesh.axes[axis][0]) for axis in sorted(axes)) or (("one", 1),),))


# ----------------------------------------------------------------
# Companions: a tensor made of some of another's factors, as scales, factored states, LoRA.


def follow(base: Layout, dims: str | Sequence[Dim]) -> Layout:
    """The layout of a companion with these dims: every factor keeps the cuts that it has in `base`.

    A cut bracket is kept when the companion has a bracket of the same factors; when it has only some of them, or has
    them otherwise, the cut cannot be said of the companion, and LayoutError is raised. `@` is kept; pending reductions
    are not.

    >>> print(follow(Layout.parse("(heads/tp d)/dp i @pp=1"), "(heads d) rank"))
    (heads/tp d)/dp rank @pp=1
    """
    target = Layout.parse(dims).dims if isinstance(dims, str) else tuple(dims)
    if base.flat:
        raise LayoutError(f"{base}: a flat cut goes through all factors; a companion has no layout of its own")
    names = {leaf.name for dim in target for leaf in dim.leaves if leaf.name}
    there = {_key(node) for dim in target for node in dim.nodes if node.terms}
    text = repr(" ".join(map(str, target)))
    cuts: dict[Key, tuple[Cut, ...]] = {}
    for node in (node for dim in base.dims for node in dim.nodes):
        inner = {leaf.name for leaf in node.leaves} - {"", VOID}
        if not inner & names:
            continue
        if node.terms and node.cuts:
            if not inner <= names:
                raise LayoutError(f"{node}: the cut goes through factors that {text} lacks")
            if _key(node) not in there:
                raise LayoutError(f"{node}: the cut is of the whole bracket, and {text} has no such bracket")
        if _key(node) in there and any(leaf.cuts for leaf in node.leaves if leaf.name in ("", VOID)):
            raise LayoutError(f"{node}: a factor without a name is cut; give it one, so that {text} can follow")
        if cuts.setdefault(_key(node), node.cuts) != node.cuts:
            raise LayoutError(f"{base}: {node.uncut()} has two ways of being cut, so that a companion has none")
    return Layout(tuple(_recut(dim, cuts) for dim in target), at=base.at)


Key = tuple[object, ...]


def _key(dim: Dim) -> Key:
    """What makes two dims the same: `("factor", name)`, or a bracket's factors; brackets in a product do not count."""
    if not dim.terms:
        return ("factor", dim.name or dim.size)
    terms = tuple(tuple(_factors(term)) for term in dim.terms)
    return ("bracket", *terms)


def _factors(term: Sequence[Dim]) -> Iterator[object]:
    for x in term:
        if len(x.terms) == 1:
            yield from _factors(x.terms[0])
        else:
            yield _key(x)


def _recut(dim: Dim, cuts: dict[Key, tuple[Cut, ...]]) -> Dim:
    terms = tuple(tuple(_recut(x, cuts) for x in term) for term in dim.terms)
    known = () if dim.name == VOID else cuts.get(_key(dim), ())
    return replace(dim, terms=terms, cuts=known)
