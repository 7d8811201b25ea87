"""The joint space of strategies for a model, a cluster and a batch, as grids of legal configurations.

Every way to make the devices of stages, TP, CP and DP ranks, times what is folded into them (experts), how
states are divided, micro-batches, virtual stages of stages, and what is recomputed. Nothing is left out because it
seldom wins; what is left out is what the models say is never better (`DOMINATED`, which tests prove), and the rest is
laid down in tables here.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from tangram.models.outlines.outline import Group, Outline
from tangram.planner.legality.engine import Rule, facts_of, holding, legal
from tangram.planner.space.grid import Grid, grid, joined
from tangram.planner.space.optimisers_and_offload import Offload, away, moved_of
from tangram.planner.space.recompute import ALL_BLOCKS, NOTHING, SETS, SOME, Ladder
from tangram.planner.space.schedule_formulas import SCHEDULES, code, fewest, many

ZERO = (0, 1, 2, 3)
FASTEST_ZERO = 1
DOMINATED = (
    "TP ranks that do not divide the tokens between their matmuls: never faster, never smaller",
    "states divided over one rank: the same as not divided",
    "PP ranks within DP ranks, where no two stages fit a fast link, or all devices do: what stages send goes "
    "as far, and what DP ranks do is never nearer",
)
"""What is left out, since the models of time and memory say that it is never better."""


@dataclass(frozen=True)
class Able:
    """What runs a plan may not be able to run all of the space; so much of it is looked at."""

    zero: tuple[int, ...] = ZERO
    """What DP ranks may divide."""
    staged: tuple[int, ...] = ZERO
    """The same, of stages of a pipeline."""
    again: tuple[str, ...] = (NOTHING, *SETS, SOME, ALL_BLOCKS)
    """What may be recomputed, by its name (`planner.space.recompute`)."""
    shares: tuple[float, ...] | None = None
    """Of layers that are, where some are, between none and all; None: any number of a virtual stage's layers."""
    pipeline: int = 0
    """Stages at most; 0: any number."""
    tensor: int = 0
    """TP ranks at most; 0: any number."""
    context: int = 0
    """CP ranks at most; 0: any number."""
    ulysses: int = 0
    """Of them those that exchange heads at most; 0: any number."""
    expert: int = 0
    """EP ranks at most; 0: any number."""
    schedules: tuple[str, ...] = tuple(one.name for one in SCHEDULES)
    """Of pipelines, as far as what runs the plan has them, too."""
    inner: bool = True
    """Whether PP ranks may lie within DP ranks."""
    near: bool = True
    """Whether states may be divided over a part of the ranks that have them alike (HSDP)."""
    uneven: int = 2
    """Blocks fewer of the first and the last virtual stage that are tried at most: a limit of the search, not a
    theorem."""
    rules: tuple[Rule, ...] = ()
    """And what else; bounds do not look at them."""

    @property
    def ladder(self) -> Ladder | None:
        """Of shares of layers that may be recomputed."""
        return Ladder.of(self.again, self.shares)


ALL = Able()


@dataclass(frozen=True)
class Request:
    """What is asked of a plan."""

    devices: int
    batch: int
    """Samples of a step."""
    sequence: int
    """Tokens of a sample."""
    most_micro: int = 64
    """Samples of a micro-batch that are tried at most: a limit of the search, not a theorem."""
    schedules: tuple[str, ...] = ("1F1B", "Interleaved1F1B")
    """Of pipelines, what may be used."""
    able: Able = ALL
    node: int = 0
    """Devices at the same fast link: states are divided over those of a rank's copies there, too; 0: over all."""
    islands: tuple[int, ...] = ()
    """Devices that meet before each farther network."""
    optimisers: tuple[int, ...] = (0,)
    """Codes of kinds that may be used (`planner.space.optimisers_and_offload`)."""
    offloads: tuple[int, ...] = (0,)
    """What may be offloaded to the host, as bits of `means.Offload`; each of these may be taken."""

    @property
    def least_moved(self) -> tuple[int, int]:
        """The optimiser and what is offloaded to the host with which the device itself updates quickest."""
        away = any(one & int(Offload.OPTIMISER) for one in self.offloads)
        return min(self.optimisers, key=moved_of), int(Offload.OPTIMISER) if away else 0


def divisors(number: int) -> list[int]:
    """Of a number, ascending."""
    low = [n for n in range(1, int(number**0.5) + 1) if number % n == 0]
    return sorted({*low, *(number // n for n in low)})


def equal_parts(outline: Outline) -> int:
    """The most TP ranks that all matmuls which are cut have equal parts for: of models without heads."""
    cut = [one for block, _ in outline.kinds for one in block.products if one.cut]
    return math.gcd(*(one.outputs if one.cut == "out" else one.inputs for one in cut)) if cut else 1


MeshSizes = tuple[int, int, int, int, int]
"""PP, TP, CP and DP ranks, and how many of the CP ranks exchange heads."""


def meshes(outline: Outline, request: Request) -> Iterator[MeshSizes]:
    """All that make all devices."""
    heads = min((scores.heads for block, _ in outline.kinds for scores in block.scores), default=equal_parts(outline))
    for pipeline in divisors(request.devices):
        if pipeline > outline.layers:
            break
        if request.able.pipeline and pipeline > request.able.pipeline:
            break
        rest = request.devices // pipeline
        for tensor in divisors(rest):
            if request.able.tensor and tensor > request.able.tensor:
                break
            if heads % tensor:
                continue
            for context in divisors(rest // tensor):
                if request.able.context and context > request.able.context:
                    break
                if request.sequence % context:
                    continue
                data = rest // tensor // context
                if request.batch % data == 0:
                    ways = _ways(context, heads // tensor, request)
                    yield from ((pipeline, tensor, context, data, ulysses) for ulysses in ways)


def _ways(context: int, heads: int, request: Request) -> Iterator[int]:
    """How many of the CP ranks may exchange a TP rank's heads; the others are a ring, of two pieces each."""
    for ulysses in divisors(context):
        if request.able.ulysses and ulysses > request.able.ulysses:
            break
        ring = ulysses < context
        if heads % ulysses == 0 and not (ring and request.sequence % (2 * context)):
            yield ulysses


NEVER_QUICKER = {"Interleaved1F1B": "InterleavedZeroBubble", "DualPipeV": "ZBVZeroBubble"}
"""Schedules that are never quicker than another, which bounds leave out where that is there."""


def _staged(outline: Outline, pipeline: int, schedules: tuple[str, ...], *, bound: bool) -> list[tuple[int, int]]:
    """Chunks of each rank, and the code of the schedule."""
    if pipeline == 1:
        return [(1, 0)]
    left = [name for name in schedules if not (bound and NEVER_QUICKER.get(name) in schedules)]
    found: list[tuple[int, int]] = []
    for name in left:
        row = SCHEDULES[code(name)]
        most = outline.layers // pipeline
        counts = range(row.fewest, most + 1) if row.chunks == 0 else range(row.chunks, min(row.chunks, most) + 1)
        counts = counts[-1:] if bound else counts
        found += [(chunks, code(name)) for chunks in counts]
    return found


def of_mesh(outline: Outline, request: Request, mesh: MeshSizes, *, bound: bool = False) -> Grid:
    """All legal configurations of a mesh; with `bound` those of which one is as fast as any, with most virtual
    stages."""
    pipeline, tensor, context, data, ulysses = mesh
    experts = max((block.experts for block, _ in outline.runs), default=0)
    stage = tensor * context * data
    folded = [
        (expert, over)
        for over in divisors(tensor)
        for expert in (divisors(experts) if experts else [1])
        if stage % (expert * over) == 0 and not (request.able.expert and expert > request.able.expert)
    ]
    if not experts:
        folded = [(1, tensor)]
    micros = [n for n in divisors(request.batch // data) if n <= request.most_micro]
    staged = _staged(outline, pipeline, request.schedules, bound=bound)
    divided = request.able.staged if pipeline > 1 else request.able.zero
    zero = (divided if not bound else (FASTEST_ZERO,)) if data * context > 1 else (0,)
    again = [0] if bound else _again(request)
    divides = [(level, shard) for level in zero for shard in _shards(request, mesh, level, bound=bound)]
    ways = [request.least_moved] if bound else list(itertools.product(request.optimisers, request.offloads))
    places = [0, 1] if not bound and _placed(request, tensor * context, pipeline, data) else [0]
    axes = [len(part) for part in (folded, micros, staged, divides, again, ways, places)]
    at = np.indices(axes).reshape(len(axes), -1).T
    if not len(at):
        return grid(batch=request.batch, sequence=request.sequence).take(slice(0, 0))
    found = grid(
        batch=request.batch,
        sequence=request.sequence,
        pipeline=pipeline,
        tensor=tensor,
        sequence_parallel=float(tensor > 1 and request.sequence % (context * tensor) == 0),
        context=context,
        ulysses=ulysses,
        data=data,
        expert=np.array([one for one, _ in folded])[at[:, 0]],
        expert_tensor=np.array([one for _, one in folded])[at[:, 0]],
        micro=np.array(micros)[at[:, 1]],
        virtual=np.array([one for one, _ in staged])[at[:, 2]],
        schedule=np.array([one for _, one in staged])[at[:, 2]],
        zero=np.array([one for one, _ in divides])[at[:, 3]],
        shard=np.array([one for _, one in divides])[at[:, 3]],
        recompute=np.array(again)[at[:, 4]],
        optimiser=np.array([one for one, _ in ways])[at[:, 5]],
        offload=np.array([one for _, one in ways])[at[:, 5]],
        inner=np.array(places)[at[:, 6]],
    )
    if not bound:
        found = _by_share(outline, request, found)
    keep = legal(outline, found)
    if not bound:
        keep = keep & holding(facts_of(outline), found, request.able.rules)
    return found.take(keep)


def _placed(request: Request, together: Any, pipeline: Any, data: Any) -> Any:
    """Whether PP ranks are tried within DP ranks: where two stages, of so many ranks of a DP rank, fit where
    not all devices do, at a fast link or on an island."""
    widest = max((size for size in (request.node, *request.islands) if size < request.devices), default=0)
    fits = (2 * together <= widest) & request.able.inner
    return (pipeline > 1) & (data > 1) & fits


def _again(request: Request) -> list[int]:
    """Groups that are recomputed; 0, where it is whole layers, of which the least share stands for all."""
    able = request.able
    return [*([0] if able.ladder else []), *(int(group) for name, group in SETS.items() if name in able.again)]


def _least(outline: Outline, request: Request, found: Grid) -> Grid:
    """With the least share of layers that may be recomputed, where that is not none of them."""
    ladder = request.able.ladder
    if ladder is None or ladder.steps is None or not ladder.steps[0]:
        return found
    rows = ladder.with_shares(outline, found, np.zeros(len(found), dtype=np.int64))
    nothing = found.recompute == 0
    return replace(
        found,
        recompute=np.where(nothing, rows.recompute, found.recompute),
        recomputed=np.where(nothing, rows.recomputed, found.recomputed),
    )


def _by_share(outline: Outline, request: Request, found: Grid) -> Grid:
    """The same; where activations are offloaded to the host each share, in quarters, is a configuration of its own."""
    found, ladder = _least(outline, request, found), request.able.ladder
    own = away(found.offload)[2] & ((found.recompute == 0) | (found.recompute == int(Group.BLOCK)))
    return found if ladder is None or not own.any() else ladder.coarse.all_of(outline, found, own)


def _shards(request: Request, mesh: MeshSizes, level: int, *, bound: bool) -> list[int]:
    """Over how many of the DP and CP ranks states may be divided: all, or those at the same fast link (HSDP)."""
    _, tensor, context, data, _ = mesh
    over = context * data
    near = math.gcd(over, max(request.node // tensor, 1)) if request.able.near else 1
    return [over, near] if level and not bound and 1 < near < over else [over]


def _near(request: Request, level: int) -> tuple[bool, ...]:
    return (False, True) if level and request.node and request.able.near else (False,)


def scheduled(request: Request, rows: Grid) -> Grid:
    """Rows that `of_mesh` laid out with `bound`, by every schedule, with any number of virtual stages."""
    slower = {code(quick): code(name) for name, quick in NEVER_QUICKER.items() if name in request.schedules}
    twice = np.isin(rows.schedule, list(slower)) & (rows.pipeline > 1)
    other = rows.take(twice)
    schedules = np.array([slower[found] for found in other.schedule.tolist()], dtype=np.int64)
    return _chunked(joined([rows, replace(other, schedule=schedules)]))


def roomiest(request: Request, rows: Grid) -> list[tuple[Grid, Any]]:
    """Rows that `scheduled` laid out as they need least of a device: divided as far as they go, with parameters and
    without, by each kind of optimiser and of offloading; and which of them may be."""
    able, found = request.able, list[tuple[Grid, Any]]()
    for level, optimiser, offload in itertools.product((2, 3), request.optimisers, request.offloads):
        there = np.where(rows.pipeline > 1, level in able.staged, level in able.zero) | (level < 3)
        filled = {"zero": float(level), "optimiser": optimiser, "offload": offload}
        columns = {name: np.full(len(rows), value) for name, value in filled.items()}
        found.append((replace(rows, shard=rows.data * rows.context, **columns), there))
    return found


def remade(outline: Outline, request: Request, found: Grid) -> Grid:
    """Rows that `scheduled` laid out with everything that may be recomputed, and in any order of the axes."""
    again = _again(request)
    count = len(found)
    found = found.take(np.tile(np.arange(count), len(again)))
    found = replace(found, recompute=np.repeat(np.array(again, dtype=np.int64), count))
    placed = _placed(request, found.tensor * found.context, found.pipeline, found.data)
    within = found.take(placed)
    return _least(outline, request, joined([found, replace(within, inner=np.ones(len(within)))]))


def _chunked(rows: Grid) -> Grid:
    """With each number of virtual stages from the fewest to theirs, of schedules that take any."""
    any_ = (many(rows.schedule) == 0) & (rows.pipeline > 1)
    counts = np.where(any_, np.maximum(rows.virtual - fewest(rows.schedule) + 1, 0), 1).astype(np.int64)
    found = rows.take(np.repeat(np.arange(len(rows)), counts))
    place = np.arange(len(found)) - np.repeat(np.cumsum(counts) - counts, counts)
    return replace(found, virtual=found.virtual - place)


def expanded(outline: Outline, request: Request, found: Grid) -> Grid:
    """All legal configurations of rows that `remade` laid out: those of which each is as fast as any."""
    count = len(found)
    levels = [(level, near) for level in ZERO for near in _near(request, level)]
    ways = list(itertools.product(levels, request.optimisers, request.offloads))
    found = found.take(np.tile(np.arange(count), len(ways)))
    zero = np.repeat([float(level) for (level, _), *_ in ways], count)
    near = np.repeat([near for (_, near), *_ in ways], count)
    over = found.data * found.context
    there = np.maximum(request.node // found.tensor, 1)
    shard = np.where(near, np.gcd(over.astype(np.int64), there.astype(np.int64)), over)
    found = replace(
        found,
        zero=zero,
        shard=shard,
        optimiser=np.repeat([one for _, one, _ in ways], count),
        offload=np.repeat([one for *_, one in ways], count),
    )
    divides = found.data * found.context > 1
    staged = np.where(found.pipeline > 1, np.isin(zero, request.able.staged), np.isin(zero, request.able.zero))
    keep = np.where(divides, staged, zero == 0) & (~near | ((shard > 1) & (shard < over))) & legal(outline, found)
    found = _by_share(outline, request, found.take(keep))
    return found.take(holding(facts_of(outline), found, request.able.rules))
