"""How the processes of ranks are started: forked from one that has imported what they need.

Importing torch and transformers takes a core some seconds. One process does it for all ranks, which are forked from it
(`multiprocessing`'s fork server): it computes nothing and holds no device, so there is nothing that a fork could break.
`make_ready` starts it while there is still something else to do. Where that is not to be had, ranks are spawned.

Trade-off: that process takes the memory of one rank that does nothing, and what ranks see of their parent's environment
and streams has to be handed to them.
"""

import contextlib
import multiprocessing
import multiprocessing.forkserver
import os
import signal
import sys
from collections.abc import Generator, Mapping
from multiprocessing import reduction, resource_tracker
from multiprocessing.context import ForkServerContext, SpawnContext
from typing import Any, cast

from tangram.training.stop import POLITE

IMPORTED = ["tangram.training.rank"]
"""What ranks need. By name: it stands on this module."""


def make_ready() -> None:
    """Begin to import what ranks will need, in the process that they are forked from; returns at once."""
    if isinstance(context_of_ranks(), ForkServerContext):
        with signals_held_back():
            multiprocessing.forkserver.ensure_running()


def context_of_ranks() -> ForkServerContext | SpawnContext:
    """How processes are started. The libraries of other systems than Linux do not take to forks."""
    if not sys.platform.startswith("linux"):
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(IMPORTED)
    return context


class Around:
    """What a rank takes over from its parent as it is now, and not as it was when the fork server started."""

    def __init__(self, environment: Mapping[str, str] | None = None, streams: Mapping[int, Any] | None = None) -> None:
        self._environment, self._streams = environment or {}, streams or {}

    def __reduce__(self) -> Any:
        """Pickled for a process that is being started, which alone may be given open files."""
        streams = {number: cast(Any, reduction).DupFd(number) for number in (1, 2) if _is_open(number)}
        return Around, (dict(os.environ), streams)

    def take(self) -> None:
        """In the rank: the parent's environment, and its standard output and error."""
        os.environ.clear()
        os.environ.update(self._environment)
        for number, stream in self._streams.items():
            descriptor = stream.detach()
            os.dup2(descriptor, number)
            os.close(descriptor)


def _is_open(descriptor: int) -> bool:
    try:
        os.fstat(descriptor)
    except OSError:
        return False
    return True


@contextlib.contextmanager
def signals_held_back() -> Generator[None]:
    """A process started here sees no SIGINT, for good, and no SIGTERM and no SIGHUP until it is ready for them.

    So Ctrl-C, which a terminal sends to all, is the parent's alone, and none ends a rank that is still starting.
    """
    resource_tracker.ensure_running()  # started any later, it would undo the mask
    before = signal.pthread_sigmask(signal.SIG_BLOCK, POLITE)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
