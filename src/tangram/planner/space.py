"""The joint space of strategies for a model, a cluster and a batch, as grids of legal configurations.

Every way to make the devices of stages, tensor, context, heads and data ranks, times what is folded into them
(experts), how states are divided, micro-batches, chunks of stages, and what is computed again. Nothing is left out
because it seldom wins; what is left out is what the models say is never better (`DOMINATED`, which tests prove), and
the rest is laid down in tables here.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tangram.models.outline import Group, Outline
from tangram.planner.grid import Grid, grid
from tangram.planner.pipelines import SCHEDULES, code
from tangram.planner.rules import legal

__all__ = ["ALL", "EXPLAINED", "RECOMPUTED", "Able", "Mesh", "Request", "Rule", "meshes", "of_mesh"]

RECOMPUTED: tuple[tuple[str, Group, float], ...] = (
    ("nothing", Group.NONE, 1.0),
    ("norms and activations", Group.NORM | Group.ACTIVATION, 1.0),
    ("half of the blocks", Group.BLOCK, 0.5),
    ("all blocks", Group.BLOCK, 1.0),
)
"""What may be computed again in the backward: in words, its groups, in which share of the blocks."""
EXPLAINED: tuple[tuple[str, Group, float], ...] = (
    *RECOMPUTED,
    ("attention", Group.SCORES, 1.0),
    ("every second product", Group.ALTERNATE, 1.0),
)
"""And what else is explained where a strategy is given, as other projects have it, but not searched."""
ZERO = (0, 1, 2, 3)
FASTEST_ZERO = 1
DOMINATED = (
    "tensor ranks that do not divide the tokens between their products: never faster, never smaller",
    "states divided over one rank: the same as not divided",
)
"""What is left out, since the models of time and memory say that it is never better."""


@dataclass(frozen=True)
class Rule:
    """What configurations have to keep to be run by somebody."""

    why: str
    """Why others are not run, in words that follow "since"."""
    holds: Callable[[Grid], NDArray[np.bool_]]
    """Of each configuration."""


@dataclass(frozen=True)
class Able:
    """What runs a plan may not be able to run all of the space; so much of it is looked at."""

    zero: tuple[int, ...] = ZERO
    """What data ranks may divide."""
    staged: tuple[int, ...] = ZERO
    """The same, of stages of a pipeline."""
    again: tuple[str, ...] = tuple(name for name, _, _ in RECOMPUTED)
    """What may be computed again, by its name."""
    pipeline: int = 0
    """Stages at most; 0: any number."""
    tensor: int = 0
    """Tensor ranks at most; 0: any number."""
    context: int = 0
    """Context ranks at most; 0: any number."""
    ulysses: int = 1
    """Ranks that exchange heads for tokens (Ulysses) at most; 0: any number. None usually: with any number there are
    four times as many meshes to bound."""
    expert: int = 0
    """Expert ranks at most; 0: any number."""
    rules: tuple[Rule, ...] = ()
    """And what else; bounds do not look at them."""


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


def divisors(number: int) -> list[int]:
    """Of a number, ascending."""
    low = [n for n in range(1, int(number**0.5) + 1) if number % n == 0]
    return sorted({*low, *(number // n for n in low)})


class Mesh(NamedTuple):
    """How many ranks there are of each kind; their product is all devices."""

    pipeline: int
    tensor: int
    context: int
    ulysses: int
    data: int


def meshes(outline: Outline, request: Request) -> Iterator[Mesh]:
    """Ranks of every kind that make all devices, so that heads, tokens and samples divide."""
    heads = min((scores.heads for block, _ in outline.runs for scores in block.scores), default=1)
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
                if context > 1 and request.sequence % (2 * context):
                    continue
                for ulysses in _exchanging(outline, request, rest // tensor // context, context, heads // tensor):
                    data = rest // tensor // context // ulysses
                    if request.batch % data == 0:
                        yield Mesh(pipeline, tensor, context, ulysses, data)


def _exchanging(outline: Outline, request: Request, ranks: int, context: int, heads: int) -> list[int]:
    """Of so many ranks, how many may exchange so many heads for tokens, of which each has as many as the others."""
    most = request.able.ulysses or ranks
    if not all(block.scores for block, _ in outline.runs):
        most = 1
    pieces = 2 if context > 1 else 1
    return [
        n
        for n in divisors(ranks)
        if n == 1 or (n <= most and heads % n == 0 and request.sequence % (pieces * context * n) == 0)
    ]


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
        counts = range(2, most + 1) if row.chunks == 0 else range(row.chunks, min(row.chunks, most) + 1)
        found += [(chunks, code(name)) for chunks in counts]
    return found


def of_mesh(outline: Outline, request: Request, mesh: Mesh, *, bound: bool = False) -> Grid:
    """All legal configurations of a mesh; with `bound` those of which one is as fast as any."""
    pipeline, tensor, context, ulysses, data = mesh
    experts = max((block.experts for block, _ in outline.runs), default=0)
    alike = context * ulysses * data
    stage = tensor * alike
    folded = [
        (expert, over)
        for over in sorted({1, tensor})
        for expert in (divisors(experts) if experts else [1])
        if stage % (expert * over) == 0 and not (request.able.expert and expert > request.able.expert)
    ]
    if not experts:
        folded = [(1, tensor)]
    micros = [n for n in divisors(request.batch // data) if n <= request.most_micro]
    staged = _staged(outline, pipeline, request.schedules, bound=bound)
    divided = request.able.staged if pipeline > 1 else request.able.zero
    zero = (divided if not bound else (FASTEST_ZERO,)) if alike > 1 else (0,)
    again = RECOMPUTED[:1] if bound else tuple(row for row in RECOMPUTED if row[0] in request.able.again)
    axes = [range(len(part)) for part in (folded, micros, staged, zero, again)]
    at = np.array(list(itertools.product(*axes)))
    if not len(at):
        return grid(batch=request.batch, sequence=request.sequence).take(slice(0, 0))
    found = grid(
        batch=request.batch,
        sequence=request.sequence,
        pipeline=pipeline,
        tensor=tensor,
        sequence_parallel=float(tensor > 1 and request.sequence % (context * ulysses * tensor) == 0),
        context=context,
        ulysses=ulysses,
        data=data,
        expert=np.array([one for one, _ in folded])[at[:, 0]],
        expert_tensor=np.array([one for _, one in folded])[at[:, 0]],
        micro=np.array(micros)[at[:, 1]],
        virtual=np.array([one for one, _ in staged])[at[:, 2]],
        schedule=np.array([one for _, one in staged])[at[:, 2]],
        zero=np.array(zero)[at[:, 3]],
        recompute=np.array([int(group) for _, group, _ in again])[at[:, 4]],
        recomputed=np.array([share for _, _, share in again])[at[:, 4]],
    )
    keep = legal(outline, found)
    for rule in () if bound else request.able.rules:
        keep = keep & rule.holds(found)
    return found.take(keep)
