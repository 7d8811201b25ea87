"""Bytes that a rank needs, for every configuration of a grid at once: of the first stage, the last, and the worst.

At its peak a rank holds what it keeps all the time (parameters, gradients, optimiser's states), what the micro-batches
in flight left for their backward, and the largest of what comes and goes: logits and their gradient on the last stage,
the widest gradient of a block's backward with what is recomputed for it, what FSDP gathers, gradients that
matmuls write beside the kept ones.

    numbers      of a stage's layers, over TP and EP ranks; the first has the embedding, the last the head
    states       as the framework keeps them (`planner.space.framework_profiles`), sharded as `zero` says
    in flight    1F1B: stage i of p has p - i micro-batches; with v virtual stages a rank 2 (p - i - 1) + (v - 1) p + 1
                 of these, at most all (Narayanan et al. 2021; Megatron-LM, schedules.py); where the backward is split
                 v p on each rank, of DualPipeV one more (played: `planner.cost.memory_timeline`; a test compares)
    activations  a block's `Kept` rows that are not recomputed; of a block that is recomputed as a whole its input

Of a pipeline the first rank is looked at, the last, and those where layers of other sizes begin: a mixture's second
rank may need more than its first, which has the dense layers; and the second where the first has fewer layers. Which
layers a rank's virtual stages have is exact (`planner.space.layers_per_stage`), and so is what those in flight keep
where virtual stages are not alike (`planner.cost.in_flight`); where these go down the ranks and up again their mean is
taken, which is 9 % below to 21 % above what playing the schedule gives (`planner.cost.memory_timeline`).

Three totals: what tensors take (`allocated`), what the allocator holds for them (`reserved`), and what the device shows
(`device`), with the context and the libraries' workspaces, which are no tensors.

The trade-off: peaks of single kernels and the allocator's order of events are not played; their size is a share that
frameworks' entries say.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from typing import Any

import numpy as np

from tangram.models.outlines.outline import Group, Outline
from tangram.planner.cost.in_flight import in_flight, in_turn, kept_by_chunks, least_of, unlike_chunks
from tangram.planner.cost.kept_activations import block_activations, block_backward, weights_of_shapes
from tangram.planner.cost.model_state_bytes import divided, model_state_bytes, rank_weights
from tangram.planner.space.grid import OF_BLOCKS, Array, Grid, distinct
from tangram.planner.space.layers_per_stage import chunk_of, dealt
from tangram.planner.space.optimisers_and_offload import FULL, away
from tangram.planner.space.schedule_formulas import folded
from tangram.planner.space.setting import Setting


@dataclass(frozen=True)
class Rank:
    """Of a rank of one stage, in bytes; arrays over the grid."""

    parameters: Array
    gradients: Array
    optimiser: Array
    activations: Array
    passing: Array
    """The largest of what comes and goes: logits, a block recomputed, what is gathered."""
    host: Array
    """In the host's memory."""

    @property
    def allocated(self) -> Array:
        """The sum of what is on the device."""
        return sum((part for name, part in self.parts().items() if name != "host"), np.zeros(()))

    def parts(self) -> dict[str, Array]:
        """By name."""
        return {one.name: getattr(self, one.name) for one in fields(self)}


@dataclass(frozen=True)
class Memory:
    """Of all ranks."""

    first: Rank
    """Of the first stage: most micro-batches in flight."""
    last: Rank
    """Of the last stage: the head."""
    between: tuple[Rank, ...]
    """Of stages that may need more than both, where layers are not alike: the first with none of the small ones, and
    the one before it."""
    reserve: float
    """What the allocator holds beyond tensors, as a share of them."""
    context: Array
    """Bytes that are no tensors: the device's context, workspaces, communicators."""

    @property
    def allocated(self) -> Array:
        """Of the rank that needs most."""
        return self.worst.allocated

    @property
    def host(self) -> Array:
        """In the host's memory, of the rank that has most there."""
        return np.maximum.reduce([one.host for one in (self.first, self.last, *self.between)])

    @property
    def reserved(self) -> Array:
        """What the allocator holds there."""
        return self.allocated * (1 + self.reserve)

    @property
    def device(self) -> Array:
        """What the device shows."""
        return self.reserved + self.context

    @property
    def worst(self) -> Rank:
        """The rank that needs most, part by part."""
        found = self.first
        for one in (self.last, *self.between):
            found = _where(found.allocated >= one.allocated, found, one)
        return found


def memory(outline: Outline, g: Grid, setting: Setting) -> Memory:
    """Of each configuration of the grid."""
    takes = takes_of(outline, g, setting)
    first, last = (_rank(outline, g, setting, place, takes) for place in (np.zeros(len(g)), g.pipeline - 1))
    between = tuple(_rank(outline, g, setting, place, takes) for place in _unlike(outline, g))
    return Memory(first, last, between, setting.framework.reserve, context_of(g, setting))


def context_of(g: Grid, setting: Setting) -> Array:
    """Bytes that are no tensors."""
    return setting.framework.context + np.where(g.ranks > 1, setting.framework.communicators, 0.0)


def needs(outline: Outline, g: Grid, setting: Setting) -> Array:
    """Bytes that the device of the fullest rank shows; infinite where a host has not the memory for what waits."""
    of = memory(outline, g, setting)
    return np.where(of.host <= setting.host.memory_bytes, of.device, np.inf)


def at_rank(
    outline: Outline, g: Grid, setting: Setting, place: Array, counts: list[Array] | None = None,
    takes: Sequence[Takes] | None = None,
) -> Array:  # fmt: skip
    """`needs` of one rank of the pipeline, for each configuration that of its own; `counts`: if it had so many layers
    of each run. With more layers it is never less. A grid of one is of all places. `takes`: `takes_of`, if known."""
    framework, takes = setting.framework, takes_of(outline, g, setting) if takes is None else takes
    one = _rank(outline, g, setting, place, takes, counts)
    shown = one.allocated * (1 + framework.reserve) + context_of(g, setting)
    return np.where(one.host <= setting.host.memory_bytes, shown, np.inf)


def floor_of(outline: Outline, g: Grid, setting: Setting, uneven: int | None = None) -> Array:
    """Bytes below which `needs` cannot be, however layers are cut and recomputed, and whatever schedule's number of
    virtual stages there is: a rank has no less than the mean over PP ranks of states, and of what one micro-batch
    leaves where all layers are recomputed. `uneven`: by the schedule that each configuration has, with its layers
    recomputed and cut so that the first and the last virtual stage have so many layers fewer at most; with what its
    micro-batches in flight leave, and what comes and goes with any block."""
    if uneven is None:
        g = replace(g, recompute=np.full(len(g), int(Group.BLOCK)), recomputed=np.ones(len(g)))
    part = 1 / g.pipeline
    takes = takes_of(outline, g, setting, least=True)
    has = stage(outline, g, setting, [count * part for _, count in outline.runs], part, part, takes)
    states, weights, flows = away(g.offload)
    left, passing = has.kept + has.embedded, np.zeros(())
    if uneven is not None:
        first, last = (_flying(g, place) for place in (np.zeros(len(g)), g.pipeline - 1))
        chunks = g.pipeline * g.virtual  # each has so many blocks at least, but for the first and the last
        fewest = np.maximum(g.virtual * np.floor(outline.layers / chunks) - 2 * uneven * (g.pipeline > 1), 0.0)
        block = np.minimum.reduce([one.left for one in takes])
        # From rank to rank there are fewer in flight, by no smaller steps than before: no fewer than half of both ends.
        left = left * last + fewest * block * (first - last) / 2
        passing = np.where(fewest >= 1, np.minimum.reduce([_passing(outline, one, g, setting) for one in takes]), 0.0)
    kept = np.where(flows, 0.0, np.maximum(left - fresh(has, g, setting), 0.0))
    held = np.where(weights, 0.0, has.parameters + has.gradients)
    held = held + np.where(states, 1 - setting.away_share, 1.0) * has.optimiser + kept + passing
    return (held * (1 + setting.framework.reserve) + context_of(g, setting)) * (1 - 1e-9)  # sums in another order


def _flying(g: Grid, place: Array) -> Array:
    """So many micro-batches, or more, each of a rank's virtual stages has at one moment."""
    return np.where(in_turn(g), least_of(g, place), in_flight(g, place) / g.virtual)


def _passing(outline: Outline, one: Takes, g: Grid, setting: Setting) -> Array:
    """What comes and goes while the backward of a block of one kind works."""
    gathered, reduced = _gathered(one, setting)
    ends = outline.vocab * outline.hidden / g.tensor * max(setting.framework.gathered_bytes, setting.flow_bytes)
    spare = one.shapes * setting.framework.scratch_bytes + setting.framework.workspace
    return one.again + spare + np.where(g.zero >= 3, 2 * gathered + reduced + ends, 0.0)


def _gathered(one: Takes, setting: Setting) -> tuple[Array, Array]:
    """Bytes of a block's parameters as they are gathered, and of its gradients until they are divided."""
    wide = max(setting.framework.gathered_bytes, setting.flow_bytes)
    frozen = (one.gathered - one.trained) * (wide if setting.base is FULL else setting.base_bytes)
    return frozen + one.trained * wide, one.trained * setting.framework.reduce_bytes


BORDERS = 4
"""How many places where other layers begin are looked at, the first of a model whose kinds alternate: after these its
pattern begins anew on ranks that have fewer micro-batches in flight, with at most one block more of a kind."""


def _unlike(outline: Outline, g: Grid) -> list[Array]:
    """PP ranks about each place where layers of other sizes begin, as after a mixture's first dense layers; and
    the second, which may have more than the first where that has fewer layers."""
    found: list[Array] = []
    if (g.ahead + g.behind).any():
        found.append(np.minimum(g.pipeline - 1, 1.0))
    at, looked = 0, 0
    for (block, count), (after, _) in pairwise(outline.runs):
        at += count
        looked += block.numbers != after.numbers
        if looked > BORDERS:
            break
        if block.numbers != after.numbers and (g.pipeline > 1).any():
            chunk, beyond_it = chunk_of(outline, g, at)
            chunk = chunk + (beyond_it > 0)
            place = np.where(folded(g.schedule), np.minimum(chunk, g.pipeline - 1), chunk % g.pipeline)
            found += [place, np.maximum(place - 1, 0)]
    return found


def _where(mask: Array, one: Rank, other: Rank) -> Rank:
    of, rest = one.parts(), other.parts()
    return Rank(**{name: np.where(mask, of[name], rest[name]) for name in of})


def _rank(
    outline: Outline, g: Grid, setting: Setting, place: Array, takes: Sequence[Takes],
    counts: list[Array] | None = None,
) -> Rank:  # fmt: skip
    """One of the pipeline's ranks at its peak."""
    embeds, last = place == 0, place == g.pipeline - 1
    heads: Array = np.asarray(np.where(folded(g.schedule), embeds, last), dtype=float)
    has = stage(outline, g, setting, counts or dealt(outline, g, place), embeds * 1.0, heads, takes)
    flying = in_flight(g, place) / g.virtual
    most = np.maximum(has.logits, has.again)
    kept = has.kept * flying + has.embedded * flying
    if (uneven := unlike_chunks(outline, g, setting)).any():
        some, embedded = g.take(uneven), has.embedded[uneven]
        left = [one.left[uneven] for one in takes]
        if counts is None:
            ever, late = kept_by_chunks(outline, some, place[uneven], left, embedded)
            of_head = late + has.logits[uneven] > ever + has.again[uneven]
            of_head &= ~away(some.offload)[2]  # of activations in the host's memory few stay at any moment
            kept[uneven] = np.where(of_head, late, ever)
            alone = np.where(of_head, has.logits[uneven], has.again[uneven])
            most[uneven] = np.where(away(some.offload)[2], most[uneven], alone)
        else:  # in which of its virtual stages layers are is not known: no less than wherever they are
            kept[uneven] *= least_of(some, place[uneven]) * some.virtual / in_flight(some, place[uneven])
    kept = np.maximum(kept - fresh(has, g, setting), 0.0)
    passing = most + has.spare + has.workspace + has.gathered_behind
    passing = np.maximum(passing, has.step + has.spare + has.workspace - kept)
    one = Rank(has.parameters, has.gradients, has.optimiser, kept, passing, np.zeros(len(g)))
    return _offloaded(one, g, has.largest, setting.away_share) if g.offload.any() else one


def _offloaded(one: Rank, g: Grid, largest: Array, share: float) -> Rank:
    """With what waits in the host's memory there; of activations those of two layers are on their way."""
    states, weights, flows = away(g.offload)
    staying = np.minimum(one.activations, 2 * largest)
    host = np.where(weights, one.parameters + one.gradients, 0.0) + np.where(states, share * one.optimiser, 0.0)
    return Rank(
        np.where(weights, 0.0, one.parameters), np.where(weights, 0.0, one.gradients),
        np.where(states, 1 - share, 1.0) * one.optimiser, np.where(flows, staying, one.activations), one.passing,
        host + np.where(flows, one.activations - staying, 0.0),
    )  # fmt: skip


def fresh(has: Stage, g: Grid, setting: Setting) -> Array:
    """Bytes of gradients that take the place of what the forward kept."""
    return np.where((g.micros == 1) & setting.framework.fresh_gradients, has.gradients, 0.0)


@dataclass(frozen=True)
class Stage:
    """What so many layers, with the embedding and the head or without, take of a rank's bytes, and when."""

    parameters: Array
    gradients: Array
    optimiser: Array
    kept: Array
    """Of each micro-batch, from its forward to the end of its backward."""
    largest: Array
    """Of it the most that one block keeps."""
    embedded: Array
    """The same, of the embedding."""
    logits: Array
    """While the head works."""
    again: Array
    """While a backward works: what is recomputed, and the widest gradient."""
    spare: Array
    """Gradients that matmuls write beside the kept ones."""
    step: Array
    """While the optimiser works, when no activations are left."""
    workspace: float
    gathered_ahead: Array
    """While a forward works: parameters that are divided."""
    gathered_behind: Array
    """While a backward works: the same, and gradients that are not divided yet."""


@dataclass(frozen=True)
class Takes:
    """What one block takes, wherever it lies."""

    left: Array
    """Bytes that stay for the backward of a micro-batch."""
    again: Array
    """Bytes while its backward works."""
    shapes: Array
    """Numbers of a rank's weights, each shape once."""
    gathered: Array
    """Numbers of a rank's weights where DP ranks divide nothing."""
    trained: Array
    """Those of them that have gradients."""


def takes_of(outline: Outline, g: Grid, setting: Setting, *, least: bool = False) -> list[Takes]:
    """Of each kind of block; `least`: without what making a block again takes beside its backward, so that with fewer
    layers recomputed none takes less."""
    if len(g) > 1:
        few, places = distinct(g, OF_BLOCKS)
        if len(few) < len(g):
            found = takes_of(outline, few, setting, least=least)
            return [Takes(*(getattr(one, part.name).take(places) for part in fields(Takes))) for one in found]
    found: list[Takes] = []
    for block, _ in outline.predicting.by_kind([count for _, count in outline.predicting.runs]):
        numbers = block.numbers
        left, remade = block_activations(block, outline.hidden, g, setting)
        again = block_backward(block, outline.hidden, g, setting) + (0.0 if least else remade)
        gathered, trained = (
            one.tensor / g.tensor + one.replicated + one.experts / (g.expert * g.expert_tensor)
            for one in (numbers, block.trained if block.adapted else numbers)
        )
        found.append(Takes(left, again, weights_of_shapes(block, g), gathered, trained))
    return found


def stage(
    outline: Outline, g: Grid, setting: Setting, counts: list[Array], embeds: Array, heads: Any,
    takes: Sequence[Takes],
) -> Stage:  # fmt: skip
    """Of so many layers of each run; `embeds`, `heads`: 1 with the embedding, the head, else 0."""
    framework = setting.framework
    wide, cut = max(framework.gathered_bytes, setting.flow_bytes), g.zero >= 3
    kept, again, gathered, reduced, scratch, largest = (np.zeros(len(g)) for _ in range(6))
    tied, predictors, further = outline.tied, outline.predictors, outline.further + outline.positions * outline.hidden
    outline, counts = outline.predicting, [*counts, *([heads * predictors] if predictors else [])]
    for (_, count), one in zip(outline.by_kind(counts), takes, strict=True):
        there = count > 0
        kept, again = kept + count * one.left, np.maximum(again, np.where(there, one.again, 0.0))
        largest = np.maximum(largest, np.where(there, one.left, 0.0))
        scratch = np.maximum(scratch, np.where(there, one.shapes, 0.0))
        weights, gradients = _gathered(one, setting)
        gathered = np.maximum(gathered, np.where(there, weights, 0.0))
        reduced = np.maximum(reduced, np.where(there, gradients, 0.0))
    ends = outline.vocab * outline.hidden / g.tensor
    beside = ends * np.maximum(embeds, heads) if tied else ends * (embeds + heads)
    numbers = rank_weights(outline, g, counts, beside + further * embeds)
    each = setting.row_bytes * g.tokens / np.where(g.sequence_parallel > 0, g.tensor, 1.0)
    embedded = embeds * each * outline.hidden * (0.5 if framework.dropout else 0.0)
    # The head's weight has its gradient made while logits and theirs are there.
    head = logits(outline, g, setting) * (1 + predictors) + ends * framework.scratch_bytes
    updated = divided(g, numbers[1], 1)
    states = model_state_bytes(g, setting, *numbers)
    if setting.in_backward:  # of each parameter until it is updated: those of a block, or the head's
        trained = numbers[1].dense + numbers[1].routed
        most = np.maximum(scratch, np.where(np.asarray(numbers[1].ends) > 0, ends, 0.0))
        states = (states[0], states[1] * np.minimum(most / trained, 1.0), states[2])
    updated = np.where(cut, np.minimum(updated, framework.step_group or np.inf), updated)
    return Stage(
        *states, kept, largest, embedded, heads * head, again,
        scratch * framework.scratch_bytes, updated * framework.step_bytes,
        framework.workspace,
        np.where(cut, 2 * gathered + ends * wide, 0.0),
        np.where(cut, 2 * gathered + reduced + ends * wide, 0.0),
    )  # fmt: skip


def logits(outline: Outline, g: Grid, setting: Setting) -> Array:
    """Of a micro-batch, with what the loss makes of them, and where ranks keep what they gathered the head's input."""
    whole, cut = (np.asarray(setting.logit_bytes(g.tokens, over_ranks=over)) for over in (False, True))
    found = g.tokens * outline.vocab / g.tensor * np.where(g.tensor > 1, cut, whole)
    if setting.beside is not None and setting.beside.teacher:  # hidden states wait at the last stage
        waiting = np.where(g.pipeline > 1, g.micros * setting.beside.teacher, 0.0)
        found = found + setting.flow_bytes * g.tokens * (outline.vocab / g.tensor + waiting)
    if not setting.framework.keeps_gathered:
        return found
    return found + np.where(g.sequence_parallel > 0, 2 * setting.flow_bytes * g.tokens * outline.hidden, 0.0)
