"""What a configuration has to satisfy to be run at all: a table of rules, each with its reason in words.

Every rule is asked for all configurations of a grid at once. The rules of experts are Megatron's: expert ranks and the
experts' tensor ranks are made of data, context, heads and tensor ranks, so that the fewest devices are
stages x max(tensor x context, expert x expert tensor), not the product of all (Megatron-Bridge pull request 3509).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tangram.models.outline import Outline
from tangram.planner.grid import Grid
from tangram.planner.pipelines import SCHEDULES, folded, least, many

__all__ = ["RULES", "Rule", "legal", "reasons"]

Array = NDArray[Any]
Mask = NDArray[np.bool_]


@dataclass(frozen=True)
class Rule:
    """One rule: where it holds, and what to say of a configuration where it does not."""

    name: str
    holds: Callable[[Outline, Grid], Mask]
    says: Callable[[Outline, dict[str, int]], str]


def _divides(whole: Any, parts: Any) -> Mask:
    return np.asarray(np.mod(whole, parts) == 0)


def _heads(outline: Outline) -> list[int]:
    return sorted({scores.heads for block, _ in outline.runs for scores in block.scores})


def _kv_heads(outline: Outline) -> list[int]:
    return sorted({scores.kv_heads for block, _ in outline.runs for scores in block.scores})


def _either(some: int, others: Array) -> Mask:
    return _divides(some, others) | _divides(others, some)


def _over(at: dict[str, int]) -> str:
    """Who has different heads in attention."""
    if at["ulysses"] == 1:
        return f"{at['tensor']} tensor ranks"
    return f"{at['tensor']} tensor x {at['ulysses']} heads ranks"


def _cuts(at: dict[str, int]) -> str:
    return f"{at['context']} context" if at["ulysses"] == 1 else f"{at['context']} context x {at['ulysses']} heads"


def _alike(at: dict[str, int]) -> int:
    return at["data"] * at["context"] * at["ulysses"]


def _experts(outline: Outline) -> int:
    return max((block.experts for block, _ in outline.runs), default=0)


def _taken(g: Grid) -> Mask:
    """Where the schedule takes as many chunks as there are."""
    several = (g.pipeline > 1) & (g.virtual > 1) & ((many(g.schedule) == 0) | (g.virtual == many(g.schedule)))
    return np.asarray(np.where(g.schedule == 0, g.virtual == 1, several), dtype=bool)


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
        lambda o, g: _every((_divides(heads, g.tensor * g.ulysses) for heads in _heads(o)), g),
        lambda o, at: f"{_over(at)} do not divide the {_heads(o)[0]} heads",
    ),
    Rule(
        "key-value heads",
        lambda o, g: _every((_either(kv, g.tensor * g.ulysses) for kv in _kv_heads(o)), g),
        lambda o, at: f"{_over(at)} and {_kv_heads(o)[0]} key-value heads: neither divides the other",
    ),
    Rule(
        "heads to exchange",
        lambda o, g: (g.ulysses == 1) | all(bool(block.scores) for block, _ in o.runs),
        lambda o, at: f"{at['ulysses']} ranks cannot exchange the heads of blocks that have no attention",
    ),
    Rule(
        "stages",
        lambda o, g: g.pipeline * g.virtual <= o.layers,
        lambda o, at: f"{at['pipeline']} stages of {at['virtual']} chunks are more than the {o.layers} blocks",
    ),
    Rule(
        "chunks",
        lambda o, g: (g.virtual == 1) | folded(g.schedule) | _divides(g.micros, g.pipeline),
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
        lambda o, g: (g.context == 1) | _divides(g.sequence, 2 * g.context),
        lambda o, at: f"{at['context']} context ranks do not cut {at['sequence']} tokens into twice as many parts",
    ),
    Rule(
        "tokens of heads ranks",
        lambda o, g: (g.ulysses == 1) | _divides(g.sequence, np.where(g.context > 1, 2, 1) * g.cuts),
        lambda o, at: (
            f"{at['ulysses']} ranks that exchange heads do not divide the tokens of {at['context']} context ranks"
        ),
    ),
    Rule(
        "tokens of tensor ranks",
        lambda o, g: (g.sequence_parallel == 0) | _divides(g.sequence, g.cuts * g.tensor),
        lambda o, at: f"{at['tensor']} tensor ranks do not divide the tokens that {_cuts(at)} ranks have",
    ),
    Rule(
        "experts",
        lambda o, g: (g.expert == 1) | (_divides(max(_experts(o), 1), g.expert) & (_experts(o) > 0)),
        lambda o, at: f"{at['expert']} expert ranks do not divide {_experts(o)} experts",
    ),
    Rule(
        "expert ranks",
        lambda o, g: _divides(g.alike * g.tensor, g.expert * g.expert_tensor),
        lambda o, at: (
            f"{at['expert']} x {at['expert_tensor']} expert ranks are not made of the "
            f"{_alike(at) * at['tensor']} ranks of a stage"
        ),
    ),
    Rule(
        "shards",
        lambda o, g: _divides(g.alike, g.shard),
        lambda o, at: f"{at['shard']} ranks to divide states over are no part of {_alike(at)}",
    ),
)


def legal(outline: Outline, g: Grid) -> Mask:
    """Which configurations can be run."""
    return _every((rule.holds(outline, g) for rule in RULES), g)


def reasons(outline: Outline, g: Grid) -> list[str]:
    """Of a grid of one configuration, why it cannot be run; empty where it can."""
    at = {name: int(values[0]) for name, values in vars(g).items()}
    return [rule.says(outline, at) for rule in RULES if not rule.holds(outline, g)[0]]
