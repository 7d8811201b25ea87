"""Sends a run's checkpoints to an object store while it trains, and fetches the newest where it goes on elsewhere.

    the ranks commit a checkpoint on the disk  ->  its files get second names, so that no retention takes them away  ->
    a thread of the process that watches the run sends them  ->  the store is pruned by the plan's rules

Where checkpoints come faster than the store takes them, those between are left out: the newest counts. What fails is
told and tried again with the next; only the last of a run has to get there.
"""

import contextlib
import queue
import secrets
import shutil
import threading
import time
from collections.abc import Callable, Generator
from pathlib import Path

from tangram.checkpoint.store import commits
from tangram.checkpoint.store.commits import Marker
from tangram.checkpoint.store.objects import ObjectStore, StoreError, store_of
from tangram.checkpoint.tiers import remote
from tangram.checkpoint.tiers.promote import PINNED, pin
from tangram.errors import UserError, sentence
from tangram.schema.plan import Plan
from tangram.training.observe.events import CheckpointSaved, Doing, Note

RUN_NAME = ".run-in-store"
"""In the folder of a run's checkpoints."""
PAUSES = (1.0, 5.0)
"""Seconds before another attempt; none is made where a newer checkpoint waits."""
PATIENCE = 120.0
"""Seconds of attempts after which the end of a run makes no other: a store that hangs takes minutes for each."""
SILENCE = 5.0
"""Seconds that the end waits without a word."""


class Uploads:
    """Sends checkpoints one after the other."""

    def __init__(self, plan: Plan, folder: Path) -> None:
        """`folder`: of the run's checkpoints, which nobody else trains into."""
        self._store = store_of(plan.checkpoint.store)
        self._address = self._store.address.rstrip("/")
        self._run = _name_of_run(folder)
        self._keep = (f"last={plan.checkpoint.keep}", *plan.checkpoint.also)
        self._waiting: tuple[int, Path] | None = None
        self._lock = threading.Condition()
        self._closed = False
        self._step = 0
        """Of the last one."""
        self._failure = ""
        """Why it is not there."""
        self._notes: queue.SimpleQueue[str] = queue.SimpleQueue()
        for left in folder.glob(f"{PINNED}-*"):  # by a run that was killed
            shutil.rmtree(left, ignore_errors=True)
        self._thread = threading.Thread(target=self._work, name="tangram-uploads", daemon=True)
        self._thread.start()

    def take(self, saved: CheckpointSaved) -> None:
        """Have a checkpoint sent; its files stay until then. Returns at once."""
        try:
            pinned = pin(Path(saved.path))
        except OSError as error:
            self._fail(saved.step, error)
            self._notes.put(self._failure)
            return
        with self._lock:
            before, self._waiting, self._step = self._waiting, (saved.step, pinned), saved.step
            self._lock.notify()
        if before is not None:
            shutil.rmtree(before[1], ignore_errors=True)

    def pass_on(self, tell: Callable[[object], None]) -> None:
        """Tell what came of it since the last call."""
        while not self._notes.empty():
            tell(Note(self._notes.get()))

    def close(self, tell: Callable[[object], None]) -> None:
        """Wait until the last one is in the store. Raises UserError where it is not."""
        tell(Doing(f"sending the last checkpoint to {self._address}"))
        with self._lock:
            self._closed = True
            self._lock.notify()
        self._thread.join(SILENCE)
        if self._thread.is_alive():
            where = f"is on the disk, and still being sent to {self._address}"
            tell(Note(f"the checkpoint of step {self._step} {where} (SIGTERM or Ctrl-C: stop without)"))
        self._thread.join()
        self.pass_on(tell)
        if self._failure:
            raise UserError(f"{self._failure}: it is on the disk, and the same command with --resume sends it")

    def _fail(self, step: int, error: Exception) -> None:
        self._failure = f"the checkpoint of step {step} could not be sent to {self._address}: {sentence(error)}"

    def _work(self) -> None:
        while (order := self._next()) is not None:
            step, pinned = order
            try:
                self._send(step, pinned)
            finally:
                shutil.rmtree(pinned, ignore_errors=True)

    def _next(self) -> tuple[int, Path] | None:
        with self._lock:
            self._lock.wait_for(lambda: self._waiting is not None or self._closed)
            order, self._waiting = self._waiting, None
            return order

    def _attempt(self, step: int, pinned: Path) -> str:
        """Its name in the store; nothing where that failed."""
        try:
            remote.refuse_other_owner(self._store, self._run)
            return remote.upload(pinned, self._store)
        except Exception as error:  # noqa: BLE001  whatever it is, it is told, and the next one is tried
            self._fail(step, error)
            return ""

    def _send(self, step: int, pinned: Path) -> None:
        begun = time.monotonic()
        pauses = [*PAUSES]
        while not (name := self._attempt(step, pinned)):
            with self._lock:
                newer = self._lock.wait_for(lambda: self._waiting is not None, pauses[0] if pauses else 0.0)
            if newer or not pauses or (self._closed and time.monotonic() - begun > PATIENCE):
                self._notes.put(self._failure)
                return
            pauses.pop(0)
        self._failure = ""
        self._notes.put(f"uploaded   step {step} to {self._address}/{name} in {time.monotonic() - begun:.1f} s")
        try:
            remote.prune(self._store, self._keep)
        except UserError as error:
            self._notes.put(f"old checkpoints could not be removed: {error}")


@contextlib.contextmanager
def sending(plan: Plan, folder: Path, tell: Callable[[object], None]) -> Generator[Callable[[object], None]]:
    """What is to hear the events of a run meanwhile, so that its checkpoints in `folder` get into the plan's store.

    Raises UserError at the end where the last one is not there. What else failed meanwhile goes before that.
    """
    if not plan.checkpoint.store:
        yield lambda event: None
        return
    uploads = Uploads(plan, folder)

    def hear(event: object) -> None:
        if isinstance(event, CheckpointSaved):
            uploads.take(event)
        uploads.pass_on(tell)

    try:
        yield hear
    except Exception:
        with contextlib.suppress(UserError):
            uploads.close(tell)
        raise
    uploads.close(tell)


def _name_of_run(folder: Path) -> str:
    """What a store calls the run of a folder: drawn once."""
    file = folder / RUN_NAME
    if not file.exists():
        folder.mkdir(parents=True, exist_ok=True)
        file.write_text(secrets.token_hex(16), encoding="utf-8")
    return file.read_text(encoding="utf-8")


def bring_here(plan: Plan, folder: Path, *, resume: bool, tell: Callable[[object], None]) -> bool:
    """Whether there is a checkpoint to go on from: the newest of the plan's store is fetched into `folder` where that
    has none as new. Nobody trains into the folder meanwhile.

    From then on this run is the one that sends to the store. Raises UserError where the store cannot be reached, has
    checkpoints or another run and this one is to begin, or none of what it has is sound and there is none here.
    """
    store = store_of(plan.checkpoint.store, quick=True)
    found = remote.committed_in(store)
    if found and not resume:
        raise UserError(
            f'"{store.address}" has checkpoints of a run, up to step {found[-1][1].step}: go on from them with '
            "--resume, or give another address as checkpoint.store"
        )
    run, owner = _name_of_run(folder), remote.owner_of(store)
    if owner is not None and owner.run != run and not resume:
        raise UserError(
            f'"{store.address}" belongs to {owner}, without a checkpoint so far: give another address as '
            "checkpoint.store, or take it over with --resume"
        )
    remote.take(store, run, over=owner is not None)
    here = commits.committed(folder)
    newest = max((marker.serial for _, marker in here), default=0)
    torn = remote.torn_in(store) if resume else []
    for why in torn:
        tell(Note(why))
    for name, marker in reversed(found):
        if marker.serial <= newest:
            break
        if _fetched(store, name, marker, folder, tell):
            return True
    if (found or torn) and not here:
        raise UserError(f'none of the checkpoints in "{store.address}" is sound: begin anew with another address')
    return bool(here)


def mended(address: str, path: Path, tell: Callable[[object], None]) -> bool:
    """Whether a store has the checkpoint `path`, which is damaged, too: what is damaged of it was then fetched.

    `address`: of the store, nothing without one. Raises UserError where that cannot be reached.
    """
    if not address:
        return False
    store, own = store_of(address, quick=True), commits.read_marker(path).id
    same = [(name, marker) for name, marker in remote.committed_in(store) if marker.id == own]
    return any(_fetched(store, name, marker, path.parent, tell) for name, marker in same)


def _fetched(store: ObjectStore, name: str, marker: Marker, folder: Path, tell: Callable[[object], None]) -> bool:
    """Fetch a checkpoint into a folder. What is wrong with it in the store is told; raises UserError for all else."""
    tell(Doing(f"fetching {name} from {store.address}"))
    try:
        path, blocks = remote.download(store, name, marker, folder)
    except OSError as error:
        raise UserError(f"{name} of {store.address} cannot be fetched: {sentence(error)}") from None
    except StoreError:  # it may answer again, and steps of days are not done again for that
        raise
    except UserError as error:  # damaged, or deleted under way: an older one may do
        tell(Note(f"{name} of {store.address} is passed over: {error}"))
        return False
    tell(Note(f"fetched    {name} from {store.address} into {path.parent}: {blocks}"))
    return True
