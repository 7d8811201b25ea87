"""What functions write into the tensors that they are given, and where such a write would be lost.

A tensor that is moved, cut or put together is another one than before: what is then written into it is not in the
first, with which the model's code goes on. Likewise a view of what has been moved, and a view that is made otherwise on
a part.

What the backward calls again where no runtime sees it: outside of any module's forward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass

from tangram.errors import UserError
from tangram.models.capturing.graph import Called, Graph, Node, Run, refs
from tangram.models.capturing.opened import unsaid
from tangram.sharding.derive.derive import Derived
from tangram.sharding.derive.layouts import input_states
from tangram.sharding.ops.calls import schema_of
from tangram.sharding.runtime.program import Border, OpAction, Program


@dataclass(frozen=True)
class Writes:
    """The tensors that a graph writes into. A write makes another value of the same tensor of the model's code."""

    first: Mapping[int, int]
    """By a value that a write has made, the first value of that tensor."""
    nodes: Mapping[int, Sequence[int]]
    """By the first value of a tensor, the nodes that write into it, or into a view of it."""

    @staticmethod
    def of(graph: Graph) -> Writes:
        """Those of a forward."""
        first: dict[int, int] = {}
        nodes: dict[int, list[int]] = {}
        for i, node in enumerate(graph.nodes):
            if node.backward:
                continue
            before = [node.renews[0]] if node.renews else written_by(node)
            for old, new in zip(before, [v for v in node.results if v is not None], strict=False):
                first[new] = first.get(old, old)
                nodes.setdefault(first[new], []).append(i)
        return Writes(first, nodes)

    def tensor(self, v: int) -> int:
        """The first value of the tensor of which this is a value."""
        return self.first.get(v, v)

    def within(self, inside: range, v: int) -> bool:
        """Whether some of these nodes write into the tensor of a value."""
        return any(i in inside for i in self.nodes.get(self.tensor(v), ()))


def lost_views(program: Program, as_it_is: Callable[[int], bool]) -> Iterator[tuple[str, int]]:
    """Where what is written into a view would not be in the tensor that it was a view of: a sentence, and the run.

    `as_it_is`: whether a node runs on a part as it does on the whole, so that a view stays one.
    """
    graph = program.derived.folded.graph
    writes, call_of = Writes.of(graph), {i: c for c, one in enumerate(graph.calls) for i in range(one.first, one.stop)}
    actions = {action.call: action for own in program.actions.values() for action in own.values()}
    used = _values_used(graph)
    for i, node in enumerate(graph.nodes):
        if node.renews is None or node.backward or used.isdisjoint(node.results):
            continue
        base, view = node.renews
        tensors = {writes.tensor(base), writes.tensor(node.inputs[-1])}  # neither may be moved on the way
        passed = [actions[c] for c in {call_of.get(view), call_of.get(i)} if c in actions]
        own = [action for action in passed if view in _nodes(graph.calls[action.call])]
        if (
            any(action.why and not as_it_is(view) for action in own)
            or any(writes.tensor(v) in tensors for action in own for v in action.after)
            or any(_brought(writes, graph, action, tensors, view) for action in passed)
            or any(_between(writes, graph.runs[at], one, tensors, view, i) for at, one in program.borders.items())
        ):
            said = "what is written into a view of a tensor would be lost, for one of them is moved in between"
            way = "write it as an operator that gives a new tensor, as torch.where or torch.cat"
            yield f"{node.source}: {said}: {way}", graph.calls[call_of[i]].run


def _values_used(graph: Graph) -> set[int]:
    """The values that something takes: not those of a tensor of which code has nothing but the view that is written,
    as of the rows that a product makes and gives as `batch sequence hidden`."""
    found = {*graph.outputs.values(), *graph.changed.values()}
    for node in reversed(graph.nodes):
        if node.renews is None or not found.isdisjoint(node.results):
            found.update(node.inputs)
    return found


def _nodes(one: Called | Run) -> range:
    return range(one.first, one.stop)


def _brought(writes: Writes, graph: Graph, action: OpAction, tensors: Set[int], view: int) -> bool:
    """Whether an action moves one of some tensors before it is viewed, or written into."""
    takes = graph.calls[action.call].takes
    if any((v := takes[leaf]) is not None and writes.tensor(v) in tensors for leaf in action.takes):
        return True
    return any(
        graph.nodes[i].implied or (place == 0 and (i == view or written_by(graph.nodes[i])))
        for i, place in action.before
    )


def _between(writes: Writes, run: Run, border: Border, tensors: Set[int], view: int, write: int) -> bool:
    """Whether one of some tensors is moved where a module takes or gives it, between a view and a write."""
    if (view in _nodes(run)) == (write in _nodes(run)):
        return False
    leaves, moved = (run.takes, border.takes) if write in _nodes(run) else (run.gives, border.gives)
    return any((v := leaves[leaf]) is not None and writes.tensor(v) in tensors for leaf in moved)


def refuse_lost_writes(graph: Graph, call: Called, action: OpAction) -> None:
    """What a function writes into a tensor would be written into another one, where that is moved or cut first."""
    for i, node in enumerate(graph.nodes[call.first : call.stop], call.first):
        names = unsaid(node.operator, node.arguments)
        places = {[*node.arguments].index(name) for name in names}
        if any(change and at == i and place in places for (at, place), change in action.before.items()):
            raise UserError(
                f"{call.line}: {call.function} changes {' and '.join(names)}, of which every rank has all, by what a "
                "rank has a part of: mark what it takes as whole"
            )
        for v in written_by(node):
            moved = any(call.takes[leaf] == v for leaf in action.takes) or not action.after.keys().isdisjoint(
                node.results
            )
            if v in call.takes and (moved or (action.why and not {*node.results} & {*call.gives})):
                raise UserError(
                    f"{call.line}: {call.function} writes into a tensor that has to lie otherwise for it: write it as "
                    "an operator that gives a new tensor"
                )


def written_by(node: Node) -> list[int]:
    """The tensors that a node writes into."""
    written = [a.name for a in schema_of(node.operator).arguments if a.is_write]
    return [v for name in written for v in refs(node.arguments[name])]


def refuse_called_again(graph: Graph, call: Called) -> None:
    """Raise UserError for a call that something is done with: in the backward it would be made as it is, and draw other
    numbers."""
    within = next((one for one in graph.customs if one.first <= call.first and call.stop <= one.stop), None)
    if within is not None and within.draws and call.run not in within.runs:
        raise UserError(
            f"{call.line}: {call.function} draws random numbers that the backward of {within.name}, an "
            "autograd.Function, draws again outside of any module's forward: keep them with ctx.save_for_backward"
        )
    if call.again:
        raise UserError(
            f"{call.line}: {call.function} is done otherwise on a part, and torch.utils.checkpoint calls it again "
            "outside of any module's forward: checkpoint a module instead of a function"
        )


def refuse_parts_again(found: Derived) -> None:
    """Raise UserError for parts of parameters: outside of a module's forward they are DTensors, for whoever gathers."""
    graph = found.folded.graph
    for call in (call for call in graph.calls if call.again):
        for name in _cut(found, [v for node in graph.nodes[call.first : call.stop] for v in node.inputs]):
            raise UserError(
                f"{call.line}: {call.function} takes a part of {name}, and torch.utils.checkpoint calls it again "
                "outside of any module's forward: checkpoint a module instead of a function"
            )
    for one in graph.customs:
        for name in _cut(found, one.late):
            raise UserError(
                f"{one.line}: the backward of {one.name}, an autograd.Function, takes {name}, of which a rank has a "
                "part: keep what it needs in the forward, by ctx.save_for_backward"
            )


def read_late(found: Derived) -> set[str]:
    """The parameters that a backward reads outside of any module's forward: as they stand in the model then."""
    graph = found.folded.graph
    calls = (call for call in graph.calls if call.again)
    values = {v for call in calls for node in graph.nodes[call.first : call.stop] for v in node.inputs}
    values |= {v for one in graph.customs for v in one.late}
    return {graph.values[v].name for v in values if graph.values[v].kind == "parameter"}


def _cut(found: Derived, values: Sequence[int]) -> Iterator[str]:
    """The names of parameters of which a rank has a part."""
    for v in values:
        value, lies = found.folded.graph.values[v], input_states(found, found.folded.classes[v])
        if value.kind == "parameter" and any(one.kind == "cut" for one in lies.values()):
            yield value.name
