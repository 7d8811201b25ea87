"""Weights that are made for one call of their layer: autograd keeps none of them, the backward makes them again.

The trade-off: a weight is made twice in a step, or three times with recompute, and is there while its layer runs alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._C import _autograd
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor

from tangram.models.building.twin import storage_of


@dataclass(frozen=True)
class _View:
    """What autograd would keep of a weight."""

    name: str
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


def made_again(made: Mapping[str, Tensor], make: Callable[[str], Tensor]) -> AbstractContextManager[object]:
    """A block in which nothing is kept of these weights for the backward, which takes those that `make` gives by name.

    What else is kept goes to the hooks around it: recompute has some, inside of which no others would be called.
    """
    if not torch.is_grad_enabled():
        return nullcontext()
    names = {storage_of(weight): name for name, weight in made.items()}
    outer: Any = _autograd._top_saved_tensors_default_hooks(True)  # pyright: ignore[reportPrivateUsage]
    pack, unpack = outer or (_same, _same)

    def keep(kept: Tensor) -> Any:
        name = None if isinstance(kept, DTensor) else names.get(storage_of(kept))
        if name is None:
            return pack(kept)
        return _View(name, tuple(kept.shape), kept.stride(), int(kept.storage_offset()))

    def again(kept: Any) -> Tensor:
        if isinstance(kept, _View):
            with torch.no_grad():
                return make(kept.name).as_strided(kept.size, kept.stride, kept.offset)
        return unpack(kept)

    return saved_tensors_hooks(keep, again)


def _same(kept: Any) -> Any:
    return kept
