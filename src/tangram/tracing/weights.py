"""Whether weights are what they should be: sums of their bits every some steps, for silent data corruption.

    by a rank alone    nothing changes weights between an update and the next one: if their sums differ, its memory did
    by who reads       ranks that hold the same part have the same sums after an update

One flipped bit changes a sum for certain. No value can be told from a sum over a layer. Whether what ranks give each
other is finite is looked at in samples.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import cast

import torch
from torch import Tensor

from tangram.tracing.conformance import Deviation
from tangram.tracing.files.format import Phase
from tangram.tracing.sites import Site

NO_GROUP = 0xFFFF
"""What is no matter of a group."""


SAMPLED, SAMPLES = 61, 4096
"""Of flat tensors each so-many-th number, at most about so many: each is a read of memory that no cache has, and what
is not finite has come to most gradients of a rank before they are given to others."""
_SUMMED = {
    torch.float64: torch.float64,
    torch.float32: torch.float32,
    torch.float16: torch.float32,
    torch.bfloat16: torch.float32,
}
"""What is looked at, and as what it is summed."""


@dataclass(frozen=True)
class WeightGroup:
    """The weights of a layer that a rank holds."""

    layer: str
    axes: tuple[str, ...]
    """Of the mesh, that shard any of them: ranks at one place of these hold the same."""
    tensors: Callable[[], Sequence[Tensor]]
    """This rank's parts, as they are now."""


def sums_of(groups: Sequence[WeightGroup]) -> list[int]:
    """Of each group the sum of its bits, read as integers."""
    with torch.no_grad():
        parts = [[_bits(one) for one in group.tensors()] for group in groups]
        totals = [torch.stack(some).sum() for some in parts if some]
        found = iter(cast("list[int]", torch.stack(totals).tolist()) if totals else list[int]())
    return [next(found) if some else 0 for some in parts]


def _bits(x: Tensor) -> Tensor:
    flat = x.detach().contiguous().reshape(-1).view(torch.uint8)
    return flat.view(torch.int32 if flat.numel() % 4 == 0 else torch.uint8).sum(dtype=torch.int64)


@dataclass
class WeightWatch:
    """Takes sums at the begins of phases."""

    groups: Sequence[WeightGroup]
    every: int
    """After the update of each so-many-th step, and before the next one."""
    updates: frozenset[Phase] = frozenset({Phase.OPTIMISER})
    """In which they change."""
    _before: Phase = Phase.START
    _kept: tuple[int, list[int]] | None = field(default=None)

    def enters(self, phase: Phase, step: int) -> tuple[list[int] | None, Deviation | None]:
        """A phase of a step begins: the sums that are new after an update, and what is wrong before one."""
        before, self._before = self._before in self.updates, phase
        if before and phase not in self.updates and step % self.every == 0:
            self._kept = step, sums_of(self.groups)
            return self._kept[1], None
        if phase in self.updates and not before and self._kept is not None:
            (updated, kept), self._kept = self._kept, None
            return None, self._changed(kept, updated, step)
        return None, None

    def _changed(self, kept: Sequence[int], updated: int, step: int) -> Deviation | None:
        now = sums_of(self.groups)
        changed = [group.layer for group, a, b in zip(self.groups, kept, now, strict=True) if a != b]
        if not changed:
            return None
        more = f" and {len(changed) - 1} more" if len(changed) > 1 else ""
        text = (
            f"had other weights in {changed[0]}{more} before the update of step {step} than after that of {updated}"
            ", though nothing updates them between: memory there is not sound, or code writes into weights"
        )
        return Deviation("corrupted", step, NO_GROUP, text, Site(layer=changed[0]))


def looks_finite(x: Tensor) -> bool:
    """Whether samples of a tensor are finite, in some microseconds.

    Every row and column of activations is looked at once, and of what is flat (weights, gradients) each 61st number or
    fewer, which hardly a column avoids. On an accelerator each look would wait for all that is queued there, so
    there is none: both ranks of a TP pair are named.
    """
    count = x.numel()
    if not x.is_cpu or x.dtype not in _SUMMED or not count or not x.is_contiguous():
        return True
    step = spread(count, x.shape[-1] if x.dim() > 1 else 0)
    samples = torch.as_strided(x.detach() if x.requires_grad else x, (-(-count // step),), (step,))
    return math.isfinite(samples.sum(dtype=_SUMMED[x.dtype]).item())


@lru_cache(maxsize=256)
def spread(count: int, width: int) -> int:
    """Each so-many-th of `count` numbers comes by every row of `width` and, of as many rows, by every column."""
    if not width:
        return max(SAMPLED, count // SAMPLES // 6 * 6 + 1)  # 2 and 3 divide it not, as they do widths
    step = max(1, min(width - 1, count // width - 1))
    while math.gcd(step, width) > 1:
        step -= 1
    return step
