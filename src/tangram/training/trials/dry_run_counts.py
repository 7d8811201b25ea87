"""What a rank's step takes, counted while it runs on fake tensors: bytes in use at the highest moment, collectives.

A dispatch mode sees every operator: the storages that it makes, and when they are let go; the collectives, with the
group that each is of. FSDP grows and empties storages by hand, which no operator tells of, so before a new highest sum
is believed, the sizes of such storages are read again. What a storage was is asked afterwards (`Tally.at_peak`): that
it is a gradient is known once the backward has ended.

Not counted: what kernels use inside, what an allocator leaves unused, what a communication library takes for itself.
"""

from __future__ import annotations

import gc
import math
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch._guards import active_fake_mode
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tangram.models.capturing.opened import GROUPED, grouped
from tangram.training.mesh.local_parts import local

FRAMES = 12  # between DTensor's question and an operator, at most
Received = Callable[[int, int], float]
"""From the bytes of a collective's larger side and the ranks of its group: the bytes that a rank receives."""


def _ring(nbytes: int, ranks: int) -> float:
    return nbytes * (ranks - 1) / ranks


COLLECTIVES: Mapping[str, tuple[str, Received]] = {
    "allreduce_": ("all-reduce", lambda nbytes, ranks: 2 * _ring(nbytes, ranks)),
    "all_reduce": ("all-reduce", lambda nbytes, ranks: 2 * _ring(nbytes, ranks)),
    "allgather_": ("all-gather", _ring),
    "_allgather_base_": ("all-gather", _ring),
    "allgather_into_tensor_coalesced_": ("all-gather", _ring),
    "all_gather_into_tensor": ("all-gather", _ring),
    "reduce_scatter_": ("reduce-scatter", _ring),
    "_reduce_scatter_base_": ("reduce-scatter", _ring),
    "reduce_scatter_tensor_coalesced_": ("reduce-scatter", _ring),
    "reduce_scatter_tensor": ("reduce-scatter", _ring),
    "alltoall_": ("all-to-all", _ring),
    "alltoall_base_": ("all-to-all", _ring),
    "all_to_all_single": ("all-to-all", _ring),
    "broadcast_": ("broadcast", lambda nbytes, ranks: nbytes),
    "send": ("send", lambda nbytes, ranks: nbytes),
    "recv_": ("receive", lambda nbytes, ranks: nbytes),
}
"""What torch's operators are called, and what they move, by the usual rings."""


@dataclass(frozen=True, order=True)
class Collective:
    """A kind of collective over one group."""

    group: str
    """The group's name."""
    kind: str


@dataclass
class TallyStep:
    """What happened in one stretch of a run."""

    times: Counter[Collective] = field(default_factory=Counter[Collective])
    nbytes: Counter[Collective] = field(default_factory=Counter[Collective])
    """What a rank receives; of a send, what it sends."""
    peak: int = 0
    """The most bytes in use."""
    alive: Mapping[int, int] = field(default_factory=dict[int, int])
    """Bytes by number of storage at that moment."""


class Tally(TorchDispatchMode):
    """Counts while it is entered."""

    def __init__(self) -> None:
        super().__init__()
        self.step = TallyStep()
        self._sizes: dict[int, int] = {}
        self._refs: dict[int, Any] = {}
        self._numbers: dict[int, int] = {}  # of a storage, by its address while it is alive
        self._by_hand: set[int] = set()  # those whose size FSDP changes
        self._total = self._count = 0
        self._fake: object = None
        self._collects = True

    def __enter__(self) -> Tally:
        """Count from now on. What hangs together in circles is not collected meanwhile: that comes at any moment."""
        self._fake, self._collects = active_fake_mode(), gc.isenabled()
        gc.collect()
        gc.disable()
        return cast(Tally, super().__enter__())

    def __exit__(self, *error: Any) -> None:
        if self._collects:
            gc.enable()
        super().__exit__(*error)

    def begin(self) -> None:
        """Count a new stretch. What is in use stays so."""
        self._read_again()
        self.step = TallyStep()
        self._note_peak()

    def watch(self, tensors: Iterable[Tensor]) -> list[int]:
        """The numbers of the storages of tensors, which count from now on."""
        return [self._watch(tensor) for tensor in tensors]

    def bytes_of(self, numbers: Iterable[int]) -> int:
        """Of storages that are in use now."""
        self._read_again()
        return sum(self._sizes.get(number, 0) for number in set(numbers))

    @property
    def gathered(self) -> frozenset[int]:
        """Storages of parameters that FSDP puts together, and of what it puts them together in."""
        return frozenset(self._by_hand)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # it becomes operators on local parts
        faked = func is GROUPED and active_fake_mode() is not None
        found = grouped(func, args, kwargs or {}) if faked else func(*args, **(kwargs or {}))
        if active_fake_mode() is not self._fake or _only_asks():
            return found
        if func.namespace in ("c10d", "_c10d_functional"):
            self._note_collective(func, args, kwargs or {})
        if func.namespace == "fsdp":
            self._by_hand.update(self._watch(x) for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor))
        for x in tree_leaves(found):
            if isinstance(x, Tensor) and x.device.type != "meta":
                self._watch(x)
        if self._total > self.step.peak:
            self._read_again()
            self._note_peak()
        return found

    def _note_peak(self) -> None:
        if self._total > self.step.peak:
            self.step.peak, self.step.alive = self._total, dict(self._sizes)

    def _watch(self, tensor: Tensor) -> int:
        storage = local(tensor).untyped_storage()
        address = storage._cdata  # pyright: ignore[reportPrivateUsage]
        if address not in self._numbers:
            self._count += 1
            self._numbers[address], self._sizes[self._count] = self._count, 0
            self._refs[self._count] = weakref.ref(storage, partial(self._gone, self._count, address))
        number = self._numbers[address]
        self._resize(number, storage.nbytes())
        return number

    def _resize(self, number: int, nbytes: int) -> None:
        before = self._sizes[number]
        self._total += nbytes - before
        self._sizes[number] = nbytes

    def _read_again(self) -> None:
        for number in self._by_hand & self._sizes.keys():
            if (storage := self._refs[number]()) is not None:
                self._resize(number, storage.nbytes())

    def _gone(self, number: int, address: int, _: object) -> None:
        self._total -= self._sizes.pop(number)
        del self._refs[number]
        if self._numbers.get(address) == number:
            del self._numbers[address]

    def _note_collective(self, func: Any, args: Any, kwargs: Any) -> None:
        name = func._schema.name.partition("::")[2]
        if name not in COLLECTIVES:
            return
        kind, received = COLLECTIVES[name]
        group = next(g for x in tree_leaves((args, kwargs)) if (g := _group_of(x)) is not None)
        sides: list[int] = []
        for arg in (*args, *kwargs.values()):
            tensors = [x for x in tree_leaves(arg) if isinstance(x, Tensor)]
            sides.append(sum(x.numel() * x.element_size() for x in tensors))
        key = Collective(group.group_name, kind)
        self.step.times[key] += 1
        uneven = _from_others(func, args, kwargs, group)
        nbytes: Any = received(max(sides), group.size()) if uneven is None else uneven
        self.step.nbytes[key] += nbytes


def _only_asks() -> bool:
    """Whether DTensor runs an operator on fake tensors of the whole shape, to know what it will give."""
    frame = sys._getframe(2)  # pyright: ignore[reportPrivateUsage]
    for _ in range(FRAMES):
        if frame is None:
            return False
        if frame.f_code.co_filename.endswith("_sharding_prop.py"):
            return True
        frame = frame.f_back
    return False


def _from_others(func: Any, args: Any, kwargs: Any, group: dist.ProcessGroup) -> float | None:
    """What a rank receives of the others in an all-to-all in which it has so many rows of each; None of any other."""
    given = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | dict(kwargs)
    rows = given.get("output_split_sizes")
    if not rows:
        return None
    out: Any = given.get("output", given.get("input"))
    one = out.element_size() * math.prod(out.shape[1:])
    return float(one * (sum(rows) - rows[group.rank()]))


def _group_of(x: Any) -> dist.ProcessGroup | None:
    if isinstance(x, dist.ProcessGroup):
        return x
    if isinstance(x, torch.ScriptObject) and "ProcessGroup" in str(x._type()):  # pyright: ignore
        return cast(Any, dist.ProcessGroup).unbox(x)
    if isinstance(x, str):
        try:
            return dist.distributed_c10d._resolve_process_group(x)  # pyright: ignore
        except (RuntimeError, ValueError):
            return None
    return None
