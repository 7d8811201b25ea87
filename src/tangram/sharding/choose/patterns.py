"""Marks of single tensors as marks by name patterns: equal layers as one, equal layouts in one line."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from tangram.errors import UserError
from tangram.sharding.derive.marking.marks import Mark, matched
from tangram.sharding.derive.marking.nodes import operators
from tangram.sharding.derive.problem.folding import Folded


def together(folded: Folded, marks: Mapping[int, Mark]) -> list[Mark]:
    """The same marks (by class) in fewer lines, in their order. No pattern names a tensor that has another mark."""
    lines: dict[tuple[str, str], list[Mark]] = {}
    for v, mark in marks.items():
        one = replace(mark, pattern=_pattern(folded, marks, v))
        joins = "{" not in one.pattern and one.pattern not in folded.graph.outputs  # which are named alone
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
    if (output := next((name for name, w in graph.outputs.items() if folded.classes[w] == v), None)) is not None:
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
