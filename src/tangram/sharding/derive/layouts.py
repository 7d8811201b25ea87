"""What was derived, in the notation: the layout of each tensor as it is made, used and needed; what moves between."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial

from tangram.layout import Layout
from tangram.layout.intervals import MAPS, size
from tangram.layout.locate import indices_of_rank
from tangram.layout.syntax import VOID, Cut, Dim
from tangram.sharding.derive.collectives_between import Label, cut_of, passed
from tangram.sharding.derive.derive import Derived
from tangram.sharding.derive.problem.folding import FoldedStep
from tangram.sharding.derive.problem.states import SAME, SEVERAL, Parts, Routed, State, cut, part_dim, scaled
from tangram.sharding.derive.transitions import StateStep as Moves
from tangram.sharding.derive.transitions import change, costs, states_to_change, summed_once
from tangram.sharding.local_ops.local_call import RankPart
from tangram.sharding.ops.calls import OpCall


def sharded_dim(n: int, cuts: Sequence[tuple[str, State]]) -> Dim:
    """A dim of `n` elements cut over axes, each by how it lies over that one."""
    borders = sorted({1, *(state.outer for _, state in cuts)})
    ends = [*borders[1:], n]
    factors: list[Dim] = []
    for start, end in zip(borders, ends, strict=True):
        own = [(axis, state) for axis, state in cuts if state.outer == start]
        inside = n // max(1, end)  # elements for each place of this factor
        factors += _written(end // start, [(axis, scaled(state.parts, 1, inside) or ()) for axis, state in own])
    return factors[0] if len(factors) == 1 else Dim(terms=(tuple(factors),))


def _written(n: int, cuts: Sequence[tuple[str, Parts]]) -> list[Dim]:
    """A factor of `n` elements; of what is cut into parts that are no even chunks, by the map that says it."""
    if not cuts or not cuts[0][1]:
        return [Dim(VOID, n, cuts=tuple(Cut(axis) for axis, _ in cuts))]
    (axis, parts), *others = cuts
    unit = math.gcd(n, *(border for part in parts for run in part for border in run))
    for chunks, width in itertools.product((True, False), dict.fromkeys((1, unit))):
        name, args = _map_of(n // width, scaled(parts, 1, width) or ())
        if name is not None and (name == "" or not chunks):
            first = Cut(axis, name, args)
            if others and width > 1:  # within the units that a rank has
                return [
                    Dim(
                        terms=((Dim(VOID, n // width, cuts=(first,)), Dim(VOID, width)),),
                        cuts=tuple(Cut(a) for a, _ in others),
                    )
                ]
            own = Dim(VOID, n // width, cuts=(first, *(Cut(a) for a, _ in others)))
            return [own] if width == 1 else [own, Dim(VOID, width)]
    raise AssertionError(f"{parts} of {n} are of no map that a mark can name")


@lru_cache(1 << 10)
def _map_of(n: int, parts: Parts) -> tuple[str | None, tuple[int, ...]]:
    """The index map by which ranks have these parts of `n` elements, and its arguments; None of no such map."""
    k = len(parts)
    sizes = tuple(map(size, parts))
    run = parts[0][0][1] - parts[0][0][0] if parts[0] else 1
    strides = (len(parts[0]),) if len(parts[0]) > 1 else ()
    known = [("", ()), ("sizes", sizes), ("zigzag", ()), ("cyclic", (run,)), *(("strided", (m,)) for m in strides)]
    for name, args in known:
        if all(MAPS[name].holds(n, k, i, args) == part for i, part in enumerate(parts)):
            return name, args
    return None, ()


def layout_of(shape: Sequence[int], states: Mapping[str, State]) -> Layout:
    """The layout of a tensor from its state over each axis, major axis first."""
    cuts: list[list[tuple[str, State]]] = [[] for _ in shape]
    for axis, state in states.items():
        if (dim := part_dim(state)) is not None:  # of rows in an order of their own, as many
            cuts[dim].append((axis, state if state.kind == "cut" else cut(dim)))
    dims = tuple(sharded_dim(n, own) if own else Dim(VOID, n) for n, own in zip(shape, cuts, strict=True))
    return Layout(dims, (), tuple(("sum", axis) for axis, state in states.items() if state.kind == "sum"))


def value_layout(found: Derived, value: int) -> Layout:
    """The layout of a tensor of the graph as it is used."""
    return layout_of(found.folded.graph.values[value].shape, used(found, found.folded.classes[value]))


def used(found: Derived, v: int) -> dict[str, State]:
    """By axis, how a class is used."""
    return {over.axis: over.used[v] for over in found.axes if v in over.used}


def input_states(found: Derived, v: int) -> dict[str, State]:
    """By axis, how a class lies that no operator makes."""
    return {over.axis: over.lying[v] for over in found.axes if v in over.lying}


def made(found: Derived, step: FoldedStep, output: int) -> dict[str, State]:
    """By axis, how an operator gives one of its results."""
    return {over.axis: over.communication[step.number].outputs[output] for over in found.axes}


def needed(found: Derived, step: FoldedStep, place: int) -> dict[str, State]:
    """By axis, how an operator needs one of its tensors."""
    states = {over.axis: over.communication[step.number].inputs[place] for over in found.axes}
    return {axis: state for axis, state in states.items() if state is not None}


def steps_of_nodes(found: Derived) -> dict[int, FoldedStep]:
    """The step that stands for each node of the forward: of equal layers, that of the first."""
    graph = found.folded.graph
    by_number = {step.number: step for step in found.folded.steps}
    first = {block.kind: block for block in reversed(graph.blocks)}
    steps = dict(by_number)
    for block in graph.blocks:
        for i in range(block.first, block.stop):
            steps[i] = by_number[first[block.kind].first + i - block.first]
    return steps


def local_shape(found: Derived, shape: Sequence[int], states: Mapping[str, State], rank: int = 0) -> tuple[int, ...]:
    """The shape of a rank's part of a tensor."""
    sizes, at = [*shape], found.mesh.coords(rank)
    for over in found.axes:
        if over.axis in states and (dim := part_dim(states[over.axis])) is not None:
            parts = states[over.axis].parts if states[over.axis].kind == "cut" else ()
            share, of = (size(parts[at[over.axis]]), sum(map(size, parts))) if parts else (1, over.k)
            sizes[dim] = sizes[dim] * share // max(1, of)
    return tuple(sizes)


def unlike(found: Derived) -> Iterator[int]:
    """One rank of each kind: those that have parts of the same sizes are alike."""
    kinds: dict[str, list[int]] = {}
    for over in found.axes:
        moves = [
            state
            for move in over.communication.values()
            for state in (*move.inputs, *move.outputs)
            if state is not None
        ]
        every = {state.parts for state in (*moves, *over.used.values(), *over.lying.values()) if state.parts}
        sizes = (tuple(size(parts[i]) for parts in every) for i in range(over.k))
        first = {own: i for i, own in reversed([*enumerate(sizes)])} if every else {(): 0}
        kinds[over.axis] = sorted(first.values())
    for places in itertools.product(*kinds.values()):
        yield found.mesh.rank(dict(zip(kinds, places, strict=True)))


def called(found: Derived, step: FoldedStep) -> OpCall:
    """The call of a step as one rank makes it where nothing but the code says how many: numbers of its own rows."""
    own = [over.k for over in found.axes if any(isinstance(s, Routed) for s in over.communication[step.number].outputs)]
    if not own or not step.call.name.startswith("arange"):
        return step.call
    return replace(step.call, arguments={**step.call.arguments, "end": step.call.arguments["end"] // math.prod(own)})


def part(found: Derived, step: FoldedStep, rank: int) -> RankPart:
    """Where a rank stands in an operator: what it holds of each factor that is cut."""
    cuts: dict[str, list[tuple[str, Label]]] = {}
    for over in found.axes:
        label = over.communication[step.number].label
        if label is not None:
            cuts.setdefault(label.factor, []).append((over.axis, label))
    at = found.mesh.coords(rank)
    sets = {
        f: indices_of_rank(
            sharded_dim(step.bound.sizes[f], [(a, cut(0, n.inner, n.parts)) for a, n in own]), found.mesh, at
        )
        for f, own in cuts.items()
    }
    return RankPart(found.mesh, rank, sets, {f: tuple(cut_of(a, n) for a, n in own) for f, own in cuts.items()})


@dataclass(frozen=True)
class Moved:
    """A tensor that does not lie as it is needed, over one axis, or over several that are moved at once."""

    value: int
    axes: tuple[str, ...]
    source: tuple[State, ...]
    """Over each of the axes."""
    target: tuple[State, ...]
    forward: str
    """The collectives, or what a rank does by itself; "" for nothing."""
    backward: str
    forward_bytes: float
    """What a rank receives, each time."""
    backward_bytes: float
    times: int
    """How often: in each of the equal layers."""
    taker: int | None
    """The node that needs it so; None where all that take it do."""

    @property
    def axis(self) -> str:
        """The axes for people: `tp`, `cp tp`."""
        return " ".join(self.axes)

    @property
    def nbytes(self) -> float:
        """All that a rank receives."""
        return (self.forward_bytes + self.backward_bytes) * self.times


def moved(found: Derived, *, at_once: bool = True) -> Iterator[Moved]:
    """Everything that ranks do so that tensors lie as they are needed, in the order of the model.

    `at_once` false: as it would be with one axis after the other, for who compares.
    """
    folded, way = found.folded, partial(between, found, at_once=at_once)
    for v in sorted({v for over in found.axes for v in over.lying}):
        yield from way(v, input_states(found, v), used(found, v), folded.times[v], None)
    for step in folded.steps:
        for place, v in enumerate(step.inputs):
            if v is not None:
                yield from way(v, used(found, v), needed(found, step, place), step.times, step.number)
        yield from _inside(found, step)
        for i, v in enumerate(step.outputs):
            yield from way(v, made(found, step, i), used(found, v), step.times, None)


def _inside(found: Derived, step: FoldedStep) -> Iterator[Moved]:
    """What parts tell each other within an operator."""
    ways = 1
    for over in found.axes:
        move = over.communication[step.number]
        one = passed(step, move.label, over.axis, over.k)
        if one is not None and one.nbytes:
            v, state = step.inputs[one.place], move.inputs[one.place]
            assert v is not None
            assert state is not None
            back = v in found.folded.differentiable
            there = one.nbytes / ways
            kind, more = one.kind if back else "", there if back else 0.0
            own = (over.axis,), (state,), (state,)
            yield Moved(v, *own, one.kind, kind, there, more, step.times, step.number)
        ways *= over.k if move.label is not None else 1


def between(
    found: Derived,
    v: int,
    source: Mapping[str, State],
    target: Mapping[str, State],
    times: int,
    taker: int | None,
    *,
    at_once: bool = True,
) -> Iterator[Moved]:
    """What is done between two ways to lie of a class, in how many equal layers, for which taker alone."""
    value, differentiable = found.folded.value(v), v in found.folded.differentiable
    standing = value.kind == "parameter"
    summed = summed_once(source, target, differentiable=differentiable) if standing else ()
    goals = states_to_change(source, target, differentiable=differentiable)
    rest = {axis: state for axis, state in goals.items() if axis not in summed}
    shape, itemsize = value.shape, value.dtype.itemsize
    moves = change(shape, itemsize, source, rest, found.mesh, differentiable=differentiable, at_once=at_once)
    sizes, nbytes = {over.axis: over.k for over in found.axes}, float(value.nbytes)
    each = [*costs(moves, nbytes, source, sizes, differentiable=differentiable)]
    for axis in summed:  # as it lies
        each += costs((Moves(axis, SAME, SEVERAL),), nbytes, source, sizes, differentiable=differentiable)
    for one in each:
        lies = tuple(source[axis] for axis in one.axes)
        goes = tuple(target.get(axis, state) for axis, state in zip(one.axes, lies, strict=True))
        yield Moved(v, one.axes, lies, goes, *one[1:], times, taker)
