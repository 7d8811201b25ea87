"""Cells: a mapping as bijections between index boxes. One cell per product of factors that two tensors share.

Both sides of a statement are expanded into monomials (products over sums are distributed). Two monomials with the same
labels and the same set of factors are the same elements; each gives, for every dim of its tensor, an index that is
affine in the factors. The monomials of a tensor tile it, so when every one has its counterpart the statement is a
bijection: the match is the proof. Parts match by label and never by their order, so k and v cannot swap.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from tangram.layout import intervals
from tangram.layout.intervals import IntSet
from tangram.layout.region import Box
from tangram.layout.syntax import VOID, Dim, Option
from tangram.relayout.mapping.errors import RelayoutError


@dataclass(frozen=True)
class IndexDigit:
    """One factor inside a dim: it adds `offset + stride * value` to the index, `0 <= value < size`."""

    offset: int
    size: int
    stride: int
    factor: str


@dataclass(frozen=True)
class DimIndex:
    """The index along one tensor dim as a function of factors: `tail` plus the digits, strides descending."""

    digits: tuple[IndexDigit, ...]
    tail: int

    def boxes(self, s: IntSet) -> list[Box]:
        """Which factor values give an index in `s`: disjoint products, one set per digit."""
        return _restrict(s, self.digits, self.tail)

    def indices(self, sets: Sequence[IntSet]) -> IntSet:
        """The indices that these factor values give."""
        s: IntSet = ((self.tail, self.tail + 1),)
        for digit, values in zip(reversed(self.digits), reversed(sets), strict=True):
            o, st = digit.offset, digit.stride
            if s == ((0, st),):
                s = tuple([(o + a * st, o + b * st) for a, b in values])
            else:
                s = intervals.normal(
                    [(o + i * st + a, o + i * st + b) for i in intervals.elements(values) for a, b in s]
                )
        return s


def _restrict(s: IntSet, digits: Sequence[IndexDigit], tail: int) -> list[Box]:
    if not digits:
        return [()] if intervals.intersect(s, ((tail, tail + 1),)) else []
    d = digits[0]
    inside = intervals.intersect(s, ((d.offset, d.offset + d.size * d.stride),)) if d.size * d.stride else ()
    rest = digits[1:]
    return [
        (outer, *more)
        for outer, part in intervals.digits(intervals.shift(inside, -d.offset), d.stride)
        for more in _restrict(part, rest, tail)
    ]


@dataclass(frozen=True)
class CellPart:
    """Where the elements of a cell lie in one tensor. `slots` are each dim's factors in the cell's order."""

    tensor: str
    dims: tuple[DimIndex, ...]
    slots: tuple[tuple[int, ...], ...]

    def boxes(self, box: Box) -> list[Box]:
        """The elements of a tensor box that belong to the cell, as boxes over the cell's factors."""
        n = sum(len(s) for s in self.slots)
        out: list[Box] = []
        for combo in itertools.product(*[dim.boxes(s) for dim, s in zip(self.dims, box, strict=True)]):
            values: list[IntSet] = [()] * n
            for slots, sets in zip(self.slots, combo, strict=True):
                for slot, s in zip(slots, sets, strict=True):
                    values[slot] = s
            out.append(tuple(values))
        return out

    def indices(self, box: Box) -> Box:
        """The tensor box of a box over the cell's factors."""
        return tuple(d.indices([box[i] for i in slots]) for d, slots in zip(self.dims, self.slots, strict=True))


@dataclass(frozen=True)
class Cell:
    """Equal elements of two tensors, over named factors of these sizes. No source: created with the `fill` option.

    `tied` are further copies of the source that must agree with it.
    """

    factors: tuple[str, ...]
    sizes: tuple[int, ...]
    target: CellPart
    source: CellPart | None
    tied: tuple[CellPart, ...] = ()
    options: tuple[Option, ...] = ()

    @cached_property
    def size(self) -> int:
        """The number of elements."""
        return math.prod(self.sizes)


@dataclass(frozen=True)
class Monomial:
    """A product of factors in one tensor, before it is matched: labels, and per dim its digits and tail."""

    tensor: str
    labels: frozenset[str]
    dims: tuple[DimIndex, ...]

    @cached_property
    def digits(self) -> tuple[IndexDigit, ...]:
        """All digits, dim by dim."""
        return tuple(d for dim in self.dims for d in dim.digits)

    @property
    def void(self) -> bool:
        """Whether it stands only on its own side."""
        return any(label[:1] == VOID for label in self.labels)

    @cached_property
    def key(self) -> tuple[frozenset[str], frozenset[str]]:
        """What must be equal for two monomials to be the same elements."""
        return self.labels, frozenset(d.factor for d in self.digits)

    @cached_property
    def factors(self) -> tuple[str, ...]:
        """The factors in the order of this tensor: the order a cell keeps its boxes in."""
        return tuple(d.factor for d in self.digits)

    def part(self, factors: Sequence[str]) -> CellPart:
        """This monomial as a part of a cell over these factors."""
        place = {name: i for i, name in enumerate(factors)}
        slots = tuple(tuple(place[d.factor] for d in dim.digits) for dim in self.dims)
        return CellPart(self.tensor, self.dims, slots)

    def __str__(self) -> str:
        return " ".join([*sorted(self.labels), *self.factors]) or "one element"


def monomials(tensor: str, dims: Sequence[Dim], labels: frozenset[str], own: frozenset[str]) -> list[Monomial]:
    """Expand a tensor's bound dims. `labels` are the names that mark parts, `own` the tensor's own label if it is one.

    Raises RelayoutError for a repeated factor (a diagonal is no bijection) and for a literal other than 1.
    """
    out: list[Monomial] = []
    for combo in itertools.product(*[_expand(dim, labels) for dim in dims]):
        found = Monomial(tensor, own.union(*(tags for _, tags in combo)), tuple(index for index, _ in combo))
        if len(set(found.factors)) != len(found.factors):
            raise RelayoutError(f"{tensor}: a factor stands twice in one product ({found}); a diagonal is no bijection")
        out.append(found)
    return out


def _expand(dim: Dim, labels: frozenset[str]) -> list[tuple[DimIndex, frozenset[str]]]:
    """`[(index, labels)]`, one for each monomial of a dim."""
    if not dim.terms:
        return [_leaf(dim, labels)]
    out: list[tuple[DimIndex, frozenset[str]]] = []
    base = 0
    for term in dim.terms:
        n = math.prod(x.n for x in term)
        out += [_compose(base, n, term, combo) for combo in itertools.product(*[_expand(x, labels) for x in term])]
        base += n
    return out


def _leaf(dim: Dim, labels: frozenset[str]) -> tuple[DimIndex, frozenset[str]]:
    void = dim.name[:1] == VOID
    if not dim.name and dim.n != 1:
        raise RelayoutError(f"the literal {dim.n} in a mapping says what nothing is; name the factor")
    if not dim.name or dim.name in labels:
        return DimIndex((), 0), frozenset([dim.name] if dim.name else [])
    digit = IndexDigit(
        0, dim.n, 1, dim.name
    )  # also of size 1: whether two parts look alike must not depend on the shapes
    return DimIndex((digit,), 0), frozenset([dim.name] if void else [])


def _compose(
    base: int, n: int, term: Sequence[Dim], parts: Iterable[tuple[DimIndex, frozenset[str]]]
) -> tuple[DimIndex, frozenset[str]]:
    """A product of indices, row-major, at `base`. Offsets ride on the next digit, so that they restrict in order."""
    digits: list[IndexDigit] = []
    tags: frozenset[str] = frozenset()
    rest, carry = n, base
    for x, (index, labels) in zip(term, parts, strict=True):
        rest = rest // x.n if x.n else 0
        for d in index.digits:
            digits.append(IndexDigit(d.offset * rest + carry, d.size, d.stride * rest, d.factor))
            carry = 0
        carry += index.tail * rest
        tags |= labels
    return DimIndex(tuple(digits), carry), tags


_ADVICE = "mark them by their tensors' names, as in (q + k)"


def match(
    statement: str,
    source: Sequence[Sequence[Monomial]],
    target: Sequence[Sequence[Monomial]],
    options: tuple[Option, ...],
) -> tuple[list[Cell], list[Monomial]]:
    """Pair the monomials of tied groups: `(cells, dropped source monomials)`.

    Raises RelayoutError when two parts of a side look the same or a part has no counterpart.
    """
    sources, targets = _table(statement, source), _table(statement, target)
    alone = sources.keys() ^ targets.keys()
    if alone:
        raise RelayoutError(f"{statement}: no counterpart for {'; '.join(sorted(_describe(*key) for key in alone))}")
    cells: list[Cell] = []
    for key, copies in targets.items():
        first, *others = sources[key]
        for t in copies:
            tied = tuple(o.part(t.factors) for o in others)
            cells.append(Cell(t.factors, _sizes(t), t.part(t.factors), first.part(t.factors), tied, options))
    voids = [m for tensors in target for m in tensors if m.void]
    cells += [Cell(m.factors, _sizes(m), m.part(m.factors), None, (), options) for m in voids]
    return cells, [m for tensors in source for m in tensors if m.void]


def _sizes(m: Monomial) -> tuple[int, ...]:
    return tuple(d.size for d in m.digits)


def _table(
    statement: str, groups: Sequence[Sequence[Monomial]]
) -> Mapping[tuple[frozenset[str], frozenset[str]], list[Monomial]]:
    """Monomials by key; tied tensors (of one group) share keys, others may not."""
    out: dict[tuple[frozenset[str], frozenset[str]], list[Monomial]] = {}
    for group in groups:
        here: dict[tuple[frozenset[str], frozenset[str]], list[Monomial]] = {}
        for m in group:
            if m.void:
                continue
            same = here.setdefault(m.key, [])
            if any(o.tensor == m.tensor for o in same):
                raise RelayoutError(f"{statement}: two parts of {m.tensor} look the same ({m}); {_ADVICE}")
            same.append(m)
        for key, same in here.items():
            if key in out:
                names = f"{out[key][0].tensor} and {same[0].tensor}"
                raise RelayoutError(f"{statement}: parts of {names} look the same ({same[0]}); {_ADVICE}")
            out[key] = same
    return out


def _describe(labels: frozenset[str], factors: frozenset[str]) -> str:
    return f"({' '.join([*sorted(labels), *sorted(factors)])})"
