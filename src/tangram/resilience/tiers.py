"""Where a run's checkpoints are: in the memory of its machine, which outlives its processes, and in its folder.

    /dev/shm/tangram-UID-DIGEST/    of the run's folder
      attempt-1/step-00000007/      what the ranks of an attempt have written
      attempt-2/...                 the writers of dead ranks may still be at the one before
      held/                         of a run on several nodes: what is being copied, and copies of what others have
      resume-2/...                  and what an attempt goes on from (`resilience.shares`)

A snapshot is a checkpoint like any other, of any layout, with its checksums. So what goes on from it may have another
mesh, and every block is proved as it is read.

Trade-off: of a run on one machine a snapshot is of use as long as that runs; what outlives it is in the run's folder.
"""

import contextlib
import hashlib
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

from tangram.checkpoint.store.commits import PARTIAL, committed, read_marker
from tangram.errors import UserError

SHARED = Path("/dev/shm")
HELD, RESUME = "held", "resume"
One = TypeVar("One")
SETTLE = 0.5
"""Seconds that a dead rank's writer is given to commit what it has begun."""


def memory_of(run: Path, memory: Path | None = None) -> Path | None:
    """The folder for snapshots of a run; None where this system has no memory that is a folder. `memory`: another
    folder than /dev/shm. Raises UserError where that one is not there or cannot be written."""
    place = memory or SHARED
    if not (place.is_dir() and os.access(place, os.W_OK)):
        if memory is not None:
            raise UserError(f"--memory {memory}: there is no such folder on {os.uname().nodename} that can be written")
        return None
    digest = hashlib.sha256(os.fsencode(run.resolve())).hexdigest()[:16]
    return place / f"tangram-{os.getuid()}-{digest}"


def id_of(path: Path) -> str:
    """Of a checkpoint; its path where it does not say."""
    try:
        return read_marker(path).id
    except UserError:
        return str(path)


class Written(Protocol):
    """When a checkpoint was written."""

    @property
    def step(self) -> int: ...

    @property
    def created(self) -> str: ...


def newest_first(memory: Iterable[One], disk: Iterable[One], written: Callable[[One], Written]) -> list[One]:
    """Those in memory and on the disk, each in the order in which they were written, together, the last one first.

    What is in memory is of the last launcher, so it is newer, unless the run has gone further elsewhere since. Which is
    the later by the clock does not decide it alone: clocks are set back.
    """
    near, far, found = [*memory], [*disk], list[One]()
    while near and far:
        ours, theirs = written(near[-1]), written(far[-1])
        later = theirs.step > ours.step and theirs.created >= ours.created
        found.append((far if later else near).pop())
    return [*found, *reversed(near), *reversed(far)]


@dataclass(frozen=True)
class Tiers:
    """Both places."""

    memory: Path | None
    disk: Path

    def attempt(self, number: int) -> Path | None:
        """Where the ranks of an attempt write; it is there afterwards. None without memory. Raises OSError."""
        return None if self.memory is None else self.folder(f"attempt-{number}")

    def folder(self, name: str) -> Path:
        """A folder in memory; it is there afterwards. Raises OSError."""
        assert self.memory is not None
        path = self.memory / name
        self.memory.mkdir(mode=0o700, exist_ok=True)
        if self.memory.is_symlink() or self.memory.stat().st_uid != os.getuid():
            raise OSError(1, "it belongs to somebody else", str(self.memory))
        path.mkdir(exist_ok=True)
        return path

    def attempts(self) -> list[Path]:
        """Folders of attempts that are there."""
        return self.folders("attempt-*")

    def folders(self, pattern: str) -> list[Path]:
        return sorted(self.memory.glob(pattern)) if self.memory is not None else []

    def newest_first(self) -> list[Path]:
        """What a run may go on from: whole checkpoints, the one that was written last first.

        Of two copies of one save first the one in memory, which is nearer.
        """
        attempts = sorted(self.attempts(), key=lambda path: int(path.name.partition("-")[2]))
        memory = [(marker, path) for folder in attempts for path, marker in committed(folder)]
        disk = [(marker, path) for path, marker in committed(self.disk)]
        return [path for _, path in newest_first(memory, disk, lambda one: one[0])]

    def on_disk(self, path: Path) -> bool:
        """Whether the save that this is of is in the run's folder, too."""
        own = read_marker(path).id
        return any(marker.id == own for _, marker in committed(self.disk))

    def settle(self, seconds: float = SETTLE) -> None:
        """Wait until what dead ranks had begun to write in memory is committed, but not longer than this."""
        until = time.monotonic() + seconds
        while any(self._under_way()) and time.monotonic() < until:
            time.sleep(0.01)

    def _under_way(self) -> Iterator[Path]:
        for folder in self.attempts():
            yield from folder.glob(f".*{PARTIAL}")

    def forget(self, *, but: Path | None = None) -> None:
        """Remove the snapshots, those of one attempt excepted."""
        of_nodes = [*self.folders(f"{RESUME}-*"), *(self.folders(HELD) if but is None else ())]
        for folder in (*self.attempts(), *of_nodes):
            if folder != but:
                shutil.rmtree(folder, ignore_errors=True)
        if self.memory is not None and but is None:
            with contextlib.suppress(OSError):  # another's
                self.memory.rmdir()
