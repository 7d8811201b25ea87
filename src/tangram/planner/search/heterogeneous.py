"""Strategies over parts of a cluster that are not alike: other devices, other nodes, a slower link between them.

Each stage of a pipeline lies within one part, and all stages have as many TP, CP and DP ranks, so that a
part has a whole number of stages. The parts follow each other in some order, and the layers are cut so that the step is
the quickest in which each stage fits its own devices (`planner.space.stage_cuts`). What a block takes and needs on a
part is what the models of time and memory say with that part's `Setting`; what goes from part to part is priced here,
and no more.

Searched are all meshes, micro-batches, folded experts, orders of the parts, ZeRO-1 or none, and nothing, norms and
activations or all layers recomputed, for 1F1B. What is found is what trying all of them finds: configurations are
tried in the order of a bound (`_bounds`), until no other can be among the best.

The trade-off: one number of TP, CP and DP ranks for all parts keeps what a stage hands on in one layout and
the search small; parts without a common divisor lie idle in part. What published runs have taught is not applied: it is
learned from devices that are alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise, permutations

import numpy as np
from numpy.typing import NDArray

from tangram.errors import UserError
from tangram.hardware.catalogue import curves
from tangram.hardware.catalogue.cluster import Cluster
from tangram.models.outlines.outline import Outline
from tangram.planner.cost.calibration import Learned
from tangram.planner.cost.communication_time import optimiser_seconds
from tangram.planner.cost.memory import Takes, at_rank, takes_of
from tangram.planner.cost.step_time import block_seconds, hop_seconds, passes_of
from tangram.planner.legality.enumerate import Able, Request, meshes, of_mesh
from tangram.planner.legality.exclusions import required
from tangram.planner.search.by_precision import ranked
from tangram.planner.search.query import requested
from tangram.planner.search.strategy import Ask, Choice, limit_of, mesh_of, safe, setting_of
from tangram.planner.space.grid import Grid, joined
from tangram.planner.space.layers_per_stage import counts_of
from tangram.planner.space.recompute import ALL_BLOCKS, NOTHING, SETS, again_name
from tangram.planner.space.setting import Setting
from tangram.planner.space.stage_cuts import best_cut

__all__ = ["MOST_PARTS", "Mixed", "Part", "alone", "enough", "over_parts", "parts_of"]

UNTAUGHT = Learned((), np.zeros(0), np.zeros((0, 0)), 0.0)

Floats = NDArray[np.float64]
Places = NDArray[np.int64]

ABLE = Able(zero=(0, 1), staged=(0, 1), again=(NOTHING, *SETS, ALL_BLOCKS), near=False, inner=False)
MOST_PARTS = 4
"""Each of their orders is tried."""


@dataclass(frozen=True)
class Part:
    """Some of the devices, all alike."""

    cluster: Cluster
    setting: Setting
    limit: float
    """Bytes that may be predicted for a rank."""


@dataclass(frozen=True)
class Mixed:
    """One strategy."""

    parts: tuple[int, ...]
    """Which of the parts has the first stages, which the next ones, and so on."""
    mesh: str
    micro: int
    micros: int
    expert: int
    expert_tensor: int
    zero: int
    again: str
    """What is recomputed in the backward."""
    blocks: tuple[tuple[int, ...], ...]
    """Of each part's stages, in the order of `parts`."""
    stage: tuple[float, ...]
    """Of each part seconds of a micro-batch on its longest stage."""
    memory: tuple[float, ...]
    """Of each part bytes of the fullest rank, as its device shows them."""
    step: float
    """Seconds."""
    tokens_per_device: float
    """In a second, of all devices on the mean."""


def parts_of(clusters: Sequence[Cluster], ask: Ask) -> tuple[Part, ...]:
    """Each with what holds on it. Raises UserError for too few or many, and for what only a cluster of one is asked."""
    if not 2 <= len(clusters) <= MOST_PARTS:
        raise UserError(f"a cluster has 2 to {MOST_PARTS} parts: name their files with commas between")
    if ask.devices:
        raise UserError("parts of a cluster are planned with all of their devices: leave --gpus out")
    if ask.without:
        raise UserError("parts of a cluster are planned with what they have in common: leave --without out")
    if ask.others or ask.optimisers != (0,) or any(ask.offloads) or ask.save_every:
        raise UserError("parts of a cluster are planned with one precision, AdamW on the devices and no checkpoints")
    return tuple(Part(one, setting_of(one, ask), safe(limit_of(one, ask))) for one in clusters)


def over_parts(outline: Outline, parts: Sequence[Part], ask: Ask, between: float) -> tuple[Mixed, ...]:
    """The quickest strategies that fit, each in its best order of parts, the quickest first, `ask.most` at most; none
    where none fits.

    `between`: bytes per second that a device gets of another part's. Raises UserError where no mesh suits all parts.
    """
    if not 0 < between < np.inf:
        raise UserError("what a device gets from another part is a number of GB/s above 0: give --between")
    if outline.images:
        raise UserError(f"{outline.name} sees images, and parts share a model by stages: PP of it is not planned yet")
    g = _space(outline, parts, ask)
    g = g.take(_roomy(outline, parts, g))
    prices = [_prices(outline, g, part, between) for part in parts]
    bounds = _bounds(outline, parts, prices, g) if len(g) else np.zeros(0)
    found: list[Mixed] = []
    for at in np.argsort(bounds, kind="stable").tolist():
        if len(found) == ask.most and bounds[at] >= found[-1].step:
            break
        one = _Priced(outline, g.take(slice(at, at + 1)), parts, [each.at(at) for each in prices])
        made = [each for order in _orders(parts) if (each := one.in_order(order, ask)) is not None]
        quickest = sorted(made, key=lambda each: each.step)[:1]
        found = sorted([*found, *quickest], key=lambda each: (each.step, max(each.memory)))[: ask.most]
    return tuple(found)


def alone(outline: Outline, part: Part, ask: Ask) -> Choice | None:
    """The quickest on one part alone, of the whole space, with as little taught as is known of several parts; None
    where nothing fits, or no mesh has all its devices."""
    try:
        request = requested(part.cluster, ask)
        found = ranked(outline, part.cluster, ask, request, limit_of(part.cluster, ask), 1, UNTAUGHT)
    except UserError:
        return None
    return found.choices[0] if found.choices else None


def enough(outline: Outline, parts: Sequence[Part], ask: Ask, between: float) -> int:
    """With how many times the memory of every part something fits: 2, 4, ..., or 0 where 16 times are not enough."""
    for times in (2, 4, 8, 16):
        larger = [replace(part, limit=part.limit * times) for part in parts]
        if over_parts(outline, larger, replace(ask, most=1), between):
            return times
    return 0


def _space(outline: Outline, parts: Sequence[Part], ask: Ask) -> Grid:
    ranks = [part.cluster.ranks for part in parts]
    if ask.sequence < 1 or ask.tokens < ask.sequence or ask.tokens % ask.sequence:
        raise UserError(f"{ask.tokens} tokens are no samples of {ask.sequence}: give a multiple of it")
    request = Request(
        sum(ranks),
        ask.tokens // ask.sequence,
        ask.sequence,
        schedules=("1F1B",),
        able=required(ABLE, ask.in_backward, ask.rows),
    )
    fitting = [mesh for mesh in meshes(outline, request) if not any(count % (sum(ranks) // mesh[0]) for count in ranks)]
    rows = [row for mesh in fitting if len(row := of_mesh(outline, request, mesh))]
    if not rows:
        raise UserError(
            f"no mesh of {' + '.join(map(str, ranks))} devices has whole stages in each part for {outline.name} in "
            f"{request.batch} samples: change the batch, or leave devices out so that there are common divisors"
        )
    found = joined(rows)
    ladder = ABLE.ladder
    return found if ladder is None else ladder.all_of(outline, found, found.recompute == 0)


def _roomy(outline: Outline, parts: Sequence[Part], g: Grid) -> Places:
    """Configurations whose stages together have room for all layers of each kind, if they had no others.

    Before the last stage no rank has fewer micro-batches in flight than the one before it; beyond that only the last,
    which has the head.
    """
    keep = np.ones(len(g), dtype=bool)
    runs = [block for block, _ in outline.runs]
    for block, total in outline.kinds:
        room = np.zeros(len(g))
        for part in parts:
            places = (np.maximum(g.pipeline - 2.0, 0.0), g.pipeline - 1.0)
            most = [_most(outline, part, g, place, runs.index(block), total) for place in places]
            room = room + _stages(part, g) * np.maximum.reduce(most)
        keep &= room >= total
    return np.flatnonzero(keep)


def _most(outline: Outline, part: Part, g: Grid, place: Floats, run: int, total: int) -> Floats:
    """How many layers of one kind, of so many, a rank at a place has room for, if it has no others."""
    takes = takes_of(outline, g, part.setting)
    none = [np.zeros(len(g)) for _ in outline.runs]
    low, high = np.zeros(len(g)), np.full(len(g), float(total))
    while (low < high).any():
        middle = np.ceil((low + high) / 2)
        counts = [middle if at == run else zero for at, zero in enumerate(none)]
        fits = at_rank(outline, g, part.setting, place, counts, takes) <= part.limit
        low, high = np.where(fits, middle, low), np.where(fits, high, np.minimum(middle - 1, high))
        high = np.maximum(low, high)
    return low


def _stages(part: Part, g: Grid) -> Floats:
    """How many a part has."""
    return part.cluster.ranks / (g.tensor * g.context * g.data)


def _orders(parts: Sequence[Part]) -> list[tuple[int, ...]]:
    """Of parts that are alike one order stands for all."""
    clusters = [part.cluster for part in parts]
    found: dict[tuple[int, ...], tuple[int, ...]] = {}
    for order in permutations(range(len(parts))):
        found.setdefault(tuple(clusters.index(clusters[at]) for at in order), order)
    return list(found.values())


@dataclass(frozen=True)
class _Prices:
    """Seconds on one part, arrays over the grid."""

    blocks: tuple[Floats, ...]
    """Of a micro-batch through one block of each run."""
    head: Floats
    """And through the head."""
    beside: Floats
    """Of a step beside its micro-batches, on a stage with the mean of layers."""
    hop: Floats
    """Of what a stage hands on, one way."""

    def at(self, place: int) -> _Prices:
        """Of one configuration."""
        one = slice(place, place + 1)
        return _Prices(tuple(each[one] for each in self.blocks), self.head[one], self.beside[one], self.hop[one])


def _prices(outline: Outline, g: Grid, part: Part, between: float) -> _Prices:
    setting, g = part.setting, part.setting.met(g)
    passes = passes_of(outline, g, setting)
    nbytes = g.tokens * outline.hidden * setting.flow_bytes / np.where(g.sequence_parallel > 0, g.tensor, 1.0)
    own = replace(g, pipeline=_stages(part, g))  # between these a micro-batch stays within the part
    far = curves.collective_seconds(
        setting.device, "p2p", nbytes, np.full(len(g), 2.0), near=np.ones(len(g)), nic=between
    )
    return _Prices(
        tuple(block_seconds(outline, g, setting)),
        passes.head,
        passes.data(outline, g, setting).step(g) + optimiser_seconds(outline, g, setting),
        np.maximum(hop_seconds(outline, own, setting), far),
    )


def _hops(prices: Sequence[_Prices]) -> Floats:
    """Each as long as the longest, since all ranks send at the same time: of each micro-batch once, for a rank has one
    neighbour at most in another part, and one way and back for the filling."""
    return np.maximum.reduce([each.hop for each in prices])


def _bounds(outline: Outline, parts: Sequence[Part], prices: Sequence[_Prices], g: Grid) -> Floats:
    """Of each configuration seconds that no cut in no order is quicker than.

    A block is so much of all work as it takes of all layers on the first part. On a part no stage does more of it in a
    second than with the block that suits the part best, and all stages work at most as long as the longest; which is
    long enough, too, for stages of whole layers to have all of them, if each took as long as the quickest.
    """
    counts = [count for _, count in outline.runs]
    whole = np.asarray(sum(count * one for count, one in zip(counts, prices[0].blocks, strict=True)))
    least = [
        np.minimum.reduce([own / first * whole for own, first in zip(each.blocks, prices[0].blocks, strict=True)])
        for each in prices
    ]
    stages = [_stages(part, g) for part in parts]
    rate = np.asarray(sum(count / all_ for count, all_ in zip(stages, least, strict=True)))
    longest = np.maximum(
        1 / rate, _filling_seconds(stages, [np.minimum.reduce(each.blocks) for each in prices], outline.layers)
    )
    through = (g.micros - 1) * longest + np.minimum.reduce(least)
    beside = np.minimum.reduce([each.beside for each in prices])  # some stage has as many blocks as the mean or more
    return through + _hops(prices) * (2 * g.pipeline - 3 + g.micros) + beside


def _filling_seconds(stages: Sequence[Floats], each: Sequence[Floats], blocks: int) -> Floats:
    """Seconds in which so many stages of each part do not have all layers yet, if one takes them `each`; less than
    seconds in which they do by a millionth at most."""
    low: Floats = np.zeros_like(each[0])
    high: Floats = np.maximum.reduce(each) * blocks
    for _ in range(20):
        middle = (low + high) / 2
        done: Floats = np.asarray(sum(count * np.floor(middle / one) for count, one in zip(stages, each, strict=True)))
        low, high = np.where(done < blocks, middle, low), np.where(done < blocks, high, middle)
    return low


@dataclass(frozen=True)
class _Priced:
    """One configuration, as a grid of one, with its prices on each part."""

    outline: Outline
    one: Grid
    parts: Sequence[Part]
    prices: Sequence[_Prices]

    def in_order(self, order: tuple[int, ...], ask: Ask) -> Mixed | None:
        """With the best cut of the layers over parts in an order; None where none fits."""
        one, micros = self.one, int(self.one.micros[0])
        of = [at for at in order for _ in range(self._stages(at))]  # which part a stage is of
        costs_of = {at: self._costs(at) for at in order}
        costs = [costs_of[at] for at in of]
        costs[-1] = costs[-1] + float(self.prices[order[-1]].head[0])
        beside = [float(self.prices[at].beside[0]) * len(of) / self.outline.layers for at in of]
        through, ends = best_cut(costs, self._reaches(order), micros, beside)
        if not ends:
            return None
        pieces = list(pairwise([0, *ends]))
        took = [float(cost[piece]) for cost, piece in zip(costs, pieces, strict=True)]
        step = through + float(_hops(self.prices)[0]) * (2 * len(of) - 3 + micros)
        said = {name: int(values[0]) for name, values in one.columns().items()}
        stages = [slice(of.index(at), of.index(at) + self._stages(at)) for at in order]
        return Mixed(
            order,
            mesh_of(said["pipeline"], said["data"], said["context"], said["ulysses"], said["tensor"]),
            said["micro"] // ask.rows, micros, said["expert"], said["expert_tensor"], said["zero"],
            again_name(said["recompute"], float(one.recomputed[0])),
            tuple(tuple(end - start for start, end in pieces[each]) for each in stages),
            tuple(max(took[each]) for each in stages),
            tuple(self._fullest(at, each.start, pieces[each]) for at, each in zip(order, stages, strict=True)),
            step, ask.tokens_met / step / float(one.ranks[0]),
        )  # fmt: skip

    def _stages(self, part: int) -> int:
        return int(_stages(self.parts[part], self.one)[0])

    def _costs(self, part: int) -> Floats:
        """Shape (layers + 1, layers + 1): seconds of a stage from the row's block to before the column's."""
        runs = zip(self.outline.runs, self.prices[part].blocks, strict=True)
        each = [float(took[0]) for (_, count), took in runs for _ in range(count)]
        ends = np.array(list(accumulate(each, initial=0.0)))
        return np.maximum(ends[None, :] - ends[:, None], 0.0)

    def _reaches(self, order: Sequence[int]) -> list[Places]:
        """Of each stage, and each block that it may begin at, behind which block it may end at most: with more layers a
        rank never needs less, so halves are left out until it is known."""
        blocks, first = self.outline.layers, 0
        found: list[Places] = []
        for at in order:
            part, stages = self.parts[at], self._stages(at)
            takes = takes_of(self.outline, self.one, part.setting)
            place = np.repeat(np.arange(first, first + stages), blocks + 1)
            start = np.tile(np.arange(blocks + 1), stages)
            low, high = start.copy(), np.full(len(start), blocks)
            while (open_ := np.flatnonzero(low < high)).size:
                middle = (low[open_] + high[open_] + 1) // 2
                fits = self._bytes(part, place[open_], start[open_], middle, takes) <= part.limit
                low[open_] = np.where(fits, middle, low[open_])
                high[open_] = np.where(fits, high[open_], middle - 1)
            found += list(low.reshape(-1, blocks + 1))
            first += stages
        return found

    def _fullest(self, part: int, first: int, pieces: Sequence[tuple[int, int]]) -> float:
        """Bytes of the fullest rank of a part whose stages, from the `first` one on, have these layers."""
        start, end = np.array(pieces).T
        of = self.parts[part]
        takes = takes_of(self.outline, self.one, of.setting)
        return float(self._bytes(of, first + np.arange(len(pieces)), start, end, takes).max())

    def _bytes(self, part: Part, place: Places, start: Places, end: Places, takes: Sequence[Takes]) -> Floats:
        """That ranks of a part at these places of the pipeline need with layers from `start` to before `end`."""
        counts = counts_of(self.outline, start, end)
        return at_rank(self.outline, self.one, part.setting, place.astype(float), counts, takes)
