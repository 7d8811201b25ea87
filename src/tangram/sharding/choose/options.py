"""What there is to choose from: for each tensor and operator, the ways to lie and to move over all axes at once.

Over each axis they are those of a derivation (`AxisProblem`); those over several axes are all combinations of which
the cuts are even together. Left out is only what can never be needed:

    masks and positions     what no parameter has a part in lies whole, at no cost, and is cut where it is taken
    several, of what has no gradient    the same as `same`
    states in between       a tensor is used as its operator makes it or as a taker needs it

`parameters`: a parameter may lie cut and be used whole. It is then gathered for the forward and again for the backward,
as FSDP does.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from tangram.errors import UserError
from tangram.layout import Mesh
from tangram.sharding.derive.collectives_between import Comm
from tangram.sharding.derive.derive import AxisProblem, Derived, Over, WorkRates, fixed_by
from tangram.sharding.derive.marking.marks import Mark
from tangram.sharding.derive.problem.folding import Folded, FoldedStep
from tangram.sharding.derive.problem.states import SAME, SEVERAL, State
from tangram.sharding.derive.regions import WithinOperators
from tangram.sharding.derive.solve.solve import Name

States = tuple[State, ...]
"""One for each axis."""
CommOptions = tuple[Comm, ...]


@dataclass(frozen=True)
class Options:
    """What there is to choose from, by class and by the number of a node."""

    folded: Folded
    mesh: Mesh
    axes: tuple[str, ...]
    """Those of more than one rank, in the order of the mesh."""
    states: Mapping[int, Sequence[States]]
    used: Mapping[int, Sequence[States]]
    communication: Mapping[int, Sequence[CommOptions]]

    @property
    def ks(self) -> tuple[int, ...]:
        """The ranks of each axis."""
        return tuple(self.mesh.axes[axis][0] for axis in self.axes)

    def choice(self, plan: Derived) -> dict[Name, int] | None:
        """The choice that a plan is; None where it is none of these."""
        own = of_derived(plan)
        found: dict[Name, int] = {}
        for kind, mine, theirs in (("lies", self.states, own.states), ("used", self.used, own.used)):
            for v, states in mine.items():
                wanted = theirs[v][0]
                if v not in self.folded.differentiable:
                    wanted = tuple(SAME if state == SEVERAL else state for state in wanted)
                place = 0 if len(states) == 1 else next((i for i, one in enumerate(states) if one == wanted), None)
                if place is None:
                    return None
                found[kind, v] = place
        for n, some in self.communication.items():
            wanted_moves = tuple(map(_same_effect, own.communication[n][0]))
            place = next((i for i, one in enumerate(some) if tuple(map(_same_effect, one)) == wanted_moves), None)
            alike = [tuple(move.label for move in one) for one in some]
            if place is None and tuple(move.label for move in own.communication[n][0]) in alike:
                place = alike.index(tuple(move.label for move in own.communication[n][0]))
            if place is None and len(some) > 1:
                return None
            found["move", n] = place or 0
        return found

    def derived(self, choice: Mapping[Name, int], marks: Sequence[Mark]) -> Derived:
        """What a choice means."""
        lies = {v: own[choice["lies", v]] for v, own in self.states.items()}
        used = {v: own[choice["used", v]] for v, own in self.used.items()}
        moves = {n: own[choice["move", n]] for n, own in self.communication.items()}
        overs = (
            Over(
                axis,
                k,
                {v: states[i] for v, states in lies.items()},
                {v: states[i] for v, states in used.items()},
                {n: some[i] for n, some in moves.items()},
            )
            for i, (axis, k) in enumerate(zip(self.axes, self.ks, strict=True))
        )
        return Derived(self.folded, self.mesh, tuple(marks), tuple(overs))


def options(folded: Folded, mesh: Mesh, marks: Sequence[Mark]) -> Options:
    """All that can be chosen. Raises UserError for marks that name nothing or contradict each other."""
    axes = tuple(axis for axis, (k, _) in mesh.axes.items() if k > 1)
    mesh.require_independent(axes, "a choice")
    fixed = fixed_by(folded, marks, mesh, all_axes=False)
    if any(state.parts for own in fixed.values() for state in own.values()):
        raise UserError(
            "a mark cuts a dim into parts that are no even chunks, which a choice does not weigh: leave it out"
        )
    problems: list[AxisProblem] = []
    for axis in axes:
        own = {v: states[axis] for v, states in fixed.items() if axis in states}
        problems.append(
            AxisProblem(
                folded,
                axis,
                mesh.axes[axis][0],
                [],
                own,
                WorkRates(follow=0.0),
                within=WithinOperators(routed=False, linked=False),
            )
        )
    ks = tuple(mesh.axes[axis][0] for axis in axes)
    quiet = still(folded, fixed)
    moves = {step.number: _communication(step, problems, ks, quiet, folded) for step in folded.steps}
    ends = _ends(folded, moves, problems)
    used: dict[int, list[States]] = {}
    lies: dict[int, list[States]] = {}
    for v in _values(folded):
        shape = folded.value(v).shape
        if v in quiet:
            used[v] = [(SAME,) * len(axes)]
        else:
            own = [[s for s in p.used[v] if s in some] for p, some in zip(problems, ends[v], strict=True)]
            used[v] = _even(shape, own, ks)
        if v in problems[0].lying:
            own = [sorted(p.lying[v], key=lambda s: s.kind != "cut") for p in problems]  # of equal ones, the smaller
            lies[v] = used[v] if v in quiet else _even(shape, own, ks)
    for name, found in (("tensor", used), ("parameter", lies)):
        empty = next((v for v, own in found.items() if not own), None)
        if empty is not None:
            raise UserError(f"the marks leave the {name} {_title(folded, empty)} no layout: leave one of them out")
    return Options(folded, mesh, axes, lies, used, moves)


def of_derived(found: Derived) -> Options:
    """One option each, those of a plan; over axes that it does not cut, all ranks do the same."""
    axes = tuple(axis for axis, (k, _) in found.mesh.axes.items() if k > 1)
    by = {over.axis: over for over in found.axes}
    folded = found.folded
    made = {v for step in folded.steps for v in step.outputs}
    some = [v for v in _values(folded) if v not in made]
    lies = {v: [tuple(by[a].lying[v] if a in by else SAME for a in axes)] for v in some}
    used = {v: [tuple(by[a].used[v] if a in by else SAME for a in axes)] for v in _values(folded)}
    moves = {
        step.number: [tuple(by[a].communication[step.number] if a in by else _nothing(step) for a in axes)]
        for step in folded.steps
    }
    return Options(folded, found.mesh, axes, lies, used, moves)


def _same_effect(move: Comm) -> tuple[object, ...]:
    return move.label, move.inputs, move.outputs


def _nothing(step: FoldedStep) -> Comm:
    inputs = tuple(None if dims is None else SAME for dims in step.bound.inputs)
    return Comm(None, inputs, (SAME,) * len(step.bound.outputs), 1.0)


def _values(folded: Folded) -> list[int]:
    return sorted({v for step in folded.steps for v in (*step.inputs, *step.outputs) if v is not None})


def _title(folded: Folded, v: int) -> str:
    graph = folded.graph
    return graph.values[v].name or next((name for name, w in graph.results.items() if folded.classes[w] == v), f"%{v}")


def still(folded: Folded, fixed: Mapping[int, object]) -> set[int]:
    """The classes that only inputs and buffers go into: whole on every rank."""
    made = {v for step in folded.steps for v in step.outputs}
    found = {
        v
        for v in _values(folded)
        if v not in made and v not in fixed and v not in folded.standing and v not in folded.differentiable
    }
    for step in folded.steps:
        own = {v for v in step.inputs if v is not None}
        if own <= found and found.isdisjoint(step.outputs) and not any(v in fixed for v in step.outputs):
            found.update(v for v in step.outputs if v not in folded.differentiable)
    return found


def _communication(
    step: FoldedStep, problems: Sequence[AxisProblem], ks: Sequence[int], quiet: set[int], folded: Folded
) -> list[CommOptions]:
    gradient = any(v in folded.differentiable for v in step.outputs)
    if quiet.issuperset(step.outputs):
        return [tuple(p.moves[step.number][0] for p in problems)]
    by_axis: list[list[Comm]] = []
    for p in problems:
        own = p.moves[step.number]
        by_axis.append([m for m in own if gradient or m.label is not None or SEVERAL not in m.outputs])
    found: list[CommOptions] = []
    for some in itertools.product(*by_axis):
        labels = [(m.label, k) for m, k in zip(some, ks, strict=True) if m.label is not None]
        by_factor: dict[str, list[tuple[int, int]]] = {}
        for label, k in labels:
            by_factor.setdefault(label.factor, []).append((label.inner, k))
        if all(fits(step.bound.sizes[f], cuts) for f, cuts in by_factor.items()):
            found.append(some)
    return found


def fits(n: int, cuts: Iterable[tuple[int, int]]) -> bool:
    """Whether cuts of `n` elements are even together, each of blocks `outer` into `k`: (outer, k)."""
    by_outer: dict[int, int] = {}
    for outer, k in cuts:
        by_outer[outer] = by_outer.get(outer, 1) * k
    borders = [*sorted(by_outer), n]
    return all(not border % (outer * by_outer[outer]) for outer, border in itertools.pairwise(borders))


def _ends(
    folded: Folded, comms: Mapping[int, Sequence[CommOptions]], problems: Sequence[AxisProblem]
) -> dict[int, list[set[State]]]:
    """Of each class, over each axis, how its maker can give it and how its takers can need it."""
    found: dict[int, list[set[State]]] = {v: [set() for _ in problems] for v in _values(folded)}
    for i, p in enumerate(problems):
        for v, own in p.lying.items():
            found[v][i].update(own)
        for v in (p.given_back | p.fixed.keys()) & found.keys():
            found[v][i].update(p.used[v])
    for step in folded.steps:
        for i, v, state in _requested(step, comms[step.number]):
            found[v][i].add(state)
    for v in found.keys() - folded.differentiable:
        for states in found[v]:
            states.add(SAME)
            states.discard(SEVERAL)
    return found


def _requested(step: FoldedStep, comms: Sequence[CommOptions]) -> Iterator[tuple[int, int, State]]:
    """Over which axis, of which class, what some move needs or gives."""
    for some in comms:
        for i, move in enumerate(some):
            sides = (*zip(step.inputs, move.inputs, strict=True), *zip(step.outputs, move.outputs, strict=False))
            for v, state in sides:
                if v is not None and state is not None:
                    yield i, v, state


def _even(shape: Sequence[int], own: Sequence[Sequence[State]], ks: Sequence[int]) -> list[States]:
    found: list[States] = []
    for states in itertools.product(*own):
        by_dim: dict[int, list[tuple[int, int]]] = {}
        for state, k in zip(states, ks, strict=True):
            if state.kind == "cut":
                by_dim.setdefault(state.dim, []).append((state.outer, k))
        if all(fits(shape[d], cuts) for d, cuts in by_dim.items()):
            found.append(states)
    return found
