"""Start the ranks of a job on this machine, and end all of them when one dies.

Each rank is a process of its own with its own one-way pipe to the parent. Over that pipe come its events, its result or
its first error; the end of the pipe is the end of the process. So the parent waits on pipes only: no polling, no fixed
port (the ranks meet in a file), no second channel for errors. A rank that finds its parent gone ends itself, so that
killing the parent leaves no orphan and no file.

The first Ctrl-C, SIGTERM, SIGHUP or SIGUSR1, to the parent, a rank or all of them, asks the ranks to stop after their
step (see `tangram.training.run.signals`); they then return as at any other end. The second ends the job at once.

Trade-off: this launcher starts the ranks of one machine. Of more, torchrun or Slurm starts one on each.
"""

import contextlib
import multiprocessing
import multiprocessing.util
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Generic, NoReturn, TypeVar, cast

import torch
import torch.distributed as dist

from tangram.errors import UserError
from tangram.hardware.host.machine import memory_kills, pick_device, usable_cores
from tangram.hardware.host.workers import Detached
from tangram.tracing.settings import TraceSettings, traced_rank
from tangram.tracing.trace import UNTRACED, Trace
from tangram.tracing.watch import LOOK_SECONDS, Watch
from tangram.training.observe.events import Note, StopRequested
from tangram.training.run.environment import Among
from tangram.training.run.fork_server import (
    Inherited,
    context_of_ranks,
    end_all,
    end_with_parent,
    fork_spare,
    give_way_in_memory,
    join,
    lasting_name,
    signals_deferred,
)
from tangram.training.run.signals import POLITE, How, Stop, death, first_line, interrupt, on_signals

Payload = TypeVar("Payload")
Result = TypeVar("Result")

LAST_WORDS_SECONDS = 0.5  # after one rank failed: how long to listen for an earlier error of another rank
COLLECTIVE_TIMEOUT = timedelta(minutes=5)
ENOUGH = "enough"
_KILLED = float("-inf")  # when a rank failed that was killed: before whatever others say


class RankError(Exception):
    """A rank died: which one, its first error as one sentence, and the stack trace when there is one."""

    def __init__(self, rank: int, world: int, error: str, details: str, how: How | None = None) -> None:
        super().__init__(f"rank {rank} of {world} ended the job: {error}")
        self.rank, self.world, self.error = rank, world, error
        self.how: How = how or ("raised" if details else "killed")
        self.details = details.encode(errors="backslashreplace").decode()  # names of files may be no text

    def __reduce__(self) -> Any:
        return type(self), (self.rank, self.world, self.error, self.details, self.how)


@dataclass(frozen=True)
class Rank:
    """What a task knows of its place: its number, how many there are, its device and its line to whoever watches."""

    index: int
    world: int
    device: torch.device
    emit: Callable[[object], None]
    stop: Stop
    """Whether to stop after this step; the ranks have to agree on the answer, as a signal may reach only one."""
    spare: Detached | None = None
    """A process that waits for a job, where there is one."""
    trace: Trace = UNTRACED
    """Where it says what it does."""


@dataclass(frozen=True)
class _Event:
    value: object


@dataclass(frozen=True)
class _Request:
    """A rank was sent a signal of its own."""

    signal: str


@dataclass(frozen=True)
class _Done:
    result: object


@dataclass(frozen=True)
class _Failure:
    """An error of a rank. `at` is the machine-wide monotonic clock: the earliest failure is the cause of the others."""

    at: float
    error: str
    details: str
    by_user: bool
    how: How = "raised"


def threads_of_a_rank(world: int) -> int:
    """The ranks share the cores that this process may use, which in a container are fewer than the machine's."""
    return max(1, int(usable_cores()) // world)


@contextlib.contextmanager
def computing_as_a_rank(world: int) -> Generator[None]:
    """Give this process the threads of one rank for a while: it adds up in the order a rank does, and on a machine that
    others use, more threads than free cores wait for each other so long that one alone is several times faster."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads_of_a_rank(world))
    try:
        yield
    finally:
        torch.set_num_threads(before)


@dataclass
class _Job(Generic[Result]):
    """The parent's view of the running ranks."""

    world: int
    wishes: Connection
    """From the parent's signal handler, which may interrupt anything, to where it may speak: the names of signals."""
    processes: dict[int, BaseProcess] = field(default_factory=dict[int, BaseProcess])
    lines: dict[Connection, int] = field(default_factory=dict[Connection, int])
    orders: list[Connection] = field(default_factory=list[Connection])
    """To each rank: the name of the signal that asks it to stop."""
    stopping: bool = False
    results: dict[int, Result] = field(default_factory=dict[int, Result])
    failures: dict[int, _Failure] = field(default_factory=dict[int, _Failure])
    watch: Watch | None = None
    kills: int = 0  # of processes, as memory ran out, by then
    stuck: str = ""  # which rank cannot be ended

    def listen(self, on_event: Callable[[object], object], timeout: float | None = None) -> None:
        """Take in what there is to hear now: one message of each rank that has one, and the wish to stop."""
        for line in wait([self.wishes, *self.lines], timeout):
            assert isinstance(line, Connection)
            if line is self.wishes:
                self._tell_to_stop(line.recv(), on_event, "stopping after this step (again to stop at once)")
                continue
            rank = self.lines[line]
            try:
                message = pickle.loads(line.recv_bytes())
            except (EOFError, OSError):
                self._hang_up(line, rank)
                continue
            if isinstance(message, _Event):
                if on_event(message.value) == ENOUGH:
                    self._pass_on(ENOUGH)
            elif isinstance(message, _Request):
                note = f"rank {rank} was sent {message.signal}: stopping after this step"
                self._tell_to_stop(message.signal, on_event, note)
            elif isinstance(message, _Done):
                self.results[rank] = message.result  # pyright: ignore[reportArgumentType]  the task's own return value
            elif isinstance(message, _Failure):
                self.failures.setdefault(rank, message)

    def _tell_to_stop(self, name: str, on_event: Callable[[object], object], note: str) -> None:
        """Pass the wish on, once: the same signal may have reached the parent and several ranks."""
        if self.stopping:
            return
        self.stopping = True
        on_event(StopRequested(note))
        self._pass_on(name)

    def _pass_on(self, name: str) -> None:
        for order in self.orders:
            with contextlib.suppress(OSError):  # a rank that is done
                order.send(name)

    def _hang_up(self, line: Connection, rank: int) -> None:
        """The rank's process has ended; without a result or an error of its own it was killed."""
        del self.lines[line]
        join(process := self.processes[rank])
        if rank not in self.results and rank not in self.failures:
            # No last words: nothing inside Python raised, so no other rank's error can have caused it. Hence "first".
            words, how = death(process.exitcode, memory=memory_kills() > self.kills)
            self.failures[rank] = _Failure(_KILLED, words, "", by_user=False, how=how)

    def look(self, on_event: Callable[[object], object]) -> None:
        """A hang is a failure of the rank that is to blame."""
        fresh, hang = self.watch.look() if self.watch is not None else ([], None)
        for one in fresh:
            on_event(Note(one.text))
        if hang is not None:
            details = "\n".join(line for one in hang.findings for line in (one.text, *one.details))
            self.failures[hang.rank] = _Failure(_KILLED, hang.sentence, details, by_user=False, how="hang")

    def drain(self, on_event: Callable[[object], object]) -> None:
        """End every process and hear the events that ranks had told of by then: of a step, say, that a snapshot has."""
        self.end()
        for line in self.lines:
            while line.poll():
                try:
                    message = pickle.loads(line.recv_bytes())
                except (EOFError, OSError):  # its end, or a message that was not sent to its end
                    break
                if isinstance(message, _Event):
                    on_event(message.value)

    def say_in_trace(self, rank: int, failure: _Failure) -> _Failure:
        """The failure with what the trace knows of it."""
        if self.watch is None:
            return failure
        dead = rank if failure.at == _KILLED else None
        return replace(failure, error=self.watch.explained(rank, self.world, failure.error, dead))

    def end(self) -> None:
        """End every process that still runs. To ask it first would be to wait for its step, or for ever."""
        self.stuck = end_all(self.processes, self.lines.values()) or self.stuck


def run_ranks(
    task: Callable[[Rank, Payload], Result],
    payload: Payload,
    *,
    world: int | Among,
    on_event: Callable[[object], object],
    device: str = "auto",
    on_start: Callable[[Sequence[int]], None] = lambda processes: None,
    spare: bool = False,
    trace: TraceSettings | None = None,
) -> list[Result]:
    """Run `task(rank, payload)` on `world` processes joined in the default process group; their results in rank order.

    Whatever a task emits reaches `on_event` in the caller's thread; where that gives ENOUGH, ranks stop after their
    step. `on_start` is given the processes' numbers. The first rank to fail ends all: a `UserError` is raised as it is,
    anything else as `RankError`, as is a hang of ranks that are traced, and what has ended those of another machine.
    With `spare` each has a process that waits for a job.
    """
    among = world if isinstance(world, Among) else Among(world)
    pick_device(device, 0, len(among.ranks))  # a mesh that does not fit is refused before anything starts
    context = context_of_ranks()
    wishes, wish = context.Pipe(duplex=False)
    watch = None if trace is None or among.first else Watch(trace)
    job = _Job[Result](among.world, wishes, watch=watch, kills=memory_kills())
    with (
        on_signals(POLITE, wish.send, interrupt),
        tempfile.TemporaryDirectory(prefix="tangram-", dir=multiprocessing.util.get_temp_dir()) as meeting,
    ):
        try:
            for index in among.ranks:
                receiver, sender = context.Pipe(duplex=False)
                orders, order = context.Pipe(duplex=False)
                start = _Start(Inherited(), index, among.for_ranks(), device, Path(meeting, "store"), spare, trace)
                arguments = (start, task, payload, sender, orders)
                process = context.Process(target=_rank_main, args=arguments, daemon=True, name=f"tangram-rank-{index}")
                try:
                    with signals_deferred():
                        process.start()
                        job.processes[index] = process
                except (EOFError, ConnectionError) as error:
                    why = "the process that ranks are forked from has ended, as when it is killed: start again"
                    raise RankError(index, among.world, why, traceback.format_exc()) from error
                sender.close()  # the rank holds the only other end, so its death ends the pipe
                orders.close()
                job.orders.append(order)
                job.lines[receiver] = index
            on_start([process.pid or 0 for process in job.processes.values()])
            pause = None if job.watch is None and not among.prefix else LOOK_SECONDS
            while job.lines and not job.failures:
                job.listen(on_event, pause)
                job.look(on_event)
                if not job.failures and (error := among.elsewhere()) is not None:
                    job.drain(on_event)
                    raise error
            _raise_first(job, on_event, among.world)
        finally:
            job.end()
            if job.failures:  # what came too late to be passed on is for whoever would start other ranks
                job.listen(on_event, 0)
    return [job.results[index] for index in among.ranks]


def _raise_first(job: _Job[Result], on_event: Callable[[object], object], world: int) -> None:
    """Raise the earliest failure, after a short wait for one that was earlier but slower to be told."""
    if not job.failures:
        return
    silent = any(failure.at == _KILLED for failure in job.failures.values())  # nothing can have come before it
    deadline = time.monotonic() + (0 if silent else LAST_WORDS_SECONDS)
    while job.lines and (left := deadline - time.monotonic()) > 0:
        job.listen(on_event, timeout=left)
    job.drain(on_event)
    rank, first = min(job.failures.items(), key=lambda item: item[1].at)
    first = job.say_in_trace(rank, first)
    if job.stuck:  # it has what others would need
        raise UserError(f"rank {rank} of {world} ended the job: {first.error}; {job.stuck}")
    if first.by_user:
        raise UserError(first.error)
    raise RankError(rank, world, first.error, first.details, first.how)


@dataclass(frozen=True)
class _Start:
    inherited: Inherited
    index: int
    among: Among
    device: str
    store: Path
    """A file in a folder of the job, where ranks of one machine meet."""
    spare: bool
    trace: TraceSettings | None


def _rank_main(
    start: _Start,
    task: Callable[[Rank, Payload], object],
    payload: Payload,
    line: Connection,
    orders: Connection,
) -> None:
    start.inherited.take()
    index, world, ranks = start.index, start.among.world, start.among.ranks
    stop = Stop(orders, heard=lambda name: _send(line, _Request(name)))
    try:
        spare = fork_spare() if start.spare else None  # before there are threads, or a device
        give_way_in_memory()
        end_with_parent(start.store.parents[1])
        # Of a second signal, too, it is for the parent to make something.
        with on_signals(set(POLITE) - {signal.SIGINT}, stop.ask, again=stop.ask):
            signal.pthread_sigmask(signal.SIG_UNBLOCK, set(POLITE) - {signal.SIGINT})
            torch.set_num_threads(threads_of_a_rank(len(ranks)))
            here = pick_device(start.device, index - ranks[0], len(ranks))
            if here.type != "cpu":
                torch.accelerator.set_device_index(index - ranks[0])
            met = _store(start)
            backend = dist.get_default_backend_for_device(here)
            with traced_rank(start.trace, index, world, backend) as traced:
                dist.init_process_group(
                    traced.backend, store=met, rank=index, world_size=world, timeout=COLLECTIVE_TIMEOUT
                )
                rank = Rank(index, world, here, lambda value: _send(line, _Event(value)), stop, spare, traced.trace)
                if traced.note:
                    rank.emit(Note(traced.note))
                result = task(rank, payload)
            _send(line, _Done(result))
            _leave_together(met, index, world)
            dist.destroy_process_group()
            # Locks that a library has made, as torch's compiler does, are given back as in any end of a process.
            cast(Any, multiprocessing.util)._run_finalizers(0)
            # Nor is this a normal exit: the interpreter's own end kills torch's threads wherever they are, and now and
            # then one of them aborts the process ("terminate called without an active exception" on the terminal).
            leave(0)
    except BaseException as error:  # noqa: BLE001  the parent must hear of everything, an interrupt too
        text = str(error) if isinstance(error, UserError) else first_line(error)
        failure = _Failure(time.monotonic(), text, traceback.format_exc(), isinstance(error, UserError))
        with contextlib.suppress(OSError):  # the parent may be gone; then nobody is left to tell
            _send(line, failure)
        leave(1)  # not a normal exit: tearing down a broken process group may wait for ranks that are gone


def _store(start: _Start) -> dist.Store:
    if not start.among.prefix:
        return dist.FileStore(lasting_name(start.store), start.among.world)
    return dist.PrefixStore(start.among.prefix, dist.TCPStore(*start.among.address, is_master=False))


def _send(line: Connection, message: object) -> None:
    """The bytes themselves: `Connection.send` gives tensors as memory of this process, which may have ended by then."""
    line.send_bytes(pickle.dumps(message, pickle.HIGHEST_PROTOCOL))


def _leave_together(met: dist.Store, index: int, world: int) -> None:
    """Wait until every rank is done with its task: one that is gone breaks what the others still do with its
    connections, as a message on its way. Where one of them fails, the parent ends this one: hence no limit."""
    met.set(f"done/{index}", "")
    met.wait([f"done/{rank}" for rank in range(world)], timedelta(days=365))


def leave(code: int) -> NoReturn:
    """End this process here and now, with what it has printed but without the interpreter's own end."""
    with contextlib.suppress(OSError):  # a terminal or a reader that is gone
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)
