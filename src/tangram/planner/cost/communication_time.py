"""What a step moves: collectives over the axes of a mesh, gradients and parameters over DP ranks, the optimiser.

Seconds for every configuration of a grid at once. Ranks lie as Megatron's do: TP ranks next to each other, then
CP, DP, and PP ranks, so that an axis of `k` ranks, each `stride` after the one before, has as many at one
fast link as fit there. Or PP ranks lie before DP ranks (`Grid.inner`), and pull those of a stage apart.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from tangram.hardware import curves
from tangram.models.outline import Outline
from tangram.planner.cost.model_state_bytes import Held, divided, experts_over, held
from tangram.planner.space.grid import Grid
from tangram.planner.space.optimisers_and_offload import away, moved_of
from tangram.planner.space.setting import Setting

__all__ = ["beyond", "data_seconds", "exchange", "numbers_held", "optimiser_seconds"]

Array = NDArray[Any]


def exchange(setting: Setting, what: str, nbytes: Array, ranks: Array, stride: Array, g: Grid | None = None) -> Array:
    """Seconds of a collective of `ranks`, each `stride` after the one before; 0 for one rank. With `g` those are places
    within a stage."""
    device = setting.device
    took = curves.collective_seconds(device, what, nbytes, ranks, near=_near(setting.node, ranks, stride, g),
                                     nic=setting.nic)  # fmt: skip
    for size, rate in setting.islands:  # all networks carry it at the same time, so the slowest of them counts
        near = _near(size, ranks, stride, g)
        farther = curves.far_seconds(device, what, nbytes, ranks, near, rate)
        took = np.where(near < ranks, np.maximum(took, farther), took)
    return took


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


def numbers_held(outline: Outline, g: Grid) -> tuple[Held, Held]:
    """Of a rank's stage on the mean: all numbers, and those that are trained."""
    ends = outline.vocab * outline.hidden / g.tensor
    ends = np.where(g.pipeline > 1, ends, ends * (1 if outline.tied else 2))
    whole = outline.predicting
    return held(whole, g, [count / g.pipeline for _, count in whole.runs], ends + outline.further / g.pipeline)


def data_seconds(outline: Outline, g: Grid, setting: Setting, ahead: Array, micro: Array) -> Array:
    """Gradients and parameters over DP ranks, beyond what runs under computation."""
    framework = setting.framework
    whole, trained = numbers_held(outline, g)
    reduce = _summed(setting, g, trained, framework.reduce_bytes)
    gather = _gathered(setting, g, trained, setting.flow_bytes)
    parts = np.maximum(outline.layers / g.pipeline, 1.0)
    backward = micro - ahead
    once = beyond(reduce, backward, framework.overlap_reduce, parts)
    once = once + beyond(gather, ahead, framework.overlap_gather, parts)
    if trained is not whole:  # what is frozen is gathered where parameters are divided, and never summed
        frozen = Held(whole.dense - trained.dense, whole.routed - trained.routed)
        gather = gather + _gathered(setting, g, frozen, setting.base_bytes)
    each = beyond(gather, ahead, 1.0, parts) + beyond(gather + reduce, backward, 1.0, parts)
    return np.where(g.zero >= 3, each * g.micros, once)


def _shards(g: Grid, over: Array) -> Array:
    """Of ranks that have the same numbers, those that divide them; all where nothing is divided."""
    return np.where(g.zero >= 1, np.minimum(over, g.shard), over)


def _ways(g: Grid, numbers: Held) -> list[tuple[Array, Array, Array]]:
    """Numbers, the ranks that have them alike, and how far each of these is from the next."""
    return [
        (numbers.dense, g.data * g.context, g.tensor),
        (numbers.routed, experts_over(g), g.expert * g.expert_tensor),
    ]


def _summed(setting: Setting, g: Grid, numbers: Held, nbytes: float) -> Array:
    """Gradients: scattered over those that divide, then summed over copies of these."""
    found = np.zeros(len(g))
    for count, over, stride in _ways(g, numbers):
        shards = _shards(g, over)
        found = found + exchange(setting, "reduce-scatter", count * nbytes, shards, stride, g)
        if (shards < over).any():
            copies = over / shards
            found = found + exchange(setting, "all-reduce", count * nbytes / shards, copies, stride * shards, g)
    return found


def _gathered(setting: Setting, g: Grid, numbers: Held, nbytes: float) -> Array:
    """Parameters, from those that divide them."""
    found = np.zeros(len(g))
    for count, over, stride in _ways(g, numbers):
        found = found + exchange(setting, "all-gather", count * nbytes, _shards(g, over), stride, g)
    return found


def beyond(traffic: Array, work: Array, share: float, parts: Array) -> Array:
    """What of some traffic does not fit under `share` of some work; of `parts` of it one has nothing to hide under."""
    return np.maximum(traffic - share * work, traffic / parts * (1 if share else parts))


def optimiser_seconds(outline: Outline, g: Grid, setting: Setting) -> Array:
    """The update of what a rank updates itself; what its host updates is `planner.cost.offload_time`'s."""
    _, trained = numbers_held(outline, g)
    here = curves.moved_seconds(setting.device, moved_of(g.optimiser) * divided(g, trained, 1))
    return np.where(away(g.offload)[0], 0.0, here)
