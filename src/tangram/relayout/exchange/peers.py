"""The ranks that do something together: a few words to and from the first of them, or between all, and messages.

Words are JSON or numbers, not pickles, and small; the tensors of a relayout never pass here. Every method is
collective, so all ranks of the group call it, in the same order; but `send` and `receive` are between two. A rank that
is gone is a PeerLostError on the others.
"""

import contextlib
import itertools
import json
import mmap
import re
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tangram.errors import UserError
from tangram.hardware.host import shared

_HEAD, _SHORT = 8, 504
"""Bytes of a length, and of a word that passes together with it: most are no longer."""


_LOST = re.compile(
    r"gloo/|(closed|reset) by peer|broken pipe|timed out|remote process (exited|has failed)", re.IGNORECASE
)
"""In what backends say of a rank that is gone."""


class PeerLostError(RuntimeError):
    """Another rank has ended, or cannot be reached."""


def lost_peer(error: BaseException) -> str:
    """What to say of an error of a collective that means that another rank is gone; nothing for other errors."""
    if isinstance(error, PeerLostError):
        return str(error)
    lines = str(error).strip().splitlines()
    if not isinstance(error, RuntimeError) or not lines or not _LOST.search(lines[0]):
        return ""
    return f"another rank has ended, or cannot be reached ({lines[0]})"


@contextlib.contextmanager
def naming_lost_peers() -> Generator[None]:
    """Raise PeerLostError where a collective meets a rank that is gone."""
    try:
        yield
    except RuntimeError as error:
        if said := lost_peer(error):
            raise PeerLostError(said) from error
        raise


@dataclass(frozen=True)
class Peers:
    """The ranks of a group, or, without one, this process alone."""

    group: dist.ProcessGroup | None = None
    """Of a backend that moves tensors of the CPU, as gloo."""

    @staticmethod
    def of_call(group: dist.ProcessGroup | None, no_dist: bool = False) -> "Peers":
        """Who takes part in a collective call: the ranks of `group`, or all of the default process group.

        This process alone where there is none, or with `no_dist`. Raises UserError for a default process group that
        moves no tensors of the CPU.
        """
        if group is not None or no_dist or not dist.is_initialized():
            return Peers(None if no_dist else group)
        backends = dist.get_backend_config()
        if "cpu" not in backends:
            raise UserError(
                f"the default process group ({backends}) moves no tensors of the CPU: give "
                'group=torch.distributed.new_group(backend="gloo"), or no_dist=True to be this process alone'
            )
        return Peers(dist.group.WORLD)

    @property
    def index(self) -> int:
        """This rank's place in the group."""
        return 0 if self.group is None else dist.get_rank(self.group)

    @property
    def size(self) -> int:
        """How many ranks there are."""
        return 1 if self.group is None else dist.get_world_size(self.group)

    @naming_lost_peers()
    def from_first(self, word: Any) -> Any:
        """What the first rank gives, on all; anything that JSON can say."""
        if self.group is None:
            return word
        data = _data(word) if self.index == 0 else torch.empty(0, dtype=torch.uint8)
        first = torch.zeros(_HEAD + _SHORT, dtype=torch.uint8)
        first[:_HEAD] = torch.tensor([data.numel()]).view(torch.uint8)
        first[_HEAD : _HEAD + data.numel()] = data[:_SHORT]
        dist.broadcast(first, group=self.group, group_src=0)
        length = int(first[:_HEAD].view(torch.int64))
        if length <= _SHORT:
            return _word(first[_HEAD : _HEAD + length])
        rest = data[_SHORT:] if self.index == 0 else torch.empty(length - _SHORT, dtype=torch.uint8)
        dist.broadcast(rest, group=self.group, group_src=0)
        return _word(torch.cat([first[_HEAD:], rest]))

    @naming_lost_peers()
    def all_words(self, word: Any) -> list[Any]:
        """What every rank gives, in their order, on all."""
        if self.group is None:
            return [word]
        data = _data(word)
        head = torch.tensor([data.numel()]).view(torch.uint8)
        found = self._all_data(torch.cat([head, data[:_SHORT]]), _HEAD + _SHORT)
        lengths = [int(some[:_HEAD].view(torch.int64)) for some in found]
        if max(lengths) > _SHORT:  # the rest of all
            more = self._all_data(data[_SHORT:], max(lengths) - _SHORT)
            found = [torch.cat(both) for both in zip(found, more, strict=True)]
        return [_word(some[_HEAD : _HEAD + n]) for some, n in zip(found, lengths, strict=True)]

    def _all_data(self, data: Tensor, length: int) -> list[Tensor]:
        padded = torch.zeros(length, dtype=torch.uint8)
        padded[: data.numel()] = data
        found = list(torch.empty(self.size, length, dtype=torch.uint8))
        dist.all_gather(found, padded, group=self.group)
        return found

    @naming_lost_peers()
    def swap(self, data: Sequence[Tensor]) -> list[Tensor]:
        """What every rank has for this one. `data`: what this one has for each rank, of one dim, all of one dtype."""
        if self.group is None:
            return list(data)
        counts = torch.tensor([some.numel() for some in data])
        theirs = torch.empty_like(counts)
        dist.all_to_all_single(theirs, counts, group=self.group)
        sizes = [int(n) for n in theirs]
        found = data[0].new_empty(sum(sizes))
        dist.all_to_all_single(found, torch.cat(list(data)), sizes, counts.tolist(), group=self.group)
        starts = itertools.accumulate(sizes, initial=0)
        return [found[at : at + n] for at, n in zip(starts, sizes, strict=False)]

    def send(self, data: Tensor, to: int, tag: int) -> Any:
        """Begin a message to a rank; gloo keeps it here until that rank says where it goes. Raises RuntimeError."""
        return dist.isend(data, group=self.group, tag=tag, group_dst=to)

    def receive(self, data: Tensor, source: int, tag: int) -> Any:
        """Begin to take a message of as many bytes from a rank. Raises RuntimeError."""
        return dist.irecv(data, group=self.group, tag=tag, group_src=source)

    @naming_lost_peers()
    def wait(self) -> None:
        """Until all ranks are here."""
        if self.group is not None:
            dist.barrier(group=self.group)


Words = Callable[[Any], list[Any]]
"""What every rank of a group gives, on all: `Peers.all_words`, or the same that says its errors otherwise."""


def node_memory(all_words: Words, here: Sequence[int], me: int, size: int) -> list[tuple[mmap.mmap, int]]:
    """Memory of each of the ranks `here`, those of a node, open to all of them, and the number of its process.

    `me`: this rank; `size`: bytes of its own. Nothing where on some node a rank has no memory that others can open.
    Collective: the same ways are tried, and the same comes of it, on all ranks.
    """
    for way in shared.WAYS:
        made = _made(way, size)
        try:
            words = all_words(["" if made is None else made.name, size, shared.process()])
            found = _opened(made, [words[i] for i in here], here.index(me))
            if all(all_words(found is not None)):
                return found or []
        finally:
            if made is not None:
                made.close()
    return []


def _made(way: Callable[[int], shared.Shared], size: int) -> shared.Shared | None:
    try:
        return way(size)
    except Exception:  # noqa: BLE001  whatever it is, the others hear that there is none
        return None


def _opened(made: shared.Shared | None, words: Sequence[Any], me: int) -> list[tuple[mmap.mmap, int]] | None:
    if made is None or not all(name for name, _, _ in words):
        return None
    try:
        return [
            (made.memory if i == me else shared.opened(name, size), process)
            for i, (name, size, process) in enumerate(words)
        ]
    except Exception:  # noqa: BLE001  as above
        return None


def _data(word: Any) -> Tensor:
    return torch.frombuffer(bytearray(json.dumps(word).encode()), dtype=torch.uint8)


def _word(data: Tensor) -> Any:
    return json.loads(data.numpy().tobytes())
