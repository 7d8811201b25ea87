"""Save while training goes on: a copy, a process that writes it, and what came of it.

    saver = AsyncSaver(Path("runs/checkpoint"), peers, Settings(keep=("last=3",)))
    saver.prepare(describe(state, peers).entries)       # before step 1: memory, and the process that writes
    ...
    saver.save(describe(state, peers), About(step))     # returns at once
    loss.backward()                                     # the copy goes on beside it
    saver.fence()                                       # before the optimiser writes
    optimiser.step()
    for saved in saver.poll(): ...                      # never waits, never raises

Each rank has a thread, which copies and listens, and a process of its own (`tangram.checkpoint.saving.writer_process`),
which writes and commits with those of the other ranks, also after the ranks have died. The only word between ranks is
the id of the save. Whatever goes wrong with the storage is a result of `poll`; training is told, never stopped.
"""

import contextlib
import queue
import threading
import time
import weakref
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from tangram.checkpoint.saving.file_layout import Outgoing
from tangram.checkpoint.saving.rank_files import share_fields
from tangram.checkpoint.saving.rank_parts import About, SaveResult, Settings, new_id
from tangram.checkpoint.saving.snapshot import Laid, Pool, RankShare, Snapshot, copies_of, share
from tangram.checkpoint.saving.writer_process import Order
from tangram.checkpoint.state.entries import Described, StateEntry
from tangram.errors import sentence
from tangram.hardware.host.hostmemory import Shared
from tangram.hardware.host.workers import Detached, Job, start_detached
from tangram.relayout import TensorSpec
from tangram.relayout.exchange.peers import Peers

__all__ = ["AsyncSaver", "SaveResult", "Settings"]

START = 120.0
"""Seconds that a new process has for its imports."""
LISTEN = 0.1
"""Seconds between two looks of the thread at what the training thread wants of it."""
_NOTHING: tuple[tuple[Outgoing, ...], Mapping[str, TensorSpec], None] = ((), {}, None)
LINGER = 10.0
"""Seconds that `close` waits for the process to end; it may go on alone."""


@dataclass(eq=False)
class _Task:
    """One save, on its way."""

    id: str
    path: Path
    entries: tuple[StateEntry, ...]
    objects: Any
    about: About
    begun: float
    nbytes: int = 0
    snapshot: Snapshot = field(default_factory=Snapshot)
    blocked: float = 0.0
    handed_over: bool = False
    done: threading.Event = field(default_factory=threading.Event)
    verdict: dict[str, Any] | None = None
    """How it ended, by the first rank's word."""
    ended: float = 0.0
    result: str = ""
    """The path."""
    cpu: float = 0.0
    reason: str = ""
    notes: list[str] = field(default_factory=list[str])

    def saved(self) -> SaveResult:
        path = Path(self.result) if self.result else None
        took = (self.ended or time.monotonic()) - self.begun
        size = self.nbytes if path else 0
        return SaveResult(self.about.step, path, self.reason, self.blocked, took, size, self.cpu, tuple(self.notes))


class AsyncSaver:
    """Saves into one folder. All ranks of `peers` make one, and call `save`, `wait` and `close` at the same steps.

    `peers` needs a group that moves tensors of the CPU and that no other thread uses. Nothing here raises for what
    cannot be written; a dead peer is found by the group, as anywhere in training.
    """

    def __init__(
        self, folder: str | Path, peers: Peers, settings: Settings | None = None, spare: Detached | None = None
    ) -> None:
        """`spare`: a helper that has no job yet, to be the first process that writes."""
        self.folder = Path(folder).absolute()
        self.settings = settings or Settings()
        self._peers = peers
        self._pool: Pool | None = None
        self._task: _Task | None = None
        self._over: queue.SimpleQueue[_Task | SaveResult] = queue.SimpleQueue()
        self._written = (0, 0)
        self._process: Detached | None = None
        self._spare = spare
        self._ready = False
        self._laid: Laid | None = None
        self._first: weakref.ref[StateEntry] | None = None
        """Of the entries that were saved last."""
        self._knows: tuple[tuple[Outgoing, ...], Mapping[str, TensorSpec], Shared | None] = _NOTHING
        self._tasks: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    # ------------------------------------------------------------ in the training thread

    def prepare(self, entries: Iterable[StateEntry]) -> str:
        """Take the memory for a state like this, and start the process that writes. Before step 1, for seconds.

        What the optimiser has not made yet may lie on the meta device. Returns why the memory cannot be had, in one
        sentence, or nothing; saves are tried again with what is free then. Raises UserError for what no checkpoint
        can hold. Not collective.
        """
        self._start()
        own = share(tuple(entries), self._peers.index, self._peers.size)
        self._laid = None
        try:
            self._pool_of(own).reserve(own.places.size)
        except Exception as error:  # noqa: BLE001  an accelerator's own error, say: training does not need the copy
            return sentence(error)
        return ""

    def save(self, state: Described, about: About | None = None) -> None:
        """Save the state as it is now; it may not change until `fence` has returned. Collective.

        Describing a state costs more than this does: of the very same tensors the entries can be used again, as
        `Described(entries, objects)`.
        """
        begun = time.monotonic()
        self._start()
        word: dict[str, Any] = {}
        # One rank says for all whether the last save is over: each sees its end at another moment, and a save that some
        # begin and others leave out would wait for parts that never come.
        if self._peers.index == 0:
            late = self.busy
            if self._task is not None and late and self.settings.policy == "wait":
                self._task.done.wait()
                late = False
            word = {"late": late, "id": new_id(), "last": None if late else self._verdict()}
        word = self._peers.from_first(word)
        about = about or About()
        if word["late"]:
            assert self._task is not None
            reason = f"left out: the save of step {self._task.about.step} is still being written"
            now = time.monotonic()
            self._over.put(SaveResult(about.step, None, reason, now - begun, now - begun, 0))
            return
        self._conclude(word["last"])
        path = self.folder / f"step-{about.step:08d}"
        self._task = task = _Task(word["id"], path, state.entries, dict(state.objects), about, begun)
        self._tasks.put(task)
        task.blocked += time.monotonic() - begun

    def fence(self) -> None:
        """Wait until the state may change. Without a save under way it costs nothing."""
        if self._task is not None:
            begun = time.monotonic()
            self._task.snapshot.fence()
            self._task.blocked += time.monotonic() - begun

    def poll(self) -> list[SaveResult]:
        """What came of saves since the last call, on this rank. Never waits."""
        found: list[SaveResult] = []
        while not self._over.empty():
            over = self._over.get()
            found.append(over if isinstance(over, SaveResult) else over.saved())
        return found

    def progress(self) -> tuple[int, int]:
        """Bytes of this rank that are written, and bytes in all, of the save under way; (0, 0) without one."""
        return self._written

    @property
    def busy(self) -> bool:
        """Whether a save is under way, as this rank sees it."""
        return self._task is not None and not self._task.done.is_set()

    @property
    def handed_over(self) -> bool:
        """Whether the process has all of the last save: where that is so on every rank, it outlives all of them."""
        return self._task is not None and self._task.handed_over

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    def wait(self) -> None:
        """Until the last save is committed or given up. Collective."""
        self.fence()
        if self._task is not None:
            if self._peers.index == 0:
                self._task.done.wait()
            self._conclude(self._peers.from_first(self._verdict()))

    def close(self) -> list[SaveResult]:
        """`wait`, give the memory back and let the process end; what `poll` would still say. Collective."""
        try:
            self.wait()
        finally:
            self._tasks.put(None)
            if self._thread is not None:
                self._thread.join()
                self._thread = None
            if self._process is not None:
                self._process.close(LINGER)
                self._process = None
            self._laid = None
            if self._pool is not None:
                self._pool.close()
        return self.poll()

    def _start(self) -> None:
        if self._thread is None:
            self._launch()
            self._thread = threading.Thread(target=self._run, name="tangram-checkpoint", daemon=True)
            self._thread.start()

    def _verdict(self) -> dict[str, Any] | None:
        task = self._task
        return None if task is None else {"id": task.id, "path": task.result, "reason": task.reason}

    def _conclude(self, verdict: dict[str, Any] | None) -> None:
        """Let the last save be as the first rank says; its writer may not have seen that yet."""
        if self._task is not None and not self._task.done.is_set():
            self._task.verdict = verdict if self.settings.node is None else None
            self._task.done.wait()

    # ------------------------------------------------------------ in the thread that copies and listens

    def _run(self) -> None:
        while True:
            try:
                task = self._tasks.get(timeout=1.0)
            except queue.Empty:
                self._look_after()
                continue
            if task is None:
                return
            before = time.thread_time()
            try:
                task.result, task.reason = self._serve(task)
            except Exception as error:  # noqa: BLE001  whatever it is, training goes on and is told
                task.reason = f"the save could not be made: {sentence(error)}"
            task.snapshot.give_up()
            task.cpu += time.thread_time() - before
            task.ended = time.monotonic()
            self._written = (0, 0)
            self._over.put(task)
            task.done.set()

    def _serve(self, task: _Task) -> tuple[str, str]:
        own = share((), self._peers.index, self._peers.size)
        memory, problem = None, ""
        try:
            laid = self._laid_out(task.entries)
            own, memory = laid.own, laid.memory
            task.nbytes = own.places.nbytes
            task.snapshot.follow(laid.copies)
        except Exception as error:  # noqa: BLE001  the other ranks wait to hear of it, from this one's writer
            problem = sentence(error)
            task.snapshot.give_up()
        hopeless = bool(problem)
        task.entries = ()
        self._written = (0, task.nbytes)
        for _ in range(self.settings.retries + 2):
            try:
                return self._have_written(task, own, memory, problem, hopeless)
            except (EOFError, OSError):
                how = self._replace()
                task.notes.append(f"the process that writes ended ({how}); a new one goes on")
                problem = problem or f"its process ended ({how})"
        return "", f"the process that writes ended again and again ({task.notes[-1]})"

    def _laid_out(self, entries: tuple[StateEntry, ...]) -> Laid:
        """What this rank writes of them and how it is copied; the same again while the entries are the same."""
        known = self._laid
        if known is not None and entries is known.entries:
            return known
        self._laid = None  # before its memory is given back
        own = share(entries, self._peers.index, self._peers.size)
        memory = self._memory(own)
        laid = Laid(entries, own, memory, copies_of(own, memory))
        if entries and self._first is not None and self._first() is entries[0]:
            self._laid = laid  # who saves the same ones again keeps them anyway
        self._first = weakref.ref(entries[0]) if entries else None
        return laid

    def _memory(self, own: RankShare) -> Shared:
        pool = self._pool_of(own)
        if pool.memory is not None and pool.memory.nbytes < own.places.size and self._knows[2] is not None:
            with contextlib.suppress(OSError):  # a process that is gone has forgotten it, too
                self._up().channel.send({"forget": True})  # or old and new were there together
            self._knows = _NOTHING
        return pool.reserve(own.places.size)

    def _have_written(
        self, task: _Task, own: RankShare, memory: Shared | None, problem: str, hopeless: bool
    ) -> tuple[str, str]:
        """Tell the process, listen until it is done. Raises EOFError or OSError when it ends or says nothing more."""
        process = self._up()
        if self._knows != (own.pieces, own.empty, memory):
            message: dict[str, Any] = {"share": share_fields(own, self._peers.index, self._peers.size)}
            if memory is not None:
                message["memory"] = memory.nbytes
            process.channel.send(message, [] if memory is None else [memory.descriptor])
            self._knows = (own.pieces, own.empty, memory)
        first = self._peers.index == 0
        order = Order(
            id=task.id,
            path=str(task.path),
            step=task.about.step,
            **{name: getattr(self.settings, name) for name in ("retries", "pause", "limit", "keep", "node", "digests")},
            objects=task.objects,
            mesh=task.about.mesh if first else "",
            beside=dict(task.about.beside) if first else None,
            problem=problem,
            hopeless=hopeless,
        )
        process.channel.send({"save": vars(order)})
        task.handed_over = True
        return self._listen(process, task)

    def _listen(self, process: Detached, task: _Task) -> tuple[str, str]:
        heard, passed_on = time.monotonic(), False
        while True:
            received = process.channel.receive(LISTEN)
            if received is not None:
                message: dict[str, Any] = received[0]
                heard = time.monotonic()
                if "bytes" in message:
                    self._written = (message["bytes"], task.nbytes)
                elif message.get("done") == task.id:
                    task.notes += message["notes"]
                    task.cpu += message["cpu"]
                    return message["path"], message["reason"]
            elif time.monotonic() - heard > self.settings.limit:
                raise EOFError("nothing was heard of it")
            if task.verdict is not None and not passed_on:
                process.channel.send({"verdict": task.verdict})
                passed_on = True

    # ------------------------------------------------------------ the process

    def _launch(self) -> None:
        job = Job("tangram.checkpoint.saving.writer_process:serve")
        self._process, self._spare = self._spare, None
        if self._process is not None and not self._process.ended:
            self._process.begin(job)
            self._ready, self._knows = False, _NOTHING
            return
        one_thread = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}  # it sums and writes in threads of its own
        self._process = start_detached(job, one_thread)
        self._ready = False
        self._knows = _NOTHING

    def _up(self) -> Detached:
        if self._process is None:
            self._launch()
        assert self._process is not None
        if not self._ready:
            received = self._process.channel.receive(START)
            if received is None or "ready" not in received[0]:
                raise EOFError(f"it did not start: {received}")
            self._ready = True
        return self._process

    def _replace(self) -> str:
        """Have a new process in place of one that ended or hangs; how it ended."""
        assert self._process is not None
        how = self._process.wait(1.0) or "it hung"  # what is gone from the channel ends in a moment
        self._process.kill()
        self._process.close(1.0)
        self._launch()
        return how

    def _look_after(self) -> None:
        """Between saves: a process that was killed is replaced before it is needed."""
        if self._process is not None and self._process.ended:
            self._replace()

    def _pool_of(self, own: RankShare) -> Pool:
        if self._pool is None:
            device = next((e.local.device for e in own.own if e.local.device.type not in ("cpu", "meta")), None)
            self._pool = Pool(device or torch.device("cpu"))
        return self._pool
