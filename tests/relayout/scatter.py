"""Random explicit pieces: regions that know nothing of a tensor's factors, with overlaps and holes."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from hypothesis import strategies as st

from tangram.layout import IntSet, Region
from tangram.layout.intervals import normal
from tests.relayout.generate import Draw, split
from tests.relayout.moving import Array


def _sets(draw: Draw, n: int) -> IntSet:
    """Some of the integers below n, as sorted intervals."""
    edges = sorted(draw(st.sets(st.integers(0, n), min_size=min(2, n + 1), max_size=4)))
    return normal(zip(edges[::2], edges[1::2], strict=False))


@st.composite
def regions(draw: Draw, shape: tuple[int, ...]) -> Region:
    """Up to three boxes of a tensor, which may overlap."""
    return Region.of([tuple(_sets(draw, n) for n in shape) for _ in range(draw(st.integers(1, 3)))])


@dataclass(frozen=True)
class Grouped:
    """The factors of a tensor in some order, fused into dims."""

    order: tuple[str, ...]
    dims: list[list[str]]
    sizes: dict[str, int]

    @property
    def text(self) -> str:
        return " ".join(d[0] if len(d) == 1 else f"({' '.join(d)})" for d in self.dims)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(math.prod(self.sizes[x] for x in d) for d in self.dims)

    def split(self, a: Array) -> Array:
        """A tensor of this shape with a dim for each factor, in alphabetic order."""
        apart = a.reshape([self.sizes[x] for x in self.order])
        return apart.transpose([self.order.index(x) for x in sorted(self.order)])

    def join(self, a: Array) -> Array:
        """The way back of `split`."""
        return np.ascontiguousarray(a.transpose([sorted(self.order).index(x) for x in self.order])).reshape(self.shape)


@dataclass(frozen=True)
class Scattered:
    """Explicit pieces of a tensor, which may overlap and may leave holes, and regions wanted of it in another form."""

    source: Grouped
    target: Grouped
    held: list[Region]
    wanted: list[Region]


@st.composite
def scattered(draw: Draw) -> Scattered:
    """One tensor in two forms, with regions that know nothing of its factors."""
    sizes = {x: draw(st.integers(1, 5)) for x in "ijkl"[: draw(st.integers(0, 4))]}
    ends: list[Grouped] = []
    for _ in range(2):
        order = tuple(draw(st.permutations(list(sizes))))
        ends.append(Grouped(order, split(draw, order), sizes))
    held = draw(st.lists(regions(ends[0].shape), min_size=1, max_size=5))
    if draw(st.integers(0, 2)):
        held.insert(draw(st.integers(0, len(held))), Region.full(ends[0].shape))
    wanted = draw(st.lists(regions(ends[1].shape), min_size=1, max_size=3))
    return Scattered(ends[0], ends[1], held, wanted)
