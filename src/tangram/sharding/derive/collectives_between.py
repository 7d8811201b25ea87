"""What an operator can do over one axis: the states that it needs of its inputs and those that it gives.

    nothing        every rank computes the same, or each with gradients of its own
    cut a factor   inputs that have it are cut, the others are on every rank; results are cut, or pending sums
    wait           a pending sum passes, where the rule says that the operator is linear

A factor of a rule stands at a place of a dim: `(dim, outer)` of the state is translated to a factor and an offset in
it and back, so a cut passes views that split or merge dims.

Where a model applies a `torch.autograd.Function` of its own (`models.capturing.custom`), its backward is code that sees
what its forward saw, so nothing moves within. Where forward and backward are element by element all of it is cut alike
or whole; else it is whole, with whole gradients: a part of a gradient is no gradient that its code was written for.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from tangram.layout import Mesh
from tangram.layout.intervals import size as size_of
from tangram.layout.syntax import Cut
from tangram.sharding.derive.problem import states
from tangram.sharding.derive.problem.folding import Folded, FoldedStep
from tangram.sharding.derive.problem.states import SAME, SEVERAL, SUM, Cutting, Parts, State, cut, rows, scaled, share
from tangram.sharding.ops.bind import BoundOp, Dims
from tangram.sharding.ops.calls import OpCall
from tangram.sharding.propagation import neighbour_needs
from tangram.sharding.propagation.axis_choices import HALO, SCAN

UNREAD = frozenset({"new_empty", "new_zeros", "new_ones", "new_full", "new_empty_strided"})
"""Operators that take a tensor for its type and its place, and read nothing of it: it may lie as it likes."""


_POINTWISE = ("silu", "gelu", "relu", "tanh", "neg", "mul.Tensor", "detach", "alias", "clone", "_to_copy")
_VIEWS = ("view", "_unsafe_view", "transpose.int", "t", "split.Tensor", "split_with_sizes", "slice.Tensor")
LEAVE_NOTHING = frozenset({*_POINTWISE, *_VIEWS})
"""Operators that give nothing where they take nothing, each place of a batch by itself."""


class Label(NamedTuple):
    """A factor of an operator, or what is left of it after the first `inner` blocks."""

    factor: str
    inner: int = 1
    parts: Parts = ()
    """What each rank has of a block, where those are no even chunks."""

    def __str__(self) -> str:
        return self.factor + (f"%{self.inner}" if self.inner > 1 else "")

    def share(self, k: int) -> float:
        """Of what the factor makes, what is done on the rank that has most."""
        return share(self.parts, k)


class Comm(NamedTuple):
    """One thing that an operator can do."""

    label: Label | None
    """What it cuts; None: nothing."""
    inputs: tuple[State | None, ...]
    """What it needs of each tensor, by place; None where there is none, or nothing of it is read."""
    outputs: tuple[State, ...]
    share: float
    """Of the work, what is done on a rank: 1, or 1/k."""


def label_of(bound: BoundOp, dims: Dims, state: State) -> Label | None:
    """The factor of an operator that a cut of a tensor is one of."""
    if state.dim >= len(dims):  # of a call that takes nothing, which has no dims to name
        return None
    before = 1
    for i, factor in enumerate(dims[state.dim]):
        n = bound.sizes[factor]
        if state.outer < before * n or (state.parts and n == 1 and state.outer == before):
            inner = state.outer // before
            if state.outer % before or n % inner:
                return None
            own = scaled(state.parts, 1, _behind(bound, dims[state.dim], i))
            fits = own is not None and (not own or sum(map(size_of, own)) == n // inner)
            return Label(factor, inner, own or ()) if fits else None
        before *= n
    return None


def place_of(bound: BoundOp, dims: Dims, label: Label) -> State | None:
    """Where a tensor has a factor; None where it lacks it."""
    for dim, factors in enumerate(dims):
        before = 1
        for i, factor in enumerate(factors):
            if factor == label.factor:
                own = scaled(label.parts, _behind(bound, factors, i)) if label.parts else ()
                return cut(dim, before * label.inner, own or ())
            before *= bound.sizes[factor]
    return None


def _behind(bound: BoundOp, factors: Sequence[str], i: int) -> int:
    """The elements of a dim for each place of one of its factors."""
    return math.prod(bound.sizes[f] for f in factors[i + 1 :])


def legal(bound: BoundOp, label: Label, k: int, *, linked: bool = False) -> bool:
    """Whether an operator allows a cut over `k` ranks. `linked`: also where those need something of each other."""
    n = bound.sizes[label.factor]
    if label.factor in bound.linked and (label.parts or not (linked and _reads_as_many(bound, label.factor))):
        return False
    return label.factor in bound.cuttable and n % label.inner == 0 and bool(label.parts or (n // label.inner) % k == 0)


def _reads_as_many(bound: BoundOp, factor: str) -> bool:
    """Whether the result of windows is as long as what they read, so that both are cut in even parts."""
    window = bound.windows.get(factor)
    return window is None or window.n == bound.sizes[factor]


def labels(bound: BoundOp, states: Sequence[Sequence[State]], k: int, *, linked: bool = False) -> Iterator[Label]:
    """The factors that can be cut, given the states that its inputs and outputs can have."""
    found: dict[Label, None] = {}
    for dims, some in zip((*bound.inputs, *bound.outputs), states, strict=True):
        for state in some:
            if dims is not None and state.kind == "cut" and (label := label_of(bound, dims, state)) is not None:
                found[label] = None
    return (label for label in found if legal(bound, label, k, linked=linked))


def comms(call: OpCall, bound: BoundOp, some: Sequence[Label], k: int, differentiable: Sequence[bool]) -> list[Comm]:
    """All that an operator can do. `differentiable`: for each result whether it has a gradient."""
    there = [dims is not None and call.name not in UNREAD for dims in bound.inputs]
    count = len(bound.outputs)

    def every(state: State) -> tuple[State | None, ...]:
        return tuple(state if one else None for one in there)

    found = [Comm(None, every(SAME), (SAME,) * count, 1.0), Comm(None, every(SEVERAL), (SEVERAL,) * count, 1.0)]
    for label in some:
        after = [_after(bound, i, label, one) for i, one in enumerate(differentiable)]
        if all(state is not None for state in after):
            inputs = tuple(None if dims is None else place_of(bound, dims, label) or SEVERAL for dims in bound.inputs)
            found.append(Comm(label, inputs, tuple(s for s in after if s is not None), label.share(k)))
    for places in bound.waiting(call):
        inputs = tuple(SUM if i in places else SEVERAL if one else None for i, one in enumerate(there))
        found.append(Comm(None, inputs, (SUM,) * count, 1.0))
    return list(dict.fromkeys(found))


def groups(call: OpCall, bound: BoundOp) -> Label | None:
    """Of a product of rows in groups, each with a matrix of its own, the factor of the groups; None of others."""
    note = bound.rule.note("ragged")
    if call.name != "_grouped_mm" or note is None or [t.ndim for t in call.tensors[:2] if t is not None] != [2, 3]:
        return None
    return next((Label(f) for f in (note[1], f"{note[1]}0") if f in bound.sizes), None)


def row_comms(call: OpCall, bound: BoundOp, some: Sequence[Sequence[State]], k: int) -> list[Comm]:
    """What can be done with rows that come from one rank each (`states.rows`): groups cut, and what leaves nothing."""
    count, found = len(bound.inputs), list[Comm]()
    label = groups(call, bound)
    if label is not None and legal(bound, label, k):
        own = [None if dims is None else place_of(bound, dims, label) or SEVERAL for dims in bound.inputs]
        for first in (SEVERAL, rows(0)):
            found += [Comm(label, (first, *own[1:]), (given,), 1 / k) for given in (SUM, rows(0))]
        return found
    if call.name not in LEAVE_NOTHING:
        return []
    sides = zip((*bound.inputs, *bound.outputs), some, strict=True)
    there = [(dims, state) for dims, own in sides if dims is not None for state in own if state.kind == "sum"]
    for label in dict.fromkeys(label_of(bound, dims, state) for dims, state in there):
        if label is None or label.factor not in bound.cuttable or label.parts:
            continue
        places = [None if dims is None else place_of(bound, dims, label) for dims in (*bound.inputs, *bound.outputs)]
        as_rows = [None if place is None else rows(place.dim, place.outer) for place in places]
        if None not in as_rows[count:]:
            ins = tuple(
                None if dims is None else state or SEVERAL for dims, state in zip(bound.inputs, as_rows, strict=False)
            )
            found.append(Comm(None, ins, tuple(state for state in as_rows[count:] if state is not None), 1.0))
    return found


def _after(bound: BoundOp, output: int, label: Label, differentiable: bool) -> State | None:
    state = place_of(bound, bound.outputs[output], label)
    if state is not None:
        return state
    pending = bound.pending[label.factor][output]
    if pending == "" and not differentiable:  # the rule has it the same on every rank, as indices that were looked up
        return SAME
    return SUM if pending == "sum" else None


def blocks(shape: Sequence[int], state: State) -> int:
    """The size of what a cut is one of: of each block of its dim."""
    return shape[state.dim] // state.outer


def size(shape: Sequence[int]) -> int:
    """Elements."""
    return math.prod(shape)


Before = tuple[int, Comm]
"""The ranks of an axis before, and what an operator does over it."""


def fits(step: FoldedStep, label: Label, k: int, before: Sequence[Before]) -> bool:
    """Whether a cut can be beside those of the axes before, and stands alone where parts need each other."""
    n = step.bound.sizes[label.factor] // label.inner
    for ranks, move in before:
        own = move.label
        if own is None or own.factor != label.factor:
            continue
        if label.factor in step.bound.linked:
            return False
        if own.parts or label.parts:
            cuts = Cutting(own.inner, own.parts, ranks), Cutting(label.inner, label.parts, k)
            if not states.beside(step.bound.sizes[label.factor], *cuts):
                return False
        elif own.inner == label.inner:
            n //= ranks
        elif own.inner < label.inner:
            if label.inner % (own.inner * ranks):
                return False
        elif (own.inner // label.inner) % k:
            return False
    return bool(label.parts) or n % k == 0


def beside(shapes: Sequence[Sequence[int] | None], move: Comm, k: int, before: Sequence[Before]) -> bool:
    """Whether a move leaves no tensor, of these shapes, a dim of which the axes before leave unlike sizes to cut."""
    mine = (*move.inputs, *move.outputs)
    if not any(state is not None and state.kind == "cut" for state in mine):
        return True
    return all(
        shape is None or both(shape, theirs, ranks, own, k)
        for ranks, other in before
        for shape, own, theirs in zip(shapes, mine, (*other.inputs, *other.outputs), strict=False)
    )


def both(shape: Sequence[int], major: State | None, k: int, minor: State | None, ranks: int) -> bool:
    """Whether a tensor can lie so over two axes, of `k` and of `ranks`, of which the first stands first in the mesh."""
    if major is None or minor is None or not (major.parts or minor.parts):
        return True
    if major.kind != "cut" or minor.kind != "cut" or major.dim != minor.dim:
        return True
    cuts = Cutting(major.outer, major.parts, k), Cutting(minor.outer, minor.parts, ranks)
    return states.beside(shape[minor.dim], *cuts)


# ---------------------------------------------------------------- parts that need each other


class NeighbourBytes(NamedTuple):
    """What a rank receives inside of an operator."""

    kind: str
    """`halo`, or `scan`: the totals of other parts."""
    place: int
    """The input of which, or of whose scan."""
    nbytes: float
    """On average, forward, where no other axis cuts anything; backward as much."""


def cut_of(axis: str, label: Label) -> Cut:
    """The cut of a factor."""
    return Cut(axis, "strided", (label.inner,)) if label.inner > 1 else Cut(axis)


def passed(step: FoldedStep, label: Label | None, axis: str, k: int) -> NeighbourBytes | None:
    """What passes in an operator that an axis cuts so; None where parts need nothing of each other."""
    if label is None or label.factor not in step.bound.linked:
        return None
    mesh, trees = Mesh((((axis, k),),)), {label.factor: (cut_of(axis, label),)}
    for place, some in neighbour_needs.halos(step.call, step.bound, trees, mesh).items():
        return NeighbourBytes(HALO, place, sum(n for _, n in some))
    return NeighbourBytes(SCAN, 0, sum(n for _, n in neighbour_needs.scans(step.call, step.bound, trees, mesh)))


_SAID = (
    "{}: {} is an autograd.Function with a backward of its own, which works on whole tensors: leave what it takes and "
    "gives unmarked, or write it as functions of torch"
)


@dataclass(frozen=True)
class Customs:
    """By class and by number of a node, whether it is of a Function whose elements may be worked out apart."""

    values: dict[int, bool]
    nodes: dict[int, bool]
    made: frozenset[int] = frozenset()
    """Of these values, what operators make."""
    why: str = ""
    """Why marks may not fit."""

    @staticmethod
    def of(folded: Folded) -> Customs:
        """Those of a graph."""
        values: dict[int, bool] = {}
        nodes: dict[int, bool] = {}
        for one in folded.graph.customs:
            nodes.update(dict.fromkeys(range(one.first, one.stop), one.each))
            for v in one.values:
                v = folded.classes[v]
                values[v] = values.get(v, True) and one.each
        worst = min(folded.graph.customs, key=lambda one: one.each, default=None)
        made = frozenset(v for v in values if folded.value(v).kind == "made")
        return Customs(values, nodes, made, "" if worst is None else _SAID.format(worst.line, worst.name))

    def allowed(self, step: FoldedStep, some: Sequence[Comm]) -> list[Comm]:
        """What a step may do of what its rule allows."""
        if step.number not in self.nodes:
            return [*some]
        each = self.nodes[step.number]
        return [move for move in some if all(_may_stay(state, each) for state in (*move.inputs, *move.outputs))]

    def states(self, v: int, some: tuple[State, ...]) -> tuple[State, ...]:
        """What a tensor may be brought to, once for all that take it; SAME where that would be nothing."""
        if v not in self.values:
            return some
        if not self.values[v] and v in self.made and any(state.kind == "cut" for state in some) and len(some) == 1:
            return some  # by a mark: no move fits it
        return tuple(state for state in some if _may_stay(state, self.values[v])) or (SAME,)

    def staying(
        self, step: FoldedStep, sources: Sequence[Any], targets: Sequence[Any], table: np.ndarray
    ) -> np.ndarray:
        """What each pair of states costs where a step takes or gives a tensor: within a Function it stays as it is."""
        if step.number not in self.nodes:
            return table
        return np.where([[a == b for b in targets] for a in sources], table, np.inf)


def _may_stay(state: State | None, each: bool) -> bool:
    return state is None or state == SAME or (each and state.kind == "cut")
