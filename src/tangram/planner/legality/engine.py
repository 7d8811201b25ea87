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

What a configuration has to satisfy to be run at all, and what the joint space lays out: tables of rules.

The rules of experts are Megatron's: EP ranks and the experts' TP ranks are made of data, context and tensor
ranks, so that the fewest devices are stages x max(tensor x context, expert x expert tensor), not the product of all
(Megatron-Bridge pull request 3509).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from math import isqrt, prod
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from tangram.models.outlines.outline import Outline
from tangram.planner.space.grid import Grid
from tangram.planner.space.layers_per_stage import filled
from tangram.planner.space.schedule_formulas import SCHEDULES, fewest, folded, least, many

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


def _virtual_stages_fit(facts: Facts, g: Grid) -> Mask:
    """Where the schedule takes as many virtual stages as there are."""
    any_ = (many(g.schedule) == 0) & (g.virtual >= fewest(g.schedule))
    taken = (g.pipeline > 1) & (any_ | (g.virtual == many(g.schedule)))
    return np.asarray(np.where(g.schedule == 0, g.virtual == 1, taken), dtype=bool)


def _some(facts: Facts, g: Grid) -> Mask:
    """Where the first and the last virtual stage have no less than none, as far as they have fewer layers than an even
    cut gives."""
    return np.asarray((g.ahead + g.behind == 0) | filled(facts.layers, g), dtype=bool)


def _shared(*columns: str) -> Callable[[Facts, Grid], Mask]:
    """Where ranks of some columns have equal parts of the key-value heads, or each head as many ranks."""

    def holds(facts: Facts, g: Grid) -> Mask:
        ranks = math.prod(getattr(g, column) for column in columns)
        return every((divides(kv, ranks) | divides(ranks, kv) for kv in facts.kv_heads), g)

    return holds


def _unshared(*columns: str) -> Callable[[Facts, At], str]:
    """That they have not."""

    def says(facts: Facts, at: At) -> str:
        size = at.size(*columns)
        kv = next(kv for kv in facts.kv_heads if kv % size and size % kv)
        return f"{at.ranks(*columns)} and {kv} key-value heads: neither divides the other"

    return says


def _named(at: At) -> str:
    return SCHEDULES[at["schedule"]].name


HEADS = (
    even("heads", "attention heads (num_attention_heads)", "heads", "tensor", "ulysses"),
    Rule("key-value heads", _shared("tensor"), _unshared("tensor")),
)
"""Of attention whose ranks have as many heads each. A plan may give some of them more (`check_plan.laid`)."""

EXCHANGED = Rule(
    "key-value heads where heads are exchanged",
    lambda f, g: (g.ulysses == 1) | _shared("tensor", "ulysses")(f, g),
    _unshared("tensor", "ulysses"),
)

RULES = (
    EXCHANGED,
    Rule(
        "CP ranks of heads",
        lambda f, g: divides(g.context, g.ulysses),
        lambda f, at: f"{at.ranks('ulysses')} are no part of {at.ranks('context')}",
    ),
    even("tokens", "tokens of a sample (data.sequence)", "sequence", "context"),
    Rule(
        "tokens of TP ranks",
        lambda f, g: (g.sequence_parallel == 0) | divides(g.sequence, g.context * g.tensor),
        lambda f, at: f"{at.ranks('tensor')} do not divide the tokens that {at.ranks('context')} have",
    ),
    even("experts", "experts", "experts", "expert"),
    Rule(
        "a mixture",
        lambda f, g: (g.expert == 1) | (f.experts > 0),
        lambda f, at: f"there are {at.ranks('expert')}, and the model has no experts",
    ),
    Rule(
        "schedule",
        _virtual_stages_fit,
        lambda f, at: f"{_named(at)} does not take {at['virtual']} virtual stages on {at['pipeline']} ranks",
    ),
    Rule(
        "micro-batches of the schedule",
        lambda f, g: (least(g.schedule) == 1) | (g.micros >= least(g.schedule) * g.pipeline),
        lambda f, at: f"{_named(at)} takes {SCHEDULES[at['schedule']].least * at['pipeline']} micro-batches or more",
    ),
    Rule(
        "offloaded parameters",
        lambda f, g: ((g.offload & 2) == 0) | (g.zero >= 3),
        lambda f, at: "parameters are offloaded to the host only where DP ranks divide them",
    ),
    Rule(
        "shards",
        lambda f, g: divides(g.data * g.context, g.shard),
        lambda f, at: f"{at['shard']} ranks to divide states over are no part of {at.size('data', 'context')}",
    ),
)
"""What nothing can run otherwise."""

STAGES = Rule(
    "stages",
    lambda f, g: g.pipeline * g.virtual <= f.layers + (g.ahead > 0) + (g.behind > 0),
    lambda f, at: f"{at['pipeline']} stages of {at['virtual']} virtual stages are more than the {f.layers} layers",
)
"""Of stages that are cut between layers."""

LAID = (
    *HEADS,
    STAGES,
    Rule(
        "stages of a model that sees images",
        lambda f, g: (g.pipeline == 1) | (not f.images),
        lambda f, at: f"{at['pipeline']} stages of a vision tower and a decoder are not planned yet: leave PP out",
    ),
    Rule(
        "layers of the first and the last virtual stage",
        lambda f, g: ((g.ahead + g.behind == 0) | (g.pipeline > 1)) & _some(f, g),
        lambda f, at: (
            f"{at['ahead']} and {at['behind']} layers fewer of the first and the last of "
            f"{at['pipeline'] * at['virtual']} virtual stages leave less than none to one of them, of {f.layers} layers"
            if at["pipeline"] > 1
            else "without stages no virtual stage has fewer layers than others"
        ),
    ),
    Rule(
        "virtual stages",
        lambda f, g: (g.schedule == 0) | folded(g.schedule) | divides(g.micros, g.pipeline),
        lambda f, at: f"interleaved virtual stages need micro-batches that {at['pipeline']} stages divide",
    ),
    Rule(
        "batch",
        lambda f, g: divides(g.batch, g.data * g.micro),
        lambda f, at: f"{at['data']} DP ranks of micro-batches of {at['micro']} do not divide {at['batch']} samples",
    ),
    Rule(
        "pieces of a ring",
        lambda f, g: divides(g.sequence, g.context * np.where(g.context > g.ulysses, 2, 1)),
        lambda f, at: f"{at['context']} CP ranks do not cut {at['sequence']} tokens into twice as many parts",
    ),
    Rule(
        "EP ranks",
        lambda f, g: divides(g.data * g.context * g.tensor, g.expert * g.expert_tensor),
        lambda f, at: (
            f"{at['expert']} x {at['expert_tensor']} EP ranks are not made of the "
            f"{at.size('data', 'context', 'tensor')} ranks of a stage"
        ),
    ),
)
"""What the joint space lays out and its models price: even cuts of heads and layers, whole micro-batches, rings of two
pieces a rank, EP ranks out of the others."""


def legal(outline: Outline, g: Grid) -> Mask:
    """Which configurations of the joint space can be run."""
    return holding(facts_of(outline), g, (*RULES, *LAID))


def reasons(outline: Outline, g: Grid) -> list[str]:
    """Of a grid of one configuration, why it cannot be run; empty where it can."""
    return [str(one) for one in refusals(facts_of(outline), g, (*RULES, *LAID))]
