"""A copy of what a rank writes, made while training goes on: all that an asynchronous save makes training wait for.

    prepare (before step 1) -> start -> the next forward and backward -> fence -> the optimiser writes

The memory is taken and touched once, and shared with the process that writes. The elements lie in it as they will lie
in the files, header and all, so what was copied once is written from where it is. Copies run in a thread that holds
Python's lock only between tensors; on an accelerator in a stream of their own, into pinned memory. Training waits at
the fence for what is still missing, and helps with it.
"""

import itertools
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tangram.checkpoint.saving.file_layout import Image, Outgoing, images
from tangram.checkpoint.state.entries import StateEntry, mine
from tangram.checkpoint.store.digest import Bytes
from tangram.checkpoint.store.safetensors_header import PAGE
from tangram.hardware.host.hostmemory import Shared
from tangram.relayout import TensorSpec

CHUNK = 1 << 24
"""Bytes copied at a time: what a thread that waits for Python's lock may lose on each is small against them."""
NO_ID = "0" * 32
"""Stands for the id of a save where only the places matter: all ids are as long."""


@dataclass(frozen=True)
class FilePlaces:
    """Where the files of one rank lie in the memory, each on a page."""

    files: tuple[Image, ...]
    starts: tuple[int, ...]
    size: int
    """Bytes in all, whole pages."""

    @property
    def nbytes(self) -> int:
        return sum(file.size for file in self.files)

    def of_save(self, save_id: str) -> "FilePlaces":
        """The same of a save with this id, where there is `NO_ID` in the headers."""
        files = tuple(replace(file, head=with_id(file.head, NO_ID, save_id)) for file in self.files)
        return replace(self, files=files)


def with_id(head: bytes, before: str, now: str) -> bytes:
    """A header of another save; all ids are as long."""
    return head.replace(_own_id(before), _own_id(now), 1)


def _own_id(save_id: str) -> bytes:
    """As a header has it, before the names of tensors."""
    return f'"tangram_save":"{save_id}"'.encode()


def places(pieces: Iterable[Outgoing], index: int, writers: int, save_id: str = NO_ID) -> FilePlaces:
    """The files of the writer at a place, one after the other, each up to the end of its last page."""
    files = images(pieces, index, writers, save_id)
    *starts, size = itertools.accumulate((-(-file.size // PAGE) * PAGE for file in files), initial=0)
    return FilePlaces(tuple(files), tuple(starts), size)


@dataclass(frozen=True)
class RankShare:
    """What one rank writes of a state, and where it comes to lie."""

    own: tuple[StateEntry, ...]
    pieces: tuple[Outgoing, ...]
    empty: Mapping[str, TensorSpec]
    """Tensors without elements, which no file has."""
    places: FilePlaces


def share(entries: Sequence[StateEntry], index: int, writers: int) -> RankShare:
    """What the rank at a place writes. Raises UserError for what no file can hold."""
    own = tuple(mine(entries, index))
    pieces = tuple(Outgoing(e.name, e.spec, e.region, e.layout, e.frozen) for e in own)
    empty = {e.name: e.spec for e in entries if 0 in e.spec.shape}
    return RankShare(own, pieces, empty, places(pieces, index, writers))


class Pool:
    """The memory for one copy, taken ahead. It grows when a share needs more; what it had is then given back first."""

    def __init__(self, device: torch.device | None = None) -> None:
        self._device = device
        self.memory: Shared | None = None

    def reserve(self, nbytes: int) -> Shared:
        """Memory of at least so many bytes, every page of it there. Raises UserError when it cannot be had."""
        if self.memory is None or self.memory.nbytes < nbytes:
            self.close()
            self.memory = Shared(max(nbytes, PAGE), self._device)
        return self.memory

    def close(self) -> None:
        if self.memory is not None:
            self.memory.close()
            self.memory = None


@dataclass(frozen=True)
class Copies:
    """What is copied where: lots of plain bytes, and what only its device or torch can copy."""

    chunks: tuple[list[tuple[Bytes, Bytes]], ...]
    others: list[tuple[Bytes, Tensor]]


def copies_of(own: RankShare, memory: Shared) -> Copies:
    values = {id(piece): entry.local for piece, entry in zip(own.pieces, own.own, strict=True)}
    copies = [
        (memory.bytes[start + placed.offset : start + placed.stop], values[id(placed.piece)])
        for file, start in zip(own.places.files, own.places.starts, strict=True)
        for placed in file.placed
    ]
    flat = [(into, local.detach().reshape(-1)) for into, local in copies if _is_plain(local)]
    plain = _chunks([(into, values.view(torch.uint8).numpy()) for into, values in flat])
    return Copies(tuple(plain), [(into, local) for into, local in copies if not _is_plain(local)])


@dataclass(frozen=True)
class Laid:
    """Where entries go, worked out once."""

    entries: tuple[StateEntry, ...]
    own: RankShare
    memory: Shared
    copies: Copies


class Snapshot:
    """One copy on its way into a pool.

    `run` (in a thread) copies until all is there; `fence` (where training would next write the state) waits for it. The
    state is the one that was there when the snapshot was made, if nothing writes it until the fence has returned.
    """

    def __init__(self) -> None:
        self._moments = _Moments()
        self._chunks: list[list[tuple[Bytes, Bytes]]] = []
        self._state = threading.Condition()
        self._copying = 0
        self._problem: Exception | None = None
        self._started = threading.Event()

    def run(self, own: RankShare, memory: Shared) -> None:
        """Copy the share's elements; returns when they are there. Raises what a copy raised, on whatever thread."""
        self.follow(copies_of(own, memory))

    def follow(self, copies: "Copies") -> None:
        """The same by copies that were worked out before: of the same tensors, into the same memory."""
        self._chunks = [*copies.chunks]
        self._moments.enqueue(copies.others)
        self._started.set()
        self._finish()
        if self._problem is not None:
            raise self._problem
        self._moments.wait()

    def give_up(self) -> None:
        """Let nobody wait for it: there is nothing to copy, or it cannot be."""
        with self._state:
            self._chunks = []
        self._started.set()

    def fence(self) -> None:
        """Wait until the state may be written again; what is left to copy is copied here, too."""
        self._started.wait()
        self._finish()
        self._moments.fence()

    def _finish(self) -> None:
        while (chunk := self._next()) is not None:
            try:
                for into, values in chunk:
                    np.copyto(into, values)
            except Exception as error:  # noqa: BLE001  told to who runs the copy; training goes on
                self._problem = error
            finally:
                with self._state:
                    self._copying -= 1
                    self._state.notify_all()
        with self._state:
            self._state.wait_for(lambda: not self._copying)

    def _next(self) -> list[tuple[Bytes, Bytes]] | None:
        with self._state:
            if not self._chunks:
                return None
            self._copying += 1
            return self._chunks.pop()


class _Moments:
    """Copies from accelerators, in streams of their own: each begins after what its device was asked to do before.

    The moment at which that is belongs to the caller's thread, so it is taken when the snapshot is made.
    """

    def __init__(self) -> None:
        self._before: Any = None
        self._done: list[tuple[Any, torch.device]] = []
        if torch.accelerator.is_available():
            self._before = torch.accelerator.current_stream().record_event()

    def enqueue(self, copies: list[tuple[Bytes, Tensor]]) -> None:
        """Have the device copy; what is on the CPU, in strides, say, is copied here and now."""
        streams: dict[torch.device, Any] = {}
        for into, values in copies:
            target = torch.from_numpy(into).view(values.dtype).view(values.shape)
            if values.device.type == "cpu":
                target.copy_(values)
                continue
            if values.device not in streams:
                streams[values.device] = torch.Stream(values.device)
                streams[values.device].wait_event(self._before)
            with streams[values.device]:
                target.copy_(values, non_blocking=True)
        self._done = [(stream.record_event(), device) for device, stream in streams.items()]

    def wait(self) -> None:
        """Until the devices have copied."""
        for event, _ in self._done:
            event.synchronize()

    def fence(self) -> None:
        """Let what the devices are asked from now on begin after the copies; the caller need not wait."""
        for event, device in self._done:
            torch.accelerator.current_stream(device).wait_event(event)


def _is_plain(values: Tensor) -> bool:
    """Whether its elements lie in the host's memory in the order of the file."""
    return values.device.type == "cpu" and values.is_contiguous() and not values.is_conj() and not values.is_neg()


def _chunks(copies: list[tuple[Bytes, Bytes]]) -> list[list[tuple[Bytes, Bytes]]]:
    """The copies in lots of about CHUNK bytes: large ones cut, small ones together."""
    found: list[list[tuple[Bytes, Bytes]]] = [[]]
    room = CHUNK
    for into, values in copies:
        for start in range(0, len(values), CHUNK):
            part = into[start : start + CHUNK], values[start : start + CHUNK]
            if len(part[1]) > room and found[-1]:
                found.append([])
                room = CHUNK
            found[-1].append(part)
            room -= len(part[1])
    return [lot for lot in found if lot]
