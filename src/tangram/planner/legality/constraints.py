"""What a configuration has to satisfy to be run at all, and what the joint space lays out: tables of rules.

The rules of experts are Megatron's: EP ranks and the experts' TP ranks are made of data, context and tensor
ranks, so that the fewest devices are stages x max(tensor x context, expert x expert tensor), not the product of all
(Megatron-Bridge pull request 3509).
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from tangram.models.outlines.outline import Outline
from tangram.planner.legality.engine import (
    At,
    Facts,
    Mask,
    Rule,
    divides,
    even,
    every,
    facts_of,
    holding,
    refusals,
)
from tangram.planner.space.grid import Grid
from tangram.planner.space.layers_per_stage import filled
from tangram.planner.space.schedule_formulas import SCHEDULES, fewest, folded, least, many


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
