"""Ways of cutting a call by index maps: a rule says which factors may be cut, and each map has to do for all of them.

every factor            by one map, another for each
factors whose parts     by every map, over 2, 3 and 5 ranks; two of them by two maps, and one by two maps in turn:
need each other         there a map says what passes between ranks
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from tangram.layout import Mesh
from tangram.layout.syntax import Cut
from tangram.sharding.local_ops.local_call import Cuts
from tangram.sharding.ops.bind import BoundOp
from tangram.sharding.propagation import neighbour_needs


def maps(n: int, k: int, axis: str = "x") -> Iterator[Cut]:
    """Cuts of `n` elements over `k` ranks, by every map; with listed sizes some are nothing."""
    yield Cut(axis, "zigzag")
    yield Cut(axis, "strided", (2,))
    yield Cut(axis, "cyclic")
    yield Cut(axis, "sizes", (1, *[0] * (k - 2), n - 1))
    yield Cut(axis, "zigzag", (n // 2, 0, n - n // 2))
    yield Cut(axis, "cyclic", (2,))
    yield Cut(axis, "strided", (3,))


def ways(bound: BoundOp, worlds: Sequence[int]) -> Iterator[tuple[Cuts, Mesh]]:
    """Every way of cutting a call by maps that is to be tried once of a rule."""
    linked = [f for f in bound.cuttable if f in bound.linked]
    k = worlds[len(worlds) // 2]
    for i, factor in enumerate(f for f in bound.cuttable if f not in linked):
        several = [*maps(_elements(bound, factor), k)]
        yield {factor: (several[i % len(several)],)}, Mesh.parse(f"x={k}")
    for world, factor in itertools.product(worlds, linked):
        for cut in maps(_elements(bound, factor), world):
            if not neighbour_needs.refusal(bound, factor, (cut,)):
                yield {factor: (cut,)}, Mesh.parse(f"x={world}")
    both, mesh = (Cut("x", "zigzag"), Cut("y", "cyclic")), Mesh.parse("x=2 y=3")
    for first, second in itertools.pairwise(linked):
        yield {first: both[:1], second: both[1:]}, mesh
    for factor, order in itertools.product(linked[:1], (both, both[::-1])):
        yield {factor: order}, mesh


def _elements(bound: BoundOp, factor: str) -> int:
    """How many are cut: of what is read by windows, those of the input."""
    return bound.windows[factor].n if factor in bound.windows else bound.sizes[factor]
