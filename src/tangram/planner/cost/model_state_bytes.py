"""Numbers that a rank holds, and bytes of what is kept of them: parameters, gradients, the optimiser's states."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from tangram.models.outlines.outline import Outline
from tangram.planner.space.grid import Array, Grid
from tangram.planner.space.optimisers_and_offload import ends_of, own_of, states_of
from tangram.planner.space.setting import Setting


@dataclass(frozen=True)
class RankWeights:
    """Numbers of a rank's weights; arrays over the grid."""

    dense: Array
    """Those that DP and CP ranks have alike."""
    routed: Array
    """Those of its experts."""
    ends: Any = 0.0
    """Of the first those of embedding and head, as far as they are trained."""


def rank_weights(outline: Outline, g: Grid, counts: Any, ends: Any) -> tuple[RankWeights, RankWeights]:
    """All numbers of so many layers of each run with `ends` (numbers beside layers); of them those that are trained.

    Where nothing is frozen both are the same object.
    """
    over = g.expert * g.expert_tensor
    dense, routed, trained, taught = (np.zeros(len(g)) for _ in range(4))
    for block, count in outline.by_kind(counts):
        one = block.numbers
        dense = dense + count * (one.tensor / g.tensor + one.replicated)
        routed = routed + count * one.experts / over
        if outline.adapted:
            one = block.trained
            trained = trained + count * (one.tensor / g.tensor + one.replicated)
            taught = taught + count * one.experts / over
    whole = RankWeights(dense + ends, routed, ends)
    if not outline.adapted:
        return whole, whole
    if outline.frozen_ends:
        return whole, RankWeights(trained, taught)
    # What is trained is a copy, and the frozen weights stay beside it (peft's `ModulesToSaveWrapper`).
    return RankWeights(dense + 2 * ends, routed, 2 * ends), RankWeights(trained + ends, taught, ends)


def frozen_weights(setting: Setting, whole: RankWeights, trained: RankWeights) -> RankWeights:
    """Of a rank's numbers those that are not trained, of `base_bytes` each; embedding and head, which stay in more
    bytes, as so many more."""
    ends = (whole.ends - trained.ends) * (setting.frozen_end_bytes / setting.base_bytes - 1)
    return RankWeights(whole.dense - trained.dense + ends, whole.routed - trained.routed)


def experts_over(g: Grid) -> Array:
    """Ranks that have the same experts."""
    return np.maximum(g.data * g.context * g.tensor / (g.expert * g.expert_tensor), 1.0)


def divided(g: Grid, numbers: RankWeights, level: int) -> Array:
    """Numbers that a rank keeps of what is divided from a level of `zero` on."""
    cut = g.zero >= level
    over = np.where(cut, g.shard, 1.0)
    return numbers.dense / over + numbers.routed / np.where(cut, np.minimum(experts_over(g), g.shard), 1.0)


def model_state_bytes(
    g: Grid, setting: Setting, whole: RankWeights, trained: RankWeights
) -> tuple[Array, Array, Array]:
    """Of parameters, of gradients and of the optimiser's states."""
    framework = setting.framework
    alone = setting.precision == "fp32"  # what is computed with is what is updated: no masters beside it
    kept, gradient, master = own_of(
        g.optimiser, 4.0 if alone else framework.parameter_bytes, framework.gradient_bytes,
        # the table's are AdamW's in float32
        0.0 if alone else max(framework.optimiser_bytes - 8.0, 0.0),
    )  # fmt: skip
    low = 1.0 if setting.precision in ("fp8", "fp4") and framework.keeps_low_weights else 0.0
    parameters = divided(g, trained, 3) * kept
    if trained is not whole:
        frozen = frozen_weights(setting, whole, trained)
        parameters = parameters + divided(g, frozen, 3) * setting.base_bytes
    if setting.beside is not None:
        of, nbytes = (whole, setting.flow_bytes) if setting.beside.teacher else (trained, kept)
        parameters = parameters + setting.beside.numbers * divided(g, of, 3) * nbytes
    ends = divided(g, RankWeights(trained.ends, 0.0 * trained.routed), 1) * ends_of(g.optimiser)
    return (
        parameters + (whole.dense + whole.routed) * low * (g.zero < 3),
        divided(g, trained, 2 if framework.divides_gradients else 3) * gradient,
        divided(g, trained, 1) * (master + states_of(g.optimiser)) + ends,
    )
