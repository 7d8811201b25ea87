"""What a derivation may do where a model applies a `torch.autograd.Function` of its own (`models.capturing.custom`).

Its backward is code that sees what its forward saw, so nothing moves within. Where forward and backward are element by
element all of it is cut alike or whole; else it is whole, with whole gradients: a part of a gradient, as of a tensor
that is cut or of which ranks have summands, is no gradient that its code was written for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tangram.sharding.derive.collectives_between import Comm
from tangram.sharding.derive.problem.folding import Folded, FoldedStep
from tangram.sharding.derive.problem.states import SAME, State

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
