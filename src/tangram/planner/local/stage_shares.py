"""What each rank of a pipeline has of a model, and for how long it keeps it: the whole model is one stage of one rank.

The schedule's table is played through (`schema.schedule_table`), with the FLOPs of the layers as time, a backward of
twice its forward's, and what is recomputed once more:

    kept     micro-batches whose activations a stage keeps at a time
    slots    times of a micro-batch on the rank with most work in a step: more than there are micro-batches by those in
             which it waits (the bubble)

What lies outside of the layers counts as the last stage's, whose head is the most of it.

What one TP rank computes of a model, as derived, is a share of the matmuls and one of all other operators: for models
that no configuration says narrower (heads without a size of their own, state spaces, experts) the costs of the whole
model are scaled. Shares are of all layers, and of what lies outside of them.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from tangram.errors import UserError
from tangram.layout import Layout, Mesh, region
from tangram.models.capturing.graph import Graph
from tangram.models.outlines.costs import OUTSIDE, Made, ModelCosts, Parameter, Part, Work
from tangram.schema.plan import Plan, matches
from tangram.schema.schedule_table import Action, kept, simulate
from tangram.schema.tuning import base_of
from tangram.sharding.derive.derive import Derived
from tangram.sharding.derive.problem.rates import effort

Stages = tuple[tuple[str, ...], ...]
"""For each stage the modules whose parameters it has."""


@dataclass(frozen=True)
class Share:
    """What one rank of the pipeline axis has."""

    stages: tuple[int, ...]
    parameters: tuple[Parameter, ...]
    local: ModelCosts
    """Its parts of what one TP rank computes."""
    work: float
    """Its share of all work."""
    kept: tuple[int, ...]
    """For each of its stages."""
    activations: float
    """Bytes that its stages keep of micro-batches when it is most; of layers that are recomputed less."""
    slots: float


def recomputed(plan: Plan, block: str) -> bool:
    """Whether the forward of a block runs again in the backward."""
    return block != OUTSIDE and matches(plan.run.recompute, block)


def kept_bytes(plan: Plan, part: Part) -> float:
    """What a part keeps of a micro-batch for its backward.

    Of one that is recomputed: what goes in, and what operators make that do not run again (`run.recompute_keep`).
    """
    if not recomputed(plan, part.name):
        return part.kept_bytes
    made = sum(part.made[kind].nbytes for kind in plan.run.recompute_keep)
    return min(part.input_bytes + made, part.kept_bytes)


def again_flops(plan: Plan, part: Part) -> float:
    """What is computed once more in its backward."""
    if not recomputed(plan, part.name):
        return 0.0
    return part.forward_flops - sum(part.made[kind].flops for kind in plan.run.recompute_keep)


def shares(plan: Plan, parameters: Sequence[Parameter], local: ModelCosts) -> list[Share]:
    """What each rank has of a model with these parameters, of which a TP rank computes `local`."""
    table = plan.actions(1 if plan.pipeline is None else None)  # of one stage micro-batches follow each other
    last = table.stages - 1
    parts: list[list[Part]] = [[] for _ in range(table.stages)]
    for part in local.parts:
        parts[last if part.name == OUTSIDE else plan.stage_of(f"{part.name}.")].append(part)
    forward = [sum(part.forward_flops for part in own) for own in parts]
    again = [sum(again_flops(plan, part) for part in own) for own in parts]

    def flops(action: Action) -> float:
        more = again[action.stage] if action.kind in ("I", "B") else 0.0
        return (2 if action.kind == "B" else 1) * forward[action.stage] + more

    found = simulate(table, flops)
    sizes = [sum(kept_bytes(plan, part) for part in own) for own in parts]
    most = kept(table, sizes)
    rows = [table.stages_of(rank) for rank in range(table.ranks)]
    busiest = max(sum(3 * forward[stage] + again[stage] for stage in own) for own in rows)
    slots = found.seconds / busiest if busiest else float(table.micros)
    if plan.pipeline is None:
        slots = float(plan.micro_steps)
    total = sum(forward) or 1.0
    return [
        Share(
            own,
            tuple(p for p in parameters if plan.stage_of(p.name) in own or (last in own and plan.is_tied(p.name))),
            replace(
                local,
                parts=tuple(part for stage in own for part in parts[stage]),
                logits_bytes=local.logits_bytes if last in own else 0.0,
            ),
            sum(forward[stage] for stage in own) / total,
            tuple(found.alive[stage] for stage in own),
            most[rank],
            slots,
        )
        for rank, own in enumerate(rows)
    ]


def cut_into_stages(graph: Graph, costs: ModelCosts, parameters: Iterable[str], count: int) -> Stages:
    """The modules of each of `count` stages, cut between layers so that the stage with most work has least.

    `graph`: of the whole model, which says in what order modules run; `costs`: of its layers; `parameters`: by name,
    tied ones by each of theirs. What runs before the layers is the first stage's, what runs after them the last one's.
    Raises UserError where there are fewer layers.
    """
    first = {run.module: run.first for run in reversed(graph.runs)}
    blocks = sorted((part.name for part in costs.blocks), key=first.__getitem__)  # of all lists of modules
    if len(blocks) < count:
        raise UserError(f"the model has {len(blocks)} layers, too few for {count} stages")
    inside = tuple(f"{block}." for block in blocks)
    names = {base_of(name)[0] for name in parameters if not name.startswith(inside)}  # adapters go with their weights
    outside = sorted({name.rpartition(".")[0] for name in names}, key=first.__getitem__)
    before = [name for name in outside if first[name] < first[blocks[0]]]
    after = [name for name in outside if first[name] >= first[blocks[0]]]
    work = {part.name: part.forward_flops for part in costs.parts}
    bounds = _least_bounds([work[name] for name in blocks], work.get(OUTSIDE, 0.0), count)
    stages = [blocks[a:b] for a, b in itertools.pairwise([0, *bounds, len(blocks)])]
    stages[0], stages[-1] = [*before, *stages[0]], sorted([*stages[-1], *after], key=first.__getitem__)
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


@dataclass(frozen=True)
class TensorShare:
    """Of 1, what is done on a rank."""

    blocks: float = 1.0
    """Of matmuls inside of layers."""
    outside: float = 1.0
    """Of those outside, as the logits."""
    others: float = 1.0
    """Of the bytes that all other operators read and write."""


def tensor_share(found: Derived, axes: Collection[str]) -> TensorShare:
    """The share of a rank of some axes of a derivation."""
    folded, whole, own = found.folded, defaultdict[str, float](float), defaultdict[str, float](float)
    paths = tuple(f"{block.path}." for block in folded.graph.blocks)
    for step in folded.steps:
        does = effort(folded, step)
        kind = ("blocks" if f"{step.node.module}.".startswith(paths) else "outside") if does.product else "others"
        amount = float(does.flops if does.product else does.touched * bool(does.flops)) * step.times
        whole[kind] += amount
        own[kind] += amount * math.prod(
            over.communication[step.number].share for over in found.axes if over.axis in axes
        )
    return TensorShare(**{kind: own[kind] / whole[kind] for kind in whole if whole[kind]})


def scaled(costs: ModelCosts, share: TensorShare, *, logits: float = 1.0) -> ModelCosts:
    """The costs of a rank that has such a share, and so much of the logits."""
    forward, backward = (_work(work, costs, share) for work in (costs.forward, costs.backward))
    return replace(
        costs,
        parts=tuple(_part(part, share) for part in costs.parts),
        forward=forward,
        backward=backward,
        logits_bytes=costs.logits_bytes * logits,
    )


def _part(part: Part, share: TensorShare) -> Part:
    products = share.blocks if part.name else share.outside
    return replace(
        part,
        forward_flops=part.forward_flops * products,
        backward_flops=part.backward_flops * products,
        kept_bytes=part.kept_bytes * share.others,
        made={kind: Made(one.nbytes * products, one.flops * products) for kind, one in part.made.items()},
    )


def _work(work: Work, costs: ModelCosts, share: TensorShare) -> Work:
    flops = {inside: sum(p.forward_flops for p in costs.parts if bool(p.name) == inside) for inside in (True, False)}
    total = sum(flops.values()) or 1.0
    products = (flops[True] * share.blocks + flops[False] * share.outside) / total
    return Work(_times(work.products, products), _times(work.memory_traffic, share.others))


def _times(sizes: Sequence[float], share: float) -> tuple[float, ...]:
    return tuple(size * share for size in sizes)


def local_shapes(
    shapes: Mapping[str, tuple[int, ...]], dims: Mapping[str, str], axis: tuple[str, int]
) -> dict[str, tuple[int, ...]]:
    """The shapes of the first rank's parts over an axis (name and size), by each parameter's layout (as in `_/tp _`).

    No rank has more, as parts are made here: in chunks, of single places or of whole heads.
    """
    mesh, found = Mesh((((axis[0], axis[1]),),)), dict(shapes)
    for parameter, text in dims.items():
        layout = Layout.parse(text).bind(shapes[parameter])
        own = replace(layout, dims=tuple(dim.over(mesh.axes) for dim in layout.dims))
        found[parameter] = region(own, mesh, 0).local_shape or ()
    return found
