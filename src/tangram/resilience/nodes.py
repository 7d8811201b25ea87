"""The launchers of one run, one on each node: what they hear of each other, and what they all agree on.

torchrun, Slurm or a platform starts them, with the variables that torchrun sets for one rank on each node. They meet in
that rank's store; so do the ranks of each attempt, under a prefix of its own. Between two attempts every launcher gives
its words, and all do the same with the same words: none of them leads.

A launcher's heart is a number in the store that it counts up. Whoever waits for one whose heart stands still says so
and ends: what is in memory stays, and launchers that are started again with --resume find it.
"""

import contextlib
import os
import pickle
import socket
import threading
import time
from collections.abc import Generator
from typing import Any, TypeVar

import torch.distributed as dist

from tangram.checkpoint.saving.rank_parts import new_id
from tangram.errors import UserError
from tangram.relayout.exchange.peers import lost_peer
from tangram.training.run.environment import Among, ReportedElsewhere
from tangram.training.run.launch import RankError
from tangram.training.run.torchrun import Meeting

T = TypeVar("T")

BEAT = 1.0
"""Seconds from one beat of a launcher's heart to the next."""
STILL = 15.0
"""Seconds without one after which it is gone."""
HURRY = 3.0
"""The same where this node was asked to stop."""
LOOK = 0.05


class ElsewhereError(Exception):
    """The ranks of another node have ended; its launcher says why."""


class LauncherGoneError(RankError):
    """A launcher, or the store where all meet, is gone: once all are started again the run goes on."""


class Nodes:
    """All launchers, as one of them sees them. One thread asks for words; `ended` and `elsewhere` are of any."""

    def __init__(self, meeting: Meeting) -> None:
        """Raises UserError where several were started on one node."""
        here = meeting.place
        if here.local_world > 1:
            raise UserError("tangram launch starts the ranks of a node itself: start one on each (--nproc-per-node 1)")
        meeting.works += 1  # as one does for all, and so a word of its own
        self._store, self._meeting = dist.PrefixStore(f"nodes/{meeting.works}", meeting.store), meeting
        self.index, self.count, self.ranks = here.index, here.world, 1
        self._round, self._patience = 0, STILL
        self._hearts: dict[int, tuple[int, float]] = {}
        self._over = threading.Event()
        threading.Thread(target=self._beat, name="tangram-heart", daemon=True).start()
        self._run: str = self.words(new_id())[0]

    def divide(self, ranks: int) -> None:
        """Have the ranks of the whole run on these nodes. Raises UserError where they do not divide among them."""
        if ranks % self.count:
            raise UserError(
                f"{ranks} ranks do not divide among {self.count} nodes: give --processes, of all nodes, or --min-ranks"
            )
        self.ranks = ranks // self.count

    @property
    def place(self) -> tuple[int, int, int, int]:
        """As savers have it: which of how many, its first rank, and how many it has."""
        return self.index, self.count, self.index * self.ranks, self.ranks

    def close(self) -> None:
        self._over.set()

    # ------------------------------------------------------------ words

    def words(self, word: T) -> list[T]:
        """What every launcher gives, in their order, on all. Raises RankError where one is gone."""
        self._round += 1
        self.say(f"round/{self._round}/{self.index}", word)
        return [self.word(f"round/{self._round}/{node}", node) for node in range(self.count)]

    def word(self, key: str, node: int) -> Any:
        """What a launcher says under a key, once it does. Raises RankError where it is gone."""
        with self._store_there():
            while not self._store.check([key]):
                self.refuse_gone(node)
                time.sleep(LOOK)
            return pickle.loads(bytes.fromhex(self._store.get(key).decode()))

    def say(self, key: str, word: Any) -> None:
        """Say something under a key, once. Raises RankError where the store is gone."""
        with self._store_there():
            self._store.set(key, pickle.dumps(word).hex())

    @contextlib.contextmanager
    def _store_there(self) -> Generator[None]:
        try:
            yield
        except dist.DistError:
            raise self._gone(0, "its launcher, with the store where all meet, is gone") from None

    def refuse_gone(self, node: int) -> None:
        """Raise RankError where nothing is heard of a launcher, and ReportedElsewhere where one says why all end."""
        if self._meeting.store.check(["failed"]):
            raise self._meeting.elsewhere()
        now, beat = time.monotonic(), int(self._store.add(f"heart/{node}", 0))
        known, since = self._hearts.get(node, (-1, now))
        if beat != known:
            self._hearts[node] = beat, now
        elif now - since > self._patience:
            raise self._gone(node, f"nothing was heard of its launcher for {self._patience:.0f} s")

    def _gone(self, node: int, why: str) -> LauncherGoneError:
        why = f"{why}; tangram launch --resume, on all nodes, goes on"
        return LauncherGoneError(node * self.ranks, self.count * self.ranks, why, "")

    def _beat(self) -> None:
        while not self._over.wait(BEAT):
            try:
                self._store.add(f"heart/{self.index}", 1)
            except RuntimeError:  # the store is gone: others say so
                return

    # ------------------------------------------------------------ an attempt

    def among(self, attempt: int) -> Among:
        """The ranks that this launcher starts."""
        address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        looked = time.monotonic()

        def elsewhere() -> Exception | None:
            nonlocal looked
            try:
                with self._store_there():
                    if self._store.check([f"ended/{attempt}"]):
                        return ElsewhereError()
                    if time.monotonic() - looked > BEAT:
                        looked = time.monotonic()
                        for node in range(self.count):
                            self.refuse_gone(node)
            except (RankError, ReportedElsewhere) as error:
                return error
            return None

        world, first = self.count * self.ranks, self.index * self.ranks
        return Among(world, first, self.ranks, address, f"{self._run}/attempt-{attempt}", elsewhere)

    def settled(
        self, attempt: int, error: Exception | None, reached: int, *, stopping: bool = False
    ) -> tuple[Exception | None, int]:
        """How an attempt ended, alike on all: by the error that came first, or without one; and the furthest step.
        `stopping`: whether this node was asked to stop."""
        if stopping and error is not None:  # whoever asked, as torchrun, will not wait for long
            self._patience = min(STILL, HURRY)
        with self._store_there():
            if error is not None:
                self._store.set(f"ended/{attempt}", "")
            order = int(self._store.add(f"order/{attempt}", 1))
        words = self.words((error, order, reached))
        errors = [(_rank(one), order, one) for one, order, _ in words if one is not None]
        first = min(errors, key=lambda one: one[:2])[2] if errors else None
        return first, max(word[2] for word in words)


def _rank(error: Exception) -> int:
    """Which of the errors of several nodes is the cause of the others: a killed rank's before one that raised, and that
    before those who say that another is gone."""
    if isinstance(error, ElsewhereError):
        return 3
    if isinstance(error, RankError) and not error.details:
        return 0
    text = error.error if isinstance(error, RankError) else str(error)
    return 2 if lost_peer(RuntimeError(text)) else 1


def address_of_this_node() -> str:
    """By which other nodes reach this one: that of the way to where all meet."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as way:
            way.connect((os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])))
            return str(way.getsockname()[0])
    except OSError:
        return socket.gethostname()
