"""Derivation: the layout of every tensor of a model from marks on a few, one mesh axis after the other.

Over one axis every tensor has a state in which it is made and one in which it is used, and every operator makes a
move. Marks fix states; parameters are used where they lie; all else is chosen so that the bytes that ranks receive,
forward and backward, and the work that they repeat (in bytes, by `WorkRates`) cost least: exactly, not step by step.

Axes are taken in the order of the mesh, each on top of those before it. The trade-off: one does not know the next.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from tangram.layout import Mesh
from tangram.models.capturing.graph import Graph
from tangram.sharding.derive.blame import blamed
from tangram.sharding.derive.collectives_between import (
    Before,
    Comm,
    Customs,
    beside,
    both,
    comms,
    fits,
    groups,
    label_of,
    labels,
    legal,
    passed,
    place_of,
    row_comms,
)
from tangram.sharding.derive.marking.marks import ConflictError, Mark, fixed_by
from tangram.sharding.derive.problem.folding import Folded, FoldedStep, far_at_taker, far_from_borders, fold, led
from tangram.sharding.derive.problem.rates import WorkRates, effort
from tangram.sharding.derive.problem.states import (
    SAME,
    SEVERAL,
    SUM,
    Gathered,
    State,
    part_dim,
    price,
    rows,
    share,
)
from tangram.sharding.derive.problem.states import cut as cut_state
from tangram.sharding.derive.regions import BOTH, Regions, WithinOperators, even, kinds_of, regions_of, together
from tangram.sharding.derive.solve.bounded import bounded, gap
from tangram.sharding.derive.solve.solve import Name, SolverCosts

__all__ = ["AxisProblem", "ConflictError", "Derived", "Over", "WorkRates", "derive", "fixed_by"]

_NEVER = float("inf")
_SPARED = 1e-3
"""What a byte of a parameter costs that every rank keeps, in bytes that are received: only so that ties are cut."""
_FAR = 1e-4
"""What it costs, in bytes for each that moves, where no border of a module is at hand: only so that ties move there."""


@dataclass(frozen=True)
class Over:
    """What was derived for one axis."""

    axis: str
    k: int
    lying: Mapping[int, State]
    """Of each class that no operator makes, how it lies."""
    used: Mapping[int, State]
    """Of each class, what it is brought to for all that take it."""
    communication: Mapping[int, Comm]
    """By the number of the node."""
    gap: float = 0.0
    """By how much it may cost more than the cheapest, as a part of that: not 0 for models too wide to be exact."""


@dataclass(frozen=True)
class Derived:
    """A model with a layout for every tensor."""

    folded: Folded
    mesh: Mesh
    marks: tuple[Mark, ...]
    axes: tuple[Over, ...] = field(default=())
    """In the order in which they were derived."""
    replicated: frozenset[int] = frozenset()
    """Classes that are whole wherever the model's code sees them, unless a mark cuts them."""


def derive(
    graph: Graph,
    marks: Sequence[Mark],
    mesh: Mesh,
    *,
    rates: WorkRates | None = None,
    whole: frozenset[int] = frozenset(),
) -> Derived:
    """Derive every layout of a captured graph (`models.capturing.capture`), folded (`models.capturing.fold`) or not.

    `whole`: classes that no axis cuts but by a mark. Raises UserError for a mark that names nothing, marks that
    contradict each other, and operators without a rule.
    """
    folded = fold(graph)
    read = {v for one in graph.reads for v in one.values}
    whole |= {folded.classes[v] for v in (*graph.changed.values(), *read)}  # what every rank has all of
    wanted = fixed_by(folded, marks, mesh)
    # An axis that no mark cuts anything over leaves all as it is, so nothing is derived for it.
    named = {axis for own in wanted.values() for axis, state in own.items() if state != SAME}
    mesh.require_independent(sorted(named), "the marks")
    wanted |= {v: {**dict.fromkeys(named, SAME), **wanted.get(v, {})} for v in whole}

    def over(*, routed: bool) -> Derived:
        done: list[Over] = []
        for axis, (k, _) in mesh.axes.items():
            if k > 1 and axis in named:
                fixed = {v: own[axis] for v, own in wanted.items() if axis in own}
                along = (rates or WorkRates()).along(mesh, axis)
                done.append(
                    AxisProblem(folded, axis, k, done, fixed, along, within=WithinOperators(routed=routed)).solved()
                )
        return Derived(folded, mesh, tuple(marks), tuple(done), whole)

    try:
        return over(routed=True)
    except ConflictError:
        if not regions_of(folded).regions:
            raise
        return over(routed=False)  # rows sent over one axis may leave another no way to have their experts cut


class AxisProblem:
    """The problem of one axis. `opened`: a class that may lie otherwise than its mark says, at the same prices."""

    def __init__(
        self,
        folded: Folded,
        axis: str,
        k: int,
        done: Sequence[Over],
        fixed: Mapping[int, State],
        rates: WorkRates,
        opened: int | None = None,
        within: WithinOperators = BOTH,
    ) -> None:
        self.folded, self.axis, self.k, self.done, self.fixed, self.rates = folded, axis, k, done, fixed, rates
        self.opened, self.linked = opened, within.linked
        self.given_back = {folded.classes[v] for v in folded.graph.outputs.values()}
        self.free = self._free()
        self.led = led(folded, self.free)
        self.far = far_from_borders(folded)
        self.customs = Customs.of(folded) if within.customs else Customs({}, {})
        self.regions = regions_of(folded) if within.routed else Regions(folded)
        self.outers: dict[int, list[int]] = {}
        self.states = self._all_states()
        self.moves = {step.number: self._communication(step) for step in folded.steps}
        self.used = {v: self.customs.states(v, self._used_states(v)) for v in self._values()}
        made = {v for step in folded.steps for v in step.outputs}
        self.lying = {v: self._lying_states(v) for v in self.used if v not in made}

    def _values(self) -> list[int]:
        """What operators take and give, and marked parameters that none takes with these inputs."""
        found = {v for step in self.folded.steps for v in (*step.inputs, *step.outputs) if v is not None}
        return sorted(found | {v for v in self.fixed if self.folded.value(v).kind == "parameter"})

    def _free(self) -> frozenset[int]:
        """The parameters, and what is made of them, that no mark says anything of."""
        bound = {v for v in self.fixed if v in self.folded.standing}
        for step in self.folded.steps:
            if {v for v in step.inputs if v is not None} & bound:
                bound.update(v for v in step.outputs if v in self.folded.standing)
        return self.folded.standing - bound

    # ------------------------------------------------------------ states

    def _all_states(self) -> dict[int, tuple[State, ...]]:
        """The cuts that each class can have: of each dim, and what comes through views that split and merge dims."""
        found: dict[int, dict[State, None]] = {}
        for v in self._values():
            shape = self.folded.value(v).shape
            # Even cuts only, for uneven ones multiply the choices: one has to be asked for by a mark.
            own = [cut_state(d) for d, n in enumerate(shape) if n > 1 and n % self.k == 0]
            found[v] = dict.fromkeys([*own, *([self.fixed[v]] if self.fixed.get(v, SAME).kind == "cut" else [])])
        for step in self.folded.steps:
            label = groups(step.call, step.bound)
            if label is not None and legal(step.bound, label, self.k):
                found[step.outputs[0]][rows(0)] = None
        todo = list(self.folded.steps)
        near: dict[int, list[FoldedStep]] = {}
        for step in todo:
            for v in dict.fromkeys((*step.inputs, *step.outputs)):
                if v is not None:
                    near.setdefault(v, []).append(step)
        # To a fixed point, in both directions: a view that merges dims gives its input a state, and that one's maker.
        waiting = {step.number for step in todo}
        while todo:
            step = todo.pop()
            waiting.discard(step.number)
            for v in self._spread(step, found):
                for other in near[v]:
                    if other.number not in waiting:
                        waiting.add(other.number)
                        todo.append(other)
        self._route(found)
        return {v: tuple(own) for v, own in found.items()}

    def _route(self, found: Mapping[int, dict[State, None]]) -> None:
        """Give the tensors of regions the states that only they have, for each way in which their tokens can be cut."""
        for number, region in self.regions.regions.items():
            ks = [self.k, *(over.k for over in self.done if kinds_of(over.communication[number]))]
            cuts = (state for state in found[region.source] if state.kind == "cut" and not state.parts)
            outers = [state.outer for state in cuts if state.dim == 0]
            self.outers[number] = [outer for outer in outers if even(region, outer, ks)]
        for v in self.regions.roles:
            found[v].update(dict.fromkeys(self.regions.states(v, self.outers)))

    def _spread(self, step: FoldedStep, found: Mapping[int, dict[State, None]]) -> list[int]:
        """Give the tensors of a step the states that its factors give them; those that have got one."""
        sides = [*zip(step.inputs, step.bound.inputs, strict=True)]
        sides += [*zip(step.outputs, step.bound.outputs, strict=False)]
        there = [(v, dims) for v, dims in sides if v is not None and dims is not None]
        # A label is a factor of the operator that is cut, so what one tensor has by it each of the others may have.
        known = {label_of(step.bound, dims, state) for v, dims in there for state in found[v] if state.kind == "cut"}
        grown: list[int] = []
        for label in known:
            if label is None or not legal(step.bound, label, self.k, linked=self._links(step)):
                continue
            for v, dims in there:
                state = place_of(step.bound, dims, label)
                if state is not None and state not in found[v]:
                    found[v][state] = None
                    grown.append(v)
        own = [[s for s in found[v] if s.kind == "sum"] if v is not None else [] for v, _ in sides]
        for move in row_comms(step.call, step.bound, own, self.k) if any(own) else ():
            for (v, _), state in zip(sides, (*move.inputs, *move.outputs), strict=False):
                if v is not None and state is not None and state.kind == "sum" and state not in (SUM, *found[v]):
                    found[v][state] = None
                    grown.append(v)
        return grown

    def _communication(self, step: FoldedStep) -> list[Comm]:
        some = [self.states[v] if v is not None else () for v in step.inputs]
        some += [self.states[v] for v in step.outputs]
        count = len(step.bound.inputs) + len(step.bound.outputs)
        some = (some + [()] * count)[:count]  # optional inputs that were left out
        differentiable = [v in self.folded.differentiable for v in step.outputs]
        found_labels = labels(step.bound, some, self.k, linked=self._links(step))
        allowed = [label for label in found_labels if fits(step, label, self.k, self._before(step))]
        differentiable += [False] * (len(step.bound.outputs) - len(differentiable))
        found = comms(step.call, step.bound, allowed, self.k, differentiable)
        found += [
            *row_comms(step.call, step.bound, some, self.k),
            *self.regions.communication(step, self.outers, self.k),
        ]
        before = [over.communication[step.number] for over in self.done]
        # What an operator does over the axes before leaves it some of these: two cuts of one dim must nest.
        found = [move for move in dict.fromkeys(found) if together(self.regions, step, move, before)]
        found = [move for move in found if beside(self._shapes(step), move, self.k, self._before(step))]
        return self.customs.allowed(step, found)

    def _before(self, step: FoldedStep) -> list[Before]:
        """What an operator does over the axes before."""
        return [(over.k, over.communication[step.number]) for over in self.done]

    def _shapes(self, step: FoldedStep) -> list[Sequence[int] | None]:
        return [None if v is None else self.folded.value(v).shape for v in (*step.inputs, *step.outputs)]

    def _links(self, step: FoldedStep) -> bool:
        """Whether parts may need each other in an operator: where gradients flow. What else is small is gathered."""
        return self.linked and any(v in self.folded.differentiable for v in step.outputs)

    def _used_states(self, v: int) -> tuple[State, ...]:
        """What a tensor may be brought to, once for all that take it."""
        bound = v in self.fixed and v != self.opened
        if v in self.given_back:
            return (self.fixed[v],) if bound else (SAME, *self._free_cuts(v))
        if bound and isinstance(self.fixed[v], Gathered):
            return (SEVERAL,)  # its gradient is summed as it is cut
        if bound:
            return (self.fixed[v],) if self.fixed[v].kind == "cut" or self.fixed[v] == SUM else (SAME, SEVERAL)
        return (SAME, SEVERAL, SUM, *self._free_cuts(v))

    def _free_cuts(self, v: int) -> list[State]:
        """The states of a tensor that fit those that it is used in over the axes before."""
        shape, before = self.folded.value(v).shape, [(over.used.get(v), over.k) for over in self.done]
        return [one for one in self.states[v] if all(both(shape, *other, one, self.k) for other in before)]

    # ------------------------------------------------------------ costs

    def solved(self) -> Over:
        """The cheapest states and moves. Raises ConflictError."""
        costs = self.costs()
        found = bounded(costs)
        if not np.isfinite(found.bound):  # even the cheapest breaks something, so the marks contradict each other
            because = self._because() or blamed(self.folded, self.axis, costs, self.used)
            said = because or "they contradict each other"
            raise ConflictError(f"no layout over {self.axis} fits the marks: {said}", self.axis, because)
        return replace(self.over(found.choice), gap=gap(costs, found))

    def _because(self) -> str:
        """Which of the model's own Functions is why no states fit; "" where none is."""
        if not self.customs.nodes:
            return ""
        within = WithinOperators(customs=False)
        other = AxisProblem(self.folded, self.axis, self.k, self.done, self.fixed, self.rates, within=within)
        return self.customs.why if np.isfinite(bounded(other.costs()).bound) else ""

    def costs(self) -> SolverCosts:
        """What is to be made small: `("used", v)`, `("lies", v)` choose of states, `("move", n)` of moves."""
        costs = SolverCosts()
        for v, own in self.lying.items():
            costs.variable(("lies", v), [self._kept(v, state) for state in own])
        for v, own in self.used.items():
            costs.variable(("used", v), [0.0] * len(own))
        for step in self.folded.steps:
            costs.variable(("move", step.number), self._work(step, self.moves[step.number]))
        for v, own in self.lying.items():
            costs.pair(("lies", v), ("used", v), self._table(v, own, self.used[v], lies=True))
        for step in self.folded.steps:
            name, some = ("move", step.number), self.moves[step.number]
            for i, v in enumerate(step.outputs):
                given = [move.outputs[i] for move in some]
                table = self._table(v, given, self.used[v], self.far.get(v, 1))
                costs.pair(name, ("used", v), self.customs.staying(step, given, self.used[v], table) * step.times)
            for i, v in enumerate(step.inputs):
                needed = [move.inputs[i] for move in some]
                if v is not None and None not in needed:
                    some_needed = [state for state in needed if state is not None]
                    table = self._table(v, self.used[v], some_needed, far_at_taker(step, i, self.far.get(v, 1)))
                    table = self.customs.staying(step, self.used[v], some_needed, table)
                    costs.pair(("used", v), name, table * step.times)
        return costs

    def over(self, best: Mapping[Name, int]) -> Over:
        """What a choice means."""
        chosen = {step.number: self.moves[step.number][best["move", step.number]] for step in self.folded.steps}
        used = {v: own[best["used", v]] for v, own in self.used.items()}
        lies = {v: own[best["lies", v]] for v, own in self.lying.items()}
        return Over(self.axis, self.k, lies, used, chosen)

    def _lying_states(self, v: int) -> tuple[State, ...]:
        if v in self.fixed and v != self.opened:
            return (self.fixed[v],)
        given = self.folded.value(v).kind in ("input", "buffer")  # every rank has all of it, and may use a part
        return (SAME,) if given else (SAME, *self._free_cuts(v))

    def _kept(self, v: int, state: State) -> float:
        own = 1.0 if state.kind != "cut" else share(state.parts, self.k)
        standing = self.folded.value(v).kind == "parameter"
        return _SPARED * self._nbytes(v) * own * self.folded.times[v] if standing else 0.0

    def _work(self, step: FoldedStep, some: Sequence[Comm]) -> list[float]:
        """What an operator does on a rank by each move, forward and backward, in bytes that are received."""
        if not any(v in self.folded.differentiable for v in step.outputs):
            return [0.0] * len(some)  # masks and positions: not worth a collective
        before = math.prod(over.communication[step.number].share for over in self.done)
        worth = 3 * effort(self.folded, step).worth(self.rates)
        ways = math.prod(over.k for over in self.done if over.communication[step.number].label is not None)
        passes = (passed(step, move.label, self.axis, self.k) for move in some)
        inside = [2 * one.nbytes / ways if one is not None else 0.0 for one in passes]
        return [(worth * (move.share * before) + own) * step.times for move, own in zip(some, inside, strict=True)]

    def _nbytes(self, v: int) -> float:
        """Of a tensor, what a rank has by the axes before."""
        nbytes = float(self.folded.value(v).nbytes)
        for over in self.done:
            if part_dim(over.used[v]) is not None:
                nbytes /= over.k
        return nbytes

    def _table(
        self, v: int, sources: Sequence[State], targets: Sequence[State], far: float = 0.0, *, lies: bool = False
    ) -> np.ndarray:
        """What each pair of states costs."""
        differentiable, nbytes = v in self.folded.differentiable, self._nbytes(v)
        table = np.empty((len(sources), len(targets)))
        for i, a in enumerate(sources):
            for j, b in enumerate(targets):
                moved = price(a, b, nbytes, self.k, differentiable=differentiable)
                # A search for marks wants layouts that stay: each change of a cut costs it more than its bytes.
                if self.rates.follow and a.kind == "cut" and a != b:
                    moved *= self.k if b.kind == "cut" else 1
                    moved += self.rates.follow * nbytes * (v in self.led)
                if v in self.folded.standing and not isinstance(a, Gathered):
                    moved *= self.rates.summed
                # A parameter is used where it lies. Only a mark that says so has it gathered for each use.
                if v in self.folded.standing and a != b and "cut" in (a.kind, b.kind) and not isinstance(a, Gathered):
                    moved = _NEVER
                moved += _FAR * far * nbytes * (a != b)
                table[i, j] = moved * (self.folded.times[v] if lies else 1)
        return table
