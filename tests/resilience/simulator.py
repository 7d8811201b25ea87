"""Actors that share a file system, one at a time, in an order drawn from a seed; any of them can be killed anywhere.

Each actor is a thread that runs the program's own code. At every operation on the file system, and wherever it waits,
it hands on to one that is drawn, so a seed is an interleaving and comes again. Who is killed does nothing more: every
further operation of it fails, so no clean-up of its own runs, as after SIGKILL. Time is counted, not measured.
"""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

EVENTS = frozenset("open os.rename os.mkdir os.remove os.rmdir os.link os.truncate os.scandir os.listdir".split())  # noqa: SIM905
GO_ON = 0.7
"""How likely an actor goes on after an operation: long stretches alone are as telling as single steps."""


class Killed(BaseException):
    """Of an actor, at once."""


@dataclass(eq=False)
class Actor:
    """One of them."""

    name: str
    act: Callable[[], object]
    ended: bool = False
    killed: bool = False
    result: object = None
    error: BaseException | None = None
    done: int = 0
    """Operations so far."""
    gate: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    """Opened where it is its turn."""


@dataclass
class Simulation:
    """One run."""

    root: Path
    seed: int
    kill_all_at: int | None = None
    """The step at which everybody is killed, as with the machine."""
    kill: Mapping[str, int] = field(default_factory=dict[str, int])
    """By actor: at which of its operations it is."""
    longest: int = 20_000
    """Steps after which it is taken to be endless."""
    now: float = 0.0
    steps: int = 0

    def __post_init__(self) -> None:
        self._draw = random.Random(self.seed)
        self._actors: dict[int, Actor] = {}

    def run(self, acts: Mapping[str, Callable[[], object]]) -> dict[str, Actor]:
        """Have all act until each has ended or was killed."""
        actors = [Actor(name, act) for name, act in acts.items()]
        threads = [threading.Thread(target=self._live, args=(actor,), daemon=True) for actor in actors]
        _running.append(self)
        try:
            for actor, thread in zip(actors, threads, strict=True):
                thread.start()
                assert thread.ident is not None
                self._actors[thread.ident] = actor
            self._next().gate.release()
            for thread in threads:
                thread.join(200)
                assert not thread.is_alive(), "an actor hangs"
        finally:
            _running.remove(self)
        return {actor.name: actor for actor in actors}

    def point(self, seconds: float = 0.0) -> None:
        """An operation of the actor that runs, or a wait of it."""
        self.now += seconds
        actor = self._actors.get(threading.get_ident())
        if actor is None or actor.ended:
            return
        self.steps += 1
        actor.done += not seconds
        late = self.kill_all_at is not None and self.steps >= self.kill_all_at
        if actor.killed or late or actor.done == self.kill.get(actor.name):
            actor.killed = True
            raise Killed(actor.name)
        if self.steps > self.longest:
            raise AssertionError(f"seed {self.seed}: it does not end")
        if seconds or self._draw.random() > GO_ON:
            chosen = self._next()
            if chosen is not actor:
                chosen.gate.release()
                actor.gate.acquire()

    def sleep(self, seconds: float) -> None:
        """As `time.sleep`."""
        self.point(max(seconds, 1e-6))

    def monotonic(self) -> float:
        """As `time.monotonic`."""
        return self.now

    def process_time(self) -> float:
        """As `time.process_time`."""
        return 0.0

    def receive(self, seconds: float | None = None) -> None:
        """As a channel whose other end says nothing."""
        self.sleep(seconds or 0.0)

    def under(self, path: Any) -> bool:
        """Whether an operation on this path is of interest: below the root, or relative to an open folder there."""
        return isinstance(path, str | bytes | Path) and (
            not str(path).startswith("/") or str(path).startswith(str(self.root))
        )

    def knows(self, thread: int) -> bool:
        """Whether a thread is an actor's."""
        return thread in self._actors

    def _live(self, actor: Actor) -> None:
        actor.gate.acquire()
        try:
            actor.result = actor.act()
        except Killed:
            pass
        except BaseException as error:  # noqa: BLE001  the test looks at it
            actor.error = error
        actor.ended = True
        if any(not one.ended for one in self._actors.values()):
            self._next().gate.release()

    def _next(self) -> Actor:
        return self._draw.choice([actor for actor in self._actors.values() if not actor.ended])


_running: list[Simulation] = []


def _hook(event: str, args: tuple[Any, ...]) -> None:
    if _running and event in EVENTS and args:
        one = _running[-1]
        if one.knows(threading.get_ident()) and one.under(args[0]):
            one.point()


sys.addaudithook(_hook)
