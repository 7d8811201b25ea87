"""Brings snapshots to the disk while training goes on: a thread beside the one that listens to the ranks."""

import queue
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from tangram.checkpoint.saving.rank_parts import sentence
from tangram.checkpoint.store import retention
from tangram.checkpoint.tiers.promote import pin, promote
from tangram.errors import UserError
from tangram.training.observe.events import CheckpointSaved, Note, SaveFailed


class Promoter:
    """Copies checkpoints into a folder one after the other, and prunes that folder by its rules of retention."""

    def __init__(self, folder: Path, keep: tuple[str, ...]) -> None:
        self._folder, self._keep = folder, keep
        self._orders: queue.Queue[tuple[CheckpointSaved, Path] | None] = queue.Queue()
        self._events: queue.Queue[CheckpointSaved | SaveFailed | Note] = queue.Queue()
        self._thread = threading.Thread(target=self._work, name="tangram-promoter", daemon=True)
        self._thread.start()

    def offer(self, snapshot: CheckpointSaved, *, disk: bool) -> None:
        """Have a snapshot copied, if it is due; its files stay until then. Returns at once."""
        if not disk:
            return
        try:
            self._orders.put((snapshot, pin(Path(snapshot.path))))
        except OSError as error:  # it was replaced by newer ones before anybody came to it
            self._events.put(SaveFailed(snapshot.step, sentence(error)))

    def heard(self) -> Iterator[CheckpointSaved | SaveFailed | Note]:
        """What came of it since the last call."""
        while not self._events.empty():
            yield self._events.get()

    def close(self) -> None:
        """Wait until all that was taken is on the disk."""
        self._orders.put(None)
        self._thread.join()

    def _work(self) -> None:
        while (order := self._orders.get()) is not None:
            snapshot, pinned = order
            begun = time.monotonic()
            try:
                path = promote(pinned, self._folder)
            except Exception as error:  # noqa: BLE001  whatever it is, it is told, and the next one is tried
                self._events.put(SaveFailed(snapshot.step, sentence(error)))
                continue
            finally:
                shutil.rmtree(pinned, ignore_errors=True)
            seconds = snapshot.seconds + time.monotonic() - begun
            blocked = snapshot.blocked_seconds
            self._events.put(CheckpointSaved(snapshot.step, str(path), blocked, seconds, asynchronous=True))
            try:
                retention.prune(retention.plan(self._folder, retention.parse(self._keep)))
            except (OSError, UserError) as error:
                self._events.put(Note(f"an old checkpoint could not be removed: {sentence(error)}"))
