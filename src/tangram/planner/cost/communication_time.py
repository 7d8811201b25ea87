"""What a step moves: collectives over the axes of a mesh, gradients and parameters over DP ranks, the optimiser.

Seconds for every configuration of a grid at once, of each link apart: what goes over one waits for what else does, and
hides only while that link carries nothing else. Ranks lie as Megatron's do: TP ranks next to each other, then
CP, DP, and PP ranks, so that an axis of `k` ranks, each `stride` after the one before, has as many at one
fast link as fit there. Or PP ranks lie before DP ranks (`Grid.inner`), and pull those of a stage apart.

And what goes to hosts and back, where something waits in their memory or is saved there:

    optimiser      the last micro-batch's gradients go to the host beside its backward, the host updates what its memory
                   bounds, new parameters come back (Ren et al. 2021, ZeRO-Offload)
    parameters     each pass brings a rank's part of them, gradients go back; beside computation (Rajbhandari et al.
                   2021, ZeRO-Infinity)
    activations    what a micro-batch keeps goes to the host beside its forward and comes back beside its backward
    checkpoints    training stands still while what is trained is copied to the host, each rank its part of what ranks
                   have alike; writing goes on beside (as `tangram.checkpoint` does)

What does not fit beside computation is waited for. The trade-off: one rate for a device's copies, none of them in the
other's way; nothing of this was measured here.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tangram.hardware.catalogue import curves
from tangram.models.outlines.outline import Outline
from tangram.planner.cost.kept_activations import block_activations
from tangram.planner.cost.model_state_bytes import RankWeights, divided, experts_over, frozen_weights, rank_weights
from tangram.planner.space.grid import Array, Grid
from tangram.planner.space.optimisers_and_offload import away, moved_of, states_of
from tangram.planner.space.schedule_formulas import splits
from tangram.planner.space.setting import Setting


def exchange(setting: Setting, what: str, nbytes: Array, ranks: Array, stride: Array, g: Grid | None = None) -> Array:
    """Seconds of a collective of `ranks`, each `stride` after the one before, by the links that carry it at the same
    time (`links_of`), shape (links, grid); it takes as long as the longest. 0 for one rank. With `g` those are places
    within a stage."""
    device = setting.device
    near = _near(setting.node, ranks, stride, g)
    took = curves.link_seconds(device, what, nbytes, ranks, near, nic=setting.nic)
    more: list[Array] = []
    for size, rate in setting.islands:
        near = _near(size, ranks, stride, g)
        farther = curves.far_seconds(device, what, nbytes, ranks, near, rate)
        more.append(np.where(near < ranks, farther, 0.0))
    return np.concatenate([took, more]) if more else took


def links_of(setting: Setting) -> tuple[str, ...]:
    """Names of the links of collectives: what devices of a node meet at, the NIC, networks beyond it."""
    fast = setting.device.link_bandwidth or 0.0
    near = "NVLink" if fast > (setting.device.pcie_bandwidth or 0.0) else "PCIe"
    return (near, "NIC", *(f"network beyond {size:,} devices" for size, _ in setting.islands))


def no_links(g: Grid, setting: Setting) -> Array:
    """Links that carry nothing."""
    return np.zeros((2 + len(setting.islands), len(g)))


def _near(size: int, ranks: Array, stride: Array, g: Grid | None) -> Array:
    """How many ranks of a group are among the same `size` devices."""
    near = np.clip(np.floor(size / stride), 1, None)
    if g is not None and g.inner.any():
        near = np.where(g.inner > 0, apart(g, size, stride), near)
    return np.minimum(near, ranks)


def apart(g: Grid, node: int, stride: Array) -> Array:
    """How many of a stage's ranks, each `stride` after the one before, meet at a fast link where PP ranks lie
    within DP ranks: of each DP rank's places those that are next to each other, times DP ranks that meet."""
    together = g.tensor * g.context
    each = np.clip(np.minimum(np.floor(together / stride), np.floor(node / stride)), 1, None)
    copies = np.floor(node / (np.maximum(together, stride) * g.pipeline))
    return each * np.clip(copies, 1, None)


def stage_weights(outline: Outline, g: Grid) -> tuple[RankWeights, RankWeights]:
    """Of a rank's stage on the mean: all numbers, and those that are trained."""
    ends = outline.vocab * outline.hidden / g.tensor
    ends = np.where(g.pipeline > 1, ends, ends * (1 if outline.tied else 2))
    whole = outline.predicting
    return rank_weights(whole, g, [count / g.pipeline for _, count in whole.runs], ends + outline.further / g.pipeline)


@dataclass(frozen=True)
class Data:
    """What DP ranks send of gradients and parameters."""

    ahead: Array
    """Seconds by which they make a forward longer: all of them, or (ZeRO below 3) a step's first."""
    behind: Array
    """The same of a backward: all of them, or the last."""
    gather: Array
    """Seconds that each link carries parameters to be used once, shape (links, grid)."""
    reduce: Array
    """The same of gradients."""
    others: float = 0.0
    """How often more parameters are gathered where each pass does, for forwards beside those of training."""

    def links(self, g: Grid) -> Array:
        """Seconds of a step that each link carries either."""
        return np.where(
            g.zero >= 3, g.micros * ((2 + self.others) * self.gather + self.reduce), self.gather + self.reduce
        )

    def step(self, g: Grid) -> Array:
        """Seconds of a step's micro-batches on a stage."""
        return (self.ahead + self.behind) * np.where(g.zero >= 3, g.micros, 1.0)


def data_traffic(outline: Outline, g: Grid, setting: Setting, ahead: Array, behind: Array) -> Data:
    """Gradients and parameters over DP ranks. `ahead`, `behind`: seconds of a micro-batch's forward and backward on a
    stage in which each link carries nothing else, shape (links, grid)."""
    framework = setting.framework
    whole, trained = stage_weights(outline, g)
    reduce = _summed(setting, g, trained, framework.reduce_bytes)
    gather = _gathered(setting, g, trained, setting.flow_bytes)
    parts = np.maximum(outline.layers / g.pipeline, 1.0)
    if framework.broadcasts:
        shards = _shards(g, g.data * g.context)
        more = np.where((g.zero >= 1) & (g.zero < 3), np.minimum(shards, framework.broadcasts * parts) - 1, 0.0)
        gather = gather + more * exchange(setting, "all-gather", np.zeros(len(g)), shards, g.tensor, g)
    once = (
        _once(g, gather, framework.overlap_gather * ahead, parts),
        _once(g, reduce, framework.overlap_reduce * behind, parts),
    )
    if trained is not whole:  # what is frozen is gathered where parameters are divided, and never summed
        frozen = frozen_weights(setting, whole, trained)
        gather = gather + _gathered(setting, g, frozen, setting.base_bytes) * (g.zero >= 3)
    others = setting.other_forwards
    own, many = np.minimum(g.virtual, parts), g.zero >= 3  # each virtual stage has a first and a last layer
    each = (
        own * (1 + others) * beyond(gather / own, ahead / own / (1 + others), parts / own),
        own * _both(gather / own, reduce / own, behind / own, parts / own),
    )
    return Data(np.where(many, each[0], once[0]), np.where(many, each[1], once[1]), gather, reduce, others)


def _shards(g: Grid, over: Array) -> Array:
    """Of ranks that have the same numbers, those that divide them; all where nothing is divided."""
    return np.where(g.zero >= 1, np.minimum(over, g.shard), over)


def _ways(g: Grid, numbers: RankWeights) -> list[tuple[Array, Array, Array]]:
    """Numbers, the ranks that have them alike, and how far each of these is from the next."""
    return [
        (numbers.dense, g.data * g.context, g.tensor),
        (numbers.routed, experts_over(g), g.expert * g.expert_tensor),
    ]


def _summed(setting: Setting, g: Grid, numbers: RankWeights, nbytes: float) -> Array:
    """Gradients: scattered over those that divide, then summed over copies of these."""
    found = no_links(g, setting)
    for count, over, stride in _ways(g, numbers):
        shards = _shards(g, over)
        found = found + exchange(setting, "reduce-scatter", count * nbytes, shards, stride, g)
        if (shards < over).any():
            copies = over / shards
            found = found + exchange(setting, "all-reduce", count * nbytes / shards, copies, stride * shards, g)
    return found


def _gathered(setting: Setting, g: Grid, numbers: RankWeights, nbytes: float) -> Array:
    """Parameters, from those that divide them."""
    found = no_links(g, setting)
    for count, over, stride in _ways(g, numbers):
        found = found + exchange(setting, "all-gather", count * nbytes, _shards(g, over), stride, g)
    return found


def beyond(traffic: Array, room: Array, parts: Array) -> Array:
    """Seconds of traffic in which nothing else is done. It goes beside computation in so many equal parts, each while
    the next (of gradients: the one before) is computed: one has nothing to hide under, and each of the others has that
    part of the link's `room`. Both of shape (links, grid)."""
    return (traffic / parts + (1 - 1 / parts) * np.maximum(traffic - room, 0.0)).max(axis=0)


def _once(g: Grid, traffic: Array, room: Array, parts: Array) -> Array:
    """Of a step's first forwards or last backwards. One virtual stage of several waits for its own alone, or all of
    them for what does not fit under as many micro-batches of the others as there are ranks; where backwards are split
    gradients come last, of all virtual stages."""
    chunks = np.where(splits(g.schedule), 1.0, np.minimum(g.virtual, parts))
    if not (chunks > 1).any():
        return beyond(traffic, room, parts)
    alone = beyond(traffic / chunks, room / chunks, parts / chunks)
    return np.maximum(alone, beyond(traffic, room * ((chunks - 1) * g.pipeline + 1) / chunks, parts))


def _both(gather: Array, reduce: Array, room: Array, parts: Array) -> Array:
    """Of a backward that gathers each layer's parameters before it and reduces its gradients behind it: the first and
    the last of these have nothing to hide under, one layer each has one of them, all others both."""
    first, last, own = gather / parts, reduce / parts, room / parts
    ends = np.maximum(first - own, 0.0) + np.maximum(last - own, 0.0)
    between = np.maximum(parts - 2, 0.0) * np.maximum(first + last - own, 0.0)
    return (first + last + ends * np.minimum(parts - 1, 1.0) + between).max(axis=0)


def optimiser_seconds(outline: Outline, g: Grid, setting: Setting) -> Array:
    """The update of what a rank updates itself, and what the host does once a step; what its host updates is
    `host_traffic`'s."""
    _, trained = stage_weights(outline, g)
    here = curves.moved_seconds(setting.device, moved_of(g.optimiser) * divided(g, trained, 1))
    return np.where(away(g.offload)[0], 0.0, here) + (0.0 if setting.captured else setting.framework.step_seconds)


@dataclass(frozen=True)
class HostTraffic:
    """Of a step, arrays over the grid."""

    seconds: Array
    """That devices wait."""
    into: Array
    """That copies to a device take, waited for or not."""
    out: Array
    """That copies to its host take."""
    memory: Array
    """That the host's memory is busy with the device's part of the update."""


def host_traffic(outline: Outline, g: Grid, setting: Setting, ahead: Array, back: Array) -> HostTraffic:
    """Of a step; `ahead`, `back`: seconds of a micro-batch's forward and backward on a stage that copies may take."""
    saved, nothing = saved_seconds(outline, g, setting), np.zeros(len(g))
    if not g.offload.any():
        return HostTraffic(saved, nothing, saved, nothing)
    host = setting.host
    whole, trained = stage_weights(outline, g)
    states, weights, flows = away(g.offload)
    mine = divided(g, trained, 1)
    gradients, parameters = mine * setting.framework.gradient_bytes / host.rate, mine * setting.flow_bytes / host.rate
    update = np.where(states, mine * moved_of(g.optimiser) / host.bandwidth, 0.0)
    back_again = np.where(states & ~weights, np.maximum(gradients - back, 0.0) + parameters, 0.0)
    frozen = divided(g, whole, 3) - divided(g, trained, 3)
    brought = parameters + frozen * setting.base_bytes / host.rate
    passes = np.maximum(brought - ahead, 0.0) + np.maximum(brought + gradients - back, 0.0)
    waits = update + back_again + np.where(weights, passes * g.micros, 0.0)
    kept = np.zeros(len(g))
    for block, count in outline.predicting.kinds:
        kept = kept + count * block_activations(block, outline.hidden, g, setting)[0] / g.pipeline
    moved = kept / host.rate
    waits = waits + np.where(flows, (np.maximum(moved - ahead, 0.0) + np.maximum(moved - back, 0.0)) * g.micros, 0.0)
    into = np.where(weights, 2 * brought, 0.0) + np.where(flows, moved, 0.0)
    out = np.where(weights, gradients, 0.0) + np.where(flows, moved, 0.0)
    return HostTraffic(
        saved + waits,
        into * g.micros + np.where(states & ~weights, parameters, 0.0),
        saved + out * g.micros + np.where(states & ~weights, gradients, 0.0),
        update,
    )


def saved_seconds(outline: Outline, g: Grid, setting: Setting) -> Array:
    """Of a step its part of a checkpoint: what is not in the host's memory anyway is copied there."""
    if not setting.save_every:
        return np.zeros(len(g))
    _, trained = stage_weights(outline, g)
    numbers = trained.dense / (g.data * g.context) + trained.routed / experts_over(g)
    nbytes = numbers * (4.0 + states_of(g.optimiser))  # in float32, as optimisers update them
    return np.where(away(g.offload)[0], 0.0, nbytes / setting.host.rate / setting.save_every)
