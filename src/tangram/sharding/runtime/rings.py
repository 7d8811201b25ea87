"""Attention whose keys go round, in the stead of putting them together before it.

A program says of a call of `attend` that its keys and values are brought from parts of their tokens to all of them.
With that step left out the ring (`relayout.ring`) does both at once; where the last step is another one, or the tokens
of a part do not lie one after the other, keys are put together as the program says.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor

from tangram.kernels.attention import Heads
from tangram.relayout.ring import ring_attend
from tangram.sharding.derive.states import cut
from tangram.sharding.runtime.program import Change

NAME = "attend.default"
QUERIES, KEYS, VALUES, OWN, SEEN, SINKS = range(6)
"""The places of its tensors, as `kernels.attention` calls it."""
TOKENS = cut(2)


class Rings:
    """Those of one model on one rank. `groups`: by axis; `bring`: does the other steps."""

    def __init__(self, groups: Mapping[str, dist.ProcessGroup], bring: Callable[[Tensor, Change], Tensor]) -> None:
        self._groups, self._bring = groups, bring

    def attend(self, takes: Mapping[int, Change], args: Sequence[Any]) -> Any:
        """The function with what moves before it; NotImplemented where a ring does not do that."""
        keys, values = takes.get(KEYS), takes.get(VALUES)
        if not keys or keys != values or keys[-1].source != TOKENS or keys[-1].target.kind == "cut":
            return NotImplemented
        before = {**takes, KEYS: keys[:-1], VALUES: keys[:-1]}
        given: list[Any] = [
            self._bring(x, before[i]) if i in before and isinstance(x, Tensor) else x for i, x in enumerate(args)
        ]
        heads, (own, seen, sinks, scale, window) = Heads(*given[:OWN]), given[OWN:]
        return ring_attend(heads, own, seen, sinks, scale, window, self._groups[keys[-1].axis])
