"""Choice: the sharding of a whole model that takes the least time on a cluster within its memory, without marks.

    found = choose(graph, Mesh.parse("dp=8 tp=8"), cluster.builtin("h100-8x8"), memory_limit=80e9)
    found.plan, found.price.seconds, found.gap

The plan is a `Derived` like one that follows from marks: what shows, proves and runs those does so with this. It is
chosen over all axes at once. The trade-off: tables grow with the ways to lie over all axes together, so two axes are
solved exactly at full size, and of three a good plan is found with a bound.

Where not all pairs of ways to lie fit into memory, it begins with choices that are known, and makes each better over
two axes while it stays as it is over the others (`by_pairs`). Where nothing fits into the memory yet, bytes are made
fewer first. What no choice can cost less is the work of all operators, cut as far as each can be by itself: a weak
bound.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import cast

import numpy as np
from numpy.typing import NDArray

from tangram.errors import UserError
from tangram.hardware.catalogue.cluster import Cluster
from tangram.layout import Layout, Mesh
from tangram.models.capturing.graph import Graph
from tangram.sharding.choose.costs import Both, Training, costs, work
from tangram.sharding.choose.options import Options, of_derived, options
from tangram.sharding.choose.search import Choice, SearchPoint, search
from tangram.sharding.derive.derive import Derived
from tangram.sharding.derive.layouts import input_states, layout_of, used
from tangram.sharding.derive.marking.marks import Mark
from tangram.sharding.derive.problem.folding import fold
from tangram.sharding.derive.problem.states import SAME
from tangram.sharding.derive.solve.solve import Name
from tangram.sharding.ops.rule_table import RuleTable

LARGEST = 50_000_000
"""Entries of all tables together; above it a choice over more than two axes is made over two at a time."""


@dataclass(frozen=True)
class Price:
    """What a plan costs a rank, by the model of a cluster."""

    work: float
    """Seconds of operators in a micro-batch, forward and backward."""
    moving: float
    """Seconds of collectives, one after the other; the sums of gradients are shared by the micro-batches of a step."""
    states: float
    """Bytes of parameters, gradients and optimiser states."""
    saved: float
    """Bytes that the backward needs of the forward."""

    @property
    def seconds(self) -> float:
        """All of them."""
        return self.work + self.moving

    @property
    def nbytes(self) -> float:
        """All of them."""
        return self.states + self.saved


@dataclass(frozen=True)
class ChosenMarks:
    """The plan that was chosen."""

    plan: Derived
    price: Price
    bound: float
    """Seconds that no plan over this mesh can beat that fits."""

    @property
    def gap(self) -> float:
        """How much longer the plan takes than the bound, as a part of it: 0 where it is proved to be the best."""
        return max(self.price.seconds / self.bound - 1, 0.0) if self.bound > 0 else 0.0


def choose(
    graph: Graph,
    mesh: Mesh,
    cluster: Cluster,
    *,
    memory_limit: float | None = None,
    marks: Sequence[Mark] = (),
    seconds: float | None = None,
    training: Training | None = None,
    gap: float = 1e-4,
    known: Sequence[Derived] = (),
    table: RuleTable | None = None,
) -> ChosenMarks:
    """The plan of the least seconds of all that keep `memory_limit` bytes on a rank (None: as many as they like).

    `marks` bind the axes that they name, as in a derivation; over all others everything is free. It ends when the plan
    is proved to be within `gap` of the best, or after `seconds` of the clock with the best that is found. `known` are
    plans of the same graph, as that of the marks that come with a model: it is never worse than one of them that fits.

    Raises UserError where nothing fits into the memory, the mesh is larger than the cluster, marks contradict each
    other or name nothing, or an operator has no rule.
    """
    start = time.monotonic()
    refuse_larger(mesh, cluster)
    if memory_limit is not None and memory_limit <= 0:
        raise UserError(f"a memory limit of {memory_limit:g} bytes leaves room for nothing: give one above 0")
    some = options(fold(graph, table), mesh, marks)
    left = float("inf") if seconds is None else seconds - (time.monotonic() - start)
    starts = [own for plan in known if (own := some.choice(plan)) is not None]
    if len(some.axes) > 2:  # too many ways together for the first look to find a good one
        starts.append(_all_replicated(some))
    if len(some.axes) > 2 and entries(some) > LARGEST:
        stop = time.monotonic() + left
        pairs = by_pairs(some, cluster, training or Training(), memory_limit, starts, stop, LARGEST)
        if pairs.best is None or pairs.both is None:
            raise UserError(_unfit(mesh, memory_limit, pairs.smallest, proved=False))
        return ChosenMarks(some.derived(pairs.best.choice, marks), _price(pairs.both, pairs.own), pairs.bound)
    both = costs(some, cluster, training or Training())
    found = search(both, memory_limit, left, lambda choice: _nearby(some, choice), gap, starts)
    if found.best is None:
        raise UserError(_unfit(mesh, memory_limit, found.smallest, proved=not np.isfinite(found.bound)))
    plan = some.derived(found.best.choice, marks)
    return ChosenMarks(plan, _price(both, found.best.choice), found.bound)


def priced(plan: Derived, cluster: Cluster, training: Training | None = None) -> Price:
    """What a plan costs by the same model. Over axes that it does not cut, all ranks do the same."""
    both = costs(of_derived(plan), cluster, training or Training())
    return _price(both, dict.fromkeys(both.seconds.sizes, 0))


def _price(both: Both, choice: Mapping[Name, int]) -> Price:
    parts = [0.0, 0.0, 0.0, 0.0]
    for place, costs_, first in ((0, both.seconds, "move"), (2, both.nbytes, "lies")):
        for names, table in costs_.tables.items():
            own = len(names) == 1 and cast("tuple[str, int]", names[0])[0] == first
            parts[place if own else place + 1] += float(table[tuple(choice[name] for name in names)])
    return Price(*parts)


def kept(plan: Derived) -> dict[str, Layout]:
    """By name, how the parameters are kept that are gathered before they are used; of equal layers the first."""
    found: dict[str, Layout] = {}
    for v, value in plan.folded.graph.of_kind("parameter"):
        own = input_states(plan, v) if plan.folded.classes[v] == v else {}
        if own and any(state.kind == "cut" != used(plan, v)[axis].kind for axis, state in own.items()):
            found[value.name] = layout_of(value.shape, own)
    return found


def refuse_larger(mesh: Mesh, cluster: Cluster) -> None:
    """Raises UserError for a mesh that has more ranks than the cluster."""
    if mesh.size > cluster.ranks:
        raise UserError(
            f"the mesh `{mesh}` has {mesh.size} ranks and the cluster {cluster.name} {cluster.ranks}: "
            "take a smaller mesh"
        )


def _unfit(mesh: Mesh, limit: float | None, smallest: float, *, proved: bool) -> str:
    if limit is None:
        return f"no layouts over `{mesh}` fit the marks: they contradict each other"
    if not np.isfinite(smallest):
        return f"no layouts over `{mesh}` were found in time: give more seconds"
    more = smallest - limit
    if not proved:
        return (
            f"no layouts over `{mesh}` that fit into {limit / 1e9:.3g} GB a rank were found: the least that was takes "
            f"{smallest / 1e9:.3g} GB, {more / 1e9:.3g} GB more: take more ranks, a smaller batch or more seconds"
        )
    return (
        f"the model does not fit over `{mesh}` into {limit / 1e9:.3g} GB a rank: the least it takes is "
        f"{smallest / 1e9:.3g} GB, {more / 1e9:.3g} GB more: take more ranks or a smaller batch"
    )


def _all_replicated(some: Options) -> dict[Name, int]:
    """Every tensor whole on every rank, as far as it can be."""

    def place(own: Sequence[Sequence[object]]) -> int:
        return max(range(len(own)), key=lambda i: sum(one == SAME for one in own[i]))

    found: dict[Name, int] = {("lies", v): place(own) for v, own in some.states.items()}
    found.update({("used", v): place(own) for v, own in some.used.items()})
    found.update({("move", n): 0 for n in some.communication})
    return found


def _nearby(some: Options, choice: Choice) -> Iterable[dict[Name, NDArray[np.intp]]]:
    """Choices that are as one is over all axes but two (of two axes: but one)."""
    count = len(some.axes)
    fixed = [(i,) for i in range(count)] if count < 3 else [
        tuple(i for i in range(count) if i not in (a, b)) for a in range(count) for b in range(a + 1, count)
    ]  # fmt: skip
    return (dict(alike(some, choice, places)) for places in fixed)


Kept = Mapping[Name, NDArray[np.intp]]


@dataclass(frozen=True)
class Paired:
    """What was found."""

    best: SearchPoint | None
    """Choices of all options; None: nothing fits."""
    both: Both | None
    """The costs around it, in which it is `own`."""
    own: Choice
    bound: float
    smallest: float


def entries(some: Options) -> int:
    """Of all tables of what pairs of choices cost."""
    return sum(
        len(some.used[v]) * len(some.communication[step.number])
        for step in some.folded.steps
        for v in (*step.inputs, *step.outputs)
        if v is not None
    )


def alike(some: Options, choice: Choice, axes: Sequence[int]) -> Kept:
    """The choices that are as one is over some axes (by place)."""

    def places(own: Sequence[Sequence[object]], chosen: int) -> NDArray[np.intp]:
        wanted = [own[chosen][i] for i in axes]
        return np.array([n for n, one in enumerate(own) if [one[i] for i in axes] == wanted])

    kinds = (("lies", some.states), ("used", some.used), ("move", some.communication))
    return {(kind, n): places(own, choice[kind, n]) for kind, table in kinds for n, own in table.items()}


def by_pairs(
    some: Options,
    cluster: Cluster,
    training: Training,
    limit: float | None,
    starts: Sequence[Choice],
    stop: float,
    largest: int,
) -> Paired:
    """The best that is found by the clock's `stop`, one round of each start at least. `largest`: entries of tables."""
    found = Paired(None, None, {}, work(some, cluster), math.inf)
    for start in starts:
        now, better, rounds = start, True, 0
        while better:
            better, rounds = False, rounds + 1
            for free in _free(some, now, largest):
                if time.monotonic() > stop and (_fits(found, limit) or rounds > 1):
                    return found if _fits(found, limit) else replace(found, best=None)
                kept = alike(some, now, [i for i in range(len(some.axes)) if i not in free])
                seen = _around(some, cluster, training, limit, now, kept, stop)
                if seen.best is not None and _before(seen, found, limit):
                    found, better = replace(seen, bound=found.bound, smallest=min(seen.smallest, found.smallest)), True
                if seen.best is not None:
                    now = seen.best.choice
    return found if _fits(found, limit) else replace(found, best=None)


def _fits(found: Paired, limit: float | None) -> bool:
    return found.best is not None and (limit is None or found.best.nbytes <= limit)


def _free(some: Options, choice: Choice, largest: int) -> list[tuple[int, ...]]:
    """Two axes (by place) at a time, or one where two are too many."""
    count = len(some.axes)
    found: list[tuple[int, ...]] = []
    for two in itertools.combinations(range(count), 2):
        kept = alike(some, choice, [i for i in range(count) if i not in two])
        found += [two] if entries(restricted(some, kept)) <= largest else [(axis,) for axis in two]
    return list(dict.fromkeys(found))


def restricted(some: Options, kept: Kept) -> Options:
    """The options that are left."""
    return replace(
        some,
        states={v: [own[i] for i in kept["lies", v]] for v, own in some.states.items()},
        used={v: [own[i] for i in kept["used", v]] for v, own in some.used.items()},
        communication={n: [own[i] for i in kept["move", n]] for n, own in some.communication.items()},
    )


def _around(
    some: Options,
    cluster: Cluster,
    training: Training,
    limit: float | None,
    now: Choice,
    kept: Kept,
    stop: float,
) -> Paired:
    """The best of the choices around one; where none fits, that of the fewest bytes."""
    both = costs(restricted(some, kept), cluster, training)
    start = {name: int(np.flatnonzero(own == now[name])[0]) for name, own in kept.items()}
    left = max(stop - time.monotonic(), 0.0) / 3
    seen = search(both, limit, left, None, 1e-4, [start])
    if seen.best is None and np.isfinite(seen.smallest):
        seen = search(both, seen.smallest * (1 + 1e-9), left, None, 1e-4, [start])
    if seen.best is None:
        return Paired(None, None, {}, 0.0, seen.smallest)
    choice = {name: int(kept[name][i]) for name, i in seen.best.choice.items()}
    return Paired(replace(seen.best, choice=choice), both, seen.best.choice, 0.0, seen.smallest)


def _before(one: Paired, other: Paired, limit: float | None) -> bool:
    """Whether one is clearly better: what fits first, then seconds, of what does not fit bytes."""
    if one.best is None or other.best is None:
        return other.best is None
    most = math.inf if limit is None else limit
    if max(one.best.nbytes, other.best.nbytes) <= most:
        return one.best.seconds < other.best.seconds * (1 - 1e-6)
    return one.best.nbytes < other.best.nbytes * (1 - 1e-6)
