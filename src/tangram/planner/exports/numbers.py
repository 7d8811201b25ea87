"""The numbers of one strategy, pulled out once: what exports write and imports read back.

Nothing here knows a project: names are Tangram's own, sizes are those of `planner.space.grid`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from tangram.errors import UserError
from tangram.models.outlines.outline import Group, Outline
from tangram.planner.search.explain import StrategyRequest
from tangram.planner.search.strategy import Ask, Choice, mesh_of
from tangram.planner.space.layers_per_stage import sizes
from tangram.planner.space.recompute import again_of
from tangram.planner.space.setting import Precision


@dataclass(frozen=True)
class Numbers:
    """One strategy of a model on so many devices."""

    pipeline: int
    virtual: int
    """Chunks of layers that each PP rank has."""
    schedule: str
    """Of the pipeline, as `planner.space.schedule_formulas` names it; "" without one."""
    tensor: int
    sequence_parallel: bool
    context: int
    expert: int
    expert_tensor: int
    data: int
    zero: int
    """What is divided: 0 nothing, 1 the optimiser's states, 2 gradients too, 3 parameters too."""
    shard: int
    """Over how many of the DP and CP ranks; copies beyond it."""
    micro: int
    """Samples of a micro-batch."""
    batch: int
    """Samples of a step over all ranks."""
    sequence: int
    again: str
    """What is recomputed, as `planner.space.recompute` names it."""
    precision: Precision
    ulysses: int = 1
    """Of the CP ranks those that exchange heads."""
    ahead: int = 0
    """How many layers fewer the first virtual stage has."""
    behind: int = 0
    """And the last one."""
    inner: bool = False
    """Whether PP ranks lie within DP ranks, which are then farthest apart."""
    loss: str = ""
    """How it is made of the logits, where that was asked for (`planner.space.framework_profiles`)."""

    @property
    def micros(self) -> int:
        """Micro-batches of a step on each rank."""
        return max(math.ceil(self.batch / (self.data * self.micro)), 1)

    @property
    def ranks(self) -> int:
        """All devices."""
        return self.pipeline * self.tensor * self.context * self.data

    @property
    def copies(self) -> int:
        """How often the divided states are there."""
        return self.data * self.context // self.shard


@dataclass(frozen=True)
class Written:
    """A file for a project, and what the project does otherwise or has to be told elsewhere."""

    text: str
    notes: tuple[str, ...] = ()


def numbers_of(choice: Choice, ask: Ask) -> Numbers:
    """Of a choice that was made for `ask`."""
    at = {name: int(value) for name, value in choice.at.items()}
    return Numbers(
        pipeline=at["pipeline"], virtual=at["virtual"], schedule=choice.schedule, tensor=at["tensor"],
        sequence_parallel=bool(at["sequence_parallel"]), context=at["context"], expert=at["expert"],
        expert_tensor=at["expert_tensor"], data=at["data"], zero=at["zero"], shard=at["shard"], micro=choice.micro,
        batch=at["batch"] // ask.rows, sequence=at["sequence"], again=choice.again, precision=choice.precision,
        ulysses=at["ulysses"], ahead=at["ahead"], behind=at["behind"], inner=at["inner"] > 0,
        loss=ask.loss,
    )  # fmt: skip


def strategy_request(one: Numbers) -> StrategyRequest:
    """As a person would give it to `tangram plan explain`."""
    return StrategyRequest(
        mesh=mesh_of(one.pipeline, one.data, one.context, one.ulysses, one.tensor, inner=one.inner),
        micro=one.micro,
        chunks=one.virtual,
        schedule=one.schedule or "1F1B",
        zero=one.zero,
        again=one.again,
        experts=f"{one.expert} x {one.expert_tensor}",
        shard=one.shard,
        sequence_parallel=one.sequence_parallel,
        uneven=f"{one.ahead} {one.behind}",
    )


def recomputed(one: Numbers) -> tuple[Group, float]:
    """Which groups are recomputed, and in which share of the layers."""
    return again_of(one.again)


def some_blocks(one: Numbers, chunks: list[int], told: list[str]) -> int:
    """How many layers of each virtual stage are recomputed, where some are. Raises UserError where that is none or
    all."""
    _, share = recomputed(one)
    count = math.ceil(round(share * max(chunks), 9))
    if count >= max(chunks):
        raise UserError(f"whole layers are recomputed, and virtual stages of {max(chunks)} have no {one.again}")
    if any(not math.isclose(share * size, count) for size in chunks):
        told.append(
            f"{count} of the {max(chunks)} layers of each virtual stage are recomputed, not exactly {one.again}"
        )
    return count


def experts_of(outline: Outline) -> int:
    """Experts of the widest mixture; 0 where there is none."""
    return max((block.experts for block, _ in outline.runs), default=0)


def chunk_blocks(one: Numbers, outline: Outline, *, alone: bool = False) -> list[int]:
    """Blocks of each virtual stage in the order in which they run: as `planner.space.layers_per_stage` cuts them.

    Raises UserError where a virtual stage would have none; with `alone` the first and the last may, which have the
    embedding and the head.
    """
    chunks, ends = one.pipeline * one.virtual, (one.ahead > 0) + (one.behind > 0) if alone else 0
    if chunks > outline.layers + ends:
        raise UserError(f"{chunks} virtual stages are more than the {outline.layers} layers of {outline.name}")
    found = sizes(outline.layers, chunks, one.ahead, one.behind)
    if min(found) < (0 if ends else 1) or 0 in found[1:-1]:
        raise UserError(
            f"{one.ahead} and {one.behind} layers fewer of the first and the last of {chunks} virtual stages leave one "
            f"of them without any of the {outline.layers} layers"
        )
    return found


def uneven_words(one: Numbers, outline: Outline) -> str:
    """How layers are uneven over virtual stages, as a sentence."""
    less = [(one.ahead, "first"), (one.behind, "last")]
    fewer = [f"the {which} has {blocks} fewer" for blocks, which in less if blocks]
    said = " and ".join(fewer) or "the first ones have one more"
    return f"the {outline.layers} layers are uneven over {one.pipeline * one.virtual} virtual stages: {said}"


def comment(lines: tuple[str, ...]) -> str:
    """Lines behind a number sign."""
    return "".join(f"# {line}\n" for line in lines)
