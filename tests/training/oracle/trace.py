"""What a training run leaves for comparing."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Tensors = Mapping[str, npt.NDArray[np.float32]]

CAPTURED = (1, 5, 20)
"""After these steps gradients and values are kept."""


@dataclass(frozen=True)
class Trace:
    """One run, in one process or as one rank has seen it."""

    losses: tuple[float, ...]
    norms: tuple[float, ...]
    """Of the whole gradient before clipping, step by step; of ranks, rank 0 alone has them."""
    gradients: Mapping[int, Tensors]
    """By step: of every trained parameter, as the optimiser got it: after clipping, where that was due."""
    values: Mapping[int, Tensors]
    """By step: every parameter, frozen ones too, after the update."""
    seen: tuple[tuple[tuple[int, ...], ...], ...] = ()
    """By step: the rows of input tokens that went through the model here."""
    empty: tuple[str, ...] = ()
    """Parameters of which this rank holds nothing."""
    routers: tuple[float, ...] = ()
    """The loss of routers step by step, where there is one; of ranks, rank 0 alone has it."""
    dropped: tuple[float, ...] = ()
    """The share of tokens' choices that experts had no room for, likewise."""
    margins: tuple[float, ...] = ()
    """Of the oracle: the smallest relative margin by which any such choice was kept and the next dropped, likewise."""
