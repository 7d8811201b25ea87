"""What decides whether a configuration can be: one kind of rule, tables of them, and one function that asks.

    rules.RULES        what nothing can run otherwise (heads, tokens, experts, schedules, shards)
    rules.LAID         what the joint space lays out and its models price, beyond that
    trainer.SAID       what `tangram train` does not run, though a plan can say it
    trainer.UNSAID     what it does not run and no plan can say
    exports, without   what another project does not run; what is to be left out

A rule is asked of a grid (`planner.space.grid`): of millions of configurations by the search, of one by `tangram plan
explain`, and of a plan's own numbers (`planner.legality.check_plan`) by whoever makes, chooses, starts or changes a
plan (`planner.legality.check_plan`). Each refusal is a sentence; ranks in it are called as the one who asks calls them
("4 TP ranks", "tp=4").
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from math import isqrt, prod
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from tangram.models.outlines.outline import Outline
from tangram.planner.space.grid import Grid

Mask = NDArray[np.bool_]

RANKS = {
    "tensor": "TP ranks", "ulysses": "ranks that exchange heads", "context": "CP ranks",
    "expert": "EP ranks", "data": "DP ranks", "pipeline": "stages",
}  # fmt: skip
"""What the ranks of a column are called where no axis has a name."""


@dataclass(frozen=True)
class Facts:
    """What rules ask of a model."""

    layers: int = 0
    """Blocks."""
    heads: tuple[int, ...] = ()
    """Of queries, one number for each kind of attention; none: nothing cuts them, or there are none."""
    kv_heads: tuple[int, ...] = ()
    experts: int = 0
    """Of the widest mixture."""
    images: bool = False
    """Whether it sees images."""


def facts_of(outline: Outline) -> Facts:
    """Of a model's outline."""
    scores = [one for block, _ in outline.kinds for one in block.scores]
    return Facts(
        layers=outline.layers,
        heads=tuple(sorted({one.heads for one in scores})),
        kv_heads=tuple(sorted({one.kv_heads for one in scores})),
        experts=max((block.experts for block, _ in outline.kinds), default=0),
        images=outline.images > 0,
    )


@dataclass(frozen=True)
class At:
    """The numbers of one configuration, and what its ranks are called."""

    numbers: Mapping[str, int]
    names: Mapping[str, str] = field(default_factory=dict[str, str])
    """Of the axes of a column, where they have any, as "tp"."""

    def __getitem__(self, column: str) -> int:
        return self.numbers[column]

    def size(self, *columns: str) -> int:
        """How many ranks there are over all of some columns."""
        return prod(self.numbers[column] for column in columns)

    def ranks(self, *columns: str, size: int | None = None) -> str:
        """The ranks of some columns in words; `size`: so many in their place. Columns of one rank are left out."""
        several = [column for column in columns if self.numbers[column] > 1] or [*columns[:1]]
        size = self.size(*columns) if size is None else size
        named = [name for column in several if (name := self.names.get(column))]
        if named:
            return f"{' x '.join(named)}={size}"
        return f"{size} {' x '.join(RANKS[column] for column in several)}"


@dataclass(frozen=True)
class Rule:
    """One rule: where it holds, and what to say of a configuration where it does not."""

    name: str
    holds: Callable[[Facts, Grid], Mask]
    says: Callable[[Facts, At], str]
    mend: Callable[[Facts, At], str] = lambda facts, at: ""
    """What would do in its place, where that is known."""


@dataclass(frozen=True)
class Refusal:
    """Why a configuration cannot be."""

    rule: str
    reason: str
    mend: str = ""

    def __str__(self) -> str:
        return f"{self.reason}: {self.mend}" if self.mend else self.reason


def holding(facts: Facts, g: Grid, rules: Iterable[Rule]) -> Mask:
    """Where all rules of a table hold."""
    return every((rule.holds(facts, g) for rule in rules), g)


def refusals(
    facts: Facts, g: Grid, rules: Iterable[Rule], names: Mapping[str, str] | None = None
) -> tuple[Refusal, ...]:
    """Of a grid of one configuration, every rule of a table that refuses it. `names`: as those of `At`."""
    at = At({name: int(values[0]) for name, values in g.columns().items()}, names or {})
    return tuple(
        Refusal(rule.name, rule.says(facts, at), rule.mend(facts, at)) for rule in rules if not rule.holds(facts, g)[0]
    )


def every(masks: Iterator[Mask], g: Grid) -> Mask:
    """Where all of some masks over a grid are true."""
    found = np.ones(len(g), dtype=bool)
    for mask in masks:
        found &= mask
    return found


def divides(whole: Any, parts: Any) -> Mask:
    """Where so many parts of a whole are equal."""
    times = np.asarray(whole / parts)
    return np.asarray(np.floor(times) == times)


def uneven(count: int, what: str, ranks: str) -> str:
    """That ranks cannot have an equal part each: the one sentence of it."""
    return f"the {count} {what} do not divide by {ranks}"


def nearest(count: int, size: int, ranks: Callable[[int], str]) -> str:
    """The sizes nearest to `size` that divide a count, or the count that it divides, in words."""
    low = [n for n in range(1, isqrt(count) + 1) if count % n == 0]
    near = min((*low, *(count // n for n in low)), key=lambda n: (abs(n - size), -n))
    return f"the nearest sizes are {ranks(near)}, or {-(-count // size) * size} in their place"


def _counts(facts: Facts, of: str, column: Callable[[], Any]) -> tuple[Any, ...]:
    found: Any = getattr(facts, of) if hasattr(facts, of) else column()
    return cast("tuple[Any, ...]", found) if isinstance(found, tuple) else (found,)


def even(name: str, what: str, of: str, *columns: str) -> Rule:
    """The rule that ranks of some columns have equal parts: of a field of `Facts`, or of another column.

    `what`: what `of` counts, in words, with the key that changes it.
    """

    def holds(facts: Facts, g: Grid) -> Mask:
        ranks = prod(getattr(g, column) for column in columns)
        return every((divides(n, ranks) for n in _counts(facts, of, lambda: getattr(g, of))), g)

    def count(facts: Facts, at: At) -> int:
        return next(n for n in _counts(facts, of, lambda: at[of]) if n % at.size(*columns))

    return Rule(
        name,
        holds,
        lambda facts, at: uneven(count(facts, at), what, at.ranks(*columns)),
        lambda facts, at: nearest(count(facts, at), at.size(*columns), lambda n: at.ranks(*columns, size=n)),
    )
