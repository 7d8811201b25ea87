"""What the backward calls again where no runtime sees it: outside of any module's forward."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tangram.errors import UserError
from tangram.models.capturing.graph import Called, Graph
from tangram.sharding.derive.derive import Derived
from tangram.sharding.derive.layouts import input_states


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
