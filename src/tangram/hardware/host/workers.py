"""Helper processes: the one module that starts them, and that cleans up after itself.

A job is the name of a function and arguments that JSON can carry; it runs in a fresh interpreter, so that a crash, a
hang or a leak in it costs the caller nothing but an `Outcome` that says so. Nothing is left behind: helpers are ended
with all that they started when the time limit passes, when one of them fails, when the caller is interrupted, and also
when the caller is killed outright (each helper watches the pipe that only the caller holds open).

`start_detached` is for the one helper that outlives its caller on purpose: it has a conversation with it over a socket,
and ends by itself when it has done what it was asked and the socket says that the caller is gone.

The trade-off: a fresh interpreter costs its imports anew (with torch, seconds), where a fork would cost nothing but
copy locks and threads in whatever state they are. Linux, and macOS from Python 3.13 (where it has os.waitid).
"""

import importlib
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, Protocol, cast

from tangram.errors import UserError
from tangram.hardware.host.channel import Channel, Json

__all__ = [
    "Channel",
    "Detached",
    "Job",
    "Json",
    "Outcome",
    "command",
    "forked",
    "in_parts",
    "run",
    "serve_detached",
    "settle_torch",
    "start_detached",
]

_LOG_TAIL = 4000
NICENESS = 5
"""Of a detached helper: a quarter of a core that one other wants, too, and its requests to disks rank lower alike. At
10 and more it hardly gets on where all cores are taken; its imports, which nobody sees, would take a minute."""


@dataclass(frozen=True, slots=True)
class Job:
    """Call `function` ("package.module:name") with `arguments`; what it returns must be JSON, too."""

    function: str
    arguments: Mapping[str, Json] = field(default_factory=dict[str, Json])


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a job: its value, or one sentence on why there is none; `log` is the end of what it printed."""

    value: Json
    error: str | None
    log: str

    @property
    def ok(self) -> bool:
        """Whether the function returned."""
        return self.error is None


@dataclass(frozen=True, slots=True)
class _Helper:
    process: subprocess.Popen[bytes]
    result: Path
    log: Path
    watcher: threading.Thread
    """Ends with the process."""


def run(jobs: Sequence[Job], limit: float, environment: Mapping[str, str] | None = None) -> list[Outcome]:
    """Run the jobs side by side, each in a process of its own, for at most `limit` seconds; outcomes in their order.

    The jobs belong together: as soon as one fails the others are ended, since they may wait for it for ever.
    """
    with ExitStack() as cleanup:
        folder = Path(cleanup.enter_context(tempfile.TemporaryDirectory(prefix="tangram-workers-")))
        helpers: list[_Helper] = []
        ended: SimpleQueue[int] = SimpleQueue()
        cleanup.callback(_end, helpers)
        for number, job in enumerate(jobs):
            helpers.append(_start(folder, number, job, environment or {}, ended))
        why = _wait(helpers, ended, time.monotonic() + limit, limit)
        unfinished = [_exit_status(helper) is None for helper in helpers]
        _end(helpers)
        return [_outcome(helper, why if cut else None) for helper, cut in zip(helpers, unfinished, strict=True)]


def in_parts(function: str, given: Mapping[str, Json], limit: float, failure: str, parts: int = 2) -> list[Any]:
    """What helpers of one thread each return, every one given its `part` of `parts` beside the other arguments.

    Raises UserError, `failure` and why, where one of them does not end in time and well.
    """
    jobs = [Job(function, {**given, "part": i, "parts": parts}) for i in range(parts)]
    found: list[Any] = []
    for outcome in run(jobs, limit, {"OMP_NUM_THREADS": "1"}):
        if not outcome.ok:
            raise UserError(f"{failure}: {outcome.error}")
        found.append(outcome.value)
    return found


def _start(folder: Path, number: int, job: Job, environment: Mapping[str, str], ended: SimpleQueue[int]) -> _Helper:
    request, result, log = (folder / f"{number}.{kind}" for kind in ("job", "result", "log"))
    request.write_text(json.dumps({"function": job.function, "arguments": dict(job.arguments), "result": str(result)}))
    with log.open("wb") as out:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "tangram.hardware.host.workers", str(request)],
            stdin=subprocess.PIPE,
            stdout=out,
            stderr=subprocess.STDOUT,
            env=_environment(environment),
            start_new_session=True,
        )
    return _Helper(process, result, log, _tell_end(process, number, ended))


def _environment(more: Mapping[str, str]) -> dict[str, str]:
    """The caller's, with which a fresh interpreter finds the same modules."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(os.path.abspath(path) for path in sys.path), **more}  # noqa: PTH100


def _wait(helpers: Sequence[_Helper], ended: SimpleQueue[int], deadline: float, limit: float) -> str:
    """Wait until all have ended, one has failed or time is up; the reason why those still running are to be ended."""
    for _ in helpers:
        try:
            number = ended.get(timeout=max(0.0, deadline - time.monotonic()))
        except Empty:
            return f"not done within {limit:g} s"
        if _exit_status(helpers[number]):
            return f"ended because helper {number}, which belongs to the same run, failed"
    return ""


def _tell_end(process: subprocess.Popen[bytes], number: int, ended: SimpleQueue[int]) -> threading.Thread:
    """A thread that waits for a helper and puts its number in the queue; it leaves the helper to be reaped by _end."""

    def wait() -> None:
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        ended.put(number)

    thread = threading.Thread(target=wait, name=f"tangram-helper-{number}", daemon=True)
    thread.start()
    return thread


def _exit_status(helper: _Helper) -> int | None:
    """The exit code or signal of a helper that has ended, None while it runs; leaves it to be reaped by _end.

    Until then its number cannot pass to another process, so its whole group can be ended safely.
    """
    ended = os.waitid(os.P_PID, helper.process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    return None if ended is None else ended.si_status


def _end(helpers: list[_Helper]) -> None:
    """End every helper and what it started, and reap it; a second call finds nothing to do."""
    for helper in helpers:
        if helper.process.returncode is None:
            with suppress(PermissionError):  # macOS says this of a group of which only the ended helper is left
                os.killpg(helper.process.pid, signal.SIGKILL)
    for helper in helpers:
        helper.watcher.join()  # before the helper is reaped, when its number may pass to another process
        helper.process.wait()
        if helper.process.stdin is not None:
            helper.process.stdin.close()


def _outcome(helper: _Helper, ended: str | None) -> Outcome:
    log = helper.log.read_text(errors="replace")[-_LOG_TAIL:]
    if ended is not None:
        return Outcome(None, ended, log)
    if not helper.result.exists():
        code = helper.process.returncode
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        return Outcome(None, f"the helper process ended with {how} and without a result", log)
    answer = cast("dict[str, Json]", json.loads(helper.result.read_text()))
    error = answer.get("error")
    return Outcome(answer.get("value"), None if error is None else str(error), log)


def _end_with_the_caller(folder: Path) -> None:
    """End this helper and what it started once the caller is gone, however it went: its end closes the pipe."""
    os.read(0, 1)  # not through sys.stdin, whose lock would be held when the interpreter shuts down
    shutil.rmtree(folder, ignore_errors=True)  # the caller has left it; the other helpers remove it, too
    os.killpg(os.getpgid(0), signal.SIGKILL)


def _main(request: Path) -> int:
    """The helper's side: run the job, leave the result in one piece."""
    threading.Thread(target=_end_with_the_caller, args=(request.parent,), daemon=True).start()
    job = json.loads(request.read_text())
    module, _, name = str(job["function"]).partition(":")
    failed = False
    try:
        text = json.dumps({"value": getattr(importlib.import_module(module), name)(**job["arguments"])})
    except Exception as error:  # noqa: BLE001 (whatever it is, the caller is told)
        failed = True
        text = json.dumps({"error": f"{type(error).__name__}: {error}"})
        traceback.print_exc()
    result = Path(job["result"])
    unfinished = result.with_suffix(".part")
    unfinished.write_text(text)
    unfinished.rename(result)
    return int(failed)


# ---------------------------------------------------------------- helpers that outlive their caller


class Process(Protocol):
    """What is asked of a process, as of one of `subprocess`."""

    returncode: Any
    pid: Any
    poll: Callable[[], int | None]
    wait: Callable[..., int]
    kill: Callable[[], None]


class Detached:
    """A helper that outlives its caller: what the caller has of it."""

    def __init__(self, process: Process, channel: Channel) -> None:
        self._process = process
        self.channel = channel

    def begin(self, job: Job) -> None:
        """Have it do this, once."""
        with suppress(OSError):  # it ended already, which `ended` tells
            self.channel.send({"function": job.function, "arguments": dict(job.arguments)})

    @property
    def pid(self) -> int:
        """Its process."""
        return self._process.pid

    @property
    def ended(self) -> str:
        """How it ended ("SIGKILL", "exit code 1"); nothing while it runs."""
        code = self._process.poll()
        if code is None:
            return ""
        return signal.Signals(-code).name if code < 0 else f"exit code {code}"

    def kill(self) -> None:
        """End it with what it does. Not waited for: what hangs in a request to a disk ends when that comes back."""
        if not self.ended:
            self._process.kill()

    def wait(self, limit: float) -> str:
        """How it ended, as soon as it has, or nothing after `limit` seconds."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(limit)
        return self.ended

    def close(self, limit: float) -> bool:
        """Let it end once it has done what it was asked; whether it did within `limit` seconds. It may go on alone."""
        self.channel.close()
        if self.wait(limit):
            return True
        self._process.returncode = 0  # as for one that another reaps: nobody waits for it here any more
        return False


def start_detached(job: Job, environment: Mapping[str, str] | None = None) -> Detached:
    """Start a helper in a session of its own that goes on when its caller dies; not when its container or machine does.

    It calls the job's function with its end of the `Channel` and the arguments, at a low priority; the function is to
    return when `receive` raises EOFError. An exception is said as `{"error": ...}`, and ends it with exit code 1. Its
    output goes nowhere: who reads the caller's to its end would wait for the helper.
    """
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    with there:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "tangram.hardware.host.workers", "--detached", str(there.fileno())],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=_environment(environment or {}),
            pass_fds=[there.fileno()],
            start_new_session=True,
        )
    helper = Detached(process, Channel(here))
    helper.begin(job)
    return helper


def command(words: Sequence[str]) -> int:
    """Run an installed program to its end, with what it prints shown; its exit status."""
    return subprocess.run(words, check=False).returncode


def _step_back() -> None:
    """Leave this process's cores and disks to others first."""
    os.nice(NICENESS)
    group = Path("/proc/self/autogroup")
    if group.exists():  # where the kernel shares cores among sessions first, niceness in a session is not enough
        with suppress(OSError):
            group.write_text(str(NICENESS))


def serve_detached(descriptor: int) -> int:
    """The detached helper's side."""
    os.chdir("/")  # no folder is kept from being unmounted
    channel = Channel(socket.socket(fileno=descriptor))
    try:
        received = channel.receive()
        assert received is not None
        job = received[0]
        module, _, name = str(job["function"]).partition(":")
        function = getattr(importlib.import_module(module), name)
        _step_back()
        function(channel, **cast("dict[str, Json]", job["arguments"]))
    except Exception as error:  # noqa: BLE001 (whatever it is, the caller is told)
        with suppress(OSError):
            channel.send({"error": f"{type(error).__name__}: {error}"})
        return 1
    return 0


if __name__ == "__main__":
    if sys.argv[1] == "--detached":
        os._exit(serve_detached(int(sys.argv[2])))  # there is nothing to flush, and libraries take long to take leave
    status = _main(Path(sys.argv[1]))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # the result is there: libraries that abort as they take leave (gloo's threads) do not undo it


def forked(act: Callable[[], Json], limit: float) -> Json:
    """What a function gives, run in a fork of this process; None where the fork crashes or takes over `limit` seconds.

    For what may end its process and needs what is loaded here. Only for callers that have no other threads.
    """
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        try:
            os.close(reading)
            settle_torch()
            with os.fdopen(writing, "wb") as stream:
                stream.write(json.dumps(act()).encode())
        finally:
            os._exit(0)  # without what this process would do at its end
    os.close(writing)
    data, until = bytearray(), time.monotonic() + limit
    try:
        while select.select([reading], [], [], max(0.0, until - time.monotonic()))[0]:
            some = os.read(reading, 1 << 16)
            if not some:
                break
            data += some
        else:
            os.kill(child, signal.SIGKILL)
    finally:
        os.close(reading)
        os.waitpid(child, 0)
    try:
        return json.loads(data)
    except ValueError:
        return None


# ----------------------------------------------------------------
# A shim for torch in a forked process, whose autograd threads may abort it as they start. The thread pool that a fork
# inherits is made anew by the first thread that asks for it. Where an accelerator, or the fake one of `FakeTensorMode`,
# gives autograd a thread per device, they ask at the same time, and those that find no pool abort: "Invalid thread
# pool!", https://github.com/pytorch/pytorch/issues/178535. In half of the forks, where it was seen. So the fork's one
# thread asks before there are others. `tests/hardware/test_after_fork.py` tells when torch does without.


def settle_torch(threads: int | None = None) -> None:
    """To be called first in a fork: make torch's thread pool anew, where torch is loaded; of as many `threads`."""
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(threads or torch.get_num_threads())
