"""A captured graph as a derivation sees it: one layer of each kind, tensors of equal layers as one.

    classes    values that must lie alike: a tensor of a layer and those in its place in the other layers of its kind;
               what a layer takes and what it gives, where a chain of layers passes it on
    steps      the nodes outside of layers, and those of one layer of each kind, with the number of times they run

A decoder of 80 equal layers is so the graph of one. The trade-off: equal layers lie alike, also where another layout
for the first or the last of them would be cheaper.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import torch

from tangram.errors import UserError
from tangram.layout.rule import Rule
from tangram.layout.syntax import Operand
from tangram.models.capturing.fold import pairs
from tangram.models.capturing.graph import Graph, Node, Value, filled
from tangram.sharding.ops import rule_table
from tangram.sharding.ops.bind import BoundOp
from tangram.sharding.ops.calls import OpCall
from tangram.sharding.ops.rule_table import RuleTable, table_of


@dataclass(frozen=True)
class FoldedStep:
    """A node, and how often it runs."""

    number: int
    node: Node
    times: int
    call: OpCall
    bound: BoundOp
    inputs: tuple[int | None, ...]
    """The class of each tensor, by place."""
    outputs: tuple[int, ...]


@dataclass(frozen=True)
class Folded:
    """The graph, folded."""

    graph: Graph
    classes: tuple[int, ...]
    """Of each value, the value that stands for its class."""
    steps: tuple[FoldedStep, ...]
    differentiable: frozenset[int]
    """The classes that gradients flow through."""
    standing: frozenset[int]
    """The classes that are parameters, or made of them alone: they are used where they lie."""

    def value(self, number: int) -> Value:
        """The tensor that stands for a class."""
        return self.graph.values[number]

    @cached_property
    def times(self) -> dict[int, int]:
        """Of each class, how many tensors it stands for."""
        found: dict[int, int] = {}
        for one in self.classes:
            found[one] = found.get(one, 0) + 1
        return found


def far_from_borders(folded: Folded) -> dict[int, int]:
    """Of each class that an operator makes, how far it is from where a runtime can move it at no cost.

    1: a module takes it or gives it; 4: another function of torch does; 16: it stays inside of one; 4096: a write into
    a view makes it or takes it, which no runtime can come between.
    """
    graph = folded.graph
    call_of = {i: c for c, call in enumerate(graph.calls) for i in range(call.first, call.stop)}
    bordering = {v for run in graph.runs for v in (*run.takes, *run.gives)}
    given = {*graph.outputs.values()}
    found: dict[int, int] = {}
    for step in folded.steps if graph.calls else ():
        for v in (v for v in step.node.results if v is not None):
            nodes = [i for i in (step.number, *graph.takers.get(v, ())) if not graph.nodes[i].backward]
            inside = len({call_of.get(i) for i in nodes}) == 1 and v not in given
            implied = any(graph.nodes[i].implied for i in nodes)
            found[folded.classes[v]] = 4096 if implied else 16 if inside else 1 if v in bordering else 4
    return found


TOGETHER: Mapping[str, tuple[int, ...]] = {"tangram.attend": (1, 2)}
"""Operators, and the places of tensors that a runtime may move and take at once: keys and values that go round."""


def far_at_taker(step: FoldedStep, place: int, far: int) -> int:
    """How far it is from there to move a tensor only for one operator that takes it; `far`: for all."""
    return 0 if place in TOGETHER.get(step.call.name, ()) else 1 + far


def led(folded: Folded, free: frozenset[int]) -> frozenset[int]:
    """The classes that go, element by element, into products with `free`: parameters without marks.

    Not those that meet a marked one, too: its mark says how they are cut.
    """
    found: set[int] = set()
    marked: set[int] = set()
    for step in reversed(folded.steps):
        sides = [(v, dims) for v, dims in zip(step.inputs, step.bound.inputs, strict=True) if v is not None and dims]
        kept = {f for dim in step.bound.outputs[0] for f in dim}
        for v, dims in sides:
            looked = step.bound.rule.note("looked") is not None and v == step.inputs[0]
            if looked or kept.issuperset(f for dim in dims for f in dim):  # an element goes into elements
                found.update([v] if found & {*step.outputs} else [])
                marked.update([v] if marked & {*step.outputs} else [])
            summed = {f for dim in dims for f in dim if step.bound.after(f, 0) == "sum"}
            met = [w for w, own in sides if w != v and summed & {f for dim in own for f in dim}]
            if v not in folded.standing and not folded.standing.isdisjoint(met):
                (found if free.issuperset(met) else marked).add(v)
    return frozenset(found - marked)


def fold(graph: Graph, table: RuleTable | None = None) -> Folded:
    """Fold a graph, by the built-in rules and its own where no table is given.

    Raises UserError for an operator without a rule, with the line that runs it.
    """
    first = {block.kind: block for block in reversed(graph.blocks)}
    parents = list(range(len(graph.values)))

    def root(v: int) -> int:
        while parents[v] != v:
            parents[v] = parents[parents[v]]
            v = parents[v]
        return v

    for block in graph.blocks:
        for one, other in pairs(graph, first[block.kind], block):
            a, b = sorted((root(one), root(other)))
            parents[b] = a
    classes = tuple(map(root, range(len(graph.values))))
    skipped = {i for block in graph.blocks if block is not first[block.kind] for i in range(block.first, block.stop)}
    count = {kind: sum(block.kind == kind for block in graph.blocks) for kind in first}
    times = {i: count[kind] for kind, block in first.items() for i in range(block.first, block.stop)}
    chosen = [i for i, node in enumerate(graph.nodes) if not node.backward and i not in skipped]
    steps = tuple(_step(graph, i, times.get(i, 1), classes, table or table_of(graph.rules)) for i in chosen)
    differentiable = frozenset(classes[i] for i, value in enumerate(graph.values) if value.differentiable)
    return Folded(graph, classes, steps, differentiable, _standing(graph, classes, steps))


def meta(value: Value) -> torch.Tensor:
    """A tensor without memory like a value."""
    return torch.empty_strided(value.shape, value.stride, dtype=value.dtype, device="meta")


def _step(graph: Graph, number: int, times: int, classes: tuple[int, ...], table: RuleTable) -> FoldedStep:
    node = graph.nodes[number]
    call = OpCall(node.operator, filled(node.arguments, lambda v: meta(graph.values[v])))
    by_place = filled(node.arguments, lambda v: v)
    inputs: list[int | None] = []
    for (name, i), tensor in zip(call.places, call.tensors, strict=True):
        own: int = by_place[name] if i is None else by_place[name][i]
        inputs.append(None if tensor is None else classes[own])
    try:
        bound = rule_table.bound(table, call) if inputs else _from_nothing(graph, node, call)
    except UserError as error:
        raise UserError(f"{node.source or node.module}: {error}") from None
    outputs = tuple(classes[v] for v in node.results if v is not None)
    return FoldedStep(number, node, times, call, bound, tuple(inputs), outputs)


def _from_nothing(graph: Graph, node: Node, call: OpCall) -> BoundOp:
    """Of an operator without tensors, as `arange`: every rank makes all of it, and takes the part that it needs.

    Also of one that draws, as `rand`: ranks have generators in one state while a model runs.
    """
    made = [graph.values[v] for v in node.results if v is not None]
    outputs = tuple(tuple(() for _ in value.shape) for value in made)
    return BoundOp(Rule((call.name,), (Operand(()),), (Operand(()),)), (), outputs, {}, frozenset())


def _standing(graph: Graph, classes: tuple[int, ...], steps: tuple[FoldedStep, ...]) -> frozenset[int]:
    found = {classes[i] for i, _ in graph.of_kind("parameter")}
    for step in steps:
        given = {v for v in step.inputs if v is not None}
        if given and given <= found:
            found |= {*step.outputs}
    return frozenset(found)
