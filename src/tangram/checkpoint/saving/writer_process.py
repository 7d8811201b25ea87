"""The process that writes what a rank has copied, and goes on alone when the rank dies.

    caller -> memory (an open file, what lies in it), save, verdict     writer -> ready, bytes, done

The writers of a save say nothing to each other: they look at its folder. The first makes it, every one writes its files
from the shared memory and leaves its part, or the reason why it cannot; when all parts are there the first commits. An
attempt that fails is followed by another, in a new folder with an id of its own, from the same memory. A failed one is
removed when every writer has been heard and the next one's folder is there: so nobody looks for what has gone.
"""

import contextlib
import hashlib
import os
import shutil
import threading
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from tangram.checkpoint.saving import rank_parts
from tangram.checkpoint.saving.rank_files import RankFiles, discard
from tangram.checkpoint.saving.rank_parts import About, finish
from tangram.checkpoint.saving.snapshot import FilePlaces
from tangram.checkpoint.store import commits, retention
from tangram.errors import sentence
from tangram.hardware.host.channel import Channel
from tangram.hardware.host.hostmemory import mapped

T = TypeVar("T")
LOOK = 0.02
"""Seconds between two looks at the folder."""
TELL = 0.5
"""Seconds between two words on how far the writing is."""
SOON = 1 << 24
"""Bytes that are written before anybody would ask."""


@dataclass(frozen=True)
class Order:
    """One save, as its writers are told of it; JSON."""

    id: str
    path: str
    """Of the checkpoint to be; where there is one already, a number is added to the name."""
    step: int
    retries: int
    pause: float
    limit: float
    """Seconds without any progress in the folder after which a writer waits no longer for the others."""
    keep: tuple[str, ...] = ()
    """Rules of `retention`; none: all are kept."""
    node: tuple[int, int, int, int] | None = None
    """As in `Settings`."""
    digests: bool = True
    objects: Any = None
    """Of this rank."""
    mesh: str = ""
    beside: Any = None
    problem: str = ""
    """Why this rank has nothing to write, for the attempt under way."""
    hopeless: bool = False
    """Whether that holds for all attempts."""

    def together(self, writers: int) -> range:
        """The writers that commit together: of `writers` all, or those of this machine."""
        return range(writers) if self.node is None else range(self.node[2], self.node[2] + self.node[3])


class _FailedError(Exception):
    """An attempt came to nothing."""


class _VerdictError(Exception):
    """The caller knows how the save ended."""


def attempt_id(save_id: str, attempt: int) -> str:
    """The id of an attempt at a save: every writer knows it without a word."""
    return hashlib.sha256(f"{save_id} {attempt}".encode()).hexdigest()[:32] if attempt else save_id


def serve(channel: Channel) -> None:
    """The process's main function: save what it is told to until the caller is gone."""
    caller = os.getppid()
    channel.send({"ready": True})
    writer = SaveWriter(channel)
    with contextlib.suppress(EOFError):
        while True:
            alive = os.getppid() == caller  # a process that the caller forked may hold the channel open
            if (received := channel.receive(5.0 if alive else 0.0)) is not None:
                writer.hear(*received)
            elif not alive:
                return


class SaveWriter:
    """What one rank's writer knows and does."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._gone = False
        self._now = ""
        """The save under way."""
        self._kept = Path()
        """Where checkpoints are kept."""
        self._wanted = False
        """Whether that was there since this save began."""
        self._files = RankFiles({"index": 0, "writers": 1, "pieces": [], "empty": {}})

    def hear(self, message: dict[str, Any], files: list[int]) -> None:
        if "share" in message:
            self._files = RankFiles(message["share"], self._files)
        if "forget" in message:
            self._files.memory = None
        if "memory" in message:
            self._files.memory = mapped(files[0], message["memory"])
            os.close(files[0])
        if "save" in message:
            order, before = Order(**message["save"]), time.process_time()
            self._now = order.id
            try:
                path, reason, notes = self._save(order)
            except _VerdictError as verdict:
                path, reason, notes = verdict.args
            except Exception as error:  # noqa: BLE001  whatever it is, the caller is told
                path, reason, notes = "", sentence(error), []
            if path:
                self._files.committed(Path(path))
            self._say(
                {"done": order.id, "path": path, "reason": reason, "notes": notes, "cpu": time.process_time() - before}
            )

    def _say(self, message: dict[str, Any]) -> None:
        try:
            if not self._gone:
                self._channel.send(message)
        except OSError:  # the caller is gone, and this is the process that goes on
            self._gone = True

    # ------------------------------------------------------------ a save

    def _save(self, order: Order) -> tuple[str, str, list[str]]:
        """Where the checkpoint is, or the reason why there is none; and what else the caller should know."""
        target, self._kept, self._wanted = Path(order.path), Path(order.path).parent, False
        folders = [commits.partial_path(target, attempt_id(order.id, i)) for i in range(order.retries + 1)]
        if order.problem and (path := _committed(target.parent, order)):  # by the process that this one replaces
            return str(path), "", []
        first = order.together(self._files.writers)[0]
        return self._lead(order, folders) if self._files.index == first else self._follow(order, folders)

    def _lead(self, order: Order, folders: list[Path]) -> tuple[str, str, list[str]]:
        """The first writer's way."""
        target, reason = Path(order.path), ""
        _remove([commits.closing_path(folder) for folder in folders])  # of the process that this one replaces
        commits.sweep(target.parent, 3 * order.limit, but=folders)
        # The process that this one replaces may have begun a later attempt, and the others write at that.
        first = max((i for i, folder in enumerate(folders) if folder.exists()), default=0)
        for attempt, partial in list(enumerate(folders))[first:]:
            problem = order.problem if order.hopeless or attempt == first else ""
            try:
                if attempt > first:
                    self._pause(order.pause)
                self._refuse_unwanted()  # or it would be made again
                if not partial.exists():
                    commits.begin(target, attempt_id(order.id, attempt))
                _remove(folders[:attempt])
                path = self._attempt(order, partial, attempt_id(order.id, attempt), problem)
                notes = retention.keep_to(order.keep, target.parent, lambda: self._say({"waiting": True}))
                return str(path), "", notes
            except (_FailedError, OSError) as error:
                reason = _reason(error)
        _remove(folders)
        return "", reason, []

    def _attempt(self, order: Order, partial: Path, save_id: str, problem: str) -> Path:
        """Write, wait for the others, commit."""
        together = order.together(self._files.writers)
        try:
            self._write(order, partial, save_id, problem)

            def look() -> list[rank_parts.RankPart] | None:
                _refuse_failed(partial)
                return rank_parts.complete_parts(partial, together)

            parts = self._until(partial, order.limit, look)
            path = commits.unused(Path(order.path))
            about = About(order.step, order.mesh, order.beside or {})
            finish(partial, path, len(together), save_id, about, parts, order.node and order.node[:2])
            return path
        except Exception as error:  # noqa: BLE001  whatever it is, the other writers wait to hear of it
            with contextlib.suppress(OSError):
                (partial / f"part-{self._files.index:05d}.json").unlink()  # it has no part in what failed
            # The next attempt removes this folder, so first the others have to be done in it, well or not. On a disk
            # that is read-only since, they can leave no word in it either.
            if self._leave_failure(partial, _reason(error)):
                with contextlib.suppress(_FailedError):
                    others = together[1:]
                    self._until(partial, order.limit, lambda: all(self._heard(partial, i) for i in others) or None)
            raise _FailedError(_reason(error)) from None

    def _follow(self, order: Order, folders: list[Path]) -> tuple[str, str, list[str]]:
        """The other writers' way."""
        problem, attempt, reason = order.problem, 0, ""
        while attempt < len(folders):
            attempt = self._appeared(order, folders, attempt)
            partial, save_id = folders[attempt], attempt_id(order.id, attempt)
            try:
                part = partial / f"part-{self._files.index:05d}.json"
                if not part.exists() and partial.exists():  # a folder that is gone is closing
                    self._write(order, partial, save_id, problem)
                path = self._until(partial, 2 * order.limit, lambda at=partial: _verdict(order, at))
                return str(path), "", []
            except (_FailedError, OSError) as error:
                reason = _reason(error)
                self._leave_failure(partial, reason)
            problem = order.problem if order.hopeless else ""
            attempt += 1
        return "", reason, []

    def _appeared(self, order: Order, folders: list[Path], attempt: int) -> int:
        """The latest attempt, from this one on, that the first writer has made a folder for."""

        def look() -> int | None:
            return next((i for i in reversed(range(attempt, len(folders))) if folders[i].exists()), None)

        return self._until(Path(order.path).parent, 2 * order.limit, look)

    # ------------------------------------------------------------ steps of it

    def _write(self, order: Order, partial: Path, save_id: str, problem: str) -> None:
        """Write this rank's files and leave its part. Raises OSError, and _FailedError for a problem from before."""
        if problem:
            raise _FailedError(f"rank {self._files.index} cannot write: {problem}")
        found = self._files.places(save_id)
        try:
            with self._telling(partial, found):
                part = self._files.write(partial, save_id, order.objects or {}, order.digests)
            rank_parts.leave_part(partial, self._files.index, part)
        except OSError as error:
            discard(partial, found)  # on a full disk the reason needs room
            raise _FailedError(f"rank {self._files.index} cannot write: {sentence(error)}") from None

    @contextlib.contextmanager
    def _telling(self, partial: Path, found: FilePlaces) -> Generator[None]:
        """Say how many bytes are written, while they are; nothing while nothing moves."""
        if found.nbytes < SOON:
            yield
            return
        ended = threading.Event()

        def tell() -> None:
            last = -1
            while not ended.wait(TELL):
                now = sum(_size(partial / file.name) for file in found.files)
                if now != last:
                    self._say({"bytes": now})
                last = now

        thread = threading.Thread(target=tell, name="tangram-tell", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
        self._say({"bytes": found.nbytes})

    def _leave_failure(self, partial: Path, reason: str) -> bool:
        """Say why in the folder: on a full disk another may make room first. If there is none, only that it is so, or
        the first would wait until nothing had moved for long. False where not even that can be left, or nobody waits.

        Who has been heard already leaves nothing more there: the first may be removing the folder.
        """
        for tries in range(21):
            try:
                if not self._heard(partial, self._files.index):
                    rank_parts.leave_failure(partial, self._files.index, reason if tries < 20 else "")
                return True
            except FileNotFoundError:  # the folder is gone
                return False
            except OSError:
                time.sleep(0.1)
        return False

    def _heard(self, partial: Path, writer: int) -> bool:
        return any((partial / f"{kind}-{writer:05d}.json").exists() for kind in ("part", "failed"))

    def _until(self, folder: Path, limit: float, look: Callable[[], T | None]) -> T:
        """What `look` finds at last. Raises _FailedError when nothing in the folder moves for `limit` seconds.

        Or at once where the caller is gone, and then the folder that all checkpoints were in: nobody wants this one.
        """
        self._refuse_unwanted()
        seen = _movement(folder)
        since = reported = time.monotonic()
        while (found := look()) is None:
            self._listen(LOOK)
            self._refuse_unwanted()
            now = time.monotonic()
            if now - reported > TELL:
                reported = now
                self._say({"waiting": True})
                if (movement := _movement(folder)) != seen:
                    seen, since = movement, now
            if now - since > limit:
                raise _FailedError(f"for {limit:g} s nothing was heard of the writer of another rank")
        return found

    def _refuse_unwanted(self) -> None:
        """Raise _FailedError where the caller is gone, and then the folder that all checkpoints were in."""
        there = self._kept.exists()
        self._wanted |= there
        if self._gone and self._wanted and not there:
            raise _FailedError("the checkpoints were removed")

    def _pause(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            self._say({"waiting": True})
            self._listen(min(left, TELL))

    def _listen(self, seconds: float) -> None:
        """Wait, and hear whether the caller knows how the save ended."""
        if self._gone:
            time.sleep(seconds)
            return
        try:
            received = self._channel.receive(seconds)
        except EOFError:
            self._gone = True
            return
        verdict: Any = None if received is None else received[0].get("verdict")
        if verdict is not None and verdict["id"] == self._now:  # one of another save came late
            raise _VerdictError(verdict["path"], verdict["reason"], [])


def _reason(error: Exception) -> str:
    return str(error) if isinstance(error, _FailedError) else sentence(error)


def _refuse_failed(partial: Path) -> None:
    """Raise _FailedError with what a writer has left as the reason why it cannot."""
    with contextlib.suppress(FileNotFoundError):  # it goes with its folder, which may be closing at this moment
        if reason := rank_parts.left_failure(partial):
            raise _FailedError(reason)


def _verdict(order: Order, partial: Path) -> Path | None:
    """The checkpoint, None while that is open. Raises _FailedError when this attempt came to nothing."""
    _refuse_failed(partial)
    if partial.exists() or commits.closing_path(partial).exists():
        return None
    if path := _committed(Path(order.path).parent, order):
        return path
    raise _FailedError("it was given up; the first rank says why")


def _committed(folder: Path, order: Order) -> Path | None:
    """The checkpoint that an attempt at this save became."""
    ids = {attempt_id(order.id, attempt) for attempt in range(order.retries + 1)}
    return next((path for path, marker in reversed(commits.committed(folder)) if marker.id in ids), None)


def _remove(folders: list[Path]) -> None:
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)


def _movement(folder: Path) -> list[tuple[str, int]]:
    """Changes whenever anything in a folder does."""
    try:
        with os.scandir(folder) as found:
            return sorted((entry.name, entry.stat().st_size) for entry in found)
    except OSError:
        return []


def _size(file: Path) -> int:
    try:
        return file.stat().st_size
    except OSError:
        return 0
