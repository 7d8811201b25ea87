"""The way of an operator from layouts to layouts: itself, or by its decomposition, whichever moves fewer bytes.

    route(table, call, layouts, mesh)

A dim that an operator needs whole (the classes of a softmax, what a norm is taken over) is gathered when the operator
runs as it is. Its decomposition needs of a cut dim sums and maxima, which are small: each step is propagated by itself,
results flow into the next step as they lie. What is left pending on a result is counted as reduced, for somebody will
have to. Ties go to the operator as it is. The trade-off: more and smaller
operators, whose results take memory (`StepRoute.memory`); whoever has a fused kernel for one pattern of cuts runs that.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from torch import Tensor

from tangram.errors import UserError
from tangram.layout import Layout, Mesh
from tangram.layout.syntax import VOID, Dim
from tangram.sharding.ops import views
from tangram.sharding.ops.calls import OpCall
from tangram.sharding.ops.decompose import DecomposedStep, ResultRef, decomposition
from tangram.sharding.ops.rule_table import NoRuleError, RuleTable
from tangram.sharding.propagation import op_cost
from tangram.sharding.propagation.axis_choices import ALL_REDUCE, received
from tangram.sharding.propagation.propagate import Propagation, propagate

_EQUAL = 1 - 1e-9
"""Below this share of the other's bytes a way moves fewer: sums of fractions are not exact."""


@dataclass(frozen=True)
class Leg:
    """One operator on the way."""

    call: OpCall
    sources: tuple[ResultRef | None, ...]
    """Where its tensors come from: the results of a leg, or (-1, i) for tensor i of the whole call."""
    propagation: Propagation | None
    """None: it takes no tensors (`arange`), so every rank makes the whole."""

    @property
    def reduced(self) -> dict[ResultRef, Layout]:
        """The tensors that are pending no more than they were: what is reduced once is used so from then on."""
        if self.propagation is None:
            return {}
        pairs = ((self.sources[one.place], one) for one in self.propagation.relayouts)
        return {
            ref: one.target
            for ref, one in pairs
            if ref is not None and len(one.target.pending) < len(one.source.pending)
        }


@dataclass(frozen=True)
class StepRoute:
    """How an operator is carried out on a mesh."""

    call: OpCall
    mesh: Mesh
    input_layouts: tuple[Layout | None, ...]
    legs: tuple[Leg, ...]
    results: tuple[ResultRef | None, ...]
    """Which leg's results are the operator's; None: absent."""
    outputs: tuple[Layout | None, ...]
    instead: float | None = None
    """Bytes of the other way, with those due: of a decomposition, by the operator as it is. None: not looked for."""

    @property
    def direct(self) -> bool:
        """Whether the operator runs as it is."""
        return len(self.legs) == 1 and self.legs[0].call is self.call

    @cached_property
    def moved(self) -> dict[tuple[str, str], float]:
        """Bytes that a rank receives, on average, by kind of collective and axis."""
        found: dict[tuple[str, str], float] = {}
        for leg in self.legs:
            for key, nbytes in leg.propagation.moved.items() if leg.propagation else ():
                found[key] = found.get(key, 0.0) + nbytes
        return found

    @property
    def nbytes(self) -> float:
        """All bytes that a rank receives, on average."""
        return sum(self.moved.values())

    @cached_property
    def due(self) -> float:
        """Bytes that a rank will receive when what is pending on the results is reduced everywhere."""
        total = 0.0
        for ref, layout in zip(self.results, self.outputs, strict=True):
            own = [] if layout is None else [axis for _, axis in layout.pending]
            made = self._result(ref) if own else None
            if layout is None or made is None:
                continue
            share = math.prod(self.mesh.axes[axis][0] for axis in layout.axes if axis not in own)
            nbytes = made.numel() * made.element_size() / share
            total += sum(received(ALL_REDUCE, nbytes, self.mesh.axes[axis][0]) for axis in own)
        return total

    def _result(self, ref: ResultRef | None) -> Tensor | None:
        """A result as a tensor without memory; None where there is none."""
        if ref is None or ref.step < 0:
            return None if ref is None else self.call.tensors[ref.place]
        made = op_cost.results(self.legs[ref.step].call)
        found = made[ref.place] if made is not None and ref.place < len(made) else None
        return found if isinstance(found, Tensor) else None

    @cached_property
    def flops(self) -> int:
        """Operations of the rank that has most to do, of all steps."""
        return sum(leg.propagation.flops for leg in self.legs if leg.propagation)

    @cached_property
    def memory(self) -> int | None:
        """Bytes of the results of all steps but views, each on the rank that holds most; None where a shape is unknown.

        What is held at once is less, where no gradient is wanted: then a result goes when the next step has read it.
        """
        total = 0
        for leg in self.legs:
            if leg.propagation is not None and (self.direct or views.view_of(leg.call.operator) is None):
                own = leg.propagation.memory
                if own is None:
                    return None
                total += own
        return total

    def __str__(self) -> str:
        how = "as it is" if self.direct else f"in {len(self.legs)} steps"
        other = "" if self.instead is None else f", {_bytes(self.instead)} {'by steps' if self.direct else 'as it is'}"
        lines = [f"{self.call} over {self.mesh}: {how}, {_bytes(self.nbytes)} a rank{other}"]
        width = max(len(leg.call.name) for leg in self.legs)
        for leg in self.legs:
            made = "whole" if leg.propagation is None else ", ".join(map(str, leg.propagation.outputs))
            lines.append(f"  {leg.call.name.ljust(width)}  -> {made}{_traffic(leg)}")
        return "\n".join(lines)

    def as_json(self) -> dict[str, Any]:
        """The same as JSON types."""
        return {
            "call": str(self.call),
            "mesh": str(self.mesh),
            "direct": self.direct,
            "bytes": self.nbytes,
            "instead": self.instead,
            "steps": [
                {
                    "operator": leg.call.name,
                    "results": [str(layout) for layout in leg.propagation.outputs] if leg.propagation else None,
                    "bytes": leg.propagation.nbytes if leg.propagation else 0.0,
                }
                for leg in self.legs
            ],
        }


def _bytes(n: float) -> str:
    return f"{n:,.0f} B"


def _traffic(leg: Leg) -> str:
    moved = leg.propagation.moved if leg.propagation else {}
    return "".join(f", {kind} over {axis} {_bytes(nbytes)}" for (kind, axis), nbytes in moved.items())


def route(
    table: RuleTable,
    call: OpCall,
    layouts: Sequence[Layout | None],
    mesh: Mesh,
    *,
    differentiable: bool = True,
) -> StepRoute:
    """The way of an operator that moves fewest bytes: as it is, or by its decomposition.

    Takes what `propagate` takes, and raises what it raises; NoRuleError only where there is no decomposition either.
    """
    return _route(table, call, layouts, mesh, differentiable, frozenset(), frozenset())


def decomposed(
    table: RuleTable, call: OpCall, layouts: Sequence[Layout | None], mesh: Mesh, *, differentiable: bool = True
) -> StepRoute | None:
    """The way of an operator by its decomposition, whatever it moves; None where it has none.

    Raises NoRuleError for a step that has no rule.
    """
    return _decomposed(table, call, layouts, mesh, differentiable, frozenset())


def _route(
    table: RuleTable,
    call: OpCall,
    layouts: Sequence[Layout | None],
    mesh: Mesh,
    differentiable: bool,
    within: frozenset[str],
    settled: frozenset[int],
) -> StepRoute:
    try:
        direct = propagate(table, call, layouts, mesh, differentiable=differentiable, settled=settled)
    except NoRuleError:
        other = _decomposed(table, call, layouts, mesh, differentiable, within)
        if other is None:
            raise
        return other
    # What moves nothing as it is cannot be bettered, so its decomposition is not even looked for.
    if direct.nbytes:
        try:
            other = _decomposed(table, call, layouts, mesh, differentiable, within)
        except UserError:  # what a step writes lies otherwise
            other = None
        if other is not None:
            whole = _as_it_is(direct)
            ours, theirs = other.nbytes + other.due, whole.nbytes + whole.due
            return replace(other, instead=theirs) if ours < theirs * _EQUAL else replace(whole, instead=ours)
    return _as_it_is(direct)


def _as_it_is(found: Propagation) -> StepRoute:
    sources = tuple(None if t is None else ResultRef(-1, i) for i, t in enumerate(found.call.tensors))
    results = tuple(ResultRef(0, i) for i in range(len(found.outputs)))
    return StepRoute(
        found.call, found.mesh, found.input_layouts, (Leg(found.call, sources, found),), results, found.outputs
    )


def _decomposed(
    table: RuleTable,
    call: OpCall,
    layouts: Sequence[Layout | None],
    mesh: Mesh,
    differentiable: bool,
    within: frozenset[str],
) -> StepRoute | None:
    """`within`: the operators that this one is a step of, which are not decomposed once more."""
    steps = None if call.name in within else decomposition(call)
    if steps is None:
        return None
    work = _Work(table, mesh, differentiable, within | {call.name})
    for i, (tensor, layout) in enumerate(zip(call.tensors, layouts, strict=True)):
        if tensor is not None:
            work.lies[ResultRef(-1, i)] = layout if layout is not None else _plain(tensor.shape)
            work.refs[ResultRef(-1, i)] = ResultRef(-1, i)
    uses = Counter(ref for step in steps.steps for ref in {*step.sources})
    for i, step in enumerate(steps.steps):
        work.take(i, step, frozenset(n for n, ref in enumerate(step.sources) if ref is not None and uses[ref] > 1))
    results = tuple(None if ref is None else work.refs[ref] for ref in steps.results)
    outputs = tuple(None if ref is None else work.lies[ref] for ref in results)
    return StepRoute(call, mesh, tuple(layouts), tuple(work.legs), results, outputs)


class _Work:
    """The legs so far, and how their results lie."""

    def __init__(self, table: RuleTable, mesh: Mesh, differentiable: bool, within: frozenset[str]) -> None:
        self.table, self.mesh, self.differentiable, self.within = table, mesh, differentiable, within
        self.legs: list[Leg] = []
        self.refs: dict[ResultRef, ResultRef] = {}
        """Of a step's results, which leg's they are: a step may be several legs."""
        self.lies: dict[ResultRef, Layout] = {}

    def take(self, number: int, step: DecomposedStep, settled: frozenset[int]) -> None:
        """Go on by one step. `settled`: which of its tensors other steps read, too."""
        sources = [None if ref is None else self.refs[ref] for ref in step.sources]
        if all(ref is None for ref in sources):
            self._made(number, step)
            return
        given = [None if ref is None else self.lies[ref] for ref in sources]
        smooth = self.differentiable and step.differentiable
        way = _route(self.table, step.call, given, self.mesh, smooth, self.within, settled)
        first = len(self.legs)

        def here(ref: ResultRef | None) -> ResultRef | None:
            return (
                None if ref is None else sources[ref.place] if ref.step < 0 else ResultRef(ref.step + first, ref.place)
            )

        for leg in way.legs:
            self.legs.append(replace(leg, sources=tuple(map(here, leg.sources))))
            self.lies.update(self.legs[-1].reduced)
        for i, (ref, layout) in enumerate(zip(way.results, way.outputs, strict=True)):
            own = here(ref)
            if own is not None and layout is not None:
                self.refs[ResultRef(number, i)] = own
                self.lies.setdefault(own, layout)

    def _made(self, number: int, step: DecomposedStep) -> None:
        """What is made of no tensor, whole on every rank."""
        for i, result in enumerate(step.call.run()):
            own = ResultRef(len(self.legs), i)
            self.refs[ResultRef(number, i)], self.lies[own] = own, _plain(result.shape)
        self.legs.append(Leg(step.call, (None,) * len(step.sources), None))


def _plain(shape: Sequence[int]) -> Layout:
    return Layout(tuple(Dim(VOID, n) for n in shape))
