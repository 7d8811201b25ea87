"""Bytes that operators make in a step and are still there: what a process has beside its states, counted and not asked.

Each storage that an operator gives and that was not there before counts from then until it is gone, with the size that
it has at a time: FSDP takes the memory of what it gathers away, and keeps the storage. So views, results in place and
parameters count nothing, and no allocator's rounding or cache does; resident memory has both, and is 1.3 to 2.3 times
as much.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, UntypedStorage
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves  # pyright: ignore[reportUnknownVariableType]

Phase = Literal["forward", "backward", "update"]


@dataclass
class Flow:
    """What was counted."""

    made: dict[int, weakref.ref[UntypedStorage]] = field(default_factory=dict[int, "weakref.ref[UntypedStorage]"])
    """The storages that operators gave and that are there."""
    peaks: dict[Phase, int] = field(default_factory=lambda: {"forward": 0, "backward": 0, "update": 0})

    @property
    def now(self) -> int:
        """Bytes of them."""
        there = [ref() for ref in [*self.made.values()]]
        return sum(one.nbytes() for one in there if one is not None)


class FlowCounter(TorchDispatchMode):
    """Counts within. `before`: the tensors that are there, which do not count."""

    def __init__(self, before: Iterable[Tensor]) -> None:
        super().__init__()
        self.flow = Flow()
        self._phase: Phase = "forward"
        self._before: dict[int, UntypedStorage] = {_key(one): one.untyped_storage() for one in before}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if torch._C._current_graph_task_id() >= 0:  # pyright: ignore[reportPrivateUsage]
            self._phase = "backward"
        elif self._phase == "backward":
            self._phase = "update"
        leaves: list[Any] = tree_leaves(found)
        for one in leaves:
            if isinstance(one, Tensor) and one.device.type != "meta":
                self._see(one)
        self.flow.peaks[self._phase] = max(self.flow.peaks[self._phase], self.flow.now)
        return found

    def _see(self, one: Tensor) -> None:
        key, storage = _key(one), one.untyped_storage()
        if key not in self._before and key not in self.flow.made:
            self.flow.made[key] = weakref.ref(storage)
            weakref.finalize(storage, self.flow.made.pop, key, None)


def _key(one: Tensor) -> int:
    return one.untyped_storage()._cdata  # pyright: ignore[reportPrivateUsage]
