"""Why a tensor lies as it does: the operators between it and a mark, how it is made, used and needed, what else costs.

A derivation is one choice for all tensors at once, so no single mark is *the* reason. Three things are said instead,
each of which is checked: the chain of operators that carries the layout from the nearest mark, with the rule of each;
what the tensor would be without each of the marks, by really deriving so; and what each other layout of it would cost
(`alternatives`).
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from tangram.errors import UserError
from tangram.sharding.derive.derive import AxisProblem, Derived, Over, WorkRates, derive, fixed_by
from tangram.sharding.derive.explain.operators import (
    layout_text,
    line_of,
    module_of,
    states_in,
    states_out,
    title,
    written,
)
from tangram.sharding.derive.explain.show import Row, amount, folded_name, short, signed, total, ways
from tangram.sharding.derive.layouts import between, input_states, layout_of, made, moved, needed, used
from tangram.sharding.derive.marking.marks import Mark, matched
from tangram.sharding.derive.marking.nodes import value_of
from tangram.sharding.derive.problem.folding import FoldedStep
from tangram.sharding.derive.problem.states import SAME, SUM, State
from tangram.sharding.derive.solve.bounded import bounded


@dataclass(frozen=True)
class ChainLink:
    """An operator of a chain."""

    module: str
    operator: str
    rule: str
    source: str

    @property
    def changes(self) -> bool:
        """Whether what it gives is cut otherwise than what it takes; where not, a cast say, tables leave it out."""
        taken, _, given = self.rule.partition(" -> ")
        return taken != given


@dataclass(frozen=True)
class Chain:
    """How a mark reaches a tensor over one axis."""

    axis: str
    mark: str
    tensor: str
    """The marked one."""
    links: tuple[ChainLink, ...]
    """From the mark on; none where the tensor itself is marked."""


@dataclass(frozen=True)
class Without:
    """What follows when one mark is left out."""

    mark: str
    layout: str
    """Of this tensor."""
    changes: bool
    received: float
    """All bytes that a rank receives then; of interest beside those of the derivation."""
    refused: str = ""
    """Why nothing follows then."""


@dataclass(frozen=True)
class Why:
    """All that is said of one tensor."""

    tensor: str
    shape: tuple[int, ...]
    layout: str
    times: int
    """How many equal tensors it stands for."""
    uses: tuple[Row, ...]
    """Made, used and needed: what, by which operator, layout, what is moved, and its rule."""
    chains: tuple[Chain, ...]
    without: tuple[Without, ...]
    alternatives: tuple[Alternative, ...]
    received: float
    """All bytes that a rank receives as derived."""

    def as_json(self) -> dict[str, Any]:
        """As JSON types; what cannot be has `null` for its cost."""
        told = asdict(self)
        for one, own in zip(told["alternatives"], self.alternatives, strict=True):
            one.update(state=_state(own.state, self.shape, own.axis))
            one["more"] = None if own.more == float("inf") else own.more
        return told


def why(found: Derived, node: str, rates: WorkRates | None = None) -> Why:
    """Explain one tensor. Raises UserError where `node` names none, or several (`nodes`)."""
    graph, folded = found.folded.graph, found.folded
    value = value_of(graph, node)
    v, shape = folded.classes[value], graph.values[value].shape
    layout = short(layout_of(shape, used(found, v)))
    return Why(
        tensor=named(found, v),
        shape=shape,
        layout=layout or "()",
        times=folded.times[v],
        uses=tuple(_uses(found, v)),
        chains=tuple(chain for over in found.axes if (chain := chain_of(found, v, over)) is not None),
        without=tuple(_without(found, v, rates)),
        alternatives=tuple(alternatives(found, v, rates)),
        received=total(found),
    )


def named(found: Derived, v: int) -> str:
    """A class in words: a parameter by its name, else what makes it."""
    graph = found.folded.graph
    value = graph.values[v]
    if value.name:
        return folded_name(found, value.name)
    own = {folded_name(found, name): None for name, w in graph.results.items() if found.folded.classes[w] == v}
    if own:
        names = [name or "the model" for name in own]
        return f"what {names[-1]} gives" + (f" (as {', '.join(names[:-1])})" if names[1:] else "")
    step = next(step for step in found.folded.steps if v in step.outputs)
    return f"what {title(step)} gives in {module_of(found, step)} ({line_of(step.node.source)})"


# ------------------------------------------------------------ made, used, needed


def _uses(found: Derived, v: int) -> Iterator[Row]:
    """Each operator that makes or takes a class: how it gives or needs it, and what is done in between."""
    shape, axes = found.folded.value(v).shape, found.axes
    as_used = used(found, v)
    kept = input_states(found, v)
    if kept:
        yield "lies", "", layout_text(shape, kept), _communication(found, v, kept, as_used), ""
    for step in found.folded.steps:
        for i, w in enumerate(step.outputs):
            if w == v:
                states = made(found, step, i)
                yield (
                    "made",
                    _place(found, step),
                    layout_text(shape, states),
                    _communication(found, v, states, as_used),
                    written(step, axes),
                )
    yield "used", "", layout_text(shape, as_used), "", ""
    for step in found.folded.steps:
        for i, w in enumerate(step.inputs):
            if w == v and (states := needed(found, step, i)):
                yield (
                    "needed",
                    _place(found, step),
                    layout_text(shape, states),
                    _communication(found, v, as_used, states),
                    written(step, axes),
                )


def _place(found: Derived, step: FoldedStep) -> str:
    return f"{module_of(found, step)}:{title(step)} ({line_of(step.node.source)})"


def _communication(found: Derived, v: int, source: Mapping[str, State], target: Mapping[str, State]) -> str:
    """What is done between two layouts, forward / backward, by axis."""
    moves = between(found, v, source, target, 1, None)
    return ", ".join(f"{text} over {one.axis}" for one in moves if (text := ways(one.forward, one.backward)))


# ------------------------------------------------------------ chains


def chain_of(found: Derived, v: int, over: Over) -> Chain | None:
    """The operators between a class and the nearest marked one; None where no mark names this axis on a tensor near it.

    Near is counted in operators; one that cuts the factor which both tensors have counts least, one over which a tensor
    is moved or that only stands between counts more.
    """
    marked = _marked(found, over.axis)
    near: dict[int, list[FoldedStep]] = {}
    for step in found.folded.steps:
        for w in dict.fromkeys((*step.inputs, *step.outputs)):
            if w is not None:
                near.setdefault(w, []).append(step)
    # Dijkstra from the tensor on: the first marked one that is reached is the nearest.
    queue: list[tuple[int, int]] = [(0, v)]
    far = {v: 0}
    came: dict[int, tuple[int, FoldedStep]] = {}
    while queue:
        d, at = heapq.heappop(queue)
        if d > far[at]:
            continue
        if at in marked:
            mark, name = marked[at]
            return Chain(over.axis, str(mark), folded_name(found, name), tuple(_links(found, v, at, came, over)))
        for step in near.get(at, ()):
            for w in dict.fromkeys((*step.inputs, *step.outputs)):
                if w is not None and w != at:
                    there = d + _length(step, at, w, over)
                    if there < far.get(w, 1 << 30):
                        far[w] = there
                        came[w] = (at, step)
                        heapq.heappush(queue, (there, w))
    return None


def _links(
    found: Derived, v: int, at: int, came: Mapping[int, tuple[int, FoldedStep]], over: Over
) -> Iterator[ChainLink]:
    while at != v:
        at, step = came[at]
        yield ChainLink(module_of(found, step), title(step), written(step, [over]), line_of(step.node.source))


def _marked(found: Derived, axis: str) -> dict[int, tuple[Mark, str]]:
    """The classes that marks name with an axis, or as whole; the last of each."""
    marked: dict[int, tuple[Mark, str]] = {}
    for mark in found.marks:
        axes = {cut for dim in mark.layout.dims for cut in dim.axes} | {one for _, one in mark.layout.pending}
        if axis in axes or not axes:
            for name, w in matched(found.folded.graph, mark).items():
                marked.setdefault(found.folded.classes[w], (mark, name))
    return marked


def _length(step: FoldedStep, one: int, other: int, over: Over) -> int:
    """How far two tensors of an operator are from each other, over an axis."""
    sides: dict[int, State] = {}
    for i, w in enumerate(step.inputs):
        if w is not None and (state := states_in(step, [over], i).get(over.axis)) is not None:
            sides.setdefault(w, state)
    for i, w in enumerate(step.outputs):
        sides[w] = states_out(step, [over], i)[over.axis]
    a, b = sides.get(one), sides.get(other)
    if a is None or b is None:
        return 50
    tied = {"cut", "sum"}
    both = a.kind in tied and b.kind in tied
    # A longer way by operators that keep the cut explains more than a short one past whole tensors.
    length = 1 if both else 10 if a.kind in tied or b.kind in tied else 20
    return length + 15 * (over.used[one] != a) + 15 * (over.used[other] != b)


# ------------------------------------------------------------ without a mark


def _without(found: Derived, v: int, rates: WorkRates | None) -> Iterator[Without]:
    """What the class would be without each of the marks."""
    graph, shape = found.folded.graph, found.folded.value(v).shape
    before = used(found, v)
    for mark in found.marks:
        others = [one for one in found.marks if one is not mark]
        try:
            other = derive(graph, others, found.mesh, rates=rates)
        except UserError as error:
            yield Without(str(mark), "", False, 0.0, str(error))
            continue
        after = used(other, v)
        layouts = [short(layout_of(shape, states)) or "()" for states in (before, after)]
        yield Without(str(mark), layouts[1], layouts[0] != layouts[1], total(other))


# ------------------------------------------------------------ for people


def lines(told: Why) -> Iterator[tuple[str, Sequence[str], list[Row]]]:
    """Title, headers and rows of each table."""
    equal = f", one of {told.times} alike" if told.times > 1 else ""
    head = f"{told.tensor}: {' x '.join(map(str, told.shape))} as {told.layout}{equal}"
    yield head, ("", "by", "layout", "forward / backward", "rule"), [*told.uses]
    for chain in told.chains:
        rows = [(link.module, link.operator, link.rule, link.source) for link in chain.links if link.changes]
        if chain.links:
            yield f"Over {chain.axis}, from `{chain.mark}` on {chain.tensor}", ("module", "", "rule", "line"), rows
        else:
            yield f"Over {chain.axis} the mark says so", ("mark",), [(chain.mark,)]
    rows = []
    for one in told.without:
        said = one.refused or (one.layout if one.changes else f"{one.layout}, as with it")
        received = "" if one.refused else f"{amount(one.received)} instead of {amount(told.received)}"
        rows.append((one.mark, said, received))
    yield "Without a mark", ("mark", "it would lie", "a rank receives"), rows
    rows = [
        (
            one.axis,
            _state(one.state, told.shape, one.axis),
            "as derived" if one.chosen else "cannot be" if one.more == float("inf") else signed(one.more),
            "" if one.chosen or one.more == float("inf") else signed(one.received),
        )
        for one in told.alternatives
    ]
    yield "What else it could be", ("axis", "layout", "costs more, as weighed", "bytes that a rank receives more"), rows


def _state(state: State, shape: Sequence[int], axis: str) -> str:
    return short(layout_of(shape, {axis: state})) or "()"


# ----------------------------------------------------------------
# What it would cost if one tensor lay otherwise: the problem of an axis solved again with that state forced.
# All else is free to follow, at the prices of the derivation, so a difference is the least that state costs. Only the
# axis itself is solved again; those after it are not asked.


@dataclass(frozen=True)
class Alternative:
    """One way for a tensor to be used over one axis."""

    axis: str
    state: State
    """`same` stands for `several`, too: whole."""
    chosen: bool
    more: float
    """What the axis costs more than as derived, as the derivation weighs it (work and all); infinite: it cannot be."""
    received: float
    """The bytes that a rank receives more over this axis, forward and backward."""


def alternatives(found: Derived, v: int, rates: WorkRates | None = None) -> Iterator[Alternative]:
    """Every state that a class could have, over each axis, that of the derivation first."""
    wanted = fixed_by(found.folded, found.marks, found.mesh)
    for i, over in enumerate(found.axes):
        if v not in over.used:
            continue
        fixed = {w: own[over.axis] for w, own in wanted.items() if over.axis in own}
        own_rates = (rates or WorkRates()).along(found.mesh, over.axis)
        problem = AxisProblem(found.folded, over.axis, over.k, found.axes[:i], fixed, own_rates, opened=v)
        chosen = _plain(over.used[v])
        options: dict[State, list[int]] = {}
        standing = v in found.folded.standing
        for place, state in enumerate(problem.used[v]):
            if not standing or state != SUM:  # a parameter is no sum of what ranks hold
                options.setdefault(_plain(state), []).append(place)
        as_it_is, _ = _forced(problem, v, options[chosen])
        before = _received(found, i, over)
        for state in sorted(options, key=lambda one: one != chosen):
            if state == chosen:
                yield Alternative(over.axis, state, True, 0.0, 0.0)
                continue
            cost, other = _forced(problem, v, options[state])
            more = 0.0 if other is None else _received(found, i, other) - before
            yield Alternative(over.axis, state, False, cost - as_it_is, more)


def _plain(state: State) -> State:
    return SAME if state.kind == "several" else state


def _forced(problem: AxisProblem, v: int, places: Sequence[int]) -> tuple[float, Over | None]:
    """The least cost with a class in one of some states, and what is done then."""
    costs = problem.costs()
    own = costs.tables[("used", v),]
    barred = np.full(own.shape, np.inf)
    barred[[*places]] = 0.0
    costs.tables[("used", v),] = own + barred
    best = bounded(costs).choice
    cost = costs.of(best)
    return cost, problem.over(best) if np.isfinite(cost) else None


def _received(found: Derived, i: int, over: Over) -> float:
    upto = replace(found, axes=(*found.axes[:i], over))
    return sum(one.nbytes for one in moved(upto) if over.axis in one.axes)
