"""Bytes that operators make in a step and are still there: what a process has beside its states, counted and not asked.

Each storage that an operator gives and that was not there before counts from then until it is gone. So views, results
in place and parameters count nothing, and no allocator's rounding or cache does; resident memory has both, and is 1.3
to 2.3 times as much.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves  # pyright: ignore[reportUnknownVariableType]

Phase = Literal["forward", "backward", "update"]


@dataclass
class Flow:
    """What was counted."""

    now: int = 0
    peaks: dict[Phase, int] = field(default_factory=lambda: {"forward": 0, "backward": 0, "update": 0})


class FlowCounter(TorchDispatchMode):
    """Counts within. `before`: the tensors that are there, which do not count."""

    def __init__(self, before: Iterable[Tensor]) -> None:
        super().__init__()
        self.flow = Flow()
        self._phase: Phase = "forward"
        self._known: dict[int, Any] = {_key(one): None for one in before}

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
        return found

    def _see(self, one: Tensor) -> None:
        key, storage = _key(one), one.untyped_storage()
        if key in self._known:
            return
        size = storage.nbytes()
        self._known[key] = weakref.finalize(storage, self._gone, key, size)
        self.flow.now += size
        self.flow.peaks[self._phase] = max(self.flow.peaks[self._phase], self.flow.now)

    def _gone(self, key: int, size: int) -> None:
        self._known.pop(key, None)
        self.flow.now -= size


def _key(one: Tensor) -> int:
    return one.untyped_storage()._cdata  # pyright: ignore[reportPrivateUsage]
