"""Seconds in which devices wait for their hosts, where something waits in the host's memory or is saved.

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

from tangram.models.outlines.outline import Outline
from tangram.planner.cost.communication_time import stage_weights
from tangram.planner.cost.kept_activations import block_activations
from tangram.planner.cost.model_state_bytes import divided, experts_over
from tangram.planner.space.grid import Array, Grid
from tangram.planner.space.optimisers_and_offload import away, moved_of, states_of
from tangram.planner.space.setting import Setting


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
