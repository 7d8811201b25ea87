"""What each stage of a pipeline has of a model, and for how long it keeps it: the whole model is one stage.

    kept     micro-batches whose activations a stage keeps at a time: all of a step with GPipe; with 1F1B as many as
             there are stages from it to the end
    slots    times of a micro-batch in a step, M + stages - 1: the last are those in which a stage waits (the bubble)

Sources: GPipe (Huang et al. 2019), PipeDream-flush or 1F1B (Narayanan et al. 2021). Work is dealt to stages as the
FLOPs of their blocks; what lies outside of the blocks counts as the last stage's, whose head is the most of it.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

from tangram.errors import UserError
from tangram.models.costs import OUTSIDE, ModelCosts, Parameter
from tangram.models.graph import Graph
from tangram.planner.plan import Plan


@dataclass(frozen=True)
class Share:
    """What one stage has."""

    parameters: tuple[Parameter, ...]
    local: ModelCosts
    """Its parts of what one tensor rank computes."""
    work: float
    """Its share of all work."""
    kept: int
    slots: int


def shares(plan: Plan, parameters: Sequence[Parameter], local: ModelCosts) -> list[Share]:
    """What each stage has of a model with these parameters, of which a tensor rank computes `local`."""
    count = plan.micro_steps
    if plan.pipeline is None:
        return [Share(tuple(parameters), local, 1.0, 1, count)]
    stages = len(plan.pipeline.stages)
    flops = sum(part.forward_flops for part in local.parts) or 1.0
    found: list[Share] = []
    for stage in range(stages):
        last = stage == stages - 1
        parts = tuple(p for p in local.parts if (last if p.name == OUTSIDE else plan.stage_of(f"{p.name}.") == stage))
        kept = count if plan.pipeline.schedule == "GPipe" else min(count, stages - stage)
        found.append(
            Share(
                tuple(one for one in parameters if plan.stage_of(one.name) == stage),
                replace(local, parts=parts, logits_bytes=local.logits_bytes if last else 0.0),
                sum(part.forward_flops for part in parts) / flops,
                kept,
                count + stages - 1,
            )
        )
    return found


def cut_into_stages(graph: Graph, costs: ModelCosts, count: int) -> tuple[tuple[str, ...], ...]:
    """The modules of each of `count` stages, cut between blocks so that the stage with most work has least.

    `graph`: of the whole model, which says in what order modules run; `costs`: of its blocks. What runs before the
    blocks is the first stage's, what runs after them the last one's. Raises UserError where there are fewer blocks.
    """
    blocks = [part.name for part in costs.blocks]
    if len(blocks) < count:
        raise UserError(f"the model has {len(blocks)} blocks, too few for {count} stages")
    first = {run.module: run.first for run in reversed(graph.runs)}
    outside = sorted({p.name.rpartition(".")[0] for p in costs.parameters if p.block == OUTSIDE}, key=first.__getitem__)
    before = [name for name in outside if first[name] < first[blocks[0]]]
    after = [name for name in outside if first[name] >= first[blocks[0]]]
    work = {part.name: part.forward_flops for part in costs.parts}
    bounds = _least_bounds([work[name] for name in blocks], work.get(OUTSIDE, 0.0), count)
    stages = [blocks[a:b] for a, b in itertools.pairwise([0, *bounds, len(blocks)])]
    stages[0], stages[-1] = [*before, *stages[0]], [*stages[-1], *after]
    return tuple(map(tuple, stages))


def _least_bounds(work: Sequence[float], end: float, count: int) -> tuple[int, ...]:
    """Where to cut a row so that the largest sum of a part is least; the last part has `end` more. Exact."""
    known: dict[tuple[int, int], tuple[float, tuple[int, ...]]] = {}

    def best(start: int, parts: int) -> tuple[float, tuple[int, ...]]:
        """Of what begins at `start`, in so many parts."""
        if (start, parts) in known:
            return known[start, parts]
        if parts == 1:
            found = sum(work[start:]) + end, ()
        else:
            choices: list[tuple[float, tuple[int, ...]]] = []
            for cut in range(start + 1, len(work) - parts + 2):
                rest, bounds = best(cut, parts - 1)
                choices.append((max(sum(work[start:cut]), rest), (cut, *bounds)))
            found = min(choices)
        known[start, parts] = found
        return found

    return best(0, count)[1]
