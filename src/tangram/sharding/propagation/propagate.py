"""Propagation of one operator: from the layouts of its inputs to those that it needs and those of its results.

    propagate(table, call, layouts, mesh)

Each mesh axis makes one choice (`tangram.sharding.propagation.axis_choices`). A dim that the operator keeps as one
factor passes with whatever tree of cuts it has; a dim that it splits or merges passes where cuts fall on borders of its
factors. What does not fit is moved, and what that costs is said: nothing is replicated in silence.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from torch import Tensor

from tangram.errors import UserError
from tangram.layout import Layout, Mesh
from tangram.layout.syntax import VOID, Dim
from tangram.sharding.ops import factor_products
from tangram.sharding.ops.bind import BoundOp
from tangram.sharding.ops.calls import OpCall
from tangram.sharding.ops.cut_trees import Tree, axes_of, dim_of, pruned
from tangram.sharding.ops.rank_part import made_of
from tangram.sharding.ops.read_inputs import PlacedInput, read
from tangram.sharding.ops.rule_table import RuleTable
from tangram.sharding.ops.rule_table import bound as find_bound
from tangram.sharding.propagation import neighbour_needs, op_cost
from tangram.sharding.propagation.axis_choices import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    BROADCAST,
    HALO,
    REDUCE_SCATTER,
    SCAN,
    SCATTER,
    SLICE,
    ZERO,
    AxisChoice,
    AxisChoices,
    choose,
    received,
    step,
)

_ORDER = {SLICE: 0, SCATTER: 1, REDUCE_SCATTER: 2, ALL_TO_ALL: 3, ALL_REDUCE: 4, BROADCAST: 5, ALL_GATHER: 6, ZERO: 7}
"""What makes a tensor smaller comes first, what makes it larger last."""


class PropagationStep(NamedTuple):
    """One collective over one axis, or what a rank does by itself (`slice`, `zero`).

    `halo`: what windows read of other parts, after all else; `scan`: the totals of other parts, after the operator.
    """

    kind: str
    axis: str
    nbytes: float
    """What a rank receives, on average over the ranks."""


@dataclass(frozen=True)
class Relayout:
    """An input that does not lie as the operator needs it."""

    place: int
    source: Layout
    target: Layout
    steps: tuple[PropagationStep, ...]
    """How the cost is counted; `tangram.relayout` plans the copies themselves, and may do with fewer bytes."""

    @property
    def nbytes(self) -> float:
        """What a rank receives, on average."""
        return sum(one.nbytes for one in self.steps)


@dataclass(frozen=True)
class Propagation:
    """What one operator does with the layouts of its inputs."""

    call: OpCall
    bound: BoundOp
    mesh: Mesh
    input_layouts: tuple[Layout | None, ...]
    choices: Mapping[str, AxisChoice]
    """For each axis; one that no input names is not listed, and does nothing."""
    trees: Mapping[str, Tree]
    """The cuts of each factor that is cut."""
    inputs: tuple[Layout | None, ...]
    """The layouts that the operator needs; None for an absent tensor."""
    outputs: tuple[Layout, ...]
    relayouts: tuple[Relayout, ...]
    differentiable: bool = True
    totals: tuple[PropagationStep, ...] = ()
    """What parts tell each other of their results before these are right: of a scan over a cut dim."""

    @cached_property
    def moved(self) -> dict[tuple[str, str], float]:
        """Bytes that a rank receives, on average, by kind of collective and axis."""
        found: dict[tuple[str, str], float] = {}
        for kind, axis, nbytes in (*(one for relayout in self.relayouts for one in relayout.steps), *self.totals):
            if nbytes:
                found[kind, axis] = found.get((kind, axis), 0.0) + nbytes
        return found

    @property
    def nbytes(self) -> float:
        """All bytes that a rank receives, on average."""
        return sum(self.moved.values())

    @cached_property
    def flops(self) -> int:
        """Floating-point operations of the rank that has most to do: 2 an element of a contraction, else 1."""
        return op_cost.flops(self.call, self.bound, self.trees, self.mesh, op_cost.results(self.call))

    @cached_property
    def memory(self) -> int | None:
        """Bytes of the results on the rank that holds most; None where their shapes depend on values."""
        return op_cost.memory(self.outputs, op_cost.results(self.call), self.mesh)


def propagate(
    table: RuleTable,
    call: OpCall,
    layouts: Sequence[Layout | None],
    mesh: Mesh,
    *,
    differentiable: bool = True,
    settled: Set[int] = frozenset(),
) -> Propagation:
    """How one operator runs on a mesh when its inputs lie like this.

    `layouts`: one for each of `call.tensors`; None for an absent one, or for one that every rank has whole.
    `differentiable`: whether a gradient is wanted; a maximum or minimum then never stays pending. `settled`: the inputs
    on which no sum is to wait, since others read them too, and would each reduce it. Raises NoRuleError for an operator
    without a rule, LayoutError for a layout that does not fit its tensor or the mesh, UserError where an operator that
    writes an input in place would need that input otherwise.
    """
    bound = find_bound(table, call)
    tensors = call.tensors
    if len(layouts) != len(tensors):
        raise UserError(f"{call.name} has {len(tensors)} tensors here, but {len(layouts)} layouts are given")
    ones = _ones(mesh)
    inputs = _read(call, layouts, bound, mesh, ones)
    chosen = choose(call, bound, inputs, mesh, ones, differentiable=differentiable, settled=settled)
    shown: dict[str, Dim] = {}
    kept = [_kept(held, chosen.trees, shown) for held in inputs]
    needed: list[Layout | None] = [None] * len(tensors)
    relayouts: list[Relayout] = []
    halos = neighbour_needs.halos(call, bound, chosen.trees, mesh) if bound.windows else {}
    for held, stays in zip(inputs, kept, strict=True):
        needed[held.place], steps = _needed(held, stays, chosen, bound, shown, mesh, ones)
        steps = (*steps, *(PropagationStep(HALO, axis, n) for axis, n in halos.get(held.place, ()) if n))
        if steps:
            target = needed[held.place]
            assert target is not None
            relayouts.append(Relayout(held.place, held.layout, target, steps))
    return Propagation(
        call,
        bound,
        mesh,
        tuple(layouts),
        chosen.choices,
        chosen.trees,
        tuple(needed),
        _outputs(call, bound, chosen, shown, mesh, ones),
        tuple(relayouts),
        differentiable,
        tuple([PropagationStep(SCAN, *one) for one in neighbour_needs.scans(call, bound, chosen.trees, mesh)])
        if bound.scans
        else (),
    )


def options(found: Propagation) -> Mapping[str, Sequence[AxisChoice]]:
    """For each axis everything that it could have done, with its price or why it was refused."""
    mesh = found.mesh
    ones = _ones(mesh)
    inputs = _read(found.call, found.input_layouts, found.bound, mesh, ones)
    return choose(found.call, found.bound, inputs, mesh, ones, differentiable=found.differentiable, every=True).options


def _ones(mesh: Mesh) -> list[str]:
    return [axis for axis, (n, _) in mesh.axes.items() if n == 1]


def _read(
    call: OpCall, layouts: Sequence[Layout | None], bound: BoundOp, mesh: Mesh, ones: Collection[str]
) -> list[PlacedInput]:
    pairs = enumerate(zip(call.tensors, layouts, strict=True))
    return [read(i, tensor, layout, bound, mesh, ones) for i, (tensor, layout) in pairs if tensor is not None]


def _kept(held: PlacedInput, trees: Mapping[str, Tree], shown: dict[str, Dim]) -> list[bool]:
    """Which dims of an input can stay as they are. `shown`: for a factor, a dim that has its cuts, with its names."""
    found: list[bool] = []
    own = held.trees
    whole = own or trees
    for dim, factors in zip(held.layout.dims, held.dims, strict=True):
        if not factors:
            found.append(not dim.axes if dim.terms else not dim.cuts)
        elif len(factors) == 1:
            f = factors[0]
            stays = not whole or own.get(f, ()) == trees.get(f, ())
            if stays:
                shown.setdefault(f, dim)
            found.append(stays)
        else:
            stays = all(own.get(f, ()) == trees.get(f, ()) for f in factors)
            axes = {axis for f in factors for axis in axes_of(own.get(f, ()))}
            found.append(stays and {a for a in dim.axes if a in held.where} <= axes)
    return found


def _needed(
    held: PlacedInput,
    stays: Sequence[bool],
    chosen: AxisChoices,
    bound: BoundOp,
    shown: dict[str, Dim],
    mesh: Mesh,
    ones: Collection[str],
) -> tuple[Layout, tuple[PropagationStep, ...]]:
    """The layout that the operator needs of an input, and the way there."""
    same, plain = all(stays), not (held.layout.flat or held.layout.pending or held.layout.at)
    if same and plain and not chosen.waits:
        return held.layout, ()
    steps: list[tuple[str, str]] = []
    for axis, choice in chosen.choices.items():
        final = choice
        if choice.kind == "cut" and chosen.trees[choice.factor] != choice.tree:
            final = choice._replace(tree=chosen.trees[choice.factor])  # more axes cut the factor by now
        what = step(held, final, mesh)
        if what:
            steps.append((what, axis))
    layout = held.layout
    if not steps and same and not layout.flat:
        return layout, ()
    dims: list[Dim] = []
    for dim, factors, unchanged in zip(layout.dims, held.dims, stays, strict=True):
        if not unchanged and len(factors) < 2 and not dim.terms:
            tree = chosen.trees.get(factors[0], ()) if factors else ()
            if isinstance(tree, tuple) and (not factors or factors[0] not in shown):
                dim, unchanged = replace(dim, cuts=tree), True  # with its name
                shown.update((f, dim) for f in factors)
        dims.append(dim if unchanged else _made(factors, dim.n, bound, chosen.trees, shown, mesh))
    moved = {axis for _, axis in steps}.union(ones)
    pending = [(op, axis) for op, axis in layout.pending if axis not in moved]
    at = tuple((axis, coords) for axis, coords in layout.at if axis not in moved)
    for choice in chosen.choices.values():
        if choice.kind == "waits" and held.place in choice.inputs and choice.axis not in {a for _, a in pending}:
            pending.append((choice.op, choice.axis))
    target = Layout(_clean(dims, ones), (), tuple(pending), at)
    return target, _priced(held, steps, mesh)


def _priced(held: PlacedInput, steps: Sequence[tuple[str, str]], mesh: Mesh) -> tuple[PropagationStep, ...]:
    nbytes = held.nbytes
    found: list[PropagationStep] = []
    for what, axis in sorted(steps, key=lambda one: _ORDER[one[0]]):
        k = mesh.axes[axis][0]
        found.append(PropagationStep(what, axis, received(what, nbytes, k)))
        if what in (SLICE, SCATTER, REDUCE_SCATTER):
            nbytes /= k
        elif what == ALL_GATHER:
            nbytes *= k
    return tuple(found)


def _made(
    factors: Sequence[str],
    n: int | None,
    bound: BoundOp,
    trees: Mapping[str, Tree],
    shown: Mapping[str, Dim],
    mesh: Mesh,
) -> Dim:
    """A dim of these factors, cut as they are."""
    if len(factors) == 1:
        f = factors[0]
        own = shown.get(f)
        if n is not None and f not in trees:  # whole, and perhaps of another size in each tensor
            return own if own is not None and own.n == n else Dim(VOID, n)
        if f in bound.windows:  # cut in the same way, and of another size in each tensor
            own = own if own is not None and own.n == (n or bound.sizes[f]) else None
            tree = trees.get(f, ()) if n else made_of(bound, f, trees.get(f, ()))
            return dim_of(tree, n or bound.sizes[f]) if own is None else own
        return own if own is not None else dim_of(trees.get(f, ()), bound.sizes[f])
    if not factors:
        return Dim(VOID, n)
    known = shown if not bound.windows else {f: dim for f, dim in shown.items() if f not in bound.windows}
    parts = tuple(
        known[f] if f in known else dim_of(made_of(bound, f, trees.get(f, ())), bound.sizes[f]) for f in factors
    )
    dim = Dim(terms=(parts,))
    if not any(f in trees for f in factors):
        return Dim(VOID, dim.n)
    plain = factor_products.flat(pruned(dim, dim.axes), mesh)
    return dim if plain is None else Dim(VOID, dim.n, cuts=plain)


def _outputs(
    call: OpCall, bound: BoundOp, chosen: AxisChoices, shown: Mapping[str, Dim], mesh: Mesh, ones: Collection[str]
) -> tuple[Layout, ...]:
    found: list[Layout] = []
    choices = chosen.choices.values()
    at = tuple([(one.axis, one.coords) for one in choices if one.kind == "at"])
    for i, out in enumerate(bound.outputs):
        dims: list[Dim] = []
        names: dict[str, int] = {}
        for at_dim, factors in enumerate(out):
            if factors and not bound.uncut.issuperset(factors):
                dim = _made(factors, None, bound, chosen.trees, shown, mesh)
            else:  # what nobody may cut can have another size in the result, as the dim of `cat`
                n = _size(call, i, at_dim)
                own = shown.get(factors[0]) if len(factors) == 1 else None
                dim = Dim(VOID, n) if own is None or own.n != n else own
            named = dim.leaves if dim.terms else (dim,) if dim.name != VOID else ()
            if named and any(names.setdefault(x.name, x.n) != x.n for x in named if x.name not in ("", VOID)):
                dim = pruned(dim, dim.axes)  # one name may not have two sizes
            dims.append(dim)
        pending: list[tuple[str, str]] = []
        for one in choices:
            if one.kind == "waits":
                pending.append((one.op, one.axis))
            elif one.kind == "cut":
                after = bound.pending[one.factor][i]
                if after:
                    pending.append((after, one.axis))
        found.append(Layout(_clean(dims, ones), (), tuple(pending), at))
    return tuple(found)


def _size(call: OpCall, output: int, dim: int) -> int | None:
    """The size of a dim of a result that the rule says nothing of."""
    made = op_cost.results(call)
    one = made[output] if made is not None and output < len(made) else None
    return one.shape[dim] if isinstance(one, Tensor) and dim < one.ndim else None


def _clean(dims: Sequence[Dim], ones: Collection[str]) -> tuple[Dim, ...]:
    """The dims of a layout; an axis of one rank, which may stand anywhere, stands once."""
    if not ones:
        return tuple(dims)
    found: list[Dim] = []
    seen: set[str] = set()
    for dim in dims:
        found.append(_without(dim, seen) if seen & dim.axes else dim)
        seen |= dim.axes & {*ones}
    return tuple(found)


def _without(dim: Dim, axes: Collection[str]) -> Dim:
    return replace(
        dim,
        cuts=tuple(c for c in dim.cuts if c.axis not in axes),
        terms=tuple(tuple(_without(x, axes) for x in term) for term in dim.terms),
    )
