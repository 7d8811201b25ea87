"""All ranks together read each block from storage once.

Which rank reads a block, and whose window or message brings it to the others, is dealt out first (`deal`). Then every
rank has threads that read blocks, or receive them from other nodes (`between`), prove them, and lay them into the slots
of its window, one after the other; meanwhile it copies what it wants from the windows of its node. A slot is filled
again when everybody is past it. So reading, sums, messages and copies overlap, nobody waits for all the others, and
memory is the window. Only which blocks are wanted passes between all ranks; each works out the same deal from it.

A rank that fails says so in its window, and to the ranks of other nodes that it would have passed blocks to or from;
one that dies is missed. All others stop within seconds, and all raise the same sentence. Ranks that have no memory in
common are nodes of their own.
"""

import mmap
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from tangram.checkpoint.loading.assign_blocks import BlockTask, Deal, Wants, deal
from tangram.checkpoint.loading.between_nodes import Between, PeerError, ReportedError
from tangram.checkpoint.loading.block_source import READERS, DamagedError, Sources, WorkQueue, in_threads
from tangram.checkpoint.loading.page_memory import pages
from tangram.checkpoint.loading.scatter import BlockCopies, Item
from tangram.checkpoint.store.commits import files_here
from tangram.checkpoint.store.digest import Bytes
from tangram.checkpoint.store.manifest import BLOCK, Manifest, blocks_of
from tangram.checkpoint.store.safetensors_header import PAGE
from tangram.errors import UserError
from tangram.hardware.host import shared
from tangram.relayout.exchange.peers import Peers, node_memory

_WORDS = 8
_FAILED, _DONE, _LENGTH, _MOVES = range(4)
_GONE = 2
_TEXT = 4 * PAGE


@dataclass(frozen=True)
class WindowShape:
    """Of all windows of an exchange."""

    slots: int
    ranks: int

    @property
    def head(self) -> int:
        """Bytes before the first slot: whole pages."""
        return -(-(8 * (_WORDS + self.slots + self.ranks) + _TEXT) // PAGE) * PAGE

    @property
    def size(self) -> int:
        return self.head + self.slots * BLOCK


class SharedWindow:
    """One window, seen by its owner or by another rank."""

    def __init__(self, memory: mmap.mmap, shape: WindowShape, process: int) -> None:
        """`process`: its owner's."""
        self._process = process
        whole = np.frombuffer(memory, np.uint8)
        words = whole[: shape.head].view(np.int64)
        self._words = words
        self.ready = words[_WORDS : _WORDS + shape.slots]
        """For each slot, one more than the number of the block that lies there."""
        self.passed = words[_WORDS + shape.slots : _WORDS + shape.slots + shape.ranks]
        """For each rank, how many blocks of this window it needs no more."""
        self._text = whole[shape.head - _TEXT : shape.head]
        self.slots = [whole[shape.head + i * BLOCK : shape.head + (i + 1) * BLOCK] for i in range(shape.slots)]

    def fail(self, text: str, *, gone: bool) -> None:
        """Say that the owner has failed, and how; `gone`: because another rank ended."""
        data = np.frombuffer(text.encode()[:_TEXT], np.uint8)
        self._text[: len(data)] = data
        self._words[_LENGTH] = len(data)
        self._words[_FAILED] = _GONE if gone else 1

    def move(self) -> None:
        """Say that the owner gets on. (Its threads may count one step twice: only that it changes matters.)"""
        self._words[_MOVES] += 1

    def finish(self) -> None:
        """Say that the owner has all that it wants."""
        self._words[_DONE] = 1

    @property
    def progress(self) -> int:
        """Changes whenever the owner gets on."""
        return int(self._words[_MOVES])

    @property
    def failure(self) -> tuple[str | None, bool]:
        """How the owner failed, and whether that was because another rank ended."""
        if not self._words[_FAILED]:
            return None, False
        text = self._text[: int(self._words[_LENGTH])].tobytes().decode(errors="replace")
        return text, bool(self._words[_FAILED] == _GONE)

    @property
    def done(self) -> bool:
        """Whether the owner has all that it wants."""
        return bool(self._words[_DONE])

    @property
    def alive(self) -> bool:
        """Whether the owner's process still runs."""
        return shared.runs(self._process)


LIMIT = 900.0
"""Seconds without any progress after which a rank gives up: longer than storage stalls and recovers."""
LOOK = 0.5
"""Seconds without progress after which a rank looks whether the others still live."""
SLOTS = 4
"""Of a window at most."""


def read_together(path: Path, manifest: Manifest, plan: Callable[[], BlockCopies], peers: Peers, memory: int) -> None:
    """Fill what all ranks want. Collective; `plan` gives what this one wants. Raises the same on all ranks.

    DamagedError, UserError, and PeerError where another rank ended: that one raises nothing.
    """
    files = sorted(manifest.files)
    numbers = {file: i for i, file in enumerate(files)}
    wanted, error = _tried(plan)
    blocks = [] if wanted is None else [[numbers[file], some] for file, some in wanted.blocks.items()]
    here = files_here(path)
    has = None if here is None else sorted(numbers[file] for file in here if file in numbers)
    word = {"node": [shared.node(), has], "save": manifest.id, "error": error, "blocks": blocks}
    words = _all_words(peers, word)
    _raise_first([word["error"] for word in words])
    if len({word["save"] for word in words}) > 1:
        raise UserError("the ranks read manifests of different saves: give all of them the same checkpoint")
    if wanted is None:
        raise AssertionError("what has no plan has an error")
    wants: list[Wants] = [{files[n]: some for n, some in word["blocks"]} for word in words]
    nodes = [str(word["node"]) for word in words]
    here = [i for i, node in enumerate(nodes) if node == nodes[peers.index]]
    holds: list[list[str]] | None = None
    if any(word["node"][1] is not None for word in words):  # what each machine has written is there alone
        holds = [files if word["node"][1] is None else [files[n] for n in word["node"][1]] for word in words]
    sizes = {name: blocks_of(manifest.files[name].size) for name in files}
    made = deal(wants, nodes, peers.index, sizes, holds)
    room = (memory // BLOCK - READERS) // len(here)  # what a rank sees of all windows counts as its memory
    slots = max(1, min(SLOTS, room, *(len(stretch) for stretch in made.stretches)))
    me = here.index(peers.index)
    shape = WindowShape(slots if any(made.stretches) else 0, len(here))
    memory_of_node = node_memory(lambda word: _all_words(peers, word), here, peers.index, shape.size)
    found = [SharedWindow(window, shape, process) for window, process in memory_of_node]
    if not found:  # no memory that ranks of a node share: each reads as if it were alone on its node
        made, me = deal(wants, range(peers.size), peers.index, sizes, holds), 0
    _, error = _tried(lambda: _Exchange(wanted, made, me, found, here, peers).run(path, manifest, memory))
    _raise_first(_all_words(peers, error))


# ---------------------------------------------------------------- what passes between ranks


def _all_words(peers: Peers, word: Any) -> list[Any]:
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
    except ReportedError:
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


@dataclass
class _Exchange:
    """One rank's part."""

    _copies: BlockCopies
    _made: Deal
    _me: int
    _windows: Sequence[SharedWindow]
    _ranks: Sequence[int]
    _peers: Peers
    _filled: dict[int, int] = field(default_factory=dict[int, int])
    _error: BaseException | None = None

    def run(self, path: Path, manifest: Manifest, memory: int) -> None:
        """Read and copy everything; returns when all ranks of the node have what they want."""
        threads = min(READERS, len(self._made.tasks), max(1, memory // BLOCK - 1))
        with Sources(path, manifest, self._copies) as sources:
            between = Between(self._peers, lambda item: sources.length(*item), LIMIT)
            line = WorkQueue(self._made.tasks)
            try:
                in_threads(
                    lambda: self._guarded(self._step(sources, between, line)), threads, self._guarded(self._rest)
                )
            except BaseException as error:  # noqa: BLE001  raised again, after whoever waits for this rank knows
                first = self._error or error  # not what other threads made of it
                between.abandon(self._made.tasks, first)
                raise first from None

    def _guarded(self, act: Callable[[], Any]) -> Callable[[], Any]:
        """The same, that says its error to everybody at once."""

        def guarded() -> Any:
            try:
                return act()
            except BaseException as error:
                if self._error is None or isinstance(self._error, ReportedError):
                    self._error = error
                    if self._windows:
                        text = "" if isinstance(error, ReportedError) else _words(error)[1]
                        self._windows[self._me].fail(text, gone=isinstance(error, PeerError))
                raise

        return guarded

    def _step(self, sources: Sources, between: Between, line: WorkQueue[BlockTask]) -> Callable[[], bool]:
        """A step for one thread: the next block is got hold of."""
        room = pages(BLOCK)

        def step() -> bool:
            task = line.take()
            if task is None:
                return False
            try:
                self._get(task, sources, between, room)
            except BaseException as error:
                between.abandon([task], error)  # at once: another thread may wait for who waits for this
                raise
            if self._windows:
                self._windows[self._me].move()
            return True

        return step

    def _get(self, task: BlockTask, sources: Sources, between: Between, room: Bytes) -> None:
        """Read or receive a block, let the ranks of this node have it, send it to others, take what is wanted of it."""
        out = room if task.slot is None else self._slot(task.slot)
        if task.source is None:
            data = sources.read(*task.item, out)
        else:
            data = sources.proved(*task.item, between.receive(task, out), f", as rank {task.source} sent it,")
        if task.slot is not None:
            self._windows[self._me].ready[task.slot % len(self._windows[self._me].slots)] = task.slot + 1
        sending = between.send(task, data) if task.to else None
        try:
            self._copies.put(*task.item, data)
        finally:
            if sending is not None:
                sending.finish()
        if task.slot is not None:
            self._filled[task.slot % len(self._windows[self._me].slots)] = task.slot

    def _slot(self, number: int) -> Bytes:
        """The slot for a block of the window, once nobody needs what lay there before."""
        window = self._windows[self._me]
        slot = number % len(window.slots)
        before = number - len(window.slots)
        others = [i for i in range(len(self._windows)) if i != self._me]

        def free() -> bool:
            return before < 0 or (self._filled.get(slot) == before and all(window.passed[i] > before for i in others))

        self._until(free)
        return window.slots[slot]

    def _rest(self) -> None:
        """Copy from the others' windows, and wait for them."""
        if not self._windows:
            return
        queues = {
            i: [(number, item) for number, item in enumerate(stretch) if self._copies.has(item)]
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
                    self._copies.put(*item, self._windows[i].slots[number % len(self._windows[i].slots)])
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
        """Wait for something that other ranks do. Raises ReportedError if one has failed, PeerError if one is gone."""
        pause, looked = 2e-4, time.monotonic()
        moved, since = -1, looked
        while not true():
            self._hear()
            time.sleep(pause)
            pause = min(2 * pause, 2e-3)
            now = time.monotonic()
            if now - looked > LOOK:
                looked = now
                if (found := sum(window.progress for window in self._windows)) != moved:
                    moved, since = found, now
                self._look(now - since)

    def _delivered(self, i: int) -> bool:
        """Whether a rank has read all of its stretch; it may be done with what it wants itself before that."""
        ready, count = self._windows[i].ready, len(self._made.stretches[i])
        return all(ready[number % len(ready)] == number + 1 for number in range(max(0, count - len(ready)), count))

    def _hear(self) -> None:
        """Stop where another rank has said that it failed, or that it misses one."""
        failures = [window.failure for window in self._windows]
        for failure, gone in failures:
            if gone:
                raise PeerError(failure)
        if any(failure is not None for failure, _ in failures):
            raise ReportedError

    def _look(self, still: float) -> None:
        """Refuse to wait for a rank that has ended, or for storage that has."""
        ended = [i for i, window in enumerate(self._windows) if not window.alive]
        left = [i for i in ended if not (self._windows[i].done and self._delivered(i))]
        if left:
            self._hear()  # after: the last word of one that ended because of another is there by now
            raise PeerError(f"rank {self._ranks[left[0]]} ended while all of them read the checkpoint")
        if still > LIMIT:
            raise PeerError(f"no rank of this node has read, received or copied anything for {still:.0f} seconds")
