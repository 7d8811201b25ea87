"""Seconds of a training step, for every configuration of a grid at once, by what they are spent on.

A step is so many micro-batches through a pipeline, then what DP ranks still have to sum, then the optimiser:

    step = M max_i(s_i) + (sum_i(s_i) - max_i(s_i)) / v  +  hops  +  exposed data traffic  +  optimiser

with s_i the forward and backward of a micro-batch on stage i, of one virtual stage with what it sends, and v virtual
stages a rank (Narayanan et al. 2021, 2.2, for equal stages); what this is above a stage's own share of the work is
idle. A micro-batch hops from rank to rank once each way while the pipeline fills and drains. What a pass through a
block takes is `planner.cost.block_time`.

What runs beside (gradients summed under the backward, parameters gathered under computation) counts as far as it does
not fit under what leaves its link free. Every part is an array of seconds on the longest way through the step; they add
up to the step, which is no shorter than any link is busy (`Seconds.links`).

The trade-off: a closed form knows no jitter, and of virtual stages neither their single layers nor what a link carries
at which moment; `planner.cost.timeline` plays that, and tests compare.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from tangram.hardware.catalogue import curves
from tangram.models.outlines.outline import Block, Outline
from tangram.planner.cost.block_time import PARTS as BLOCKS
from tangram.planner.cost.block_time import Pass, Ways, none
from tangram.planner.cost.communication_time import (
    Data,
    HostTraffic,
    data_traffic,
    exchange,
    host_traffic,
    links_of,
    no_links,
    optimiser_seconds,
)
from tangram.planner.space.grid import OF_BLOCKS, Array, Grid, distinct
from tangram.planner.space.layers_per_stage import cut
from tangram.planner.space.schedule_formulas import folded, splits
from tangram.planner.space.setting import Setting


@dataclass(frozen=True)
class Seconds:
    """Of a step, by what they are spent on; arrays over the grid."""

    products: Array
    attention: Array
    streams: Array
    head: Array
    """The embedding's end of the model: logits, loss."""
    launch: Array
    """In which devices wait for the host."""
    tensor: Array
    expert: Array
    context: Array
    stages: Array
    """Sent between stages."""
    idle: Array
    """In which a stage waits for others: for the slowest, and while the pipeline fills and drains."""
    data: Array
    """Gradients and parameters over DP ranks, as far as nothing covers them."""
    optimiser: Array
    host: Array
    """In which devices wait for what is in their hosts' memory."""

    links: Mapping[str, Array]
    """Seconds of a step that each link carries something, by name and direction."""

    @property
    def step(self) -> Array:
        """The sum of the parts."""
        return sum(self.parts().values(), np.zeros(()))

    @property
    def busiest(self) -> Array:
        """Seconds of the link that has most to carry."""
        return np.maximum.reduce([*self.links.values()]) if self.links else np.zeros(())

    def parts(self) -> dict[str, Array]:
        """By name."""
        return {name: getattr(self, name) for name in PARTS}


PARTS = tuple(one.name for one in fields(Seconds) if one.name != "links")
"""What a step's seconds are spent on."""
COVERED = ("data", "host")
"""What may be less where more is computed: it runs beside."""
Scales = Mapping[str, float] | None
"""By what each part of a step is multiplied (`planner.cost.calibration`); None: by one."""


def scaled(one: Seconds, scales: Scales) -> Array:
    """Seconds of steps, each part multiplied: what is longer in every part stays longer. What is learned of parts makes
    no link quicker."""
    return np.maximum(sum(multiplied(one, scales).values(), np.zeros(())), one.busiest)


def multiplied(one: Seconds, scales: Scales, without: tuple[str, ...] = ()) -> dict[str, Array]:
    """The parts, each multiplied, some left out."""
    parts = one.parts().items()
    return {name: (scales[name] if scales else 1.0) * part for name, part in parts if name not in without}


LOGIT_BYTES = 24.0
"""Moved for each logit: written and read in 16 bits, its exponential and gradient in float32."""


@dataclass(frozen=True)
class Passes:
    """Of one micro-batch, through all layers and through the head."""

    forward: Pass
    backward: Pass
    """With what is recomputed."""
    weights: Array
    """Seconds of the backward's matmuls that make gradients of weights."""
    head: Array
    """Seconds of the head and of predictors, forward and backward."""
    over: Array
    """Of these how long each link carries something, shape (links, grid)."""

    def at(self, places: Array) -> Passes:
        """Some of them, as often as they are named."""
        ahead, back = self.forward.at(places), self.backward.at(places)
        return Passes(ahead, back, self.weights[places], self.head[places], self.over[:, places])

    def data(self, outline: Outline, g: Grid, setting: Setting) -> Data:
        """What DP ranks send beside it."""
        behind = self.backward.room  # the head comes before any layer's gradients
        behind = np.where(splits(g.schedule) & (g.zero < 3), self.weights, behind)  # by which gradients are whole
        return data_traffic(outline, g, setting, self.forward.room / g.pipeline, behind / g.pipeline)


def _columns(g: Grid, setting: Setting) -> tuple[str, ...]:
    """Of a grid those that passes depend on: those of blocks, FSDP's hooks, and where they are used the places of PP
    ranks and the samples of a rank's step."""
    places = ("inner", "pipeline") if g.inner.any() else ()
    samples = ("batch", "data") if setting.documents is not None or setting.precision in ("fp8", "fp4") else ()
    return (*OF_BLOCKS, "zero", *places, *samples)


def passes_of(outline: Outline, g: Grid, setting: Setting) -> Passes:
    """Of each configuration of the grid."""
    few, places = distinct(g, _columns(g, setting))
    if len(few) < len(g):
        return passes_of(outline, few, setting).at(places)
    ahead, back, again, further = _passes(outline, g, setting)
    head, over = _head(outline, g, setting)
    return Passes(ahead, back + again, _weights(outline, back), head + further.total, over + further.links)


def block_seconds(outline: Outline, g: Grid, setting: Setting) -> list[Array]:
    """Of a micro-batch through one block of each run, forward, backward and what is recomputed."""
    kinds = {block: sum(_of_block(block, outline, g, setting), none(g, setting)).total for block, _ in outline.kinds}
    return [kinds[block] for block, _ in outline.runs]


def _of_block(block: Block, outline: Outline, g: Grid, setting: Setting) -> tuple[Pass, Pass, Pass]:
    """Forward, backward, and what is recomputed, on the mean of all layers."""
    passes = Ways(block, block.hidden or outline.hidden, g.of_rows(block.rows), setting)
    forward = passes.forward()
    return forward, passes.backward(), passes.repeated(forward) * g.recomputed


def _passes(outline: Outline, g: Grid, setting: Setting) -> tuple[Pass, Pass, Pass, Pass]:
    """All layers forward, backward, and what of them is recomputed; and all that of predictors' layers."""
    ahead, back, again, further = (none(g, setting) for _ in range(4))
    for block, count in outline.kinds:
        forward, backward, repeated = _of_block(block, outline, g, setting)
        ahead, back, again = (
            ahead + forward * (count * (1 + setting.other_forwards)),
            back + backward * count,
            again + repeated * count,
        )
        if outline.predictors and block == outline.runs[-1][0]:
            further = forward + backward + repeated
    if outline.predictors:
        join = Ways(outline.join, outline.hidden, g, setting)
        further = (further + join.forward() + join.backward()) * outline.predictors
    return ahead, back, again, further


def seconds(outline: Outline, g: Grid, setting: Setting, *, least: bool = False, fewer: bool = False) -> Seconds:
    """Of a step of each configuration of the grid; with `least` what no cut of the layers into virtual stages is
    quicker than, without its links, and what is never less where layers take longer; with `fewer`, nor with fewer
    virtual stages, from two on, or where PP ranks lie within DP ranks, and without what DP ranks and hosts move."""
    g = setting.met(g)
    of = passes_of(outline, g, setting)
    whole, head, micros = of.forward + of.backward, of.head, g.micros
    body = whole * (1 / g.pipeline)
    hop = hop_seconds(outline, replace(g, inner=np.ones(len(g))) if fewer else g, setting)
    weights = of.weights / np.maximum(whole.total, 1e-30)
    way = pipeline_seconds(outline, g, whole.total, head, weights, hop, least=least)
    alone = g.virtual == 1  # with several virtual stages others are computed meanwhile
    found = Seconds(
        **{name: getattr(body, name) * micros for name in BLOCKS},
        head=head * micros / g.pipeline,
        stages=hop * alone * micros,
        idle=way - (body.total + head / g.pipeline + hop * alone) * micros,
        data=np.zeros(len(g)), host=np.zeros(len(g)), links={},
        optimiser=optimiser_seconds(outline, g, setting),
    )  # fmt: skip
    if fewer:
        return found
    data, host = of.data(outline, g, setting), _host(outline, g, setting, of)
    found = replace(found, data=data.step(g), host=host.seconds)
    if least:
        return found
    if (filling := (g.zero >= 3) & (g.pipeline > 1)).any():  # what lengthens each pass lengthens the filling, too
        more = (data.ahead + data.behind) * g.pipeline * filling
        longer = pipeline_seconds(outline, g, whole.total + more, head, weights, hop) - way
        found = replace(found, data=np.where(filling, longer, found.data))
    through = (body.links + of.over / g.pipeline + hop_links(outline, g, setting)) * micros
    found = replace(found, links=demand(setting, through + data.links(g), host))
    return replace(found, data=found.data + np.maximum(found.busiest - found.step, 0.0))


def _host(outline: Outline, g: Grid, setting: Setting, of: Passes) -> HostTraffic:
    """Copies run beside all of a pass, or where collectives go over the same link beside what leaves that free."""
    alone = bool(setting.device.link_bandwidth)
    ahead = of.forward.total if alone else of.forward.room[0]
    back = of.backward.total + of.head if alone else of.backward.room[0] + of.head - of.over[0]
    return host_traffic(outline, g, setting, ahead / g.pipeline, back / g.pipeline)


def demand(setting: Setting, links: Array, host: HostTraffic) -> dict[str, Array]:
    """Seconds of a step by link and direction. What collectives send they receive, from wherever, so one number of each
    of their links is of both directions."""
    links_busy = {
        f"{name} {way}": carried
        for name, carried in zip(links_of(setting), links, strict=True)
        for way in ("in", "out")
    }
    for name, carried in {"PCIe in": host.into, "PCIe out": host.out, "host memory": host.memory}.items():
        links_busy[name] = links_busy[name] + carried if name in links_busy else carried
    return links_busy


def _weights(outline: Outline, back: Pass) -> Array:
    """Of the backward, what makes gradients of weights: one of the two matmuls of each map, if they are trained."""
    return back.products * (0.0 if outline.adapted else 0.5)


def pipeline_seconds(
    outline: Outline, g: Grid, blocks: Array, head: Array, weights: Any = 0.0, hop: Any = 0.0, *, least: bool = False
) -> Array:
    """All micro-batches through all stages: the slowest each time, the others once.

    `weights`: which share of a micro-batch's work makes gradients of weights; a schedule that splits the backward fills
    its waits with them, twice as many as there are (`planner.space.schedule_formulas`). `hop`: seconds of one way from
    stage to stage; a rank of one virtual stage waits for what it sends.
    """
    slowest = slowest_rank(outline, g, blocks, head, hop, least=least)
    waits = np.where(splits(g.schedule), np.maximum(1 - 2 * weights, 0.0), 1.0)
    # No rank waits for the others without what it sends itself.
    alone = slowest - hop * (g.virtual == 1)
    filling = np.maximum(blocks + head - alone, 0.0) / g.virtual * waits
    return slowest * g.micros + filling + 2 * hop * (_crossed(g, least) - 0.5 * (g.virtual == 1))


def _crossed(g: Grid, least: bool) -> Array:
    """How often a micro-batch goes from rank to rank forward; with `least` with two virtual stages of several."""
    chunks = np.minimum(g.virtual, 2.0) if least else g.virtual
    return np.where(folded(g.schedule), chunks * (g.pipeline - 1), chunks * g.pipeline - 1)


def slowest_rank(
    outline: Outline, g: Grid, blocks: Array, head: Array, hop: Any = 0.0, *, least: bool = False
) -> Array:
    """Seconds of a micro-batch on it; with `least` on that of the best cut or less: some rank has as many layers as the
    mean, rounded up, and some takes as long as the mean with the head. Ranks of one virtual stage send to both sides,
    the first and the last to one."""
    each = blocks / outline.layers
    one = hop * (g.virtual == 1)
    if least:
        return np.maximum(np.ceil(outline.layers / g.pipeline) * each, (blocks + head) / g.pipeline) + one
    most, last = loads(outline, g)
    return np.maximum(most * each + one * np.where(g.pipeline > 2, 2.0, 1.0), last * each + head + one)


def loads(outline: Outline, g: Grid) -> tuple[Array, Array]:
    """Blocks of the rank that has most of those without the head, and of the rank with the head.

    Of ranks between the first and the last, or behind the first where virtual stages go down the ranks and up again,
    the second has most, or the one that has two of the first virtual stages after each other.
    """
    (each, more), ranks = cut(outline.layers, g), g.pipeline
    dealt_out, even = ~folded(g.schedule), g.virtual * each
    first = even + np.ceil(more / ranks) - g.ahead
    between = even + np.maximum(np.ceil((more - 1) / ranks), 0.0)
    last = even + np.floor(more / ranks) - g.behind
    turning = even + np.where(more > ranks, 2.0, np.where(more > 1, 1.0, 0.0))
    both = even + (more > 0) - g.ahead - g.behind
    looped = np.where(ranks > 2, np.maximum(first, between), np.where(ranks > 1, first, 0.0))
    return np.where(dealt_out, looped, turning), np.where(dealt_out, last, both)


def _head(outline: Outline, g: Grid, setting: Setting) -> tuple[Array, Array]:
    """Logits and loss of a micro-batch, forward and backward, with the further passes of predictors; and how long of
    it each link carries something."""
    device, vocab, hidden = setting.device, outline.vocab / g.tensor, float(outline.hidden)
    kind = "fp32" if setting.precision == "fp32" else "bf16"
    times = 1 + setting.other_forwards
    products = times * curves.product_seconds(device, kind, g.tokens, vocab, hidden)
    products = products + curves.product_seconds(device, kind, g.tokens, hidden, vocab)
    if not outline.frozen_ends:  # a frozen head has no gradient
        products = products + curves.product_seconds(device, kind, hidden, vocab, g.tokens)
    loss = (1 + setting.other_logits / 3) * curves.moved_seconds(device, LOGIT_BYTES * g.tokens * vocab)
    over = exchange(setting, "all-reduce", g.tokens * hidden * setting.flow_bytes, g.tensor, np.ones(len(g)))
    times = 1 + outline.predictors
    return (products + loss + over.max(axis=0)) * times, over * times


def _leaving(size: int, g: Grid, stride: Array) -> Array:
    """Of the ways from stage to stage the share between other groups of `size` devices."""
    return (np.ceil(g.pipeline / np.maximum(np.floor(size / stride), 1.0)) - 1) / np.maximum(g.pipeline - 1, 1.0)


def hop_seconds(outline: Outline, g: Grid, setting: Setting) -> Array:
    """What a stage hands on of a micro-batch, one way; the mean of stages whose neighbour is at the same fast link and
    of others. 0 without stages."""
    one = sum((share * sent.max(axis=0) for share, sent in _hops(outline, g, setting)), np.zeros(len(g)))
    return np.where(g.pipeline > 1, one, 0.0)


def hop_links(outline: Outline, g: Grid, setting: Setting) -> Array:
    """Seconds that each link carries it, in each direction, of a rank with both neighbours if there are any; shape
    (links, grid)."""
    one = sum((share * sent for share, sent in _hops(outline, g, setting)), no_links(g, setting))
    return one * (g.pipeline > 1) * g.virtual * np.where(g.pipeline * g.virtual > 2, 2.0, 1.0)


def _hops(outline: Outline, g: Grid, setting: Setting) -> list[tuple[Array, Array]]:
    """From near to far which share of stages has its neighbour there, and seconds of one way by link."""
    cut = np.where(g.sequence_parallel > 0, g.tensor, 1.0)
    nbytes = g.tokens * outline.hidden * setting.flow_bytes / cut
    stride = g.tensor * g.context * np.where(g.inner > 0, 1.0, g.data)
    two = np.where(g.pipeline > 1, 2.0, 1.0)
    sizes = (setting.node, *(size for size, _ in setting.islands))
    shares = [_leaving(size, g, stride) for size in sizes]
    ways = [exchange(setting, "p2p", nbytes, two, np.full(len(g), float(size))) for size in sizes]
    near = np.where(stride * 2 <= setting.node, exchange(setting, "p2p", nbytes, two, stride), ways[0])
    rest = [*shares[1:], np.zeros(len(g))]
    return [(1 - shares[0], near), *((share - more, way) for share, more, way in zip(shares, rest, ways, strict=True))]
