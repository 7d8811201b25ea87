"""What of the joint space `tangram train` runs: the search can keep to it, and rows that are not run say why.

The planner looks at more than any one program runs. A row here is a rule that configurations have to keep, with the
reason for those that do not; when the trainer learns something, its row goes. `SAID` is asked of every plan, too, since
a plan's file can say what these refuse; what `UNSAID` refuses no file can say.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import get_args

import numpy as np

from tangram.planner.legality.engine import At, Facts, Mask, Rule, even
from tangram.planner.legality.enumerate import Able
from tangram.planner.space.grid import Grid
from tangram.planner.space.optimisers_and_offload import optimisers_of
from tangram.planner.space.recompute import WHOLE
from tangram.planner.space.schedule_formulas import SCHEDULES, splits
from tangram.schema.optimiser import RuleName
from tangram.schema.schedules import micros_unlike

KINDS: Mapping[int, RuleName] = {code: name for name in get_args(RuleName) for code in optimisers_of(name)}
"""The kinds of optimisers that are run, by code."""
KV_HEADS = even("whole key-value heads", "key-value heads (num_key_value_heads)", "kv_heads", "tensor", "ulysses")
"""The trainer copies none to more ranks."""


def _micros_unlike(code: int, ranks: int, micros: int) -> str:
    return micros_unlike(SCHEDULES[code].name, ranks, micros) or "" if ranks > 1 else ""


def _passes(facts: Facts, g: Grid) -> Mask:
    """Where the schedule's table takes as many micro-batches as there are, asked once of each kind of configuration."""
    columns = np.stack(np.broadcast_arrays(g.schedule, g.pipeline, g.micros)).astype(np.int64)
    kinds, place = np.unique(columns, axis=1, return_inverse=True)
    taken = np.array([not _micros_unlike(*kind) for kind in kinds.T.tolist()], dtype=bool)
    return taken[np.ravel(place)]


def _micro_batch_reason(facts: Facts, at: At) -> str:
    micros = max(-(-at["batch"] // at.size("data", "micro")), 1)
    return f"a step has {micros} micro-batches, and {_micros_unlike(at['schedule'], at['pipeline'], micros)}"


SAID = (
    Rule(
        "layers of split backwards",
        lambda f, g: ~(splits(g.schedule) & (g.pipeline > 1) & (g.recompute > 0)),
        lambda f, at: "the schedule does backwards in two parts, and would recompute layers for each of them",
    ),
    Rule("micro-batches that pass", _passes, _micro_batch_reason),
)
"""What a plan can say, and the trainer does not run."""

UNSAID = (
    KV_HEADS,
    Rule(
        "optimisers",
        lambda f, g: np.isin(g.optimiser, [*KINDS]),
        lambda f, at: "its optimisers are AdamW, with states as masters are kept or in 8 bits, SGD, Adafactor and Muon",
    ),
    Rule(
        "on devices",
        lambda f, g: g.offload == 0,
        lambda f, at: "everything is kept on devices",
    ),
    Rule(
        "states of CP ranks",
        lambda f, g: (g.context == 1) | (g.zero == 0) | (g.shard <= g.data),
        lambda f, at: "states are sharded over DP ranks alone, and not over those of a context axis",
    ),
    Rule(
        "CP ranks alike",
        lambda f, g: (g.ulysses == 1) | (g.ulysses == g.context),
        lambda f, at: "CP ranks exchange heads or send keys around, all of them alike",
    ),
    Rule(
        "EP ranks",
        lambda f, g: g.expert == 1,
        lambda f, at: "experts are dealt to ranks of an axis of their own, not to those of others",
    ),
    Rule(
        "states of stages",
        lambda f, g: (g.pipeline == 1) | (g.zero <= 1),
        lambda f, at: (
            "a pipeline's ranks gather parameters and reduce gradients once a step, so neither is divided between"
        ),
    ),
    Rule(
        "stages cut by work",
        lambda f, g: (g.ahead + g.behind) == 0,
        lambda f, at: "its stages are cut by work, not so that the first and the last have so many layers fewer",
    ),
)
"""What no plan can say: such a choice does not become one."""

RULES = (*SAID, *UNSAID)
"""Beside those of `planner.legality.engine`."""
RUNS = Able(staged=(0, 1), again=WHOLE, expert=1, uneven=0, rules=RULES)
"""For the search."""
