"""A derivation of a module rather than of a graph: capture it, fold it, derive."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from tangram.errors import UserError
from tangram.layout import Mesh
from tangram.models.building.named import is_named
from tangram.models.capturing.capture import capture
from tangram.models.capturing.fold import folded
from tangram.models.capturing.graph import Graph
from tangram.models.outlines.costs import block_names
from tangram.sharding.derive.derive import ConflictError, Derived, derive
from tangram.sharding.derive.layouts import input_states
from tangram.sharding.derive.marking.marks import Mark, matched, noted, result_names, states
from tangram.sharding.derive.marking.published import marks_known_for
from tangram.sharding.derive.problem.states import SAME, State
from tangram.text import alternatives

States = Mapping[str, State]


def graph_of(
    model: nn.Module, inputs: Mapping[str, Any], dtype: torch.dtype, *, grad: bool = True, rules: str = ""
) -> Graph:
    """What a model (on meta or not) runs for inputs of these sizes, its modules in training or not as they are.

    `grad`: whether gradients are on; `rules`: of operators of one's own. Raises UserError where it cannot be captured.
    """
    seeds: list[int] = []
    with torch.random.fork_rng(devices=()):
        before, state = torch.initial_seed(), torch.get_rng_state()
        graph = capture(model, inputs, dtype=dtype, grad=grad)
        if (seed := torch.initial_seed()) != before:
            torch.set_rng_state(state)
            capture(model, inputs, dtype=dtype, grad=grad)
            seeds = [seed, torch.initial_seed()]
    if len({*seeds}) > 1:
        raise UserError(
            f"{type(model).__name__} seeds torch's generator in its forward by another number on every rank and at "
            "every call, as torch.seed does: seed it outside of the model, or by a number that stays the same"
        )
    return replace(folded(graph, block_names(model)), rules=rules)


def derive_model(graph: Graph, marks: Sequence[Mark], mesh: Mesh, *, left: bool = False) -> Derived:
    """What follows from marks and those in the model's code; results that no mark names are whole. Raises UserError.

    `left`: such results lie as is cheapest, as for a loss that takes them in parts.
    """
    marks = [*marks, *noted(graph)]
    if left:
        return _derived(graph, marks, mesh)
    named = {mark.pattern for mark in marks}
    marked = {v for mark in marks for v in matched(graph, mark).values()}
    free = [name for name, v in result_names(graph).items() if name not in named and v not in marked]
    return _derived(graph, [*marks, *(Mark.parse(f"{name}: ...") for name in free)], mesh)


def marks_or_known(graph: Graph, marks: Sequence[Mark], mesh: Mesh, model: nn.Module) -> list[Mark]:
    """The marks, or, where there are none and none in the model's code, those known for its type as far as they fit."""
    return [*marks] if marks or noted(graph) else off_results(graph, fitting(graph, marks_known_for(model), mesh))


def off_results(graph: Graph, marks: Sequence[Mark]) -> list[Mark]:
    """The marks without the names of what a model gives: who has set none gets its results whole, as of one process."""
    results, found = {*graph.outputs.values()}, list[Mark]()
    for mark in marks:
        names = matched(graph, mark)
        if not results & {*names.values()}:
            found.append(mark)
        elif left := [name for name, v in names.items() if v not in results]:
            found.append(replace(mark, pattern=left[0] if len(left) == 1 else "{" + ",".join(left) + "}"))
    return found


def refuse_idle_axes(found: Derived, model: nn.Module) -> None:
    """Raise UserError for an axis of several ranks that no mark names: they would all compute the same."""
    named = {over.axis for over in found.axes}
    kind = getattr(getattr(model, "config", None), "model_type", None)
    kind = kind if kind and is_named(kind) else None
    shapes = [value.shape for _, value in found.folded.graph.of_kind("input") if len(value.shape) == 2]
    sizes = " --batch {} --sequence {}".format(*shapes[0]) if kind and shapes else ""
    choose = (
        f", have marks chosen by `tangram shard {kind or 'FILE.py:function'}{sizes} --mesh '{found.mesh}' --choose "
        "--cluster h100-8x8 --write FILE` (tangram.sharding.read_marks reads them)"
    )
    for axis, (k, _) in found.mesh.axes.items():
        if k > 1 and axis not in named:
            raise UserError(
                f"no mark names the axis {axis}, so its {k} ranks would compute the same: name it in one, as in "
                f'"embed: batch/{axis} ..."{"" if named else choose}, or leave it out, and use DDP or FSDP over those '
                "ranks"
            )


def _derived(graph: Graph, marks: Sequence[Mark], mesh: Mesh) -> Derived:
    """Equal layers lie alike where they can: what the last gives may be a result, and whole, and that of others not."""
    try:
        return derive(graph, marks, mesh)
    except ConflictError as error:
        if not graph.blocks:
            raise
        try:
            return derive(replace(graph, blocks=()), marks, mesh)
        except UserError:
            raise error from None


def parameter_states(found: Derived) -> dict[str, States]:
    """How each parameter lies over each axis of the mesh; of several names of one, by the first."""
    whole = dict.fromkeys(found.mesh.axes, SAME)
    graph = found.folded.graph
    return {
        value.name: {**whole, **input_states(found, found.folded.classes[v])} for v, value in graph.of_kind("parameter")
    }


def fitting(graph: Graph, marks: Sequence[Mark], mesh: Mesh, *, parts: bool = False) -> list[Mark]:
    """The marks without the names that are not in a model, or that they would cut unevenly; without those of none.

    `parts`: parameters may be cut unevenly, as long as every rank has something.
    """
    found: list[Mark] = []
    for mark in marks:
        names = [name for name in alternatives(mark.pattern) if _fits(graph, replace(mark, pattern=name), mesh, parts)]
        if names:
            found.append(replace(mark, pattern=names[0] if len(names) == 1 else "{" + ",".join(names) + "}"))
    return found


def uneven(graph: Graph, mark: Mark, mesh: Mesh) -> bool:
    """Whether a mark of a layout that the mesh has would cut a tensor of a graph unevenly. Raises UserError."""
    return any(
        state.kind == "cut" and bool(state.parts)
        for v in matched(graph, mark).values()
        for state in states(mark.layout, graph.values[v].shape, mesh).values()
    )


def leaves_nothing(graph: Graph, mark: Mark, mesh: Mesh) -> bool:
    """Whether a rank would have nothing of a tensor that a mark is on. Raises UserError."""
    return any(
        not part
        for v in matched(graph, mark).values()
        for state in states(mark.layout, graph.values[v].shape, mesh).values()
        for part in state.parts
    )


def on_parameters(graph: Graph, mark: Mark) -> bool:
    """Whether a mark is on nothing else. Raises UserError."""
    return all(graph.values[v].kind == "parameter" for v in matched(graph, mark).values())


def _fits(graph: Graph, mark: Mark, mesh: Mesh, parts: bool) -> bool:
    try:
        return not (leaves_nothing if parts and on_parameters(graph, mark) else uneven)(graph, mark, mesh)
    except UserError:
        return False


def too_small(graph: Graph, mark: Mark, mesh: Mesh) -> bool:
    """Whether what flows in a graph cannot be cut as a mark says, as one sample over two ranks: all compute it then.

    Probes of a model are as small as that; the sizes of training are looked at before a run starts.
    """
    flows = all(graph.values[v].kind != "parameter" for v in matched(graph, mark).values())
    return flows and leaves_nothing(graph, mark, mesh)
