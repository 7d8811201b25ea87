"""A helper forked from a rank while that has one thread, before it joins the others: it has imported all it needs.

A fresh interpreter takes two seconds of a core to import what the writer of checkpoints needs, on each rank, just when
the first steps want the cores; after a restart no snapshot could be taken until then.
"""

import os
import signal
import socket
import subprocess
import sys
import time

from tangram.hardware.host.channel import Channel
from tangram.hardware.host.workers import Detached, serve_detached, settle_torch
from tangram.training.run.signals import POLITE


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
    do. Only for a caller without threads that hold locks."""
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
