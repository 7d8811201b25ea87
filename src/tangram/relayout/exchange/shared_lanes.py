"""Lanes: memory that the ranks of a node share, through which they pass bytes, a lane for each rank.

    head     words that are written by one side and read by the other: gone, how many rounds are packed, how many each
             other rank has read, and where the bytes for each begin
    rooms    what the owner packs in a round; with two of them it packs a round while the others still read the last

There is no lock: each word has one writer, and grows. A word is written after what it speaks of, and read before;
between lie calls that are barriers of memory (the lock of Python, the kernel). Bytes are packed into the lane and
unpacked out of it, so they are copied twice, as little as can be.
"""

from __future__ import annotations

import mmap
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from tangram.errors import UserError
from tangram.hardware.host import shared
from tangram.layout import Region
from tangram.relayout.exchange.messages import ALIGNED, Message, pack, unpack
from tangram.relayout.exchange.peers import Peers, node_memory
from tangram.relayout.mapping.codecs import Codec
from tangram.relayout.mapping.errors import CoverageError, PeerError, RelayoutError

_GONE, _PACKED, _WORDS = range(3)
_PAGE = 4096
LOOK = 0.5
"""Seconds of waiting after which a rank looks whether the others still live."""


@dataclass(frozen=True)
class Plot:
    """The sizes of a lane. `room`: bytes of one of its rooms; `ranks`: of the node."""

    room: int
    rooms: int
    ranks: int

    @property
    def head(self) -> int:
        """Bytes before the first room: whole pages."""
        return -(-8 * (_WORDS + self.ranks * (1 + self.rooms)) // _PAGE) * _PAGE

    @property
    def size(self) -> int:
        """Of all."""
        return self.head + self.room * self.rooms


class Lane:
    """One lane, seen by its owner or by another rank."""

    def __init__(self, memory: mmap.mmap, plot: Plot) -> None:
        words = np.frombuffer(memory, np.int64, plot.head // 8)
        self._words = words[:_WORDS]
        self.read = words[_WORDS : _WORDS + plot.ranks]
        """For each rank of the node, how many rounds it has read."""
        self.begins = words[_WORDS + plot.ranks :][: plot.rooms * plot.ranks].reshape(plot.rooms, plot.ranks)
        """For each room and rank, the byte where what is for it begins."""
        self.data: Tensor = torch.frombuffer(memory, dtype=torch.uint8)[plot.head :]

    @property
    def packed(self) -> int:
        """How many rounds are packed."""
        return int(self._words[_PACKED])

    @packed.setter
    def packed(self, rounds: int) -> None:
        self._words[_PACKED] = rounds

    @property
    def gone(self) -> int | None:
        """The rank because of which the owner has left before the end; None while it goes on."""
        return int(self._words[_GONE]) - 1 if self._words[_GONE] else None

    def leave(self, because_of: int) -> None:
        """Say that the owner leaves before the end, because of a rank: itself or one that it missed. Said once."""
        self._words[_GONE] = self._words[_GONE] or because_of + 1


class Lanes:
    """The lanes of a node as one of its ranks sees them; `here` are its ranks, `processes` theirs."""

    def __init__(
        self, lanes: Sequence[Lane], here: Sequence[int], processes: Sequence[int], me: int, plot: Plot
    ) -> None:
        self._lanes, self._here, self._processes, self._me = lanes, here, processes, here.index(me)
        self._plot = plot

    def pack(self, messages: Mapping[int, Message], k: int, rounds: int, codecs: Mapping[str, Codec]) -> None:
        """Pack what is for others in a round. What goes wrong is raised; they will find a round of other bytes."""
        mine, room = self._lanes[self._me], k % self._plot.rooms
        places = {self._here.index(rank): message for rank, message in messages.items()}
        self._until(lambda: all(mine.read[i] > k - self._plot.rooms for i in places))
        at = room * self._plot.room
        try:
            for i, message in places.items():
                end = at + message.length(k, rounds)
                mine.begins[room, i] = at
                pack(message, k, rounds, mine.data[at:end], codecs)
                at = -(-end // ALIGNED) * ALIGNED
        finally:
            mine.packed = k + 1

    def unpack(self, messages: Mapping[int, Message], k: int, rounds: int, codecs: Mapping[str, Codec]) -> None:
        """Unpack what comes from others in a round, in the order in which it is there."""
        left = {self._here.index(rank): message for rank, message in messages.items()}
        room, fault = k % self._plot.rooms, None
        while left:
            self._until(lambda: any(self._lanes[i].packed > k for i in left))
            for i in [i for i in left if self._lanes[i].packed > k]:
                lane, message = self._lanes[i], left.pop(i)
                at = int(lane.begins[room, self._me])
                part = lane.data[at : at + message.length(k, rounds)]
                _, wrong = tried(lambda m=message, p=part: unpack(m, k, rounds, p, codecs))
                fault = fault or wrong
                lane.read[self._me] = k + 1
        if fault is not None:
            raise fault

    @contextmanager
    def in_use(self) -> Generator[None]:
        """While this rank moves its bytes: who leaves before the end says so."""
        try:
            yield
        except BaseException:
            self._lanes[self._me].leave(self._here[self._me])
            raise

    def _until(self, true: Callable[[], bool]) -> None:
        """Wait for something that other ranks do. Raises PeerError when one is gone."""
        pause, spins, looked = 2e-5, 0, time.monotonic()
        while not true():
            time.sleep(pause if spins > 50 else 0)
            spins += 1
            pause = min(1.2 * pause, 1e-3) if spins > 50 else pause
            if time.monotonic() - looked > LOOK:
                looked = time.monotonic()
                if (rank := self._missed()) is not None:
                    self._lanes[self._me].leave(rank)
                    raise PeerError(f"rank {rank} ended while all of them moved tensors")

    def _missed(self) -> int | None:
        """The rank that ended first: of those that do not run, one that said whom it missed has ended because of it."""
        ended = [rank for rank, process in zip(self._here, self._processes, strict=True) if not shared.runs(process)]
        said = [lane.gone for lane in self._lanes if lane.gone is not None]  # after: its last word is there by now
        return next(iter(said + ended), None)


def open_lanes(peers: Peers, nodes: Sequence[str], room: int, rooms: int) -> Lanes | None:
    """The lanes of this rank's node, its own with rooms of so many bytes; None where a rank has no memory in common.

    Collective: the same on all ranks.
    """
    here = [i for i, name in enumerate(nodes) if name == nodes[peers.index]]
    plot = Plot(room, rooms, len(here))
    with noticed():
        found = node_memory(peers.all_words, here, peers.index, plot.size)
    lanes = [Lane(memory, plot) for memory, _ in found]
    return Lanes(lanes, here, [process for _, process in found], peers.index, plot) if found else None


T = TypeVar("T")


def tried(act: Callable[[], T]) -> tuple[T | None, Exception | None]:
    """What it gives, or what it raised. PeerError passes: there is nobody left to agree with."""
    try:
        return act(), None
    except PeerError:
        raise
    except Exception as error:  # noqa: BLE001  whatever it is, the other ranks wait to hear of it
        return None, error


def agreed(peers: Peers, fault: Exception | None, word: Any = None) -> list[Any]:
    """The words of all ranks, where none has a fault; else the first one's, raised on all. Collective."""
    with noticed():
        found = peers.all_words([None if fault is None else _fault_words(fault), word])
    for rank, (said, _) in enumerate(found):
        if said is not None:
            raise _error(rank, *said) from fault
    return [words for _, words in found]


def _fault_words(fault: Exception) -> list[str]:
    if isinstance(fault, CoverageError):
        return [str(fault), fault.tensor, str(fault.region)]
    return [str(fault) if isinstance(fault, UserError) else f"{type(fault).__name__}: {fault}"]


def _error(rank: int, text: str, tensor: str | None = None, region: str = "") -> RelayoutError:
    sentence = f"rank {rank}: {text}"
    return RelayoutError(sentence) if tensor is None else CoverageError(tensor, Region.parse(region), sentence)


@contextmanager
def noticed() -> Generator[None]:
    """PeerError where a collective ends because a rank is gone."""
    try:
        yield
    except RuntimeError as error:  # as the backend says it when a connection closes
        raise PeerError(f"another rank ended while all of them moved tensors: {error}") from None
