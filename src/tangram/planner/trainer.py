"""What of the joint space `tangram train` runs: the search can keep to it, and rows that are not run say why.

The planner looks at more than any one program runs. A row here is a rule that configurations have to keep, with the
reason for those that do not; when the trainer learns something, its row goes.
"""

from __future__ import annotations

import numpy as np

from tangram.models.outline import Group, Outline
from tangram.planner.again import WHOLE, again_of
from tangram.planner.choice import Choice
from tangram.planner.pipelines import splits
from tangram.planner.rules import Rule
from tangram.planner.space import Able

__all__ = ["RULES", "RUNS", "why_not"]

RULES = (
    Rule(
        "blocks of split backwards",
        lambda o, g: ~(splits(g.schedule) & (g.pipeline > 1) & (g.recompute > 0)),
        lambda o, at: "its schedule does backwards in two parts, and would compute blocks again for each of them",
    ),
    Rule(
        "AdamW",
        lambda o, g: g.optimiser == 0,
        lambda o, at: "its optimiser is AdamW, with states as parameters are kept",
    ),
    Rule(
        "on devices",
        lambda o, g: g.offload == 0,
        lambda o, at: "everything is kept on devices",
    ),
    Rule(
        "all is trained",
        lambda o, g: np.full(len(g), not o.adapted),
        lambda o, at: "adapters and frozen bases are not trained from a plan",
    ),
    Rule(
        "states of context ranks",
        lambda o, g: (g.context == 1) | (g.zero == 0) | (g.shard <= g.data),
        lambda o, at: "states are divided over data ranks alone, and not over those of a context axis",
    ),
    Rule(
        "context ranks alike",
        lambda o, g: (g.ulysses == 1) | (g.ulysses == g.context),
        lambda o, at: "context ranks exchange heads or send keys around, all of them alike",
    ),
    Rule(
        "expert ranks",
        lambda o, g: g.expert == 1,
        lambda o, at: "experts are dealt to ranks of an axis of their own, not to those of others",
    ),
    Rule(
        "states of stages",
        lambda o, g: (g.pipeline == 1) | (g.zero <= 1),
        lambda o, at: (
            "a pipeline's ranks gather parameters and reduce gradients once a step, so neither is divided between"
        ),
    ),
    Rule(
        "filled stages",
        lambda o, g: (g.virtual > 1) | (g.micros >= g.pipeline),
        lambda o, at: "1F1B is run with as many micro-batches as stages, or more",
    ),
    Rule(
        "whole key-value heads",
        lambda o, g: (_kv_heads(o) % (g.tensor * g.ulysses)) == 0,
        lambda o, at: f"its {_kv_heads(o)} key-value heads are not copied to more ranks",
    ),
    Rule(
        "data ranks within stages",
        lambda o, g: (g.inner == 0) | (g.pipeline == 1),
        lambda o, at: "its pipeline ranks are farthest apart, and data ranks lie within",
    ),
    Rule(
        "stages cut by work",
        lambda o, g: (g.ahead + g.behind) == 0,
        lambda o, at: "its stages are cut by work, not so that the first and the last have so many blocks fewer",
    ),
)
"""Beside those of `planner.rules`."""
RUNS = Able(staged=(0, 1), again=WHOLE, expert=1, uneven=0, inner=False, rules=RULES)
"""For the search."""


def _kv_heads(outline: Outline) -> int:
    return min((scores.kv_heads for block, _ in outline.runs for scores in block.scores), default=0)


def why_not(choice: Choice, outline: Outline) -> str:
    """Why `tangram train` does not run a choice of a model; "" where it does."""
    if again_of(choice.again)[0] not in (Group.NONE, Group.BLOCK):
        return f"{choice.again} are not computed again by themselves: blocks are"
    one, at = choice.grid(), {name: int(value) for name, value in choice.at.items()}
    return next((rule.says(outline, at) for rule in RULES if not rule.holds(outline, one).all()), "")
