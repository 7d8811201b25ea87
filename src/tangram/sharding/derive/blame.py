"""Where a derivation that no states fit breaks: at which operator, in which line, with which tensor.

What cannot be costs much instead of all, so that the least choice breaks as little as there is to break: mostly one
operator's, which is then what a person has to look at.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import cast

import numpy as np

from tangram.sharding.derive.problem.folding import Folded, FoldedStep
from tangram.sharding.derive.problem.states import State, part_dim
from tangram.sharding.derive.solve.solve import LIMIT, Name, SolverCosts, eliminated

_STANDS = 4.0
"""How much rather operators are blamed than a parameter that is not used as it lies."""


def blamed(folded: Folded, axis: str, costs: SolverCosts, used: Mapping[int, Sequence[State]]) -> str:
    """The operator that no layouts fit, and why; "" where none alone is. `used`: how each class may be used."""
    finite = (np.abs(table[np.isfinite(table)]).max(initial=0.0) for table in costs.tables.values())
    most = 1.0 + float(sum(finite))
    soft = SolverCosts(costs.sizes)
    for names, table in costs.tables.items():
        stands = "lies" in _numbers(names)
        soft.tables[names] = np.where(np.isfinite(table), table, most * (_STANDS if stands else 1.0))
    choice = eliminated(soft, LIMIT).choice
    steps = {step.number: step for step in folded.steps}
    for names, table in costs.tables.items():
        if np.isfinite(table[tuple(choice[name] for name in names)]):
            continue
        own = _numbers(names)
        if "move" in own and "used" in own:
            v, step = own["used"], steps[own["move"]]
            return _sentence(folded, axis, step, v, used[v][choice["used", v]])
    return ""


def _numbers(names: tuple[Name, ...]) -> dict[str, int]:
    """What variables choose of, and the number of its class or node."""
    return dict(cast("Iterable[tuple[str, int]]", names))


def _sentence(folded: Folded, axis: str, step: FoldedStep, v: int, state: State) -> str:
    node = step.node
    name = node.operator.name().partition("::")[2].partition(".")[0]
    where = " ".join(x for x in (node.module and f"of {node.module}", node.source and f"({node.source})") if x)
    dim = part_dim(state)
    kinds = {"sum": "as partial sums"}
    lies = kinds.get(state.kind, "replicated") if dim is None else f"sharded over {axis} in dim {dim}"
    if v in step.inputs:
        return f"{name} {where} cannot take {_named(folded, v)} {lies}"
    return (
        f"{name} {where} cannot give its result {lies}, as what takes it needs: what is made of parameters stays as is"
    )


def _named(folded: Folded, v: int) -> str:
    """What a person knows a tensor by."""
    value = folded.value(v)
    if value.name:
        return value.name
    module = next((name for name, w in folded.graph.results.items() if folded.classes[w] == v), None)
    if module is not None:
        return f"what {module or 'the model'} gives"
    maker = next((step for step in folded.steps if v in step.outputs), None)
    if maker is None:
        return "a tensor"
    name = maker.node.operator.name().partition("::")[2].partition(".")[0]
    line = maker.node.source.rpartition("/")[2]
    return f"what {name} ({line}) gives"
