"""What each mesh axis does in one operator: one choice an axis, the one that moves the fewest bytes.

    cut      the axis cuts a factor, in every tensor that has it
    waits    a pending sum passes through, because the operator is linear in what it is pending on
    at       the operator runs where its inputs are held (`@pp=1`)
    whole    nothing: every rank of the axis does the same

Axes are taken one after the other, those that cut first before those that cut what is left: time in axes times
factors, never in the product over axes. The trade-off: an axis does not know what the next one will cost.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence, Set
from functools import lru_cache
from typing import Literal, NamedTuple

from torch._ops import OpOverload

from tangram.errors import UserError
from tangram.layout import Mesh
from tangram.sharding.ops.bind import BoundOp
from tangram.sharding.ops.calls import OpCall, is_written, schema_of
from tangram.sharding.ops.cut_trees import Tree, axes_of, context, with_axis
from tangram.sharding.ops.rank_part import LISTED, in_chunks
from tangram.sharding.ops.read_inputs import PlacedInput
from tangram.sharding.propagation.neighbour_needs import price, refusal

Kind = Literal["cut", "waits", "at", "whole"]
_RANKS: Mapping[str, int] = {"cut": 0, "at": 0, "waits": 1, "whole": 3}
WAITING = ("sum", "avg")
"""Pending reductions that a linear operator may pass on."""
ALL_TO_ALL, ALL_GATHER, ALL_REDUCE = "all-to-all", "all-gather", "all-reduce"
REDUCE_SCATTER, BROADCAST, SCATTER, SLICE, ZERO = "reduce-scatter", "broadcast", "scatter", "slice", "zero"
HALO, SCAN = "halo", "scan"


class AxisChoice(NamedTuple):
    """What one axis does, or could do."""

    axis: str
    kind: Kind
    factor: str = ""
    tree: Tree = ()
    """Of a cut: the cuts of the factor with this axis, as far as axes are chosen."""
    op: str = ""
    """Of what waits: `sum` or `avg`."""
    inputs: tuple[int, ...] = ()
    """Of what waits: the inputs that it is pending on."""
    coords: tuple[int, ...] = ()
    """Of `at`: which ranks of the axis."""
    nbytes: float = 0.0
    """What a rank receives over this axis so that the inputs fit, by the inputs' own layouts; and what parts need of
    each other."""
    refused: str = ""
    """Why it cannot be chosen."""
    due: float = 0.0
    """What a rank will receive at least so that what this leaves pending is reduced."""

    def __str__(self) -> str:
        if self.kind == "cut":
            return f"cut {self.factor}"
        if self.kind == "waits":
            return f"{self.op} waits on input{'s' * (len(self.inputs) > 1)} {' '.join(map(str, self.inputs))}"
        return "at " + ",".join(map(str, self.coords)) if self.kind == "at" else "whole"


def written(call: OpCall) -> frozenset[int]:
    """The inputs that an operator writes: their layouts cannot be changed for it."""
    names = _written(call.operator)
    return frozenset([i for i, (name, _) in enumerate(call.places) if name in names]) if names else frozenset()


@lru_cache(1 << 12)
def _written(operator: OpOverload) -> frozenset[str]:
    return frozenset(a.name for a in schema_of(operator).arguments if not a.is_out and is_written(a))


def step(held: PlacedInput, choice: AxisChoice, mesh: Mesh) -> str:
    """What has to be done to an input over an axis so that it fits a choice; nothing where it does."""
    state = held.where.get(choice.axis)
    if choice.kind == "cut" and choice.factor in held.factors:
        if state is None:
            return SLICE
        if state.kind == "cut":
            if state.factor != choice.factor:
                return ALL_TO_ALL
            own, tree = held.trees[choice.factor], choice.tree
            if isinstance(own, tuple) and isinstance(tree, tuple):
                end = state.depth + 1  # as `context`, only faster
                return "" if own[:end] == tree[:end] else ALL_TO_ALL
            return "" if context(own, choice.axis) == context(tree, choice.axis) else ALL_TO_ALL
        return REDUCE_SCATTER if state.kind == "pending" else SCATTER if state.kind == "at" else ALL_TO_ALL
    if choice.kind == "waits" and held.place in choice.inputs:
        if state is None:
            return ZERO if choice.op == "sum" else ""
        if state.kind == "pending" and state.op == choice.op:
            return ""
    if state is None or (choice.kind == "at" and state.kind == "at" and {*choice.coords} <= {*state.coords}):
        return ""
    return ALL_REDUCE if state.kind == "pending" else BROADCAST if state.kind == "at" else ALL_GATHER


def received(what: str, nbytes: float, k: int) -> float:
    """What a rank receives in one step over an axis of `k` ranks, of which each has `nbytes`: an average."""
    if what in ("", SLICE, ZERO):
        return 0.0
    if what == ALL_GATHER:
        return nbytes * (k - 1)
    share = {ALL_REDUCE: 2 * (k - 1), BROADCAST: k, SCATTER: 1}.get(what, k - 1)
    return nbytes * share / k


class AxisChoices(NamedTuple):
    """One choice an axis, in the order in which they were made."""

    choices: Mapping[str, AxisChoice]
    trees: Mapping[str, Tree]
    """The cuts of each factor."""
    waits: bool
    """Whether something waits."""
    options: Mapping[str, Sequence[AxisChoice]]
    """What else there was, where it was asked for."""


def choose(
    call: OpCall,
    bound: BoundOp,
    inputs: Sequence[PlacedInput],
    mesh: Mesh,
    ones: Collection[str],
    *,
    differentiable: bool,
    every: bool = False,
    settled: Set[int] = frozenset(),
) -> AxisChoices:
    """One choice for each axis that an input names. `every`: look at every option, and list them. `settled`: the
    inputs on which no sum is to wait."""
    depth: dict[str, int] = {}
    for held in inputs:
        for axis, state in held.where.items():
            if depth.get(axis, -1) < state.depth:
                depth[axis] = state.depth
    if len(depth) > 1:
        place = {axis: i for i, axis in enumerate(mesh.axes)}
        order = sorted(depth, key=lambda axis: (depth[axis], place[axis]))
    else:
        order = list(depth)
    work = _Work(call, bound, inputs, mesh, differentiable, every)
    if settled:
        work.waiting = [places for places in work.waiting if not settled & {*places}]
    for axis in order:
        if axis not in ones:
            work.decide(axis)
    return AxisChoices(work.choices, work.trees, work.waits, work.options)


class _Work:
    """The axes that are decided, and what is needed to decide the next."""

    def __init__(
        self, call: OpCall, bound: BoundOp, inputs: Sequence[PlacedInput], mesh: Mesh, differentiable: bool, every: bool
    ) -> None:
        self.call, self.bound, self.inputs, self.mesh = call, bound, inputs, mesh
        self.differentiable, self.every = differentiable, every
        self.waiting = bound.waiting(call)
        self.written = written(call)
        self.trees: dict[str, Tree] = {}
        self.choices: dict[str, AxisChoice] = {}
        self.options: dict[str, Sequence[AxisChoice]] = {}
        self.waits = False
        self._refused: dict[str, str] = {}

    def decide(self, axis: str) -> None:
        """Choose for one axis. Raises UserError where what the operator writes would have to move."""
        best = self._agreed(axis)
        if best is None:
            best = self._best(axis)
        self.choices[axis] = best
        if best.kind == "cut":
            self.trees[best.factor] = best.tree
        self.waits = self.waits or best.kind == "waits"

    def _agreed(self, axis: str) -> AxisChoice | None:
        """What `_best` finds where all inputs agree, which is the usual case: only faster."""
        if self.written or self.every or len(self.mesh.views) > 1:
            return None
        factor, cuts = "", ()
        for held in self.inputs:
            state = held.where.get(axis)
            if state is None:
                continue
            own = held.trees.get(state.factor)
            if state.kind != "cut" or not isinstance(own, tuple):
                return None
            end = state.depth + 1
            own = own if len(own) == end else own[:end]
            if not factor:
                factor, cuts = state.factor, own
            elif state.factor != factor or own != cuts:
                return None
        if (
            factor in self.bound.linked
            or self._refusal(factor)
            or any(self.bound.pending[factor])
            or self.trees.get(factor, ()) != cuts[:-1]
        ):
            return None
        return AxisChoice(axis, "cut", factor, cuts)

    def _best(self, axis: str) -> AxisChoice:
        k = self.mesh.axes[axis][0]
        options: list[AxisChoice] = []
        best: AxisChoice | None = None
        rank = 0
        for option in self._options(axis):  # ties: what stays cut, before what waits, before a new pending sum
            one = self._priced(option, k)
            own = _RANKS[one.kind]
            if one.kind == "cut" and any(self.bound.pending[one.factor]):
                own = 2
            if not one.refused and (best is None or (one.nbytes + one.due, own) < (best.nbytes + best.due, rank)):
                best, rank = one, own
            if self.every:
                options.append(one)
            elif best is not None and not (best.nbytes or rank):
                break  # nothing can be better
        if best is None:
            held = next(h for h in self.inputs if h.place in self.written)
            raise UserError(
                f"{self.bound.rule.operators[0]} writes its input {held.place}, which lies as {held.layout}: as it is "
                f"cut over {axis} the result cannot be; give that input another layout first"
            )
        self.options[axis] = options
        return best

    def _options(self, axis: str) -> Iterator[AxisChoice]:
        for one in self._distinct(axis):
            yield self._independent(one) if len(self.mesh.views) > 1 else one
        yield AxisChoice(axis, "whole")

    def _distinct(self, axis: str) -> Iterator[AxisChoice]:
        found: list[AxisChoice] = []
        for held in self.inputs:
            state = held.where.get(axis)
            if state is None or state.kind == "lost":
                continue
            options: list[AxisChoice] = []
            if state.kind == "cut":
                tree = held.trees[state.factor]
                options.append(self._cut(axis, state.factor, tree, state.depth))
                if state.factor in self.bound.linked and (chunks := in_chunks(tree)) != tree:
                    options.append(self._cut(axis, state.factor, chunks, state.depth))
            elif state.kind == "at":
                options.append(AxisChoice(axis, "at", coords=state.coords))
            elif state.op in WAITING:
                options += [
                    AxisChoice(axis, "waits", op=state.op, inputs=places)
                    for places in self.waiting
                    if held.place in places
                ]
            for one in options:
                if one not in found:
                    found.append(one)
                    yield one

    def _cut(self, axis: str, factor: str, source: Tree, depth: int) -> AxisChoice:
        refused = self._refusal(factor)
        before = self.trees.get(factor, ())
        tree = with_axis(before, source, axis, depth)
        if tree is None:
            return AxisChoice(axis, "cut", factor, source, refused="other axes cut the factor otherwise already")
        if before and not refused and tree is not source:
            own, new = context(source, axis), context(tree, axis)
            if own != new and _counts(own, axis):
                refused = "its sizes count what the axes before it leave"
        if factor in self.bound.linked and not refused:
            refused = refusal(self.bound, factor, tree)
        return AxisChoice(axis, "cut", factor, tree, refused=refused)

    def _refusal(self, factor: str) -> str:
        """Why no axis may cut a factor; nothing where one may."""
        refused = self._refused.get(factor)
        if refused is None:
            refused = self._refused[factor] = self._why(factor)
        return refused

    def _why(self, factor: str) -> str:
        bound = self.bound
        if factor in bound.uncut:
            return "the operator needs it whole"
        if bound.sizes[factor] < 2:
            return f"{bound.sizes[factor]} of it cannot be shared"
        if self.differentiable:
            for op in bound.pending[factor]:
                if op in ("max", "min"):
                    return f"it would leave a {op} pending, which has no gradient"
        return ""

    def _independent(self, option: AxisChoice) -> AxisChoice:
        """Axes of other views that share ranks may stand together only where an input has them so."""
        if option.kind == "whole" or option.refused:
            return option
        for axis, other in self.choices.items():
            if other.kind == "whole" or self.mesh.independent(axis, option.axis):
                continue
            together = other.kind == option.kind == "cut" and other.factor == option.factor
            if not (together and not isinstance(option.tree, tuple)):
                return option._replace(refused=f"{axis} shares ranks with it")
        return option

    def _priced(self, option: AxisChoice, k: int) -> AxisChoice:
        if option.refused:
            return option
        nbytes = 0.0
        for held in self.inputs:
            what = step(held, option, self.mesh)
            if held.place in self.written:
                state = held.where.get(option.axis)
                other = state is not None and state.kind == "at" and state.coords != option.coords
                if what or other or (state is None) != (option.kind == "whole"):
                    return option._replace(refused=f"the operator writes input {held.place}, which lies otherwise")
            if what:
                nbytes += received(what, held.nbytes, k)
        if option.kind == "cut" and option.factor in self.bound.linked:
            nbytes += price(self.call, self.bound, self.inputs, option.axis, option.factor, option.tree, self.mesh)
        due = self._due(option, k)
        return option._replace(nbytes=nbytes, due=due) if nbytes or due else option

    def _due(self, option: AxisChoice, k: int) -> float:
        """What it will take to reduce what an option leaves pending: a sum that is new may be scattered, one that waits
        would have been reduced everywhere. What lies so already, in every input that has the factor, stays: moving it
        is never the operator's own choice. Of dims without a factor nothing is known: they count as one element."""
        if option.kind == "waits":
            left, what = range(len(self.bound.outputs)), ALL_REDUCE
        elif option.kind == "cut" and any(after := self.bound.pending[option.factor]):
            if not any(step(held, option, self.mesh) for held in self.inputs if option.factor in held.factors):
                return 0.0
            left, what = [i for i, op in enumerate(after) if op], REDUCE_SCATTER
        else:
            return 0.0
        total = 0.0
        there = [t for t in self.call.tensors if t is not None]
        numbers = [t for t in there if t.is_floating_point() or t.is_complex()]  # beside indices, as a rule
        itemsize = max((t.element_size() for t in numbers or there), default=0)
        for i in left:
            n = float(itemsize)
            for factors in self.bound.outputs[i]:
                for f in factors:
                    n *= self.bound.sizes[f]
                    for axis in axes_of(self.trees.get(f, ())):
                        n /= self.mesh.axes[axis][0]
            total += received(what, n, k)
        return total


def _counts(tree: Tree, axis: str) -> bool:
    """Whether the cut of an axis lists sizes."""
    cuts = tree if isinstance(tree, tuple) else [cut for node in tree.nodes for cut in node.cuts]
    return any(cut.axis == axis and cut.map in LISTED and cut.args for cut in cuts)
