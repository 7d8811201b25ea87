"""A polite stop: a signal asks, the rank finishes its step, and whoever cannot wait asks again.

A signal is only a wish: its handler takes a note, and the training loop asks for it once a step. What comes within half
a second of the first signal counts as the same one, since many wrappers (`timeout`, `srun`, package runners) pass on
a signal that the terminal or the scheduler has delivered to everybody already. The trade-off: who presses Ctrl-C twice
in that time has to press it once more.
"""

import contextlib
import os
import signal
import stat
import threading
import time
from collections.abc import Callable, Generator, Iterable
from multiprocessing.connection import Connection
from types import FrameType
from typing import Literal, NoReturn

from tangram.training.observe.text_tables import printable

SAME_SECONDS = 0.5
POLITE = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
"""Ctrl-C, the end of a job by its scheduler, a terminal that has closed, and a time limit near (`sbatch --signal`)."""


class Stop:
    """Whether somebody wants this rank to stop after its step: a signal of its own, or word from the parent."""

    def __init__(self, line: Connection | None = None, heard: Callable[[str], None] | None = None) -> None:
        self.signal = ""
        """The name of the signal, as "SIGTERM"; empty until one was seen."""
        self._line = line
        self._heard = heard

    def ask(self, name: str) -> None:
        """Note the wish; this is all that a signal handler does."""
        self.signal = self.signal or name

    def requested(self) -> bool:
        """Ask this once a step. The first to see a signal of the rank itself also tells of it."""
        if self._line is not None and not self.signal and self._line.poll():
            with contextlib.suppress(EOFError, OSError):  # the parent is gone; that ends a rank by another way
                self.signal = str(self._line.recv())
                self._heard = None  # whom we would tell has told us
        if self.signal and self._heard is not None:
            heard, self._heard = self._heard, None
            heard(self.signal)
        return bool(self.signal)


@contextlib.contextmanager
def on_signals(
    numbers: Iterable[signal.Signals], first: Callable[[str], None], again: Callable[[str], None]
) -> Generator[None]:
    """For a while, call `first` with the name of the first of these signals and `again` with that of any later one.

    Signals that are ignored stay ignored (as in a job that a shell put in the background). Outside the main thread,
    where Python takes no signals, nothing changes. Both are called inside a signal handler: in the midst of anything.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    owner = os.getpid()
    since: float | None = None

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal since
        if os.getpid() != owner:  # a forked child has inherited this handler but not the wish to be polite
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        elif since is None:
            since = time.monotonic()
            if number == signal.SIGHUP:
                _leave_terminal()
            first(signal.Signals(number).name)
        elif time.monotonic() - since >= SAME_SECONDS:
            again(signal.Signals(number).name)

    before = {
        number: handler for number in numbers if (handler := signal.getsignal(number)) not in (None, signal.SIG_IGN)
    }
    try:
        for number in before:
            signal.signal(number, handle)
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def interrupt(name: str) -> NoReturn:
    """What the second signal does."""
    raise KeyboardInterrupt


def _leave_terminal() -> None:
    """What is printed from now on goes nowhere if the terminal is gone: writing to it would raise an error."""
    for number in (1, 2):
        with contextlib.suppress(OSError):
            if stat.S_ISCHR(os.fstat(number).st_mode) and not os.isatty(number):
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, number)
                os.close(nowhere)


LESS_MEMORY = "lower data.micro_batch or data.sequence, or recompute blocks (run.recompute)"
UNKNOWN = 255  # what multiprocessing takes for the exit code of a process whose fork server is gone


How = Literal["raised", "killed", "memory", "hang"]
"""What ended a rank: an error of its own, somebody, the kernel as memory ran out, or that it stood still."""


def death(exitcode: int | None, *, memory: bool = False) -> tuple[str, How]:
    """How a process without last words ended. `memory`: whether the kernel has ended one meanwhile as that ran out."""
    if exitcode == UNKNOWN:
        return "it ended without an error message, after the process that it was forked from had been killed", "killed"
    if exitcode == -signal.SIGKILL:
        if memory:
            return f"killed by the kernel, as memory ran out: {LESS_MEMORY}", "memory"
        return "killed by signal 9, as the kernel does when memory runs out", "killed"
    if exitcode is not None and exitcode < 0:
        return f"killed by signal {-exitcode}", "killed"
    return f"exited with code {exitcode} without an error message", "killed"


LONGEST = 2000  # letters of an error's sentence


def first_line(error: BaseException) -> str:
    """An error as one sentence that can be printed: its kind and the first line of what it says; of a rank that is gone
    what that means."""
    from tangram.relayout.exchange.peers import lost_peer  # loads torch: not before ranks are started

    try:
        if said := lost_peer(error):
            return said
        lines = str(error).strip().splitlines()
    except Exception:  # noqa: BLE001  its own code says what it says
        lines = []
    words = printable(f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__)
    return words if len(words) <= LONGEST else f"{words[:LONGEST]}..."
