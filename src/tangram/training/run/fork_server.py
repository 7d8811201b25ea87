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
import multiprocessing.process
import multiprocessing.util
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Collection, Generator, Mapping
from multiprocessing import reduction, resource_tracker
from multiprocessing.connection import wait
from multiprocessing.context import ForkServerContext, SpawnContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, cast

from tangram.errors import UserError
from tangram.hardware.host.channel import Channel
from tangram.hardware.host.workers import Detached, serve_detached, settle_torch
from tangram.training.run.signals import POLITE, UNKNOWN

_LONGEST = 103 - len("/pymp-xxxxxxxx/listener-xxxxxxxx")
"""Bytes of a path below which a socket of multiprocessing has an address on every system (macOS: 103, Linux: 107)."""
_SHORT = (Path("/tmp"), Path("/var/tmp"), Path("/dev/shm"))  # tried in turn

ENDS_SECONDS = 60.0
"""So long a process that was killed may take to give back its memory."""
_left: list[BaseProcess] = []
"""Who was not waited for: while the pipe is open that a process has to its parent, that lives, and its folder stays."""
PRELOADED = ["tangram.training.preloaded"]


def make_ready() -> None:
    """Begin to import what ranks will need, in the process that they are forked from; returns at once."""
    if isinstance(context_of_ranks(), ForkServerContext):
        with signals_deferred():
            multiprocessing.forkserver.ensure_running()


def context_of_ranks() -> ForkServerContext | SpawnContext:
    """How processes are started. The libraries of other systems than Linux do not take to forks."""
    settle_temporary_folder()
    if not sys.platform.startswith("linux"):
        return multiprocessing.get_context("spawn")
    _wake()
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    return context


def join(process: BaseProcess) -> None:
    """Wait for the end of a rank, of which the process that it was forked from tells."""
    _wake()
    process.join()


def end_all(processes: dict[int, BaseProcess], speaking: Collection[int]) -> str:
    """Kill the processes of ranks and wait for their ends; `speaking`: the ranks whose pipes are open.

    Whoever waits in the kernel for a device or a file system that does not answer ends when that does: it is left out
    of `processes` and waited for no longer, also at the end of this process. Returns a sentence that names it.
    """
    for rank, process in processes.items():
        # Whose fork server was killed seems to have ended, and has not while its pipe is open.
        if process.is_alive() or (process.exitcode == UNKNOWN and rank in speaking):
            with contextlib.suppress(ProcessLookupError):
                os.kill(cast(int, process.pid), signal.SIGKILL)
    stuck, until = list[str](), time.monotonic() + ENDS_SECONDS
    for rank, process in [*processes.items()]:
        _wake()
        process.join(max(0.1, until - time.monotonic()))
        if process.is_alive():
            _left.append(processes.pop(rank))
            cast(Any, multiprocessing.process)._children.discard(process)
            stuck.append(f"the process {process.pid} of rank {rank} cannot be ended")
    return f"{', '.join(stuck)}: it waits for a device or a file system that does not answer" if stuck else ""


def _wake() -> None:
    """Continue the process that ranks are forked from, should it have been stopped: as of Ctrl-Z, where the launcher
    alone was continued. Whoever waits for its answer hears no signal."""
    if server := cast(Any, multiprocessing.forkserver)._forkserver._forkserver_pid:
        with contextlib.suppress(ProcessLookupError):
            os.kill(server, signal.SIGCONT)


def settle_temporary_folder() -> None:
    """Have multiprocessing make its sockets where their paths are short enough, whatever TMPDIR is.

    The address of a socket is at most 107 bytes on Linux. Processes that are started take the folder over. Raises
    UserError where no folder will do.
    """
    usual = tempfile.gettempdir()
    if len(os.fsencode(usual)) <= _LONGEST:
        return
    short = next((str(folder) for folder in _SHORT if folder.is_dir() and os.access(folder, os.W_OK)), None)
    if short is None:
        raise UserError(
            f'the folder for temporary files "{usual}" is too long for the address of a socket: set TMPDIR to one of '
            f"at most {_LONGEST} bytes"
        )
    try:
        tempfile.tempdir = short
        multiprocessing.util.get_temp_dir()  # made once, and used from then on
    finally:
        tempfile.tempdir = usual


class Inherited:
    """What a rank takes over from its parent as it is now, and not as it was when the fork server started."""

    def __init__(self, environment: Mapping[str, str] | None = None, streams: Mapping[int, Any] | None = None) -> None:
        self._environment, self._streams = environment or {}, streams or {}

    def __reduce__(self) -> Any:
        """Pickled for a process that is being started, which alone may be given open files."""
        streams = {number: cast(Any, reduction).DupFd(number) for number in (1, 2) if _is_open(number)}
        return Inherited, (dict(os.environ), streams)

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
def signals_deferred() -> Generator[None]:
    """A process started here sees no SIGINT, for good, and none of the other polite signals until it is ready for them.

    So Ctrl-C, which a terminal sends to all, is the parent's alone, and none ends a rank that is still starting.
    """
    resource_tracker.ensure_running()  # started any later, it would undo the mask
    before = signal.pthread_sigmask(signal.SIG_BLOCK, POLITE)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class _Child:
    """A process that was forked here, as `subprocess` has those that it starts."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            try:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
            except ChildProcessError:
                pid, status = self.pid, 0
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float) -> int:
        until = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() >= until:
                raise subprocess.TimeoutExpired(str(self.pid), timeout)
            time.sleep(0.01)
        return code

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)


def fork_spare() -> Detached | None:
    """A process that waits for its job (`Detached.begin`), and goes on when its caller dies; None where forks will not
    do. Only for a caller without threads that hold locks: a rank, before it joins the others.

    A fresh interpreter takes two seconds of a core to import what the writer of checkpoints needs, on each rank, just
    when the first steps want the cores; after a restart no snapshot could be taken until then.
    """
    if not sys.platform.startswith("linux"):
        return None
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    pid = os.fork()
    if not pid:
        try:
            _alone(there)
            status = serve_detached(there.fileno())
        except BaseException:  # noqa: BLE001  nothing of the rank's own end may run here
            status = 1
        os._exit(status)
    there.close()
    return Detached(_Child(pid), Channel(here))


def _alone(link: socket.socket) -> None:
    """Keep nothing of the rank's: its pipe would seem open after its death, its signals are not for this process."""
    os.setsid()
    for number in POLITE:
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, POLITE)
    keep = link.fileno()
    os.closerange(3, keep)
    os.closerange(keep + 1, os.sysconf("SC_OPEN_MAX"))
    nowhere = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(nowhere, stream)
    settle_torch(threads=1)  # it sums and writes in threads of its own


def give_way_in_memory() -> None:
    """Have the kernel kill this process before its parent and its writer where memory runs out (Linux).

    It takes the largest process, and of small models that is the launcher, without which nobody goes on. Anybody may
    raise this number of a process of their own; 300 is what browsers give their tabs.
    """
    with contextlib.suppress(OSError, ValueError):
        score = Path("/proc/self/oom_score_adj")
        score.write_text(str(min(1000, int(score.read_text()) + 300)))


def end_with_parent(folder: Path) -> None:
    """End this process as soon as its parent is gone, however it went, and with it the folder that it has left.

    In that folder the ranks meet, and the fork server has its address.
    """
    parent = multiprocessing.parent_process()
    if parent is None:
        return

    def watch() -> None:
        wait([parent.sentinel])
        shutil.rmtree(folder, ignore_errors=True)  # the other ranks do so, too
        os._exit(1)

    threading.Thread(target=watch, name="tangram-parent-watch", daemon=True).start()


def lasting_name(file: Path) -> str:
    """A name by which this process opens a file, which is made, whether or not its folder is still there. Raises
    OSError where that is gone already.

    torch's FileStore looks for its file for five minutes, and no other thread runs meanwhile: so a rank that was
    starting as its launcher was killed did not see that.
    """
    descriptor = os.open(file, os.O_RDWR | os.O_CREAT, 0o600)
    name = f"/proc/self/fd/{descriptor}"
    return name if Path(name).exists() else str(file)
