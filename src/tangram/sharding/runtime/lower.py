"""From a derivation to a program: where in the model's code each tensor is brought to how it is needed.

A tensor is made in one way and used in another; between the two it may be brought there

    when a module takes it     the outermost one that has all its takers inside
    when a module gives it     where no such module is
    around a function          where no module's border lies between its making and its use

The first is preferred: until then the code of the model sees the tensor as it was made, so what it works out from
sizes, as masks and positions, is of whole sequences. What falls inside a function of torch makes a runtime run the
operators in its stead, and so does an operator that is another one on a part (an embedding's own rows, a bias that is
added once).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from tangram.errors import UserError
from tangram.models.capturing.graph import Called, Graph, Node, filled
from tangram.sharding.derive.derive import Derived
from tangram.sharding.derive.layouts import input_states, made, needed, steps_of_nodes, used
from tangram.sharding.derive.problem.folding import FoldedStep as Node_Step
from tangram.sharding.derive.problem.states import SAME, SEVERAL, State, part_dim
from tangram.sharding.derive.transitions import Change, change, states_to_change, summed_once
from tangram.sharding.runtime.program import Border, CallKey, OpAction, Place, Program
from tangram.sharding.runtime.writes import Writes, written_by

States = Mapping[str, State]
Fits = Callable[[range], bool]


def lower(found: Derived, *, inside: bool = False) -> Program:
    """The program of a derivation. Raises UserError for what no runtime can do, with the line of the model.

    `inside`: what code has to see whole is cut around the functions that take parts of it, and at no module's border.
    """
    return _Lowering(found, inside).program()


def places_of(node: Node, step: Node_Step) -> list[int | None]:
    """The values that a node takes, in the order of its rule's inputs."""
    by_place = filled(node.arguments, lambda v: v)
    found: list[int | None] = []
    for (name, i), tensor in zip(step.call.places, step.call.tensors, strict=True):
        own: int = by_place[name] if i is None else by_place[name][i]
        found.append(None if tensor is None else own)
    return found


class _Lowering:
    def __init__(self, found: Derived, inside: bool) -> None:
        self.found, self.graph, self.inside = found, found.folded.graph, inside
        self.steps = steps_of_nodes(found)
        self.call_of = {i: c for c, call in enumerate(self.graph.calls) for i in range(call.first, call.stop)}
        self.inner = {run for one in self.graph.customs for run in one.runs}
        """The runs in a Function of the model's own, whose backward knows nothing of what would be done there."""
        self.makers = makers(self.graph)
        self.maker = {v: i for v, (i, _) in self.makers.items()}
        self.takers: dict[int, list[Place]] = {}
        for i, node in self._forward():
            if node.implied and not any(v in self.graph.takers for v in node.results):
                continue  # a view that autograd makes anew, and nobody takes
            for place, v in enumerate(places_of(node, self.steps[i])):
                if v is not None:
                    self.takers.setdefault(v, []).append((i, place))
        self.writes = Writes.of(self.graph)
        self.borders: dict[int, Border] = {}
        self.actions: dict[int, OpAction] = {}
        self.summed: dict[str, tuple[str, ...]] = {}
        self.gathered: dict[str, Change] = {}

    def _forward(self) -> Iterator[tuple[int, Node]]:
        return ((i, node) for i, node in enumerate(self.graph.nodes) if not node.backward)

    def program(self) -> Program:
        """Place every change."""
        for v, value in enumerate(self.graph.values):
            # What no operator takes, code may ask for its shape.
            seen = v in self.maker and self.found.folded.classes[v] in self.found.replicated
            if seen or v in self.takers or v in self.graph.outputs.values():
                if v in self.maker:
                    self._made(v)
                elif value.kind == "parameter":
                    self._parameter(v)
                else:
                    self._lower_input(v)
        actions: dict[int, dict[CallKey, OpAction]] = {}
        for c, action in self.actions.items():
            call = self.graph.calls[c]
            self._settle(call, action)
            actions.setdefault(call.run, {})[call.line, call.function, call.turn] = action
        return Program(self.found, self.borders, actions, self.summed, self.gathered)

    # ------------------------------------------------------------ states

    def _states(self, v: int) -> tuple[States, States]:
        """How a value comes to be, and how it is used."""
        cls = self.found.folded.classes[v]
        if v not in self.maker:
            return input_states(self.found, cls), used(self.found, cls)
        i, k = self.makers[v]
        return made(self.found, self.steps[i], k), used(self.found, cls)

    def _change(self, v: int, source: States, target: States) -> Change:
        value, differentiable = self.graph.values[v], self._differentiable(v)
        goals = states_to_change(source, target, differentiable=differentiable)
        return change(value.shape, value.dtype.itemsize, source, goals, self.found.mesh, differentiable=differentiable)

    def _differentiable(self, v: int) -> bool:
        return self.found.folded.classes[v] in self.found.folded.differentiable

    # ------------------------------------------------------------ where

    def _parameter(self, v: int) -> None:
        source, target = self._states(v)
        name = self.graph.values[v].name
        summed = summed_once(source, target, differentiable=self._differentiable(v))
        rest = {**target, **{axis: source[axis] for axis in summed}}
        goals = states_to_change(source, rest, differentiable=self._differentiable(v))
        gathered = self._change(v, source, rest)
        if any(source[axis].kind != "cut" or b not in (SAME, SEVERAL) for axis, b in goals.items()):
            raise UserError(f"{name} would have to move in each forward: mark it")
        if gathered:
            self.gathered[name] = gathered
        if summed:
            self.summed[name] = summed
        self._needs(v, target, ())

    def _lower_input(self, v: int) -> None:
        source, target = self._states(v)
        change = self._change(v, source, target)
        # Where it is worked with: code further out may ask how large what the model was given is.
        run = self._common(v, [i for i, _ in self.takers.get(v, ())], innermost=True)
        if change and run is not None:
            self._border_takes(run, v, change)
            change = ()
        self._needs(v, target, change)

    def _made(self, v: int) -> None:
        source, target = self._states(v)
        change = self._change(v, source, target)
        if change:
            takers = [i for i, _ in self.takers.get(v, ())]
            run = (
                None if v in self.graph.outputs.values() or self._shown(v, source, target) else self._common(v, takers)
            )
            if run is not None:
                self._border_takes(run, v, change)
            elif (giver := self._giver(v, takers)) is not None:
                for leaf in _places(self.graph.runs[giver].gives, v):
                    self.borders.setdefault(giver, Border()).gives[leaf] = change
            elif self._written(v):  # its code may go on with the tensor that it was written into
                self._needs(v, target, change)
                self._leaves(v, change)
                return
            else:
                self._action(self.maker[v]).after[v] = change
        self._needs(v, target, ())

    def _leaves(self, v: int, change: Change) -> None:
        """Move a result of the model as it is given, while the code inside goes on with what it was."""
        if v in self.graph.outputs.values():
            root = next(at for at, run in enumerate(self.graph.runs) if run.parent is None)
            gives = self.borders.setdefault(root, Border()).gives
            gives.update(dict.fromkeys(_places(self.graph.runs[root].gives, v), change))

    def _shown(self, v: int, source: States, target: States) -> bool:
        """Whether the model's code has to see a tensor whole, so that it is put together as soon as it is made."""
        whole = self.found.folded.classes[v] in self.found.replicated
        return whole and all(part_dim(state) is None or state == source.get(axis) for axis, state in target.items())

    def _written(self, v: int) -> bool:
        """Whether a value is what a function has written into one of its tensors."""
        maker = self.graph.nodes[self.maker[v]]
        return maker.implied or bool(written_by(maker))

    def _needs(self, v: int, target: States, first: Change) -> None:
        """What single takers of a value need of it, after `first`."""
        changes: dict[Place, Change] = {}
        for i, place in self.takers.get(v, ()):
            changes[i, place] = first + self._change(v, target, needed(self.found, self.steps[i], place))
        waiting: set[Place] = {place for place, change in changes.items() if change}
        while waiting:
            i, place = min(waiting)
            change = changes[i, place]
            run = (
                None
                if self.inside and self.found.folded.classes[v] in self.found.replicated
                else self._common(
                    v, [i], lambda nodes, own=change: all(c == own for (j, _), c in changes.items() if j in nodes)
                )
            )
            if run is not None:
                self._border_takes(run, v, change)
                nodes = range(self.graph.runs[run].first, self.graph.runs[run].stop)
                waiting = {p for p in waiting if p[0] not in nodes}
            else:
                self._action(i).before[i, place] = change
                waiting.discard((i, place))

    def _border_takes(self, run: int, v: int, change: Change) -> None:
        for leaf in _places(self.graph.runs[run].takes, v):
            takes = self.borders.setdefault(run, Border()).takes
            takes[leaf] = takes.get(leaf, ()) + change

    def _common(
        self, v: int, nodes: Sequence[int], fits: Fits = lambda nodes: True, *, innermost: bool = False
    ) -> int | None:
        """The outermost run that takes a value, has these nodes inside, and not the one that makes the value.

        None that writes into the value, or gives it back, as an encoder that collects what its layers take: what it
        would be given is another tensor than the one its caller goes on with.
        """
        if not nodes:
            return None
        for at in self._outward(nodes[0])[:: 1 if innermost else -1]:
            run = self.graph.runs[at]
            inside = range(run.first, run.stop)
            if (
                v in run.takes
                and v not in run.gives
                and all(i in inside for i in nodes)
                and self.maker.get(v, -1) not in inside
                and not self.writes.within(inside, v)
                and fits(inside)
            ):
                return at
        return None

    def _giver(self, v: int, takers: Sequence[int]) -> int | None:
        """The innermost run that gives a value and has none of its takers inside.

        None that has only written into it: its caller may go on with the tensor that it had.
        """
        first = self.maker.get(self.writes.tensor(v), -1)
        for at in self._outward(self.maker[v]):
            run = self.graph.runs[at]
            inside = range(run.first, run.stop)
            if v in run.gives and first in inside and not any(i in inside for i in takers):
                return at
        return None

    def _outward(self, node: int) -> list[int]:
        """The runs that a node is in, innermost first."""
        at: int | None = self.graph.calls[self._call(node)].run
        found: list[int] = []
        while at is not None:
            found += [at] if at not in self.inner else []
            at = self.graph.runs[at].parent
        return found

    def _call(self, node: int) -> int:
        """The function of torch that ran a node, which a runtime can find again."""
        if node not in self.call_of:
            one = self.graph.nodes[node]
            raise UserError(
                f"{one.source}: {one.operator} runs in no function that the model's code calls, so nothing can be "
                "moved before or behind it: call it as a function of torch, as torch.transpose for x.T"
            )
        return self.call_of[node]

    def _action(self, node: int) -> OpAction:
        c = self._call(node)
        if custom := next((one for one in self.graph.customs if node in range(one.first, one.stop)), None):
            raise UserError(
                f"{custom.line}: {custom.name} is an autograd.Function, within which no tensor can be moved: give "
                "what it takes as the result of a module or of a function of torch"
            )
        return self.actions.setdefault(c, OpAction(c))

    # ------------------------------------------------------------ functions

    def _settle(self, call: Called, action: OpAction) -> None:
        """Say what happens by the leaves of a call, where that is all; else that its operators run one by one."""
        by_value: dict[int, set[Change]] = {}
        for i in range(call.first, call.stop):
            for place, v in enumerate(places_of(self.graph.nodes[i], self.steps[i])):
                if v is not None and self.maker.get(v, -1) not in range(call.first, call.stop):
                    by_value.setdefault(v, set()).add(action.before.get((i, place), ()))
        for v, changes in by_value.items():
            if len(changes) > 1 or (changes != {()} and v not in call.takes):
                action.why = "its operators need a tensor each in a way of its own"
                return
            if change := changes.pop():
                action.takes.update(dict.fromkeys(_places(call.takes, v), change))
        inner = {v for i in range(call.first, call.stop) for v in self.graph.nodes[i].inputs}
        for v, change in action.after.items():
            if v in inner or v not in call.gives:
                action.why = "a tensor moves between its operators"
                return
            action.gives.update(dict.fromkeys(_places(call.gives, v), change))
        moved = {places_of(self.graph.nodes[i], self.steps[i])[place] for i, place in action.before}
        if any(v is not None and self.maker.get(v, -1) in range(call.first, call.stop) for v in moved):
            action.why = "a tensor moves between its operators"


def refuse_cut_inputs(found: Derived) -> None:
    """Raise UserError where a mark cuts what every rank is given."""
    graph = found.folded.graph
    for v, value in graph.of_kind("input", "buffer"):
        axis = next((a for a, s in input_states(found, found.folded.classes[v]).items() if s != SAME), None)
        if axis is not None:
            raise UserError(
                f"a mark cuts {value.name} over {axis}, but every rank has all of what a model is given: mark what is "
                "made of it"
            )


def refuse_cut_buffers(found: Derived) -> None:
    """Raise UserError where a forward leaves but a part of a buffer, of which every rank has all."""
    graph, steps, maker = found.folded.graph, steps_of_nodes(found), makers(found.folded.graph)
    for name, v in graph.changed.items():
        states = (
            made(found, steps[maker[v][0]], maker[v][1]) if v in maker else input_states(found, found.folded.classes[v])
        )
        if axis := next((axis for axis, state in states.items() if state not in (SAME, SEVERAL)), None):
            raise UserError(
                f"{name} is a buffer that each forward changes, and over {axis} a rank would have a part of what it "
                "becomes: mark what it is made of as whole"
            )


def cut_classes(found: Derived, run: int) -> frozenset[int]:
    """The classes of the tensors that the code of a run sees in parts."""
    graph, classes = found.folded.graph, found.folded.classes
    seen = [v for call in graph.calls if call.run == run for v in call.gives]
    seen += [v for one in graph.runs if one.parent == run for v in one.gives]
    seen += graph.runs[run].takes
    writes = Writes.of(graph)
    seen += [new for new, v in writes.first.items() if v in {writes.tensor(one) for one in seen if one is not None}]
    maker, steps = makers(graph), steps_of_nodes(found)

    def states(v: int) -> list[State]:
        own = [*used(found, classes[v]).values()]
        return [*own, *made(found, steps[maker[v][0]], maker[v][1]).values()] if v in maker else own

    there = {v for v in seen if v is not None and graph.values[v].kind != "parameter"}
    cut = {v for v in there if any(part_dim(state) is not None for state in states(v))}
    for call in (call for call in graph.calls if call.run == run):
        for i in range(call.first, call.stop):
            for place, v in enumerate(places_of(graph.nodes[i], steps[i])):
                ways = needed(found, steps[i], place).values() if v in there else ()
                cut |= {v for state in ways if v is not None and part_dim(state) is not None}
    return frozenset(classes[v] for v in cut)


def makers(graph: Graph) -> dict[int, tuple[int, int]]:
    """For each value the first node that gives it, and which of its results; what a node gives as it took it was there.

    Counted are results that are tensors.
    """
    found: dict[int, tuple[int, int]] = {}
    for i, node in enumerate(graph.nodes):
        for k, v in enumerate(v for v in node.results if v is not None):
            if v not in node.inputs:
                found.setdefault(v, (i, k))
    return found


def _places(leaves: Sequence[int | None], v: int) -> list[int]:
    return [i for i, one in enumerate(leaves) if one == v]
