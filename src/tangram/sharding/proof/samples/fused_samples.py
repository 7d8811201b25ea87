"""Calls of the fused operators of `kernels.fused`, as `extra_samples` has others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tangram.kernels.fused.gated import GATED
from tangram.kernels.fused.norm import ADD_RMS_NORM, RMS_NORM
from tangram.kernels.fused.projected_loss import PROJECTED_LOSS
from tangram.kernels.fused.rotary import ROTARY


def _some(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


FUSED: Sequence[tuple[Any, Callable[[], tuple[Any, ...]]]] = (
    (RMS_NORM.default, lambda: (_some(5, 3, 4), _some(4), 1e-6, 1.0)),
    (RMS_NORM.default, lambda: (_some(5, 4), None, 1e-6)),
    (ADD_RMS_NORM.default, lambda: (_some(3, 5, 4), _some(3, 5, 4), _some(4), 1e-6)),
    (GATED.default, lambda: (_some(5, 3), _some(5, 3))),
    (GATED.default, lambda: (_some(2, 5, 3), _some(2, 5, 3), "gelu_tanh")),
    (PROJECTED_LOSS.default, lambda: (_some(7, 3), _some(5, 3), torch.tensor([0, -100, 3, 4, 1, -100, 2]))),
    (PROJECTED_LOSS.default, lambda: (_some(3, 4), _some(6, 4), torch.tensor([5, 2, 2]), 2)),
    (ROTARY.default, lambda: (_some(3, 4, 5, 6), _some(3, 2, 5, 6), _some(3, 5, 4), _some(3, 5, 4))),
    (ROTARY.default, lambda: (_some(3, 2, 5, 4), _some(3, 2, 5, 4), _some(1, 5, 4), _some(1, 5, 4))),
)
