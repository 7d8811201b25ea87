"""Blocks that pass between nodes: from the rank that reads one to a rank of each other node that wants it.

A block goes as a word and its bytes. The word comes first: that the bytes follow, or that they never will, and why. So
a rank that fails tells whoever waits for it, at once and for all that it would still have sent or received, and the
group is as it was before. Bytes lie nowhere but in the windows and rooms of both sides: gloo sends when the other side
has said where they go.

The trade-off: sends of their own, not the collectives of a group, whose steps all its ranks take together. Which nodes
want a block differs from block to block; these sends have none but those take part, several at once, beside reading,
and where all nodes want all they move what an all-gather moves, in equal parts.
"""

import itertools
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tangram.checkpoint.loading.assign_blocks import BlockTask
from tangram.checkpoint.loading.page_memory import pages
from tangram.checkpoint.loading.scatter import Item
from tangram.checkpoint.store.digest import Bytes
from tangram.checkpoint.store.manifest import BLOCK
from tangram.errors import UserError
from tangram.relayout.exchange.peers import Peers

_WORD = 256
"""Bytes of a word: how it is, and a sentence."""
_FOLLOWS, _FAILED, _GONE = range(3)
_TAGS = 1 << 30
"""Blocks under way at one time have numbers that are closer."""


class PeerError(UserError):
    """Another rank ended, or made no progress, while all of them read."""


class ReportedError(Exception):
    """Another rank, or another thread, has failed and says how by itself."""


@dataclass(frozen=True)
class Sending:
    """Messages under way."""

    works: Sequence[tuple[int, Any]]
    """With the rank of each."""
    wait: Callable[[int, Any], None]

    def finish(self) -> None:
        """Until all have arrived, or cannot. Raises PeerError for the first that cannot."""
        errors: list[PeerError] = []
        for rank, work in self.works:
            try:
                self.wait(rank, work)
            except PeerError as error:
                errors.append(error)
        if errors:
            raise errors[0]


class Between:
    """One rank's side. Several threads may use it, each for tasks of its own."""

    def __init__(self, peers: Peers, length: Callable[[Item], int], limit: float) -> None:
        """`length`: bytes of a block; `limit`: seconds without a byte after which the other side is given up."""
        self._peers = peers
        self._length = length
        self._limit = limit
        self._closed: set[int] = set()

    def send(self, task: BlockTask, data: Bytes) -> Sending:
        """Begin to send a block to whom the task says; `data` stays as it is until that is finished."""
        self._closed.add(task.number)
        word, body = _word(_FOLLOWS), torch.from_numpy(data)
        pairs = itertools.product(task.to, ((word, 0), (body, 1)))
        return Sending(
            [(rank, self._begin(self._peers.send, some, rank, task, n)) for rank, (some, n) in pairs], self._wait
        )

    def receive(self, task: BlockTask, out: Bytes) -> Bytes:
        """A block from the rank that sends it, in `out`.

        Raises ReportedError where that rank has failed, PeerError where it, or one that it waited for, is gone.
        """
        self._closed.add(task.number)
        how, text = self._receive(task, out)
        if how == _GONE:
            raise PeerError(text)
        if how == _FAILED:
            raise ReportedError
        return out[: self._length(task.item)]

    def abandon(self, tasks: Iterable[BlockTask], error: BaseException) -> None:
        """Say that this rank has failed, for every block that it has not yet sent; take what is sent to it.

        `tasks`: all that are left, in their order. Who is gone is not waited for.
        """
        word = _word(_GONE, str(error)) if isinstance(error, PeerError) else _word(_FAILED)
        gone: set[int] = set()
        for task in tasks:
            if task.number in self._closed:
                continue
            self._closed.add(task.number)
            for rank in [rank for rank in task.to if rank not in gone]:
                work = self._begin(self._peers.send, word, rank, task, 0)
                _unless_gone(rank, gone, lambda rank=rank, work=work: self._wait(rank, work))
            if task.source is not None and task.source not in gone:
                _unless_gone(task.source, gone, lambda task=task: self._receive(task, pages(BLOCK)))

    def _receive(self, task: BlockTask, out: Bytes) -> tuple[int, str]:
        source = -1 if task.source is None else task.source
        word = torch.zeros(_WORD, dtype=torch.uint8)
        self._wait(source, self._begin(self._peers.receive, word, source, task, 0))
        how, text = int(word[0]), word[1:].numpy().tobytes().rstrip(b"\0").decode(errors="replace")
        if how == _FOLLOWS:
            body = torch.from_numpy(out[: self._length(task.item)])
            self._wait(source, self._begin(self._peers.receive, body, source, task, 1))
        return how, text

    def _begin(
        self, act: Callable[[Tensor, int, int], Any], data: Tensor, rank: int, task: BlockTask, part: int
    ) -> Any:
        """A message begun, or the error with which it cannot be."""
        try:
            return act(data, rank, 2 * (task.number % _TAGS) + part)
        except RuntimeError as error:
            return error

    def _wait(self, rank: int, work: Any) -> None:
        try:
            if isinstance(work, RuntimeError):
                raise work
            work.wait(timedelta(seconds=self._limit))
        except RuntimeError as error:  # as the backend says it when a connection closes
            if re.search("timed? ?out", str(error), re.IGNORECASE):  # its own, or that of another message before it
                raise PeerError(f"rank {rank} has passed nothing on for {self._limit:.0f} seconds") from None
            raise PeerError(f"rank {rank} ended while all of them read the checkpoint") from None


def _word(how: int, text: str = "") -> Tensor:
    data = np.zeros(_WORD, np.uint8)
    said = np.frombuffer(text.encode()[: _WORD - 1], np.uint8)
    data[0], data[1 : 1 + len(said)] = how, said
    return torch.from_numpy(data)


def _unless_gone(rank: int, gone: set[int], act: Callable[[], object]) -> None:
    try:
        act()
    except PeerError:
        gone.add(rank)
