"""Where a layout puts things: which elements a rank holds, and who holds a set of elements.

Both directions cost time in the overlaps and in the intervals of the sets, never in the number of ranks: a layout is
read as arithmetic on the digits of a rank, and no table over ranks is ever made.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod

from tangram.layout import intervals
from tangram.layout.errors import LayoutError
from tangram.layout.intervals import MAPS, IntSet
from tangram.layout.mesh import Coords, Mesh
from tangram.layout.notation import Layout
from tangram.layout.region import Box, Region, box_intersect, flat_boxes
from tangram.layout.sizes import check_cut
from tangram.layout.syntax import Cut, Dim

At = dict[str, int]


@lru_cache(1 << 14)
def validate(layout: Layout, mesh: Mesh) -> Layout:
    """Return the layout when it makes sense on the mesh, else raise LayoutError.

    An axis cuts a product once (terms of a sum may share it); axes of two views that share digits of the rank do not
    stand together (only in terms of a sum, where no cut stands on the bracket); an axis that cuts has no pending
    reduction and does not say who holds the tensor.
    """
    for axis in sorted(layout.axes.union(a for _, a in layout.pending).union(a for a, _ in layout.at)):
        mesh.axis(axis)
    for axis, coords in layout.at:
        if not coords or len(set(coords)) != len(coords) or max(coords) >= mesh.axis(axis)[0]:
            raise LayoutError(f"{layout}: @{axis}={','.join(map(str, coords))} does not name ranks of mesh {mesh}")
    parts: list[Sequence[str]] = [sorted(_axes_of(dim, mesh)) for dim in layout.dims]
    parts += [(cut.axis,) for cut in layout.flat]
    parts += [(axis,) for _, axis in layout.pending] + [(axis,) for axis, _ in layout.at]
    _merge(parts, mesh, str(layout))
    if layout.flat:
        mesh.require_independent(sorted(layout.axes), str(layout))
    return layout


def _axes_of(dim: Dim, mesh: Mesh) -> set[str]:
    inner: set[str] = set()
    for term in dim.terms:
        inner |= _merge([sorted(_axes_of(x, mesh)) for x in term], mesh, str(dim))
    if dim.cuts:  # what they cut depends on all axes inside together
        mesh.require_independent(sorted(inner), str(dim))
    return _merge([sorted(inner), *((cut.axis,) for cut in dim.cuts)], mesh, str(dim))


def _merge(parts: Iterable[Sequence[str]], mesh: Mesh, what: str) -> set[str]:
    """The axes of parts that are multiplied with each other; between parts they must be independent."""
    merged: list[str] = []
    for part in parts:
        for x, y in itertools.product(merged, part):
            if x == y:
                raise LayoutError(f"{what}: axis {x} cuts twice")
            if not mesh.independent(x, y):
                raise LayoutError(f"{what}: axes {x} and {y} are not independent on mesh {mesh}")
        merged += part
    return set(merged)


# ---------------------------------------------------------------- rank -> elements


def indices_of_rank(dim: Dim, mesh: Mesh, at: At) -> IntSet:
    """The indices of one tensor dim that a rank at these coordinates holds. Every axis of the dim must be in `at`."""
    s = _inside(dim, mesh, at) if dim.terms else intervals.span(0, dim.n)
    for cut in dim.cuts:
        s = intervals.take(s, _part(cut, intervals.size(s), mesh, at[cut.axis]))
    return s


def _inside(dim: Dim, mesh: Mesh, at: At) -> IntSet:
    """What a bracket holds before its own cuts."""
    base = 0
    out: list[tuple[int, int]] = []
    for term in dim.terms:
        sizes = [x.n for x in term]
        out += intervals.shift(intervals.product([indices_of_rank(x, mesh, at) for x in term], sizes), base)
        for n in sizes[1:]:
            sizes[0] *= n
        base += sizes[0]
    return tuple(out) if len(dim.terms) == 1 else intervals.normal(out)


def _part(cut: Cut, n: int, mesh: Mesh, i: int) -> IntSet:
    k = mesh.axes[cut.axis][0]
    return MAPS[cut.map].holds(n, k, i, check_cut(cut, n, k))


def region(layout: Layout, mesh: Mesh, rank: int, family_dims: int = 0) -> Region:
    """The elements that `rank` holds; empty when the rank is outside `@` or gets nothing of an uneven cut.

    `family_dims`: how many leading dims are indices in the tensor's name. A flat cut (`//`) then cuts each tensor of
    the family by itself. Raises LayoutError when the layout does not fit the mesh or has no sizes.
    """
    return region_at(validate(layout, mesh), mesh, mesh.coords(rank), family_dims)


def region_at(layout: Layout, mesh: Mesh, at: At, family_dims: int = 0) -> Region:
    """`region` by coordinates. `at` has every axis that the layout names; the layout is taken as valid."""
    if any(at[axis] not in coords for axis, coords in layout.at):
        return Region()
    sets = tuple([indices_of_rank(dim, mesh, at) for dim in layout.dims])
    if not all(sets):
        return Region()
    if not layout.flat:
        return Region((sets,))
    lead, local = sets[:family_dims], sets[family_dims:]
    positions = intervals.span(0, _count(local))
    for cut in layout.flat:
        positions = intervals.take(positions, _part(cut, intervals.size(positions), mesh, at[cut.axis]))
    return Region.of([(*lead, *box) for box in flat_boxes(local, positions)])


def _count(sets: Iterable[IntSet]) -> int:
    return prod(map(intervals.size, sets))


def partitions(layout: Layout, mesh: Mesh) -> bool:
    """Whether what the ranks hold, each region that several hold counted once, is the tensor, every element once.

    Of a bound layout without flat cuts or `@`: its regions are products of what each dim gives by itself, since no two
    dims share an axis. So each dim is looked at alone, over the ranks of the axes that cut it. Raises LayoutError for
    another layout, and where the axes of one dim are of views that share digits of the rank.
    """
    _refuse_joint(layout, mesh)
    return 0 in layout.shape or all(_partitioned(dim, mesh) for dim in layout.dims)


def local_shapes(layout: Layout, mesh: Mesh) -> set[tuple[int, ...]]:
    """The shapes of what ranks hold, each once. Of a bound layout without flat cuts or `@`, as `partitions`."""
    _refuse_joint(layout, mesh)
    return set(itertools.product(*[{intervals.size(s) for s in _sets(dim, mesh)} for dim in layout.dims]))


def _refuse_joint(layout: Layout, mesh: Mesh) -> None:
    validate(layout, mesh)
    if layout.flat or layout.at:
        raise LayoutError(f"{layout}: cuts of the flattened block and ranks by name are not looked at dim by dim")


@lru_cache(1 << 12)
def _partitioned(dim: Dim, mesh: Mesh) -> bool:
    sets = _sets(dim, mesh)
    together = intervals.normal(run for s in sets for run in s)
    return together == intervals.span(0, dim.n) and sum(intervals.size(s) for s in sets) == dim.n


@lru_cache(1 << 12)
def _sets(dim: Dim, mesh: Mesh) -> frozenset[IntSet]:
    """What ranks hold of one dim, each set once."""
    axes = sorted(dim.axes)
    mesh.require_independent(axes, str(dim))
    places = itertools.product(*[range(mesh.axis(axis)[0]) for axis in axes])
    return frozenset(indices_of_rank(dim, mesh, dict(zip(axes, place, strict=True))) for place in places)


# ---------------------------------------------------------------- elements -> ranks


@dataclass(frozen=True)
class Owner:
    """Ranks that hold a part of what was asked for: those of `layout.at` with these coordinates hold all of `boxes`."""

    coords: Coords
    boxes: tuple[Box, ...]


def owners(layout: Layout, mesh: Mesh, wanted: Region, family_dims: int = 0) -> list[Owner]:
    """Who holds the wanted elements, and which of them each holds, in time of the overlaps.

    Replicas are not listed one by one: axes that an owner's coordinates leave out are free (`ranks_of` lists the
    ranks). An element is with several owners only where a cut bracket holds it at several places, as in `(z/tp +
    x)/dp`.
    """
    validate(layout, mesh)
    if not wanted.within(layout.shape):
        raise LayoutError(f"{layout}: {wanted} does not lie inside a tensor of shape {list(layout.shape)}")
    out: dict[Coords, list[Box]] = {}
    for box in wanted.boxes:
        per_dim = [dim_owners(dim, s, mesh) for dim, s in zip(layout.dims, box, strict=True)]
        for combo in itertools.product(*per_dim):
            coords = tuple(sorted([pair for c, _ in combo for pair in c]))
            sub = tuple([s for _, s in combo])
            for more, part in flat_owners(layout, mesh, coords, sub, family_dims):
                out.setdefault(more, []).append(part)
    return [Owner(coords, tuple(boxes)) for coords, boxes in out.items()]


def ranks_of(layout: Layout, mesh: Mesh, owner: Owner) -> Iterator[int]:
    """Every rank that an owner stands for, `@` applied."""
    for places in itertools.product(*[[(axis, i) for i in allowed] for axis, allowed in layout.at]):
        yield from mesh.ranks(tuple(sorted((*owner.coords, *places))))


def nearest_holder(layout: Layout, mesh: Mesh, coords: Coords, to: int) -> int:
    """One rank with these coordinates, `@` applied: `to` itself when it is one, else spread over `to`."""
    if not layout.at:
        return mesh.nearest(coords, to)
    here = mesh.coords(to % mesh.size)
    places = tuple((a, here[a] if here[a] in allowed else allowed[to % len(allowed)]) for a, allowed in layout.at)
    return mesh.nearest(tuple(sorted((*coords, *places))), to)


def dim_owners(dim: Dim, s: IntSet, mesh: Mesh) -> list[tuple[Coords, IntSet]]:
    """`[(coordinates, part of s)]` over the axes that cut this dim: who holds the set `s` of its indices.

    The coordinates of one answer stand in any order: callers join those of several dims and sort once.
    """
    if not s:
        return []
    found = _bracket_owners(dim, s, mesh) if dim.terms else [((), s)]
    if not dim.cuts:
        return found
    whole = intervals.span(0, dim.n)
    state = [(coords, sub, whole) for coords, sub in found]
    if dim.inner_axes:
        state = [
            (full, sub, _inside(dim, mesh, dict(full)))
            for coords, part in found
            for full, sub in _spread(coords, part, dim.inner_axes, mesh)
        ]
    return _through_cuts(dim.cuts, state, mesh)


def _through_cuts(
    cuts: Sequence[Cut], state: Sequence[tuple[Coords, IntSet, IntSet]], mesh: Mesh, *, whole: bool = False
) -> list[tuple[Coords, IntSet]]:
    """Follow sets through cuts: `state` has, for coordinates, what is asked for and what is held before the cuts.

    Returns `[(coordinates, set)]` after them: the part that is asked for, or with `whole` all that is held there.
    """
    for cut in cuts:
        last = cut is cuts[-1]
        k = mesh.axis(cut.axis)[0]
        row = MAPS[cut.map]
        after: list[tuple[Coords, IntSet, IntSet]] = []
        for coords, sub, have in state:
            n = intervals.size(have)
            args = check_cut(cut, n, k)
            for i, positions in row.who(n, k, intervals.rank(have, sub), args):
                asked = () if last and whole else intervals.take(have, positions)
                held_there = intervals.take(have, row.holds(n, k, i, args)) if whole or not last else ()
                after.append(((*coords, (cut.axis, i)), asked, held_there))
        state = after
    return [(coords, have if whole else sub) for coords, sub, have in state]


def _bracket_owners(dim: Dim, s: IntSet, mesh: Mesh) -> list[tuple[Coords, IntSet]]:
    """Who holds `s` of a bracket before its own cuts. Terms that share axes are merged by coordinates."""
    base = 0
    out: dict[Coords, list[tuple[int, int]]] = {}
    for term in dim.terms:
        sizes = [x.n for x in term]
        n = 1
        for m in sizes:
            n *= m
        part = intervals.shift(intervals.intersect(s, intervals.span(base, base + n)), -base)
        for box in _factor_boxes(part, sizes):
            for combo in itertools.product(*[dim_owners(x, y, mesh) for x, y in zip(term, box, strict=True)]):
                coords = tuple([pair for c, _ in combo for pair in c])
                sub = intervals.product([y for _, y in combo], sizes)
                out.setdefault(coords, []).extend(intervals.shift(sub, base))
        base += n
    return [(coords, intervals.normal(pairs)) for coords, pairs in out.items()]


def _factor_boxes(s: IntSet, sizes: Sequence[int]) -> list[Box]:
    """`s` over row-major digits of these sizes, as disjoint products."""
    if len(sizes) == 1:
        return [(s,)] if s else []
    inner = 1
    for n in sizes[1:]:
        inner *= n
    return [(outer, *rest) for outer, part in intervals.digits(s, inner) for rest in _factor_boxes(part, sizes[1:])]


def _spread(coords: Coords, s: IntSet, axes: Sequence[str], mesh: Mesh) -> Iterator[tuple[Coords, IntSet]]:
    """The same set at every coordinate of the axes that `coords` leaves open: the bracket depends on them all."""
    open_ = [a for a in axes if a not in dict(coords)]
    for more in itertools.product(*[[(a, i) for i in range(mesh.axis(a)[0])] for a in open_]):
        yield (*coords, *more), s


def flat_owners(layout: Layout, mesh: Mesh, coords: Coords, sub: Box, family_dims: int) -> Iterator[tuple[Coords, Box]]:
    """Follow a box through the flat cuts of its owner's local block: `(coordinates, part of the box)`."""
    if not layout.flat:
        yield coords, sub
        return
    lead, rest = sub[:family_dims], sub[family_dims:]
    axes = sorted(frozenset[str]().union(*(dim.axes for dim in layout.dims)))
    for full, _ in _spread(coords, (), axes, mesh):  # where a flat block begins depends on all that the rank holds
        local = tuple(indices_of_rank(dim, mesh, dict(full)) for dim in layout.dims[family_dims:])
        places = intervals.product(
            [intervals.rank(have, want) for have, want in zip(local, rest, strict=True)],
            [intervals.size(have) for have in local],
        )
        block = intervals.span(0, _count(local))
        for at, mine in _through_cuts(layout.flat, [(full, places, block)], mesh, whole=True):
            for box in flat_boxes(local, mine):  # of fewer intervals than what of it is wanted
                part = box_intersect(box, rest)
                if part is not None:
                    yield tuple(sorted(at)), (*lead, *part)
