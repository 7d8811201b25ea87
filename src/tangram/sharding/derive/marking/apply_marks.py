"""What marks fix: the states of the tensors that they name, over each axis, where no two of them contradict."""

from __future__ import annotations

from collections.abc import Sequence

from tangram.errors import UserError
from tangram.layout import Mesh
from tangram.models.capturing.graph import Graph
from tangram.sharding.derive.marking.marks import Mark, marked_states, matched, refuse_unlike
from tangram.sharding.derive.problem.folding import Folded
from tangram.sharding.derive.problem.states import SAME, State


class ConflictError(UserError):
    """Marks that no layouts fit, over `axis`; `derive.conflicts` looks for what would work. `because`: if known."""

    def __init__(self, said: str, axis: str, because: str = "") -> None:
        super().__init__(said)
        self.axis, self.because = axis, because


def fixed_by(
    folded: Folded, marks: Sequence[Mark], mesh: Mesh, *, all_axes: bool = True
) -> dict[int, dict[str, State]]:
    """By class and axis, the states that marks fix. `all_axes`: a parameter is whole over those that no mark names."""
    graph = folded.graph
    found: dict[int, dict[str, State]] = {}
    by: dict[tuple[int, str], str] = {}
    for mark in marks:
        for name, v in matched(graph, mark).items():
            own = found.setdefault(folded.classes[v], {})
            lies = _states_of(mark, name, graph, v, mesh)
            for axis, state in lies.items():
                k = mesh.axes[axis][0]
                if k == 1:  # whatever a mark says, the one rank has all
                    continue
                if state.kind == "cut":
                    refuse_unlike(own, axis, state, graph.values[v].shape[state.dim], mark.layout, mesh)
                if own.setdefault(axis, state) != state:
                    other = by[folded.classes[v], axis]
                    said = f"the marks `{other}` and `{mark}` contradict each other on {name} over {axis}"
                    raise ConflictError(said, axis)
                by[folded.classes[v], axis] = str(mark)
    for v, own in found.items():
        if all_axes and graph.values[v].kind == "parameter":
            own.update({axis: SAME for axis in mesh.axes if axis not in own})
    return found


def _states_of(mark: Mark, name: str, graph: Graph, value: int, mesh: Mesh) -> dict[str, State]:
    try:
        return marked_states(mark, graph, value, mesh)
    except UserError as error:
        raise UserError(f"the mark `{mark}` does not fit {name}: {error}") from None
