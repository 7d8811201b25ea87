"""What of the joint space `tangram train` runs: the search can keep to it, and rows that are not run say why.

The planner looks at more than any one program runs. A row here is a rule that configurations have to keep, with the
reason for those that do not; when the trainer learns something, its row goes.
"""

from __future__ import annotations

from tangram.models.outline import Outline
from tangram.planner.choice import Choice
from tangram.planner.grid import Grid, grid
from tangram.planner.pipelines import splits
from tangram.planner.space import Able, Rule

__all__ = ["RULES", "WHOLE", "grid_of", "rules", "runs", "why_not"]

WHOLE = ("nothing", "half of the blocks", "all blocks")
"""What can be computed again."""
RULES = (
    Rule(
        "its schedule does backwards in two parts, and would compute blocks again for each of them",
        lambda g: ~(splits(g.schedule) & (g.pipeline > 1) & (g.recompute > 0)),
    ),
    Rule(
        "states are divided over data ranks alone, and not over those of a context axis",
        lambda g: (g.context == 1) | (g.zero == 0) | (g.shard <= g.data),
    ),
    Rule(
        "context ranks exchange heads or send keys around, all of them alike",
        lambda g: (g.ulysses == 1) | (g.ulysses == g.context),
    ),
    Rule("experts are dealt to ranks of an axis of their own, not to those of others", lambda g: g.expert == 1),
    Rule(
        "a pipeline's ranks gather parameters and reduce gradients once a step, so neither is divided between",
        lambda g: (g.pipeline == 1) | (g.zero <= 1),
    ),
    Rule(
        "its stages are cut by work, not so that the first and the last have so many blocks fewer",
        lambda g: (g.ahead + g.behind) == 0,
    ),
    Rule(
        "1F1B is run with as many micro-batches as stages, or more",
        lambda g: (g.virtual > 1) | (g.micros >= g.pipeline),
    ),
)
"""Of any model."""


def rules(outline: Outline) -> tuple[Rule, ...]:
    """With those of this one."""
    fewest = min((scores.kv_heads for block, _ in outline.runs for scores in block.scores), default=0)
    whole = Rule(
        f"its {fewest} key-value heads are not copied to more ranks",
        lambda g: (fewest % (g.tensor * g.ulysses)) == 0,
    )
    return (*RULES, whole)


def runs(outline: Outline) -> Able:
    """For the search."""
    return Able(staged=(0, 1), again=WHOLE, expert=1, uneven=0, rules=rules(outline))


def grid_of(choice: Choice) -> Grid:
    """The one configuration."""
    return grid(**{name: int(v) if name in ("recompute", "schedule") else v for name, v in choice.at.items()})


def why_not(choice: Choice, outline: Outline) -> str:
    """Why `tangram train` does not run a choice of a model; "" where it does."""
    one = grid_of(choice)
    if choice.again not in WHOLE:
        return f"{choice.again} are not computed again by themselves: blocks are"
    return next((rule.why for rule in rules(outline) if not rule.holds(one).all()), "")
