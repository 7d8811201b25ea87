"""The reference of preferences: the model with the values that its trained parameters began with.

They are kept beside the others, on each rank its part of each: of adapters little, else as much as the parameters
again. What is computed with them is computed by the same model, so it lies and communicates alike on any mesh, with a
quantised base as without, and DoRA's magnitudes and modules that are trained whole are those of the begin, too.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tangram.training.parallel.fsdp import resharded


@contextmanager
def evaluating(module: nn.Module) -> Generator[None]:
    """Within, a module computes in evaluation and without gradients. All ranks call it alike."""
    training = module.training
    module.eval()
    try:
        with torch.no_grad(), resharded(module):
            yield
    finally:
        module.train(training)


class Reference:
    """A copy of this rank's parts of what is trained of a module, as it is now."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._kept = {name: part.clone() for name, part in self._trained()}

    @property
    def kept(self) -> list[Tensor]:
        """What is kept here."""
        return [*self._kept.values()]

    @contextmanager
    def used(self) -> Generator[None]:
        """Within, the module computes with them, in evaluation and without gradients. All ranks call it alike."""
        self._exchange()
        try:
            with evaluating(self._module):
                yield
        finally:
            self._exchange()

    def _trained(self) -> list[tuple[str, Tensor]]:
        """Asked each time: FSDP changes where parameters lie."""
        named = [(name, p.detach()) for name, p in self._module.named_parameters() if p.requires_grad]
        return [(name, p.to_local() if isinstance(p, DTensor) else p) for name, p in named]

    def _exchange(self) -> None:
        """One tensor at a time, so that no third copy of all of them is ever there."""
        for name, part in self._trained():
            now = part.clone()
            part.copy_(self._kept[name])
            self._kept[name].copy_(now)
