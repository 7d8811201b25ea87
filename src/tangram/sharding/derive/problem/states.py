"""How a tensor can lie over one mesh axis, and what it costs to come from one way to another, forward and backward.

    same      every rank has all of it, and all compute the same with it: the gradient is whole on every rank
    several   every rank has all of it, and each computes something of its own: gradients are to be summed
    sum       each rank has a summand; the gradient of a sum is `several`
    cut       each rank has a part of a dim, and that part's gradient
    own, sent rows in an order of their own (`Routed`): of a rank's own tokens, or of the experts that it has

A state is a place of `relayout.collectives.one_collective`, which brings tensors from one to another; its table says
how, and how the gradient comes back. So no backward rule is needed, and the cost of a step is that of both. Source of
the algebra: the types of spmd_types (R, I, V, P), and the conjugate operators of Megatron-LM (Shoeybi et al. 2019;
Korthikanti et al. 2022).
"""

from __future__ import annotations

from typing import NamedTuple

from tangram.layout.intervals import MAPS, IntSet, product, size, span
from tangram.relayout.collectives import one_collective
from tangram.relayout.collectives.one_collective import ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, REDUCE_SCATTER
from tangram.relayout.collectives.one_collective import RankPlacement as State

NOTED = "noted"
"""What is done with the groups of sorted rows, so that they can be sent: nothing is sent yet."""
SAME, SEVERAL, SUM = State("same"), State("several"), State("sum")
Parts = tuple[IntSet, ...]
"""What each rank has of a block; (): even chunks."""


class Cutting(NamedTuple):
    """A cut of a dim over an axis of `k` ranks."""

    outer: int
    parts: Parts
    k: int


class Gathered(State):
    """How a parameter lies that is put together to be used, and its gradient cut again: equal to the cut that it is."""

    __slots__ = ()


def rows(dim: int, outer: int = 1) -> State:
    """A sum of which each place along a dim comes from one rank, and is nothing on the others, as rows of experts.

    What leaves nothing as nothing can be done before it is summed. It is brought to other states as any sum.
    """
    return State("sum", dim, outer)


def plain(state: State) -> State:
    """A state as what moves tensors knows it."""
    return SUM if state.kind == "sum" else state


def cut(dim: int, outer: int = 1, parts: Parts = ()) -> State:
    """The state of a cut. `parts`: what each rank has of a block, where those are no even chunks."""
    return State("cut", dim, outer, parts)


def chunked(dim: int, n: int, k: int) -> State:
    """The state of a dim of `n` elements that is cut into `k` chunks as torch.chunk does."""
    return cut(dim, 1, () if n % k == 0 else parts_of("", n, k))


def parts_of(name: str, n: int, k: int, args: tuple[int, ...] = (), width: int = 1) -> Parts:
    """What each of `k` ranks has of `n` units of `width` elements by an index map; () where those are even chunks."""
    own = tuple(product([MAPS[name].holds(n, k, i, args), span(0, width)], [n, width]) for i in range(k))
    return (
        () if n % k == 0 and own == tuple(span(i * n // k * width, (i + 1) * n // k * width) for i in range(k)) else own
    )


def alike(parts: Parts) -> bool:
    """Whether all ranks have as much."""
    return len(set(map(size, parts))) < 2


def share(parts: Parts, k: int) -> float:
    """What the rank has that has most, as a part of all; of even chunks over `k` ranks where there are no `parts`."""
    return max(map(size, parts)) / max(1, sum(map(size, parts))) if parts else 1 / k


def scaled(parts: Parts, num: int, den: int = 1) -> Parts | None:
    """The same of units that are `num / den` as large; None where borders would lie within a unit."""
    if any(border % den for part in parts for run in part for border in run):
        return None
    return tuple(tuple((a // den * num, b // den * num) for a, b in part) for part in parts)


def beside(n: int, major: Cutting, minor: Cutting) -> bool:
    """Whether a dim of `n` elements may be cut over two axes, of which `major` stands first in the mesh.

    Where one is no even chunks: what it leaves has to be as much on all ranks for what is cut within it, so that sizes
    and blocks of that do not depend on the rank.
    """
    coarse, fine = sorted((major, minor), key=lambda one: one.outer)
    if coarse.outer == fine.outer:
        inner = major.parts and not minor.parts and alike(major.parts)
        return bool(inner) and size(major.parts[0]) % minor.k == 0
    if not coarse.parts:
        return (fine.outer // coarse.outer) % coarse.k == 0
    return alike(coarse.parts) and alike(fine.parts) and scaled(coarse.parts, 1, n // fine.outer) is not None


OWN, SENT = "own", "sent"
OWN_IDS, SENT_IDS, OWN_ENDS, SENT_ENDS, SORTED = "own ids", "sent ids", "own ends", "sent ends", "sorted"
_DISPATCHED = {OWN: SENT, OWN_IDS: SENT_IDS, OWN_ENDS: SENT_ENDS}


class Routed(State):
    """How what is made of rows lies that were sorted by a group, as those of tokens by their experts.

        own          each rank has rows of its own part, sorted among themselves; numbers of rows count its own
        sent         each rank has the rows of its own groups, from all ranks, sorted; how many, their values say
        own ids      the groups of own rows; `sorted`: the same as the sort gives them, before they are known as a route
        sent ids     the groups of rows that were sent, counted among those of the rank
        own ends     of each group, what is counted of the rank's rows
        sent ends    where each of the rank's groups ends among the rows that were sent

    `outer`: of the cut that the rows had before they were sorted. Over an axis nothing else can be made of them but by
    the operators of one region (`derive.regions`), whose number is kept beside.
    """

    region: int
    groups: int

    def __new__(cls, kind: str, outer: int, region: int, groups: int) -> Routed:
        """Of the region that begins with node `region`, of rows of so many groups."""
        self = super().__new__(cls, kind, -1 if kind == OWN_ENDS else 0, outer)
        self.region, self.groups = region, groups
        return self


def part_dim(state: State) -> int | None:
    """The dim of which a rank has a part; None where it has all of it."""
    return state.dim if state.kind == "cut" or (isinstance(state, Routed) and state.dim >= 0) else None


class Transition(NamedTuple):
    """What is done between two states; "" where nothing is."""

    forward: str
    backward: str


def way(source: State, target: State) -> Transition | None:
    """The steps from one state to another. None: there is no sense in it."""
    if isinstance(source, Routed) or isinstance(target, Routed):
        return _way_of_rows(source, target)
    if (source.kind, target.kind) == ("cut", "sum"):
        return None  # a move can do it, and nothing is won by it
    if target.kind == "sum" and target not in (SUM, source):
        return None  # operators alone know what comes from one rank
    return Transition(*one_collective.way(plain(source), plain(target)))


def _way_of_rows(source: State, target: State) -> Transition | None:
    pair = source.kind, target.kind
    if source == target:
        return Transition("", "")
    if source.outer != target.outer or not (isinstance(source, Routed) and isinstance(target, Routed)):
        return None
    if pair == (SORTED, OWN_IDS):
        return Transition(NOTED, "")
    there = pair[0] in _DISPATCHED and _DISPATCHED[pair[0]] == pair[1]
    back = pair == (SENT, OWN)
    return Transition(ALL_TO_ALL, ALL_TO_ALL if OWN in pair else "") if there or back else None


def received(what: str, nbytes: float, k: int) -> float:
    """What a rank receives on average, of a tensor of `nbytes` that lies over an axis of `k` ranks."""
    shares = {ALL_GATHER: 1.0, REDUCE_SCATTER: 1.0, ALL_REDUCE: 2.0, ALL_TO_ALL: 1.0 / k}
    return nbytes * shares.get(what, 0.0) * (k - 1) / k


def price(source: State, target: State, nbytes: float, k: int, *, differentiable: bool) -> float:
    """Bytes that a rank receives forward and, where there is a gradient, backward; infinite where there is no way."""
    found = way(source, target)
    if found is None:
        return float("inf")
    return received(found.forward, nbytes, k) + (received(found.backward, nbytes, k) if differentiable else 0.0)
