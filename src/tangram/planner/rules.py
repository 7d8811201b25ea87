"""What a configuration has to satisfy to be run at all: a table of rules, each with its reason in words.

Every rule is asked for all configurations of a grid at once. The rules of experts are Megatron's: expert ranks and the
experts' tensor ranks are made of data, context and tensor ranks, so that the fewest devices are
stages x max(tensor x context, expert x expert tensor), not the product of all (Megatron-Bridge pull request 3509).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tangram.models.outline import Outline
from tangram.planner.dealt import ends
from tangram.planner.grid import Grid
from tangram.planner.pipelines import SCHEDULES, fewest, folded, least, many

__all__ = ["RULES", "Rule", "legal", "reasons"]

Mask = NDArray[np.bool_]


@dataclass(frozen=True)
class Rule:
    """One rule: where it holds, and what to say of a configuration where it does not."""

    name: str
    holds: Callable[[Outline, Grid], Mask]
    says: Callable[[Outline, dict[str, int]], str]


def _divides(whole: Any, parts: Any) -> Mask:
    times = np.asarray(whole / parts)
    return np.asarray(np.floor(times) == times)


def _heads(outline: Outline) -> list[int]:
    return sorted({scores.heads for block, _ in outline.runs for scores in block.scores})


def _kv_heads(outline: Outline) -> list[int]:
    return sorted({scores.kv_heads for block, _ in outline.runs for scores in block.scores})


def _experts(outline: Outline) -> int:
    return max((block.experts for block, _ in outline.runs), default=0)


def _taken(g: Grid) -> Mask:
    """Where the schedule takes as many chunks as there are."""
    any_ = (many(g.schedule) == 0) & (g.virtual >= fewest(g.schedule))
    taken = (g.pipeline > 1) & (any_ | (g.virtual == many(g.schedule)))
    return np.asarray(np.where(g.schedule == 0, g.virtual == 1, taken), dtype=bool)


def _some(outline: Outline, g: Grid) -> Mask:
    """Where the first and the last chunk have a block at least, as far as they have fewer than an even cut gives."""
    first, last = ends(outline, g)
    return np.asarray((g.ahead + g.behind == 0) | ((first >= 1) & (last >= 1)), dtype=bool)


def _named(at: dict[str, int]) -> str:
    return SCHEDULES[at["schedule"]].name


def _every(masks: Iterator[Mask], g: Grid) -> Mask:
    found = np.ones(len(g), dtype=bool)
    for mask in masks:
        found &= mask
    return found


RULES = (
    Rule(
        "heads",
        lambda o, g: _every((_divides(heads, g.tensor) for heads in _heads(o)), g),
        lambda o, at: f"{at['tensor']} tensor ranks do not divide the {_heads(o)[0]} heads",
    ),
    Rule(
        "ranks of heads",
        lambda o, g: (g.ulysses == 1) | _every((_divides(heads, g.tensor * g.ulysses) for heads in _heads(o)), g),
        lambda o, at: (
            f"{at['tensor']} tensor ranks x {at['ulysses']} that exchange heads do not divide the {_heads(o)[0]} heads"
        ),
    ),
    Rule(
        "key-value heads of these",
        lambda o, g: (
            (g.ulysses == 1)
            | _every(
                (_divides(kv, g.tensor * g.ulysses) | _divides(g.tensor * g.ulysses, kv) for kv in _kv_heads(o)), g
            )
        ),
        lambda o, at: (
            f"{at['tensor'] * at['ulysses']} ranks of heads and {_kv_heads(o)[0]} key-value heads: neither divides the "
            "other"
        ),
    ),
    Rule(
        "context ranks of heads",
        lambda o, g: _divides(g.context, g.ulysses),
        lambda o, at: f"{at['ulysses']} ranks that exchange heads are no part of {at['context']} context ranks",
    ),
    Rule(
        "key-value heads",
        lambda o, g: _every((_divides(kv, g.tensor) | _divides(g.tensor, kv) for kv in _kv_heads(o)), g),
        lambda o, at: f"{at['tensor']} tensor ranks and {_kv_heads(o)[0]} key-value heads: neither divides the other",
    ),
    Rule(
        "stages",
        lambda o, g: g.pipeline * g.virtual <= o.layers,
        lambda o, at: f"{at['pipeline']} stages of {at['virtual']} chunks are more than the {o.layers} blocks",
    ),
    Rule(
        "blocks of the first and the last chunk",
        lambda o, g: ((g.ahead + g.behind == 0) | (g.pipeline > 1)) & _some(o, g),
        lambda o, at: (
            f"{at['ahead']} and {at['behind']} blocks fewer of the first and the last of "
            f"{at['pipeline'] * at['virtual']} chunks leave one of them without any of the {o.layers} blocks"
            if at["pipeline"] > 1
            else "without stages no chunk has fewer blocks than others"
        ),
    ),
    Rule(
        "chunks",
        lambda o, g: (g.schedule == 0) | folded(g.schedule) | _divides(g.micros, g.pipeline),
        lambda o, at: f"interleaved chunks need micro-batches that {at['pipeline']} stages divide",
    ),
    Rule(
        "schedule",
        lambda o, g: _taken(g),
        lambda o, at: f"{_named(at)} does not take {at['virtual']} chunks on {at['pipeline']} ranks",
    ),
    Rule(
        "micro-batches of the schedule",
        lambda o, g: (least(g.schedule) == 1) | (g.micros >= least(g.schedule) * g.pipeline),
        lambda o, at: f"{_named(at)} takes {SCHEDULES[at['schedule']].least * at['pipeline']} micro-batches or more",
    ),
    Rule(
        "batch",
        lambda o, g: _divides(g.batch, g.data * g.micro),
        lambda o, at: f"{at['data']} data ranks of micro-batches of {at['micro']} do not divide {at['batch']} samples",
    ),
    Rule(
        "tokens",
        lambda o, g: _divides(g.sequence, g.context * np.where(g.context > g.ulysses, 2, 1)),
        lambda o, at: f"{at['context']} context ranks do not cut {at['sequence']} tokens into twice as many parts",
    ),
    Rule(
        "tokens of tensor ranks",
        lambda o, g: (g.sequence_parallel == 0) | _divides(g.sequence, g.context * g.tensor),
        lambda o, at: f"{at['tensor']} tensor ranks do not divide the tokens that {at['context']} context ranks have",
    ),
    Rule(
        "experts",
        lambda o, g: (g.expert == 1) | (_divides(max(_experts(o), 1), g.expert) & (_experts(o) > 0)),
        lambda o, at: f"{at['expert']} expert ranks do not divide {_experts(o)} experts",
    ),
    Rule(
        "expert ranks",
        lambda o, g: _divides(g.data * g.context * g.tensor, g.expert * g.expert_tensor),
        lambda o, at: (
            f"{at['expert']} x {at['expert_tensor']} expert ranks are not made of the "
            f"{at['data'] * at['context'] * at['tensor']} ranks of a stage"
        ),
    ),
    Rule(
        "offloaded parameters",
        lambda o, g: ((g.offload & 2) == 0) | (g.zero >= 3),
        lambda o, at: "parameters wait on the host only where data ranks divide them",
    ),
    Rule(
        "shards",
        lambda o, g: _divides(g.data * g.context, g.shard),
        lambda o, at: f"{at['shard']} ranks to divide states over are no part of {at['data'] * at['context']}",
    ),
)


def legal(outline: Outline, g: Grid) -> Mask:
    """Which configurations can be run."""
    return _every((rule.holds(outline, g) for rule in RULES), g)


def reasons(outline: Outline, g: Grid) -> list[str]:
    """Of a grid of one configuration, why it cannot be run; empty where it can."""
    at = {name: int(values[0]) for name, values in g.columns().items()}
    return [rule.says(outline, at) for rule in RULES if not rule.holds(outline, g)[0]]
