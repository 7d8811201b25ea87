"""All ranks of a node together read each block from storage once.

    a block that one rank wants      that rank reads it, and copies what it wants
    a block that several want        one of them reads it into its window; each copies what it wants from there

What several want is dealt out in contiguous stretches, so that all ranks read about the same. Every rank has threads
that read and prove blocks into the slots of its window, one after the other, and copies meanwhile what it wants from
the others' windows; a slot is filled again when everybody is past it. So reading, sums and copies overlap, nobody waits
for all the others, and memory is the window. Only which blocks are wanted passes between ranks; each works out the same
deal from it.

A rank that fails says so in its window, and one that dies is missed: all others stop within seconds, and all raise the
same sentence. Ranks of other nodes share no memory, so each node reads by itself what its ranks want.
"""

import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tangram.checkpoint.blocks import READERS, Line, filler, in_threads
from tangram.checkpoint.manifest import BLOCK, Manifest, blocks_of
from tangram.checkpoint.scatter import Item, Moves
from tangram.checkpoint.source import DamagedError, Sources
from tangram.checkpoint.windows import Shape, Window
from tangram.errors import UserError
from tangram.hardware import shared
from tangram.hardware.shared import Shared
from tangram.relayout.peers import Peers

LIMIT = 900.0
"""Seconds without any progress after which a rank gives up: longer than storage stalls and recovers."""
LOOK = 0.5
"""Seconds without progress after which a rank looks whether the others still live."""
SLOTS = 4
"""Of a window at most."""


class PeerError(UserError):
    """Another rank ended, or made no progress, while all of them read."""


class _ToldError(Exception):
    """Another rank, or another thread, has failed and says how by itself."""


@dataclass(frozen=True)
class Deal:
    """Who reads what on a node."""

    alone: list[Item]
    """What only this rank wants."""
    stretches: list[list[Item]]
    """By rank of the node: what several want, each block with one of them."""


def read_together(path: Path, manifest: Manifest, plan: Callable[[], Moves], peers: Peers, memory: int) -> None:
    """Fill what all ranks want. Collective; `plan` gives what this one wants. Raises the same on all ranks.

    DamagedError, UserError, and PeerError where another rank of the node ended: that one raises nothing.
    """
    files = sorted(manifest.files)
    numbers = {file: i for i, file in enumerate(files)}
    wanted, error = _tried(plan)
    blocks = [] if wanted is None else [[numbers[file], some] for file, some in wanted.blocks.items()]
    words = _said(peers, {"node": shared.node(), "save": manifest.id, "error": error, "blocks": blocks})
    _raise_first([word["error"] for word in words])
    if len({word["save"] for word in words}) > 1:
        raise UserError("the ranks read manifests of different saves: give all of them the same checkpoint")
    if wanted is None:
        raise AssertionError("what has no plan has an error")
    here = [i for i, word in enumerate(words) if word["node"] == words[peers.index]["node"]]
    sizes = {name: blocks_of(manifest.files[name].size) for name in files}
    me = here.index(peers.index)
    made = deal([{files[n]: some for n, some in words[i]["blocks"]} for i in here], me, sizes)
    room = (memory // BLOCK - READERS) // len(here)  # what a rank sees of all windows counts as its memory
    slots = max(1, min(SLOTS, room, *(len(stretch) for stretch in made.stretches)))
    found = _windows(peers, here, me, Shape(slots if any(made.stretches) else 0, len(here)))
    if not found:  # without memory in common each reads by itself what it wants
        made = Deal(wanted.items, [[]])
    _, error = _tried(lambda: _Exchange(wanted, made, me, found, here).run(path, manifest, memory))
    _raise_first(_said(peers, error))


def deal(wants: Sequence[Mapping[str, Sequence[Sequence[int]]]], me: int, sizes: Mapping[str, int]) -> Deal:
    """Who reads what. `wants`: for each rank of the node and each file, the blocks as intervals; `sizes`: in blocks."""
    own: list[Item] = []
    several: list[Item] = []
    private = [0] * len(wants)
    for file, size in sizes.items():
        times, last = np.zeros(size + 1, np.int32), np.zeros(size + 1, np.int64)
        for rank, want in enumerate(wants):
            for start, stop in want.get(file, ()):
                times[start:stop] += 1
                last[start:stop] = rank
        several += [(file, int(block)) for block in np.flatnonzero(times > 1)]
        single = times == 1
        own += [(file, int(block)) for block in np.flatnonzero(single & (last == me))]
        for rank, count in enumerate(np.bincount(last[single], minlength=len(wants))):
            private[rank] += int(count)
    shares = _level(private, len(several))
    bounds = np.cumsum([0, *shares])
    return Deal(own, [several[int(a) : int(b)] for a, b in itertools.pairwise(bounds)])


def _level(has: Sequence[int], more: int) -> list[int]:
    """How many of `more` each gets, so that all have as much the same as can be."""
    shares = [0] * len(has)
    order = sorted(range(len(has)), key=lambda rank: (has[rank], rank))
    for count in range(len(order), 0, -1):  # the ones with least, filled to one level
        some = order[:count]
        total = sum(has[rank] for rank in some) + more
        if total >= count * has[some[-1]]:
            for i, rank in enumerate(some):
                shares[rank] = total // count + (i < total % count) - has[rank]
            break
    return shares


# ---------------------------------------------------------------- what passes between ranks


def _windows(peers: Peers, here: Sequence[int], me: int, shape: Shape) -> list[Window]:
    """The windows of the ranks of this node, open to this one; none where they cannot have memory in common."""
    for way in shared.WAYS:
        made, _ = _tried(lambda way=way: way(shape.size))
        try:
            if made is not None:
                Window(made.memory, shape).begin()
            names = _said(peers, "" if made is None else made.name)
            found, error = _tried(lambda made=made, names=names: _opened(made, [names[i] for i in here], me, shape))
            if not any(_said(peers, error)):
                return found
        finally:
            if made is not None:
                made.close()
    return []


def _opened(made: Shared | None, names: Sequence[str], me: int, shape: Shape) -> list[Window]:
    if made is None or not all(names):
        raise OSError("a rank has no memory that others can open")
    memory = [made.memory if i == me else shared.opened(name, shape.size) for i, name in enumerate(names)]
    return [Window(some, shape) for some in memory]


def _said(peers: Peers, word: Any) -> list[Any]:
    try:
        return peers.all_words(word)
    except RuntimeError as error:  # as the backend says it when a connection closes
        raise PeerError(f"another rank ended while all of them read the checkpoint: {error}") from None


def _tried(act: Callable[[], Any]) -> tuple[Any, list[str]]:
    """What it gives, or its error as words: a kind and a sentence."""
    try:
        return act(), []
    except PeerError:
        raise
    except _ToldError:
        return None, []
    except Exception as error:  # noqa: BLE001  whatever it is, the other ranks wait to hear of it
        return None, _words(error)


def _words(error: BaseException) -> list[str]:
    if isinstance(error, UserError):
        return ["damaged" if isinstance(error, DamagedError) else "user", str(error)]
    return ["", f"{type(error).__name__}: {error}"]


def _raise_first(errors: Sequence[list[str]]) -> None:
    for rank, words in enumerate(errors):
        if words:
            kind, text = words
            if kind == "damaged":
                raise DamagedError(text)
            raise UserError(text if kind else f"rank {rank} could not read the checkpoint: {text}")


# ---------------------------------------------------------------- reading and copying


class _Exchange:
    """One rank's part."""

    def __init__(self, wanted: Moves, made: Deal, me: int, found: Sequence[Window], ranks: Sequence[int]) -> None:
        self._wanted = wanted
        self._made = made
        self._me = me
        self._windows = found
        self._ranks = ranks
        self._shared, self._alone = Line(made.stretches[me if found else 0]), Line(made.alone)
        self._filled: dict[int, int] = {}
        self._error: BaseException | None = None

    def run(self, path: Path, manifest: Manifest, memory: int) -> None:
        """Read and copy everything; returns when all ranks of the node have what they want."""
        own = len(self._made.alone) + len(self._made.stretches[self._me if self._windows else 0])
        threads = min(READERS, own, max(1, memory // BLOCK - 1))
        try:
            with Sources(path, manifest, self._wanted) as sources:
                in_threads(lambda: self._guarded(self._reader(sources)), threads, self._guarded(self._rest))
        except BaseException:
            if self._error is not None:  # the first, not what other threads made of it
                raise self._error from None
            raise

    def _guarded(self, act: Callable[[], Any]) -> Callable[[], Any]:
        """The same, that says its error to everybody at once."""

        def guarded() -> Any:
            try:
                return act()
            except BaseException as error:
                if self._error is None and not isinstance(error, _ToldError):
                    self._error = error
                    if self._windows:
                        self._windows[self._me].fail(_words(error)[1], gone=isinstance(error, PeerError))
                raise

        return guarded

    def _reader(self, sources: Sources) -> Callable[[], bool]:
        """A step for one thread: a block for all, or where there are none left, one for this rank."""
        for_this_rank = filler(sources, self._wanted, self._alone)

        def step() -> bool:
            taken = self._shared.take()
            if taken is None:
                done = for_this_rank()
            else:
                self._fill(sources, *taken)
                done = True
            if self._windows:
                self._windows[self._me].move()
            return done

        return step

    def _fill(self, sources: Sources, number: int, item: Item) -> None:
        window = self._windows[self._me]
        slot = number % len(window.slots)
        before = number - len(window.slots)
        others = [i for i in range(len(self._windows)) if i != self._me]

        def free() -> bool:
            return before < 0 or (self._filled.get(slot) == before and all(window.passed[i] > before for i in others))

        self._until(free)
        data = sources.read(*item, window.slots[slot])
        window.ready[slot] = number + 1
        self._wanted.put(*item, data)
        self._filled[slot] = number

    def _rest(self) -> None:
        """Copy from the others' windows, and wait for them."""
        if not self._windows:
            return
        queues = {
            i: [(number, item) for number, item in enumerate(stretch) if self._wanted.has(item)]
            for i, stretch in enumerate(self._made.stretches)
            if i != self._me
        }
        for i, queue in queues.items():
            queue.reverse()
            self._pass(i, queue)
        while queues := {i: queue for i, queue in queues.items() if queue}:
            self._until(lambda queues=queues: any(self._there(i, queue[-1][0]) for i, queue in queues.items()))
            for i, queue in queues.items():
                while queue and self._there(i, queue[-1][0]):
                    number, item = queue.pop()
                    self._wanted.put(*item, self._windows[i].slots[number % len(self._windows[i].slots)])
                    self._pass(i, queue)
                    self._windows[self._me].move()
        self._windows[self._me].finish()
        self._until(lambda: all(window.done for window in self._windows))

    def _there(self, i: int, number: int) -> bool:
        ready = self._windows[i].ready
        return bool(ready[number % len(ready)] == number + 1)

    def _pass(self, i: int, queue: list[tuple[int, Item]]) -> None:
        """Tell a rank which of its blocks this one wants next."""
        self._windows[i].passed[self._me] = queue[-1][0] if queue else len(self._made.stretches[i])

    def _until(self, true: Callable[[], bool]) -> None:
        """Wait for something that other ranks do. Raises _ToldError when one has failed, PeerError when one is gone."""
        pause, looked = 2e-4, time.monotonic()
        moved, since = -1, looked
        while not true():
            self._hear()
            time.sleep(pause)
            pause = min(2 * pause, 2e-3)
            now = time.monotonic()
            if now - looked > LOOK:
                looked = now
                if (found := sum(window.moves for window in self._windows)) != moved:
                    moved, since = found, now
                self._look(now - since)

    def _delivered(self, i: int) -> bool:
        """Whether a rank has read all of its stretch; it may be done with what it wants itself before that."""
        ready, count = self._windows[i].ready, len(self._made.stretches[i])
        return all(ready[number % len(ready)] == number + 1 for number in range(max(0, count - len(ready)), count))

    def _hear(self) -> None:
        """Stop where another rank has said that it failed, or that it misses one."""
        for window in self._windows:
            failure, gone = window.failure
            if gone:
                raise PeerError(failure)
            if failure is not None:
                raise _ToldError

    def _look(self, still: float) -> None:
        """Refuse to wait for a rank that has ended, or for storage that has."""
        ended = [i for i, window in enumerate(self._windows) if not window.alive]
        left = [i for i in ended if not (self._windows[i].done and self._delivered(i))]
        if left:
            self._hear()  # after: the last word of one that ended because of another is there by now
            raise PeerError(f"rank {self._ranks[left[0]]} ended while all of them read the checkpoint")
        if still > LIMIT:
            raise PeerError(f"no rank of this node has read or copied anything for {still:.0f} seconds")
