"""Proof of a derivation: the graph run by what was derived, every rank's part here, beside the graph run whole.

Every operator runs on each rank's tensors; what does not lie as it is needed is put together and cut again. Each result
is put together by its layout and compared with the whole run's, so the first operator that is wrong is named; then the
gradients of all that the model was given, by torch's own backward through all ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from tangram.layout import Layout, Mesh
from tangram.models.capturing.answers import defined, replay
from tangram.models.capturing.graph import Graph, filled
from tangram.sharding.derive.derive import Derived
from tangram.sharding.derive.layouts import called, input_states, layout_of, made, needed, part, steps_of_nodes, used
from tangram.sharding.derive.problem.folding import FoldedStep, meta
from tangram.sharding.derive.problem.states import (
    OWN,
    OWN_IDS,
    SENT,
    SENT_ENDS,
    SENT_IDS,
    SORTED,
    Routed,
    State,
    part_dim,
)
from tangram.sharding.derive.transitions import ordered
from tangram.sharding.local_ops.local_call import run_all
from tangram.sharding.ops.calls import OpCall
from tangram.sharding.ops.rule_table import builtin, table_of
from tangram.sharding.proof.execute import differs
from tangram.sharding.proof.simulate import SimTensor, SimWorld, cut, of_parts, together


@dataclass(frozen=True)
class Ran:
    """What came of it."""

    wrong: str
    """Where it first differs from the whole run, and how; "" where it is right."""
    operators: int
    gradients: int
    """How many were compared."""


def check(found: Derived, inputs: Mapping[str, Tensor]) -> Ran:
    """Compare; `inputs` are the tensors of the graph by name, of the sizes that it was captured with."""
    graph = found.folded.graph
    inputs = {**graph.constants, **inputs}
    leaves = {name: t.detach().clone().requires_grad_(t.is_floating_point()) for name, t in inputs.items()}
    whole = replay(graph, leaves)
    cotangents = _cotangents(graph, whole)
    wanted = [t for t in leaves.values() if t.requires_grad]
    want = _gradients(graph, whole, cotangents, wanted)
    parts = _Ranks(found, leaves)
    wrong = parts.compared(whole)
    if wrong:
        return Ran(wrong, parts.operators, 0)
    outputs = {v: together(parts.values[v]) for v in graph.outputs.values()}
    got = _gradients(graph, outputs, cotangents, wanted)
    names = [name for name, t in leaves.items() if t.requires_grad]
    for name, g, w in zip(names, got, want, strict=True):
        none = torch.zeros_like(leaves[name])
        wrong = _differs(none if g is None else g, none if w is None else w, parts.rough)
        if wrong:
            return Ran(f"the gradient of {name} {wrong}", parts.operators, len(names))
    return Ran("", parts.operators, len(names))


def _cotangents(graph: Graph, full: Mapping[int, Tensor]) -> dict[int, Tensor]:
    generator = torch.Generator().manual_seed(5)
    outputs = {v: full[v] for v in graph.outputs.values() if full[v].requires_grad}
    return {v: torch.randn(t.shape, generator=generator).to(t.dtype) for v, t in outputs.items()}


def _gradients(
    graph: Graph, values: Mapping[int, Tensor], cotangents: Mapping[int, Tensor], target: Sequence[Tensor]
) -> Sequence[Tensor | None]:
    outputs = [values[v] for v in cotangents]
    return torch.autograd.grad(outputs, target, [*cotangents.values()], allow_unused=True)


def _differs(found: Tensor, want: Tensor, rough: bool) -> str:
    """How two tensors differ; where some operators round to bfloat16, by what that may do to all after them."""
    if rough and want.is_floating_point():
        found, want = found.to(torch.bfloat16), want.to(torch.bfloat16)
    return differs(found, want)


class _Ranks:
    """The graph run by all ranks."""

    def __init__(self, found: Derived, leaves: Mapping[str, Tensor]) -> None:
        self.found, self.graph = found, found.folded.graph
        self.world = SimWorld(found.mesh, table_of(found.folded.graph.rules))
        self.routes = SortedRows(found.mesh)
        self.values: dict[int, SimTensor] = {}
        self.operators = 0
        self.rough = any(t.dtype == torch.bfloat16 for t in leaves.values())
        for i, value in self.graph.of_kind("parameter", "buffer", "input"):
            start = input_states(self.found, self.found.folded.classes[i])
            own = cut(leaves[value.name], self._layout(i, start), self.world)
            self.values[i] = self._brought(i, own, start, self._used(i))

    def compared(self, full: Mapping[int, Tensor]) -> str:
        """Run every operator; where one is wrong, which and how."""
        steps = steps_of_nodes(self.found)
        for i, node in enumerate(self.graph.nodes):
            if node.backward:
                break
            step = steps[i]
            parts = self._run(i, step)
            for k, v in enumerate(w for w in node.results if w is not None):
                states = made(self.found, step, k)
                layout = self._layout(v, states)
                value = of_parts(self.graph.values[v].shape, [own[k] for own in parts], layout, self.world)
                wrong = "" if is_routed(states) else _differs(together(value).detach(), full[v].detach(), self.rough)
                if wrong:
                    return f"{node.operator.name()} of {node.module} ({node.source}): result {k} {wrong}"
                self.values[v] = self._brought(v, value, states, self._used(v))
            self.operators += 1
        return ""

    def _run(self, i: int, step: FoldedStep) -> list[list[Any]]:
        node = self.graph.nodes[i]
        call = OpCall(node.operator, filled(node.arguments, lambda v: meta(self.graph.values[v])))
        own = call if call.tensors else replace(call, arguments=called(self.found, step).arguments)
        by_place = filled(node.arguments, lambda v: v)
        ready: list[SimTensor | None] = []
        for place, ((name, at), tensor) in enumerate(zip(call.places, call.tensors, strict=True)):
            if tensor is None:
                ready.append(None)
                continue
            v = by_place[name] if at is None else by_place[name][at]
            ready.append(self._brought(v, self.values[v], self._used(v), needed(self.found, step, place)))
        ranks = range(self.found.mesh.size)
        every: list[list[Tensor | None]] = []
        for rank in ranks:
            local = [None if t is None else t.parts[rank] for t in ready]
            if call.name == "view":  # what is brought here may have other strides than what a model's own code has
                local = [None if t is None else t.contiguous() for t in local]
            every.append(local)
        results = run_all(own, step.bound, [part(self.found, step, rank) for rank in ranks], every)
        pairs = ((zip(defined(node, [*some]), node.results, strict=True)) for some in results)
        return [[r for r, v in both if v is not None] for both in pairs]

    def _brought(self, v: int, value: SimTensor, source: Mapping[str, State], target: Mapping[str, State]) -> SimTensor:
        """A tensor that lies otherwise, compared by its layout but for rows in an order of their own."""
        layout = self._layout(v, {axis: target.get(axis, state) for axis, state in source.items()})
        if is_routed(source) or is_routed(target):
            parts = self.routes.brought(value.parts, source, target)
            return of_parts(self.graph.values[v].shape, parts, layout, self.world)
        return value if value.own_layout == layout else cut(together(value), layout, self.world)

    def _used(self, v: int) -> Mapping[str, State]:
        return used(self.found, self.found.folded.classes[v])

    def _layout(self, v: int, states: Mapping[str, State]) -> Layout:
        return layout_of(self.graph.values[v].shape, states)


# ----------------------------------------------------------------
# What ranks that are all here do with rows that each has sorted for itself, to prove what is derived.
# Written apart from what real ranks do (`relayout.collectives.grouped_rows`): there every row is looked for among all.


def is_routed(states: Mapping[str, State]) -> bool:
    """Whether rows lie in an order of their own over some axis."""
    return any(isinstance(state, Routed) for state in states.values())


class SortedRows:
    """The rows that ranks of a mesh have sorted last, by axis and region."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._ids: dict[tuple[str, int], list[Tensor]] = {}

    def brought(
        self, parts: Sequence[Tensor], source: Mapping[str, State], target: Mapping[str, State]
    ) -> list[Tensor]:
        """What all ranks have of a tensor where it lies as `target`."""
        wanted = {axis: target.get(axis, state) for axis, state in source.items()}
        now = [*parts]
        for axis, a, b in ordered(source, wanted, {axis: n for axis, (n, _) in self._mesh.axes.items()}):
            if isinstance(a, Routed) and (a.kind, b.kind) == (SORTED, OWN_IDS):
                self._ids[axis, a.region] = now
                continue
            for ranks in self._along(axis):
                own = [now[r] for r in ranks]
                if isinstance(a, Routed):
                    made = _routed(own, [self._ids[axis, a.region][r] for r in ranks], a, b)
                else:
                    made = _moved(own, a, b)
                for r, one in zip(ranks, made, strict=True):
                    now[r] = one
        return now

    def _along(self, axis: str) -> list[list[int]]:
        """Ranks that differ in one axis alone, in the order of it."""
        found: dict[tuple[tuple[str, int], ...], list[int]] = {}
        for rank in range(self._mesh.size):
            at = self._mesh.coords(rank)
            found.setdefault(tuple((a, i) for a, i in sorted(at.items()) if a != axis), []).append(rank)
        return [*found.values()]


def _moved(parts: Sequence[Tensor], source: State, target: State) -> list[Tensor]:
    world = SimWorld(Mesh((((_ONE, len(parts)),),)), builtin())
    shape = [*parts[0].shape]
    if (dim := part_dim(source)) is not None:
        shape[dim] *= len(parts)
    whole = together(of_parts(shape, parts, layout_of(shape, {_ONE: source}), world))
    return cut(whole, layout_of(shape, {_ONE: target}), world).parts


_ONE = "x"


def _routed(parts: Sequence[Tensor], ids: Sequence[Tensor], source: Routed, target: State) -> list[Tensor]:
    """Over one axis: `ids` are the groups of the rows that each rank has sorted."""
    k, own = len(parts), source.groups // len(parts)
    every = torch.cat([*ids])
    order = torch.argsort(every, stable=True)
    index = [order[every[order] // own == r] for r in range(k)]
    if target.kind == SENT:
        rows = torch.cat([*parts])
        return [rows[i] for i in index]
    if (source.kind, target.kind) == (SENT, OWN):
        back = torch.argsort(torch.cat(index))
        return [*torch.cat([*parts])[back].split([len(one) for one in ids])]
    if target.kind == SENT_IDS:
        return [every[i] % own for i in index]
    assert target.kind == SENT_ENDS
    counts = [torch.bincount(every[i] % own, minlength=own) for i in index]
    return [one.cumsum(0).to(part.dtype) for one, part in zip(counts, parts, strict=True)]
