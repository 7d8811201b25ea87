"""What a step moves: collectives over the axes of a mesh, gradients and parameters over data ranks, the optimiser.

Seconds for every configuration of a grid at once. Ranks lie as Megatron's do: tensor ranks next to each other, then
those that exchange heads, context, data, and pipeline ranks, so that an axis of `k` ranks, each `stride` after the one
before, has as many at one fast link as fit there.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from tangram.hardware import curves
from tangram.models.outline import Outline
from tangram.planner.grid import Grid
from tangram.planner.setting import Setting

__all__ = ["beyond", "data_seconds", "exchange", "numbers_held", "optimiser_seconds"]

Array = NDArray[Any]

OPTIMISER_BYTES = 34.0
"""Moved by AdamW for each number that a rank updates: gradient, master and two moments read and written, parameter
written, and once more the gradient for its norm."""


def exchange(setting: Setting, what: str, nbytes: Array, ranks: Array, stride: Array) -> Array:
    """Seconds of a collective of `ranks`, each `stride` after the one before; 0 for one rank."""
    device = setting.device
    near = np.clip(np.floor(setting.node / stride), 1, None)  # ranks of the group at the same fast link
    return curves.collective_seconds(device, what, nbytes, ranks, near=np.minimum(near, ranks), nic=setting.nic)


def numbers_held(outline: Outline, g: Grid) -> tuple[Array, Array]:
    """Of a rank's stage: numbers that data, context and heads ranks have alike, and those of its experts."""
    dense, routed = np.zeros(len(g)), np.zeros(len(g))
    for block, count in outline.runs:
        one = block.numbers
        dense = dense + count * (one.tensor / g.tensor + one.whole)
        routed = routed + count * one.experts / (g.expert * g.expert_tensor)
    ends = outline.vocab * outline.hidden / g.tensor
    ends = np.where(g.pipeline > 1, ends, ends * (1 if outline.tied else 2))
    return dense / g.pipeline + ends, routed / g.pipeline


def data_seconds(outline: Outline, g: Grid, setting: Setting, ahead: Array, micro: Array) -> Array:
    """Gradients and parameters over data ranks, beyond what runs under computation."""
    framework, flow = setting.framework, setting.flow_bytes
    dense, routed = numbers_held(outline, g)
    over, stride = g.alike, g.tensor
    experts_over = np.maximum(g.alike * g.tensor / (g.expert * g.expert_tensor), 1.0)
    reduce = exchange(setting, "reduce-scatter", dense * framework.reduce_bytes, over, stride)
    reduce = reduce + exchange(
        setting, "reduce-scatter", routed * framework.reduce_bytes, experts_over, g.expert * g.expert_tensor
    )
    gather = exchange(setting, "all-gather", dense * flow, over, stride)
    gather = gather + exchange(setting, "all-gather", routed * flow, experts_over, g.expert * g.expert_tensor)
    backward = micro - ahead
    parts = np.maximum(outline.layers / g.pipeline, 1.0)
    once = beyond(reduce, backward, framework.overlap_reduce, parts)
    once = once + beyond(gather, ahead, framework.overlap_gather, parts)
    each = beyond(gather, ahead, 1.0, parts) + beyond(gather + reduce, backward, 1.0, parts)
    return np.where(g.zero >= 3, each * g.micros, once)


def beyond(traffic: Array, work: Array, share: float, parts: Array) -> Array:
    """What of some traffic does not fit under `share` of some work; of `parts` of it one has nothing to hide under."""
    return np.maximum(traffic - share * work, traffic / parts * (1 if share else parts))


def optimiser_seconds(outline: Outline, g: Grid, setting: Setting) -> Array:
    """AdamW on what a rank updates."""
    dense, routed = numbers_held(outline, g)
    experts_over = np.maximum(g.alike * g.tensor / (g.expert * g.expert_tensor), 1.0)
    divided = g.zero >= 1
    mine = dense / np.where(divided, g.shard, 1.0) + routed / np.where(divided, np.minimum(experts_over, g.shard), 1.0)
    return curves.moved_seconds(setting.device, OPTIMISER_BYTES * mine)
