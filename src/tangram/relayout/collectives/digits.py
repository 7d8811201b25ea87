"""Even layouts as digits: which digit of which dim each digit of the rank is; so plans are arithmetic on few numbers.

A dim of n elements is a number with digits, in any mixed radix that divides it; an even cut says that one of them is a
digit of the rank. Where it stands is `DigitSpot(dim, outer)`: `outer` blocks stand before it, counted in the whole dim.
Two layouts hold the same elements exactly where their spots are the same, in whatever words they were written: `x/a/b`
puts b at outer |a|, `(2 f/tp)/dp` with dp=4 splits dp into two digits around tp.

The trade-off: cuts that leave a remainder, maps as `zigzag`, sums of factors that are cut inside, `//` and `@` are
no digits and are refused here; `tangram.relayout.exchange.redistribute` moves those.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from tangram.layout import Layout, Mesh, validate
from tangram.layout.syntax import Cut, Dim
from tangram.relayout.mapping.errors import RelayoutError


class DigitSpot(NamedTuple):
    """Where in a tensor a digit of the rank stands."""

    dim: int
    outer: int
    """How many blocks of the whole dim stand before it."""


WAITING = DigitSpot(-1, 0)
"""Of a digit over which a sum is pending."""

State = tuple[DigitSpot | None, ...]
"""For each digit of the rank, where it stands; None: all of its ranks have the same."""


class RankDigit(NamedTuple):
    """A digit of the rank: `rank // stride % k`."""

    stride: int
    k: int


@dataclass(frozen=True)
class DigitProblem:
    """Two layouts of one tensor over the digits of the rank that either uses, most significant first."""

    shape: tuple[int, ...]
    digits: tuple[RankDigit, ...]
    names: tuple[str, ...]
    """The axis that each digit is; `dp.0`, `dp.1` of an axis that is several."""
    axes: tuple[str, ...]
    """The axis that each digit is of."""
    source: State
    target: State


_Piece = tuple[RankDigit, DigitSpot]


def problem(shape: Sequence[int], source: Layout, target: Layout, mesh: Mesh, *, idle: bool = False) -> DigitProblem:
    """Both layouts as digits. Raises RelayoutError, LayoutError for what is none.

    `idle`: with the other axes of the mesh, which may help; without it, only where sums are reduced.
    """
    whole = tuple(shape)
    sides = [_pieces(validate(layout.bind(whole), mesh), mesh) for layout in (source, target)]
    borders = sorted({b for side in sides for digit, _ in side for b in (digit.stride, digit.stride * digit.k)})
    if any(b % a for a, b in itertools.pairwise(borders)):
        raise RelayoutError(f"{source} and {target} share out the ranks of mesh {mesh} in ways that do not nest{_MOVE}")
    split = [{d: spot for piece in side for d, spot in _split(piece, borders)} for side in sides]
    used = {*split[0], *split[1]}
    if idle or any(spot == WAITING != split[1].get(digit) for digit, spot in split[0].items()):
        used |= _idle(used, mesh)
    digits = tuple(sorted(used, reverse=True))
    found = [_axis(digit, mesh, source, target) for digit in digits]
    states = [tuple(side.get(digit) for digit in digits) for side in split]
    return DigitProblem(whole, digits, _names(found), tuple(found), states[0], states[1])


_MOVE = "; tangram.relayout.exchange moves any two layouts"


def _idle(used: Iterable[RankDigit], mesh: Mesh) -> set[RankDigit]:
    """The axes of the first view of the mesh that share no rank's digit with those in use."""
    own = list(used)
    found = [RankDigit(mesh.axes[axis][1], k) for axis, k in mesh.views[0] if k > 1]
    return {a for a in found if all(a.stride * a.k <= b.stride or b.stride * b.k <= a.stride for b in own)}


def _axis(digit: RankDigit, mesh: Mesh, source: Layout, target: Layout) -> str:
    used = [a for layout in (source, target) for a in (*sorted(layout.axes), *(a for _, a in layout.pending))]
    for axis in (*used, *mesh.axes):
        k, stride = mesh.axes[axis]
        if stride <= digit.stride and digit.stride * digit.k <= stride * k:
            return axis
    raise RelayoutError(f"no axis of mesh {mesh} has {digit}{_MOVE}")


def _names(axes: Sequence[str]) -> tuple[str, ...]:
    return tuple(a if axes.count(a) == 1 else f"{a}.{axes[:i].count(a)}" for i, a in enumerate(axes))


def _split(piece: _Piece, borders: Iterable[int]) -> list[_Piece]:
    (stride, k), spot = piece
    inside = [b for b in borders if stride <= b <= stride * k]
    found: list[_Piece] = []
    for low, high in itertools.pairwise(inside):
        outer = spot.outer * (stride * k // high) if spot != WAITING else 0
        found.append((RankDigit(low, high // low), DigitSpot(spot.dim, outer)))
    return found


def _pieces(layout: Layout, mesh: Mesh) -> list[_Piece]:
    """The digits of the rank that a layout uses, and where they stand."""
    if layout.flat or layout.at:
        raise RelayoutError(f"{layout}: a flat cut or @ has no sequence of collectives{_MOVE}")
    found: list[_Piece] = []
    for op, axis in layout.pending:
        if op != "sum":
            raise RelayoutError(f"{layout}: only sums are reduced here, and {op}:{axis} is none; reduce it first")
        k, stride = mesh.axes[axis]
        found += [(RankDigit(stride, k), WAITING)] if k > 1 else []
    for d, dim in enumerate(layout.dims):
        outer = 1
        for n, digit in _digits(dim, mesh, layout):
            if digit is not None:
                found.append((digit, DigitSpot(d, outer)))
            outer *= n
    return found


_Run = tuple[int, RankDigit | None]
"""A digit of a dim: its size, and which digit of the rank it is."""


def _digits(dim: Dim, mesh: Mesh, layout: Layout) -> list[_Run]:
    if not dim.terms:
        found: list[_Run] = [(dim.n, None)]
    elif len(dim.terms) == 1:
        found = [run for x in dim.terms[0] for run in _digits(x, mesh, layout)]
    elif dim.inner_axes:
        raise RelayoutError(f"{layout}: {dim} is cut inside a sum of factors{_MOVE}")
    else:
        found = [(dim.n, None)]
    for cut in dim.cuts:
        found = _cut(found, cut, mesh, layout)
    return [run for run in found if run[0] > 1]


def _cut(runs: Sequence[_Run], cut: Cut, mesh: Mesh, layout: Layout) -> list[_Run]:
    """Give an axis the first of what is left, as much as it has ranks."""
    k, stride = mesh.axes[cut.axis]
    left, out = k, list[_Run]()
    if cut.map and k > 1:
        raise RelayoutError(f"{layout}: only even chunks have a sequence of collectives, and /{cut} is none{_MOVE}")
    for n, digit in runs:
        if left == 1 or digit is not None:
            out.append((n, digit))
            continue
        own = min(n, left)
        if max(n, left) % own:
            break
        left //= own
        out += [(own, RankDigit(stride * left, own)), (n // own, None)]
    if left > 1:
        raise RelayoutError(f"{layout}: /{cut} does not cut into {k} even parts{_MOVE}")
    return out


def fits(problem: DigitProblem, state: State) -> bool:
    """Whether the digits stand beside each other in a tensor of this shape."""
    ends: dict[int, list[tuple[int, int]]] = {}
    for (_, k), spot in zip(problem.digits, state, strict=True):
        if spot is not None and spot != WAITING:
            ends.setdefault(spot.dim, []).append((spot.outer, k))
    for d, own in ends.items():
        end = 1
        for outer, k in sorted(own):
            if outer % end:
                return False
            end = outer * k
        if problem.shape[d] % end:
            return False
    return True


def local_shape(problem: DigitProblem, state: State) -> tuple[int, ...]:
    """What a rank has."""
    shape = list(problem.shape)
    for (_, k), spot in zip(problem.digits, state, strict=True):
        if spot is not None and spot != WAITING:
            shape[spot.dim] //= k
    return tuple(shape)


def layout_of(problem: DigitProblem, state: State) -> Layout:
    """A state in the notation. A digit that is only part of an axis is named as in `DigitProblem.names`."""
    cuts: Mapping[int, list[tuple[int, int, str]]] = {d: [] for d in range(len(problem.shape))}
    for (_, k), spot, name in zip(problem.digits, state, problem.names, strict=True):
        if spot is not None and spot != WAITING:
            cuts[spot.dim].append((spot.outer, k, name))
    pending = tuple(("sum", name) for name, spot in zip(problem.names, state, strict=True) if spot == WAITING)
    return Layout(tuple(_written(n, sorted(cuts[d])) for d, n in enumerate(problem.shape)), (), pending)


def _written(n: int, cuts: Sequence[tuple[int, int, str]]) -> Dim:
    runs: list[tuple[int, list[Cut]]] = []
    at = 1
    for outer, k, name in cuts:
        if outer > at or not runs:
            runs += [(outer // at, [])] if outer > at else []
            runs.append((1, []))
        size, own = runs[-1]
        runs[-1] = size * k, [*own, Cut(name)]
        at = outer * k
    if not runs:
        return Dim(size=n)
    size, own = runs[-1]
    runs[-1] = size * (n // at), own
    factors = tuple(Dim(size=size, cuts=tuple(own)) for size, own in runs)
    return factors[0] if len(factors) == 1 else Dim(terms=(factors,))


def elements(problem: DigitProblem, state: State) -> float:
    """How many elements a rank has, and of a state with digits that stand nowhere all of them."""
    return math.prod(local_shape(problem, state))


# How much of a tensor a rank has in two layouts, on average: what it need not receive.
_GRID = 1 << 20
"""Blocks that are counted one by one where digits do not nest; of more the share counts as none."""

_Cut = tuple[int, int, int]
"""A digit of a dim: dim, blocks before it, size."""


def in_common(problem: DigitProblem, a: State, b: State) -> float:
    """The share of the whole tensor. An element counts on the ranks whose digits are the element's own in both."""
    parts = 1
    pairs: list[tuple[_Cut, _Cut]] = []
    for (_, k), x, y in zip(problem.digits, a, b, strict=True):
        if x is y or x == y:
            parts *= k if x is not None and x != WAITING else 1
        elif x != WAITING and y != WAITING:
            parts *= k
            if x is not None and y is not None:
                pairs.append(((x.dim, x.outer, k), (y.dim, y.outer, k)))
    return _equal(tuple(pairs)) / parts if pairs else 1 / parts


@lru_cache(1 << 14)
def _equal(pairs: tuple[tuple[_Cut, _Cut], ...]) -> float:
    """The share of the elements in which the two digits of each pair are the same."""
    cuts = sorted({cut for pair in pairs for cut in pair})
    for (d, outer, k), (e, start, _) in itertools.pairwise(cuts):
        if d == e and start % (outer * k):
            return _counted(pairs)
    share = 1.0
    joined: dict[_Cut, _Cut] = {cut: cut for cut in cuts}

    def root(cut: _Cut) -> _Cut:
        while joined[cut] != cut:
            cut = joined[cut]
        return cut

    for x, y in pairs:  # independent digits are equal once in k; those that follow from others always
        if root(x) != root(y):
            share /= x[2]
            joined[root(x)] = root(y)
    return share


def _counted(pairs: tuple[tuple[_Cut, _Cut], ...]) -> float:
    dims = sorted({cut[0] for pair in pairs for cut in pair})
    sizes = {d: math.lcm(*[outer * k for pair in pairs for e, outer, k in pair if e == d]) for d in dims}
    if math.prod(sizes.values()) > _GRID:
        return 0.0
    grids = dict(zip(sizes, np.ogrid[tuple(slice(0, n) for n in sizes.values())], strict=True))
    same = np.ones(tuple(sizes.values()), dtype=bool)
    for pair in pairs:
        x, y = [grids[d] // (sizes[d] // (outer * k)) % k for d, outer, k in pair]
        same &= x == y
    return float(same.mean())
