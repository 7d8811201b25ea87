"""Be one rank of a job whose ranks torchrun, or a Slurm script that sets the same variables, has started.

The ranks first meet in torchrun's key-value store. There one of them does for all what is to be done once (`on_one`),
and there the first error is noted: the rank that met it tells it, the others leave in silence (`ReportedElsewhere`).
Only then do they join in a process group (`run_as_rank`).

torchrun restarts a job's processes in place and lets them meet in the same store again, in which the addresses of the
dead ones still stand; and its count of restarts is not the same on every node. So the ranks agree on a word of their
own for each attempt, and put all their keys under it.

Trade-off: who waits for the store looks into it again and again, twice a second at last. And a rank that is killed
outright leaves no word, so the first to miss it tells of the lost connection; torchrun's own report names the dead.
"""

import contextlib
import math
import os
import pickle
import signal
import sys
import threading
import time
import traceback
import uuid
from collections.abc import Callable, Generator
from dataclasses import dataclass
from datetime import timedelta
from typing import Literal, NoReturn, TypeVar

import torch
import torch.distributed as dist

from tangram.errors import UserError
from tangram.hardware.host.machine import pick_device
from tangram.tracing.settings import TraceSettings, traced_rank
from tangram.tracing.watch import Hang, Watch, watched
from tangram.training.observe.events import Note
from tangram.training.run.environment import RankPlace, ReportedElsewhere, place, speaks, started_by_torchrun
from tangram.training.run.launch import COLLECTIVE_TIMEOUT, Rank, RankError, leave, threads_of_a_rank
from tangram.training.run.signals import POLITE, Stop, first_line, on_signals

Payload = TypeVar("Payload")
Result = TypeVar("Result")

MEETING_SECONDS = 300.0  # until every rank has come to the store: nodes do not start together
INTERRUPTED = 130  # as a shell says it
FAREWELL_SECONDS = 5.0
STORE_SECONDS = 2.0
_SOON, _SELDOM = 0.02, 0.5  # seconds between two looks into the store, when one has begun to wait and later
_FAILED = "failed"


@dataclass
class Meeting:
    """Where the ranks of one attempt meet before, beside and after their process group."""

    place: RankPlace
    store: dist.Store
    """All keys under the word of this attempt."""
    works: int = 0
    """How much has been done by one for all; every rank counts alike."""

    def wait(self, key: str) -> bytes:
        """The value of a key that another rank will set. Raises ReportedElsewhere when the job fails meanwhile."""
        for _ in _looks():
            if self.store.check([key]):
                break
            if self.store.check([_FAILED]):
                raise self.elsewhere()
        return self.store.get(key)

    def fails(self, code: int, why: str) -> bool:
        """Note that this rank has failed; False if another had before, which then is the one to tell of it."""
        mine = f"{code} {self.place.index} {why}"
        return self.store.compare_set(_FAILED, "", mine).decode() == mine

    def elsewhere(self) -> ReportedElsewhere:
        code, _, why = self.store.get(_FAILED).decode().split(" ", 2)
        return ReportedElsewhere(int(code), why)

    def inform(self, error: BaseException) -> BaseException:
        """What this rank is to raise: its error, or ReportedElsewhere if it was not the first."""
        if isinstance(error, ReportedElsewhere):
            return error
        code = 2 if isinstance(error, UserError) else INTERRUPTED if isinstance(error, KeyboardInterrupt) else 1
        try:
            return error if self.fails(code, str(error) or type(error).__name__) else self.elsewhere()
        except dist.DistError:  # the store is gone, and what it knew: better said twice than never
            return error

    def part(self) -> None:
        """Leave. Where rank 0 holds the store, it leaves last, so that the others can still read it."""
        with contextlib.suppress(dist.DistError):  # then somebody has died, who took no leave
            if self.store.add("gone", 1) == self.place.world:
                self.store.set("all gone", "")
            if self.place.index == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
                for _ in _looks(FAREWELL_SECONDS):
                    if self.store.check(["all gone"]):
                        break


def together() -> contextlib.AbstractContextManager[Meeting | None]:
    """Around all that a rank does: the meeting of torchrun's ranks, or None where nobody else started them."""
    return met() if started_by_torchrun() else contextlib.nullcontext()


@contextlib.contextmanager
def met() -> Generator[Meeting]:
    """Meet the other ranks that were started with this one, for as long as the job lasts.

    An error that leaves this context is raised on the rank that met it first, and as ReportedElsewhere on the others.
    """
    try:
        here = place()
    except UserError:
        if speaks():
            raise
        raise ReportedElsewhere(2) from None
    store = _store(here)
    meeting = Meeting(here, dist.PrefixStore(f"tangram/{agree(store, here.index, here.world)}", store))
    try:
        yield meeting
    except BaseException as error:
        _last_words()
        what = meeting.inform(error)
        meeting.part()
        if what is error:
            raise
        raise what from error
    meeting.part()


def _store(here: RankPlace) -> dist.Store:
    """The store that torchrun holds, or that rank 0 holds where nobody else does."""
    try:
        store, _, _ = next(dist.rendezvous("env://", timeout=timedelta(seconds=MEETING_SECONDS)))
    except (dist.DistError, RuntimeError) as error:
        where = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        raise UserError(
            f"rank {here.index} of {here.world} cannot meet the others at {where} (MASTER_ADDR and MASTER_PORT): "
            f"{first_line(error)}"
        ) from None
    return store


def agree(store: dist.Store, index: int, world: int, seconds: float = MEETING_SECONDS) -> str:
    """A word that all ranks of this attempt know and no other attempt in the same store does.

    Each rank but the first says hello with a number used once, and waits for the word under that number: an answer to
    a rank that is dead now is never taken for one's own. Rank 0 answers whoever says hello until all have come.
    """
    word = uuid.uuid4().hex
    if index:
        store.set(f"tangram/hello/{index}", word)
        answer = f"tangram/answer/{word}"
        for _ in _looks(seconds):
            if store.check([answer]):
                word = store.get(answer).decode()
                store.add(f"tangram/{word}/come", 1)
                return word
        raise UserError(f"rank {index} of {world} has waited {seconds:g} s for rank 0: were all ranks started?")
    answered: dict[int, str] = {}
    for _ in _looks(seconds):
        if store.add(f"tangram/{word}/come", 0) == world - 1:
            return word
        for other in range(1, world):
            if store.check([f"tangram/hello/{other}"]):
                number = store.get(f"tangram/hello/{other}").decode()
                if answered.get(other) != number:
                    store.set(f"tangram/answer/{number}", word)
                    answered[other] = number
    come = store.add(f"tangram/{word}/come", 1)
    raise UserError(f"of {world} ranks only {come} have come within {seconds:g} s: were all of them started?")


def _looks(seconds: float = math.inf) -> Generator[None]:
    """Go round a loop that waits, ever more slowly, for that long; one that ends by itself has waited in vain.

    Not the store's own waiting: no signal gets through to that, and it logs every time-out.
    """
    deadline, nap = time.monotonic() + seconds, _SOON
    while time.monotonic() < deadline:
        yield
        time.sleep(nap)
        nap = min(_SELDOM, 1.5 * nap)


def on_one(meeting: Meeting | None, work: Callable[[], Result], *, per: Literal["job", "node"] = "job") -> Result:
    """Let rank 0, or one rank of each node, do `work` while the others wait; what it returned, on every rank.

    It travels pickled, so let it be small. An error there ends the job on all ranks. Without a meeting, where nobody
    else has started ranks, it is just `work()`. Every rank has to call this, in the same order.
    """
    if meeting is None:
        return work()
    meeting.works += 1
    here, begin = meeting.place, f"work/{meeting.works}"
    key = f"{begin}/{here.node}" if per == "node" else begin
    if (here.local_index if per == "node" else here.index) == 0:
        result = work()
        meeting.store.set(key, pickle.dumps(result).hex())
    else:
        result = pickle.loads(bytes.fromhex(meeting.wait(key).decode()))
    if meeting.store.add(f"{begin}/done", 1) == here.world:
        meeting.store.set(f"{begin}/all", "")
    meeting.wait(f"{begin}/all")
    return result


def run_as_rank(
    task: Callable[[Rank, Payload], Result],
    payload: Payload,
    *,
    world: int,
    on_event: Callable[[object], None],
    device: str = "auto",
    meeting: Meeting,
    trace: TraceSettings | None = None,
) -> Result:
    """Run `task(rank, payload)` as this rank of `world`, joined in the default process group; its own result.

    On rank 0, whatever it emits reaches `on_event`; elsewhere events go nowhere. SIGINT, SIGTERM, SIGHUP and SIGUSR1
    ask to stop after the step, the second of them ends the rank at once. An error that is no `UserError` is raised as
    `RankError`.
    """
    here = meeting.place
    if here.world != world:
        raise UserError(
            f"the plan's mesh has {world} ranks, but {here.world} were started (WORLD_SIZE): start {world}, or change "
            "the mesh"
        )
    emit = on_event if here.index == 0 else _nowhere
    stop = Stop(heard=lambda name: emit(Note(f"{name}: stopping after this step (again to stop at once)")))
    with on_signals(POLITE, stop.ask, again=_leave_at_once):
        try:
            torch.set_num_threads(threads_of_a_rank(here.local_world))
            chosen = pick_device(device, here.local_index, here.local_world)
            if chosen.type != "cpu":
                torch.accelerator.set_device_index(here.local_index)
            backend = dist.get_default_backend_for_device(chosen)

            def end(hang: Hang) -> None:
                _end_of(hang, here, meeting)

            with (
                traced_rank(trace, here.index, world, backend) as traced,
                watched(trace, (here.index // here.local_world, here.local_index), world, end),
            ):
                dist.init_process_group(
                    traced.backend,
                    store=dist.PrefixStore("group", meeting.store),
                    rank=here.index,
                    world_size=world,
                    timeout=COLLECTIVE_TIMEOUT,
                )
                if traced.note:
                    emit(Note(traced.note))
                result = task(Rank(here.index, world, chosen, emit, stop, trace=traced.trace), payload)
        except BaseException as error:
            _last_words()
            if isinstance(error, UserError | ReportedElsewhere) or not isinstance(error, Exception):
                raise
            raise RankError(here.index, world, _words_of(error, meeting, trace), traceback.format_exc()) from error
        dist.destroy_process_group()
    return result


def _words_of(error: Exception, meeting: Meeting, trace: TraceSettings | None) -> str:
    """The error in a sentence. At a number that is none all ranks stop: once they have come to it, rank 0 says whose it
    was, and the others wait to hear that it has."""
    words, here = first_line(error), meeting.place
    if trace is None or not isinstance(error, FloatingPointError):
        return words
    with contextlib.suppress(dist.DistError):
        meeting.store.add("astray", 1)
        for _ in _looks(STORE_SECONDS):
            if meeting.store.check([_FAILED]) or (here.index == 0 and meeting.store.add("astray", 0) == here.world):
                break
    return words if here.index else Watch(trace).explained(0, here.world, words)


def _end_of(hang: Hang, here: RankPlace, meeting: Meeting) -> NoReturn:
    """Say, for all ranks, why the job ends, and end this one: torchrun then ends the others."""
    said = f"rank {hang.rank} of {here.world} ended the job: {hang.sentence}"
    # Whoever misses this rank is silent then. The store may be waited for by the thread that hangs: not for long.
    note = threading.Thread(target=lambda: meeting.fails(1, said), daemon=True)
    note.start()
    note.join(STORE_SECONDS)
    sys.stderr.write(f"error: {said}\n")
    leave(1)


def _last_words() -> None:
    """From here on this process only says why it ends; torchrun, which ends the ranks of a failed job, has to wait."""
    signal.pthread_sigmask(signal.SIG_BLOCK, POLITE)


def _nowhere(event: object) -> None:
    """Only rank 0 tells."""


def _leave_at_once(name: str) -> NoReturn:
    leave(INTERRUPTED)
