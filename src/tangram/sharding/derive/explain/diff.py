"""What two derivations of one model have not in common: what lies otherwise, and what moves otherwise, with bytes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from tangram.sharding.derive.derive import Derived
from tangram.sharding.derive.explain.show import Row, amount, folded_name, parts_of, place, short, signed, total, ways
from tangram.sharding.derive.layouts import Moved, moved, value_layout

Key = tuple[str, str]


@dataclass(frozen=True)
class LayoutDifference:
    """A tensor that lies otherwise."""

    name: str
    shape: tuple[int, ...]
    one: str
    other: str
    one_bytes: float
    """On a rank, of all tensors that it stands for."""
    other_bytes: float


@dataclass(frozen=True)
class CommunicationDifference:
    """Where something else moves."""

    place: str
    axis: str
    one: str
    """Forward / backward; nothing where nothing moves."""
    other: str
    one_bytes: float
    """What a rank receives, of all times."""
    other_bytes: float


@dataclass(frozen=True)
class DerivationDifference:
    """What is unlike in two derivations of the same graph."""

    parameters: tuple[LayoutDifference, ...]
    modules: tuple[LayoutDifference, ...]
    communication: tuple[CommunicationDifference, ...]
    one_bytes: float
    """All that a rank receives."""
    other_bytes: float

    def as_json(self) -> dict[str, Any]:
        """As JSON types."""
        return {
            "parameters": [vars(one) for one in self.parameters],
            "modules": [vars(one) for one in self.modules],
            "moves": [vars(one) for one in self.communication],
            "bytes": [self.one_bytes, self.other_bytes],
        }


def difference(one: Derived, other: Derived) -> DerivationDifference:
    """Compare two derivations of one graph."""
    graph = one.folded.graph
    # Of equal layers, which have one name here, the first stands for all: of a key the last written value stays,
    # so they are written backwards, and brought into their order again below.
    parameters = {folded_name(one, value.name): v for v, value in reversed([*graph.of_kind("parameter")])}
    modules = {folded_name(one, name) or "the model": v for name, v in reversed([*graph.results.items()])}
    return DerivationDifference(
        tuple(_layout_differences(one, other, dict(reversed(parameters.items())))),
        tuple(_layout_differences(one, other, dict(reversed(modules.items())))),
        tuple(_communication_differences(one, other)),
        total(one),
        total(other),
    )


def _layout_differences(one: Derived, other: Derived, named: dict[str, int]) -> Iterator[LayoutDifference]:
    graph, times = one.folded.graph, one.folded.times
    for name, v in named.items():
        layouts = value_layout(one, v), value_layout(other, v)
        if layouts[0] != layouts[1]:
            n = times[one.folded.classes[v]] * graph.values[v].nbytes
            texts = [short(layout) or "()" for layout in layouts]
            yield LayoutDifference(
                name, graph.values[v].shape, texts[0], texts[1], n / parts_of(one, v), n / parts_of(other, v)
            )


def _communication_differences(one: Derived, other: Derived) -> Iterator[CommunicationDifference]:
    """By place and axis; where several tensors move at one place, they are counted together."""
    sides = [_by_place(found) for found in (one, other)]
    for key in dict.fromkeys((*sides[0], *sides[1])):
        here, there = (side.get(key, []) for side in sides)
        said = [_described(some) for some in (here, there)]
        if said[0] != said[1]:
            yield CommunicationDifference(*key, said[0][0], said[1][0], said[0][1], said[1][1])


def _by_place(found: Derived) -> dict[Key, list[Moved]]:
    some: dict[Key, list[Moved]] = {}
    for one in moved(found):
        if one.nbytes:
            some.setdefault((place(found, one), one.axis), []).append(one)
    return some


def _described(some: Sequence[Moved]) -> tuple[str, float]:
    each = dict.fromkeys(ways(one.forward, one.backward) for one in some)
    return ", ".join(each), sum(one.nbytes for one in some)


def tables(found: DerivationDifference, names: tuple[str, str]) -> Iterator[tuple[str, Row, list[Row]]]:
    """Title, headers and rows of each table that has any. `names`: what the two are called."""
    for title, some in (("Parameters", found.parameters), ("What modules give", found.modules)):
        rows = [
            (one.name, " x ".join(map(str, one.shape)), one.one, one.other, signed(one.other_bytes - one.one_bytes))
            for one in some
        ]
        if rows:
            yield f"{title} that lie otherwise", ("", "shape", *names, "bytes on a rank"), rows
    rows = [
        (one.place, one.axis, one.one or "-", one.other or "-", signed(one.other_bytes - one.one_bytes))
        for one in sorted(found.communication, key=lambda one: -abs(one.other_bytes - one.one_bytes))
    ]
    if rows:
        yield "What moves otherwise, forward / backward", ("where", "axis", *names, "a rank receives"), rows


def summary(found: DerivationDifference, names: tuple[str, str]) -> str:
    """The bytes of both, in a line."""
    if not (found.parameters or found.modules or found.communication):
        return f"{names[0]} and {names[1]} give the same: a rank receives {amount(found.one_bytes)}"
    each = [f"{amount(n)} with {name}" for n, name in zip((found.one_bytes, found.other_bytes), names, strict=True)]
    return f"a rank receives {', '.join(each)}: {signed(found.other_bytes - found.one_bytes)}"
