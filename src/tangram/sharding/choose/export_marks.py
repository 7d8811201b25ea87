"""A chosen plan as marks, from which a derivation gives it again: whatever runs marks can so run a choice.

    found = choose(graph, mesh, cluster, memory_limit=80e9)
    marked = as_marks(found.plan, cluster, memory_limit=80e9)
    marked.marks, marked.plan

A choice is made over all axes at once and by a cluster's rates; a derivation takes axis by axis and knows marks alone.
So what is written down is tried: the marks of all parameters and of what all modules give, then of operators where it
follows otherwise, and then as few of all as give the same. `Marked.plan` follows from nothing but the marks. It is
never another plan in silence: parameters lie and are used as chosen, and neither time, nor bytes that ranks receive,
nor memory are more; else it is refused.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from tangram.errors import UserError
from tangram.hardware.catalogue.cluster import Cluster
from tangram.layout import Layout
from tangram.sharding.choose.choose import Price, priced
from tangram.sharding.choose.costs import Training
from tangram.sharding.derive.derive import Derived, derive
from tangram.sharding.derive.explain.show import amount, short, total
from tangram.sharding.derive.layouts import input_states, layout_of, used
from tangram.sharding.derive.marking.marks import Mark, matched, result_names
from tangram.sharding.derive.marking.nodes import operators
from tangram.sharding.derive.problem.folding import Folded
from tangram.sharding.derive.problem.states import State

SLACK = 1e-6
"""Of seconds and bytes, as a part: what adding up in another order may make."""

NEARLY = 0.05
"""By what part of the seconds a plan may take longer that is taken where none as good follows."""
ROUNDS = 4
"""How often what operators give is marked where it follows otherwise, before it is given up."""
Written = Mapping[int, Mark]
"""By class, its mark; of the pattern nothing but one name of the class."""


@dataclass(frozen=True)
class Marked:
    """A plan as marks."""

    marks: tuple[Mark, ...]
    plan: Derived
    """What follows from them, by the rates of a derivation that knows no cluster, as a run derives it."""
    price: Price
    """Of that, by the model that the choice was made by."""


def as_marks(
    chosen: Derived, cluster: Cluster, *, memory_limit: float | None = None, training: Training | None = None
) -> Marked:
    """The fewest marks found from which a chosen plan follows. `training`: as it was chosen for.

    `memory_limit`: what follows may take so many bytes of a rank; None: no more than the chosen plan does.

    What follows takes no more time and bytes than was chosen; where no such marks are found, at most `NEARLY` more
    time, which `price` tells. Raises UserError where what follows from the marks of all parameters and modules takes
    more.
    """
    wanted = priced(chosen, cluster, training)
    room = max(memory_limit or 0.0, wanted.nbytes)
    tried = _Tried(chosen, wanted, room, lambda plan: priced(plan, cluster, training))
    parameters, flows = _of_parameters(chosen), _of_modules(chosen)
    every = {**parameters, **flows}
    why = tried.why_not(every)
    for _ in range(ROUNDS):
        more = {} if why is None else tried.otherwise(every)
        if not more:
            break
        flows |= more
        every |= more
        why = tried.why_not(every)
    if why is not None:
        tried = replace(tried, nearly=True)
        why = tried.why_not(every)
    if why is not None:
        raise UserError(f"the chosen plan cannot be written as marks: {why}; choose over other axes, or give marks")
    if not tried.nearly:  # else what is left out would cost a little more each time
        every = _fewest(tried, every, [*flows])
        every = _fewest(tried, every, [v for v, mark in parameters.items() if mark.used is None])  # none gathers alone
    marks = together(chosen.folded, every)
    plan = derive(chosen.folded.graph, marks, chosen.mesh)
    if (why := tried.unlike(plan)) is not None:
        raise UserError(f"the chosen plan cannot be written as marks of all layers: {why}")
    return Marked(tuple(marks), plan, priced(plan, cluster, training))


@dataclass(frozen=True)
class _Tried:
    """What follows from marks, beside what was chosen."""

    chosen: Derived
    target: Price
    room: float
    price: Callable[[Derived], Price]
    nearly: bool = False
    """Whether what takes a little longer will do, whatever ranks receive."""

    def why_not(self, marks: Written) -> str | None:
        """What is worse about the plan that follows; None where nothing is."""
        try:
            return self.unlike(derive(self.chosen.folded.graph, [*marks.values()], self.chosen.mesh))
        except UserError as error:
            return str(error)

    def otherwise(self, marks: Written) -> dict[int, Mark]:
        """Marks of what operators give, where it follows to lie otherwise than chosen; empty where none can be said."""
        try:
            plan = derive(self.chosen.folded.graph, [*marks.values()], self.chosen.mesh)
        except UserError:
            return {}
        found: dict[int, Mark] = {}
        folded = self.chosen.folded
        for name, v in operators(folded.graph).items():
            one = folded.classes[v]
            flows = one in folded.differentiable and one not in folded.standing
            wanted = used(self.chosen, one)
            if flows and one not in marks and one not in found and _cuts(wanted) != _cuts(used(plan, one)):
                found[one] = Mark(name, _layout(folded.value(one).shape, wanted))
        return found

    def unlike(self, plan: Derived) -> str | None:
        """The same of a plan."""
        if (name := _has_other_layout(self.chosen, plan)) is not None:
            return f"{name} follows to lie otherwise than it was chosen to"
        price, received, most = self.price(plan), total(plan), total(self.chosen)
        if price.nbytes > self.room * (1 + SLACK):
            return f"what follows takes {amount(price.nbytes)} of a rank, where it was to take {amount(self.room)}"
        if price.seconds > self.target.seconds * (1 + (NEARLY if self.nearly else SLACK)):
            return f"what follows takes {price.seconds:.4g} s, and {self.target.seconds:.4g} s were chosen"
        if received > most * (1 + SLACK) and not self.nearly:
            return f"a rank receives {amount(received)} by what follows, and {amount(most)} by the choice"
        return None


def _has_other_layout(one: Derived, other: Derived) -> str | None:
    """The first parameter that does not lie, or is not used, in the same parts in two plans."""
    graph = one.folded.graph
    for v, value in graph.of_kind("parameter"):
        sides = [(_cuts(input_states(plan, v)), _cuts(used(plan, v))) for plan in (one, other)]
        if one.folded.classes[v] == v and sides[0] != sides[1]:
            return value.name
    return None


def _cuts(states: Mapping[str, State]) -> dict[str, tuple[int, int]]:
    return {axis: (state.dim, state.outer) for axis, state in states.items() if state.kind == "cut"}


def _of_parameters(chosen: Derived) -> dict[int, Mark]:
    """A mark of each parameter: how it lies and, where it is gathered, how it is used."""
    found: dict[int, Mark] = {}
    for v, value in chosen.folded.graph.of_kind("parameter"):
        if chosen.folded.classes[v] == v:
            lies, uses = input_states(chosen, v), used(chosen, v)
            left = {axis: state for axis, state in lies.items() if uses[axis].kind == "cut"}
            gathered = _cuts(lies).keys() - left.keys()
            after = _layout(value.shape, left) if gathered else None
            found[v] = Mark(value.name, _layout(value.shape, lies), used=after)
    return found


def _of_modules(chosen: Derived) -> dict[int, Mark]:
    """A mark of what each module and the model give, where it has a gradient."""
    folded = chosen.folded
    graph = folded.graph
    found: dict[int, Mark] = {}
    for name, v in (*result_names(graph).items(), *graph.results.items()):
        one = folded.classes[v]
        if name and one in folded.differentiable and one not in folded.standing and one not in found:
            found[one] = Mark(name, _layout(folded.value(one).shape, used(chosen, one)))
    return found


def _layout(shape: Sequence[int], states: Mapping[str, State]) -> Layout:
    """As people write it: sizes only where a dim is cut within."""
    return Layout.parse(short(layout_of(shape, states)))


def _fewest(tried: _Tried, marks: Written, order: Sequence[int]) -> dict[int, Mark]:
    """Without those of `order` that follow from the others: many at once, then fewer, then each by itself."""
    kept = dict(marks)
    for size in _halves(len(order)):
        left = [v for v in order if v in kept]
        for first in range(0, len(left), size):
            without = {v: mark for v, mark in kept.items() if v not in left[first : first + size]}
            if tried.why_not(without) is None:
                kept = without
    return kept


def _halves(count: int) -> Iterator[int]:
    while count:
        yield count
        count = (count + 1) // 2 if count > 1 else 0


# ----------------------------------------------------------------
# Marks of single tensors as marks by name patterns: equal layers as one, equal layouts in one line.


def together(folded: Folded, marks: Mapping[int, Mark]) -> list[Mark]:
    """The same marks (by class) in fewer lines, in their order. No pattern names a tensor that has another mark."""
    lines: dict[tuple[str, str], list[Mark]] = {}
    for v, mark in marks.items():
        one = replace(mark, pattern=_pattern(folded, marks, v))
        joins = "{" not in one.pattern and one.pattern not in result_names(folded.graph)  # which are named alone
        with_own = (":" if ":" in one.pattern else "") if joins else one.pattern
        own = lines.setdefault((with_own, str(one).removeprefix(one.pattern)), [])
        own += [one] if one not in own else []
    return [_joined(own) for own in lines.values()]


def _joined(own: Sequence[Mark]) -> Mark:
    names = [mark.pattern for mark in own]
    return replace(own[0], pattern=names[0] if len(names) == 1 else "{" + ",".join(names) + "}")


def _pattern(folded: Folded, marks: Mapping[int, Mark], v: int) -> str:
    """The shortest pattern of those tried for the names of a class that names nothing else without the same mark."""
    graph = folded.graph
    if (output := next((name for name, w in result_names(graph).items() if folded.classes[w] == v), None)) is not None:
        return output
    known = {value.name: w for w, value in graph.of_kind("parameter")}
    if ":" in marks[v].pattern:
        known = operators(graph)
    elif graph.values[v].kind != "parameter":
        known = {name: w for name, w in graph.results.items() if name}
    alike: dict[str, list[str]] = {}
    for name, w in known.items():
        if folded.classes[w] == v:
            alike.setdefault(re.sub(r"(?<=\.)\d+(?=[.:]|$)", "*", name), []).append(name)
    pattern, names = min(alike.items(), key=lambda item: (-len(item[1]), len(item[0])))
    own = marks[v].layout, marks[v].used
    for one in _tried(pattern, names):
        try:
            classes = {folded.classes[w] for w in matched(graph, Mark(one, own[0])).values()}
        except UserError:  # it names tensors of other numbers of dims
            continue
        if v in classes and all(c in marks and (marks[c].layout, marks[c].used) == own for c in classes):
            return one
    return names[0]


def _tried(pattern: str, names: Sequence[str]) -> Iterator[str]:
    """Patterns for tensors of equal layers, the shortest first; for one tensor its name."""
    if len(names) == 1:
        yield names[0]
        return
    parts = pattern.split(".")
    for n in range(1, len(parts)):
        if "*" not in parts[-n:]:
            yield ".".join(["*", *parts[-n:]])
    yield pattern
    if pattern.count("*") == 1:
        before, after = pattern.split("*")
        numbers = [int(name.removeprefix(before).removesuffix(after)) for name in names]
        yield f"{before}{{{','.join(_runs(numbers))}}}{after}"


def _runs(numbers: Sequence[int]) -> Iterator[str]:
    """`0, 1, 2, 4` as `0..2` and `4`."""
    for _, run in itertools.groupby(enumerate(sorted(numbers)), key=lambda item: item[1] - item[0]):
        own = [number for _, number in run]
        yield f"{own[0]}..{own[-1]}" if len(own) > 1 else str(own[0])
