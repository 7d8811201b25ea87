"""Marks that no layouts fit: which of them, on which tensors, at which operator; and what was tried and would work.

The marks are left out one after the other until what is left fits, so those that are named are no more than it takes to
make a conflict. Every way out that is offered has been derived: a mark left out, or, where the tensor is no parameter,
the second mark put on what the next module gives, so that the tensor is moved in between.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from tangram.layout import Mesh
from tangram.models.capturing.graph import Graph
from tangram.sharding.derive.collectives_between import label_of, legal, place_of
from tangram.sharding.derive.derive import AxisProblem, ConflictError, Derived, Over, WorkRates, derive, fixed_by
from tangram.sharding.derive.explain.operators import VIEWS, factor_names, line_of, module_of, title, written
from tangram.sharding.derive.explain.show import amount, folded_name, short, total
from tangram.sharding.derive.layouts import layout_of, used
from tangram.sharding.derive.marking.marks import Mark, matched, states
from tangram.sharding.derive.problem.folding import Folded, FoldedStep, fold
from tangram.sharding.derive.problem.states import SAME, State
from tangram.sharding.derive.solve.bounded import bounded


@dataclass(frozen=True)
class Fix:
    """A change of the marks that was derived, and works."""

    what: str
    received: float
    """The bytes that a rank receives then."""


@dataclass(frozen=True)
class Conflict:
    """Marks that contradict each other, or one that fits nothing."""

    axis: str
    marks: tuple[str, ...]
    tensors: tuple[str, ...]
    """What they are on: one tensor of which they say unlike things, or several that no layouts go together with."""
    alike: bool
    """Whether they are only one because equal layers lie alike."""
    tables: tuple[str, ...]
    """The operators between, with the factors of their tensors and what the marks cut of them."""
    fixes: tuple[Fix, ...]
    because: str = ""
    """What is why, if it is known."""

    @property
    def sentence(self) -> str:
        """What is wrong, in one sentence."""
        names, marks = " and ".join(self.tensors), " and ".join(f"`{mark}`" for mark in self.marks)
        layers = " (equal layers lie alike)" if self.alike else ""
        because = self.because and f": {self.because}"
        if len(self.marks) == 1:
            return f"no layout over {self.axis} fits the mark {marks} on {names}{layers}{because}"
        return f"the marks {marks} contradict each other on {names}{layers} over {self.axis}{because}"

    @property
    def lines(self) -> list[str]:
        """The operators between, with the numbers of the marks, and what works."""
        told = [line for table in self.tables for line in table.splitlines()]
        told += ["tried, and it works:"] if self.fixes else ["left out one at a time, the others do not fit either"]
        return [*told, *(f"  {fix.what}: a rank receives {amount(fix.received)}" for fix in self.fixes)]

    def __str__(self) -> str:
        marks = [f"  {i}  {mark}" for i, mark in enumerate(self.marks, 1)]
        return "\n".join([f"{self.sentence}:", *marks, *self.lines])


def conflict(
    graph: Graph, marks: Sequence[Mark], mesh: Mesh, error: ConflictError, rates: WorkRates | None = None
) -> Conflict:
    """What `derive` refused with this error, in full."""
    needed = [*marks]
    for mark in marks:
        fewer = [one for one in needed if one is not mark]
        if _derived(graph, fewer, mesh, rates) is None:
            needed = fewer
    folded = fold(graph)
    asked = _marked_states(folded, needed, mesh, error.axis)
    twice = [v for v, own in asked.items() if len({state for _, _, state in own}) > 1]
    at = twice[:1] or _together(folded, asked, mesh, needed, error.axis, rates or WorkRates())
    plain = Derived(folded, mesh, tuple(marks))
    own = {v: asked[v] for v in at}
    exact = {(name, i) for v in at for i, name, _ in own[v]}
    names = {name for name, _ in exact}
    alike = bool(twice) and not any(len({i for n, i in exact if n == name}) > 1 for name in names)
    steps = _between(folded, at)
    tensors = tuple(folded_name(plain, own[v][0][1]) for v in at)
    if len(at) == 1:
        ways = [_behind(folded, [step], own) for step in steps]
        k = mesh.axes[error.axis][0]
        steps, own = next((way for way in ways if _refuses(way[0][0], way[1], k)), ways[0])
    return Conflict(
        error.axis,
        tuple(map(str, needed)),
        tensors,
        alike,
        tuple(_table(plain, step, own, error.axis, mesh.axes[error.axis][0]) for step in steps[:3]),
        tuple(_fixes(plain, graph, marks, needed, at, mesh, rates)),
        error.because,
    )


def _derived(graph: Graph, marks: Sequence[Mark], mesh: Mesh, rates: WorkRates | None) -> Derived | None:
    try:
        return derive(graph, marks, mesh, rates=rates)
    except ConflictError:
        return None


MarkedStates = Mapping[int, list[tuple[int, str, State]]]
"""By class: the number of the mark, the name that it matches, and the state that it asks for."""


def _marked_states(folded: Folded, marks: Sequence[Mark], mesh: Mesh, axis: str) -> MarkedStates:
    found: dict[int, list[tuple[int, str, State]]] = {}
    for i, mark in enumerate(marks, 1):
        for name, v in matched(folded.graph, mark).items():
            lies = states(mark.layout, folded.graph.values[v].shape, mesh) or dict.fromkeys(mesh.axes, SAME)
            if axis in lies:
                found.setdefault(folded.classes[v], []).append((i, name, lies[axis]))
    return found


def _together(
    folded: Folded, requested: MarkedStates, mesh: Mesh, marks: Sequence[Mark], axis: str, rates: WorkRates
) -> list[int]:
    """The fewest marked classes that no layouts over the axis fit together."""
    done = _before(folded, marks, mesh, axis, rates)
    wanted = fixed_by(folded, marks, mesh)
    fixed = {v: own[axis] for v, own in wanted.items() if axis in own}
    for v in requested:
        fewer = {w: state for w, state in fixed.items() if w != v}
        problem = AxisProblem(folded, axis, mesh.axes[axis][0], done, fewer, rates.along(mesh, axis))
        if not np.isfinite(bounded(problem.costs()).bound):
            fixed = fewer
    return [v for v in requested if v in fixed]


def _before(folded: Folded, marks: Sequence[Mark], mesh: Mesh, axis: str, rates: WorkRates) -> list[Over]:
    """What was derived for the axes before."""
    wanted = fixed_by(folded, marks, mesh)
    named = {one for own in wanted.values() for one, state in own.items() if state != SAME}
    done: list[Over] = []
    for one, (k, _) in mesh.axes.items():
        if one == axis:
            break
        if k > 1 and one in named:
            fixed = {v: own[one] for v, own in wanted.items() if one in own}
            done.append(AxisProblem(folded, one, k, done, fixed, rates.along(mesh, one)).solved())
    return done


def _between(folded: Folded, at: Sequence[int]) -> list[FoldedStep]:
    """The operators on the shortest way from the first of some classes to the last; of one class, all that take it."""
    near: dict[int, list[FoldedStep]] = {}
    for step in folded.steps:
        for v in dict.fromkeys((*step.inputs, *step.outputs)):
            if v is not None:
                near.setdefault(v, []).append(step)
    if len(at) == 1:
        takers = [step for step in near.get(at[0], ()) if at[0] in step.inputs]
        return takers or near.get(at[0], [])
    came: dict[int, tuple[int, FoldedStep] | None] = {at[0]: None}
    queue = deque([at[0]])
    while queue and at[-1] not in came:
        v = queue.popleft()
        for step in near.get(v, ()):
            for w in dict.fromkeys((*step.inputs, *step.outputs)):
                if w is not None and w not in came:
                    came[w] = (v, step)
                    queue.append(w)
    steps: list[FoldedStep] = []
    link = came.get(at[-1])
    while link is not None:
        steps.insert(0, link[1])
        link = came[link[0]]
    return steps


def _refuses(step: FoldedStep, own: MarkedStates, k: int) -> bool:
    """Whether an operator cannot take a tensor as a mark says."""
    for v, dims in zip(step.inputs, step.bound.inputs, strict=True):
        for _, _, state in own.get(v, ()) if v is not None and dims is not None else ():
            label = label_of(step.bound, dims or (), state) if state.kind == "cut" else None
            if state.kind == "cut" and (label is None or not legal(step.bound, label, k)):
                return True
    return False


def _behind(folded: Folded, steps: list[FoldedStep], own: MarkedStates) -> tuple[list[FoldedStep], MarkedStates]:
    """Behind a parameter that is only transposed or cast the operator that computes, and what is asked for there."""
    while steps and title(steps[0]) in VIEWS and folded.standing.issuperset(steps[0].outputs):
        step = steps[0]
        (v,) = own
        dims, w = step.bound.inputs[step.inputs.index(v)], step.outputs[0]
        found: list[tuple[int, str, State]] = []
        for mark, name, state in own[v]:
            label = label_of(step.bound, dims or (), state) if state.kind == "cut" else None
            there = SAME if label is None else place_of(step.bound, step.bound.outputs[0], label)
            if there is None or (label is None and state.kind == "cut"):
                return steps, own
            found.append((mark, name, there))
        takers = [one for one in folded.steps if w in one.inputs]
        if not takers:
            return steps, own
        steps, own = takers[:1], {w: found}
    return steps, own


# ------------------------------------------------------------ the factor table


def _table(plain: Derived, step: FoldedStep, requested: MarkedStates, axis: str, k: int) -> str:
    """The factors of each tensor of an operator, with what the marks cut of them."""
    bound, names = step.bound, factor_names(step)
    factors = [f for f in names if any(f in dim for dims in (*bound.inputs, *bound.outputs) for dim in dims or ())]
    rows: list[list[str]] = [["", *(names[f] for f in factors), ""]]
    sides = [
        (name, v, dims)
        for (name, _), v, dims in zip(step.call.places, step.inputs, bound.inputs, strict=True)
        if v is not None and dims is not None
    ]
    sides += [("result", v, dims) for v, dims in zip(step.outputs, bound.outputs, strict=False)]
    for name, v, dims in sides:
        for mark, _, state in requested.get(v, [(0, "", SAME)]):
            label = label_of(bound, dims, state) if state.kind == "cut" else None
            cells = [
                ""
                if not any(f in dim for dim in dims)
                else f"/{axis}"
                if label and label.factor == f
                else _kept(step, f)
                for f in factors
            ]
            note = ""
            if state.kind == "cut" and label is None:
                note = f"{short(layout_of(plain.folded.value(v).shape, {axis: state}))} cuts what is whole here"
            elif label is not None and not legal(bound, label, k):
                note = f"{names[label.factor]} may not be cut"
            rows.append([f"{name} by {mark}" if mark else name, *cells, note])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    shown = ["    " + "  ".join(x.ljust(w) for x, w in zip(row, widths, strict=True)).rstrip() for row in rows]
    where = f"{module_of(plain, step)} ({line_of(step.node.source)})"
    return "\n".join([f"  {title(step)} in {where}: {written(step, ())}", *dict.fromkeys(shown)])


def _kept(step: FoldedStep, factor: str) -> str:
    return "whole" if factor in step.bound.uncut else "."


# ------------------------------------------------------------ what would work


def _fixes(
    plain: Derived,
    graph: Graph,
    marks: Sequence[Mark],
    needed: Sequence[Mark],
    at: Sequence[int],
    mesh: Mesh,
    rates: WorkRates | None,
) -> Iterator[Fix]:
    for i, mark in enumerate(needed, 1):
        found = _derived(graph, [one for one in marks if one is not mark], mesh, rates)
        if found is not None:
            own = [v for v in at if v in {plain.folded.classes[w] for w in matched(graph, mark).values()}]
            shape = graph.values[own[0]].shape if own else ()
            then = f", so that it lies as {short(layout_of(shape, used(found, own[0]))) or '()'}" if own else ""
            yield Fix(f"without {i}{then}", total(found))
    if len(at) == 1 and len(needed) > 1 and at[0] not in plain.folded.standing:
        after = _next_module(plain, at[0])
        if after is not None:
            moved_mark = replace(needed[-1], pattern=after)
            found = _derived(graph, [moved_mark if one is needed[-1] else one for one in marks], mesh, rates)
            if found is not None:
                yield Fix(f"{len(needed)} on the next module, which moves it in between, `{moved_mark}`", total(found))


def _next_module(plain: Derived, v: int) -> str | None:
    """What the first module behind a tensor gives that has its shape, and is another tensor."""
    graph, classes = plain.folded.graph, plain.folded.classes
    made: dict[int, str] = {}
    for name, w in graph.results.items():
        made.setdefault(classes[w], name)
    seen, queue = {v}, deque([v])
    while queue:
        one = queue.popleft()
        if one != v and one in made and graph.values[one].shape == graph.values[v].shape:
            name = made[one]
            block = next((b for b in graph.blocks if name.startswith(f"{b.path}.")), None)
            base = block.path.rpartition(".") if block else None
            return f"{base[0]}.*{name.removeprefix(block.path)}" if block and base else name
        for step in plain.folded.steps:
            if one in step.inputs:
                for w in step.outputs:
                    if w not in seen:
                        seen.add(w)
                        queue.append(w)
    return None
