"""What a grid of configurations has in common: the device, the framework, the type that is computed in, the nodes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

from tangram.planner.space.document_lengths import Documents
from tangram.planner.space.framework_profiles import Framework
from tangram.planner.space.losses import LOSSES
from tangram.planner.space.optimisers_and_offload import FULL, Base

Precision = Literal["bf16", "fp16", "fp8", "fp4", "fp32"]


@dataclass(frozen=True)
class Host:
    """What each device has of its host."""

    rate: float = 25e9
    """Bytes per second to a device, and as many from it; if nothing is known what copies reach of PCIe 4.0 x16."""
    bandwidth: float = 40e9
    """Bytes per second that its part of the host's processors moves through memory; if nothing is known a tenth of
    two processors of eight channels of DDR5."""
    memory_bytes: float = math.inf


@dataclass(frozen=True)
class Setting:
    """Of one evaluation of the models of memory and time."""

    device: Any
    """`hardware.catalogue.devices.Figures`, or None where only memory is asked for."""
    framework: Framework
    precision: Precision = "bf16"
    """What matmuls are computed in; what flows between them is in 16 bits below fp32."""
    node: int = 8
    """Devices that meet at the fast link, which may be those of several machines."""
    nic: float | None = None
    """Bytes per second that a device receives from other nodes; None: as the catalogue says."""
    islands: tuple[tuple[int, float], ...] = ()
    """Beyond the nodes' network, the smallest first: so many devices meet before a farther one, of which each receives
    so many bytes per second over that one."""
    graphs: bool = False
    """Whether kernels are started from captured graphs, so that the host starts none of them."""

    base: Base = FULL
    """What frozen weights are kept in."""
    host: Host = Host()
    unlike: float = 0.0
    """How unlike experts' loads are: their standard deviation over their mean."""
    documents: Documents | None = None
    """Of packed samples, whose outline is `document_lengths.packed`; None: a sample is one."""
    save_every: int = 0
    """Steps between two checkpoints; 0: none."""
    loss: str = ""
    """How it is made of the logits (`planner.space.losses`); "": as the framework does."""
    away_share: float = 1.0
    """Of the optimiser's states that are offloaded to the host, where they are."""

    def __post_init__(self) -> None:
        if self.node < 1:
            raise ValueError(f"{self.node} devices at a fast link; at least 1, the device itself")

    def logit_bytes(self, *, over_ranks: bool) -> float:
        """Of each logit while the loss is made; `over_ranks`: where TP ranks divide the vocabulary."""
        usual = (self.framework.loss_over_ranks if over_ranks else "") or self.framework.loss
        return LOSSES[self.loss or usual]

    @property
    def base_bytes(self) -> float:
        """Of a frozen number."""
        return max(self.base.nbytes, self.flow_bytes) if self.base is FULL else self.base.nbytes

    @property
    def flow_bytes(self) -> float:
        """Of a number of activations."""
        return 4.0 if self.precision == "fp32" else 2.0
