"""Save the state of a job while it trains, and load it into any other layout.

    stage (training waits) -> write (a thread) -> agree -> commit (one rename)

Training is blocked only while the state is copied into buffers of the host, which are made once. Then a thread writes
them, over a process group of its own: collectives of two threads in one group would mix differently on every rank.
A rank that cannot write says so to the others, so that all take the checkpoint as failed, and training goes on.

Of what several ranks hold, one writes. On the disk is torch's distributed checkpoint inside the folder protocol of
`tangram.checkpoint.folders`; an engine of our own can take its place behind this interface.
"""

import itertools
import threading
import time
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from tangram.checkpoint import folders
from tangram.checkpoint.folders import FileMark, Marker, newest
from tangram.checkpoint.formats import dcp
from tangram.errors import UserError
from tangram.layout import Region, coverage, intervals
from tangram.planner.plan import Plan
from tangram.relayout import TensorSpec
from tangram.training.events import Note, Saved, SaveFailed
from tangram.training.restore import describe, load
from tangram.training.state import Entry, JobState, Places, Progress, entries, frozen
from tangram.training.world import World

__all__ = ["Checkpointer", "JobState", "Progress", "describe", "load", "newest"]

T = TypeVar("T")
LONGEST_WRITE = timedelta(hours=1)  # ranks wait this long for one that still writes; one that dies is seen at once


@dataclass(eq=False)
class _Job:
    """One save: what the thread needs, and what came of it."""

    progress: Progress
    about: Mapping[str, Any]
    frozen: tuple[str, ...]
    specs: Mapping[str, TensorSpec]
    chunks: list[dcp.Chunk]
    problem: str | None
    """Why this rank has nothing to write."""
    asynchronous: bool
    begun: float
    blocked: float = 0.0
    ended: float = 0.0
    path: Path | None = None
    reason: str = ""
    notes: list[str] = field(default_factory=list[str])


@dataclass(frozen=True)
class _Verdict:
    """What rank 0 tells the others at the end."""

    path: Path | None
    reason: str = ""
    notes: tuple[str, ...] = ()


class Checkpointer:
    """Saves a job into one folder. All ranks make one, and call each method at the same steps.

    Making one is collective (it makes a process group). Without a world it serves a process that trains alone.
    """

    def __init__(self, folder: Path, plan: Plan, world: World | None) -> None:
        self.folder = folder
        self.blocked_seconds = 0.0
        """How long training stood still for saving, so far."""
        self._plan = plan
        self._world = world
        self._places = Places(plan, world)
        self._peers = _Peers(world)
        self._buffers: dict[tuple[str, tuple[int, ...]], Tensor] = {}
        self._thread: threading.Thread | None = None
        self._job: _Job | None = None
        self._untold: list[_Job] = []

    def save(self, state: JobState, *, wait: bool = False) -> None:
        """Save the state as it is now. One that is under way is waited for first; `wait`: for this one too.

        A step that this object has saved already is not saved again. Nothing is raised for what cannot be written:
        `poll` reports it.
        """
        begun = time.monotonic()
        self._join()
        last = self._job
        if last is not None and last.path is not None and last.progress.step == state.progress.step:
            return
        job = self._job = self._stage(state, begun, asynchronous=self._plan.checkpoint.asynchronous and not wait)
        self._untold.append(job)
        self._thread = threading.Thread(target=self._run, args=(job,), name="tangram-checkpoint", daemon=True)
        job.blocked = time.monotonic() - begun
        self._thread.start()
        if not job.asynchronous:
            self._join()
            job.blocked = time.monotonic() - begun
        self.blocked_seconds += time.monotonic() - begun

    def poll(self) -> list[Saved | SaveFailed | Note]:
        """What came of saves since the last call, on rank 0; the other ranks get nothing. Never waits."""
        done = [job for job in self._untold if job.ended]
        self._untold = [job for job in self._untold if job not in done]
        if self._world is not None and self._world.index:
            return []
        return [event for job in done for event in _events(job)]

    def close(self) -> list[Saved | SaveFailed | Note]:
        """Wait for the save that is under way; what is still to be told."""
        self._join()
        return self.poll()

    def _join(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    # ------------------------------------------------------------ in the training thread

    def _stage(self, state: JobState, begun: float, *, asynchronous: bool) -> _Job:
        """Copy what this rank writes; a rank that cannot goes on, as the others count on it."""
        found = entries(state, self._places)
        job = _Job(
            progress=state.progress,
            about=dict(state.about),
            frozen=frozen(state),
            specs={entry.name: entry.spec for entry in found},
            chunks=[],
            problem=None,
            asynchronous=asynchronous,
            begun=begun,
        )
        try:
            mine = (entry for entry in found if self._writes(entry))
            job.chunks = [self._staged(*block, copy=asynchronous) for entry in mine for block in _blocks(entry)]
            for device in {entry.local.device for entry in found} - {torch.device("cpu")}:
                torch.accelerator.synchronize(device)
        except (RuntimeError, MemoryError) as error:  # no memory, most likely
            job.problem = f"the state could not be copied: {_sentence(error)}"
        return job

    def _writes(self, entry: Entry) -> bool:
        """Whether this rank, of those that hold the same of a tensor, is the one that writes it."""
        if self._world is None:
            return True
        mesh, index = self._world.mesh, self._world.index
        at = mesh.coords(index)
        copies, mine = 1, 0
        for axis, size in mesh.views[0]:
            if axis not in entry.axes:
                copies, mine = copies * size, mine * size + at[axis]
        return mine == zlib.crc32(entry.name.encode()) % copies

    def _staged(self, name: str, offsets: tuple[int, ...], values: Tensor, *, copy: bool) -> dcp.Chunk:
        """A block with memory of its own, which is kept for the next time."""
        if not copy and values.device.type == "cpu" and values.untyped_storage().nbytes() == values.nbytes:
            return dcp.Chunk(name, offsets, values)
        buffer = self._buffers.get((name, offsets))
        if buffer is None or buffer.shape != values.shape or buffer.dtype != values.dtype:
            pinned = values.device.type != "cpu"
            buffer = torch.empty(values.shape, dtype=values.dtype, pin_memory=pinned)
            self._buffers[name, offsets] = buffer
        buffer.copy_(values, non_blocking=True)
        return dcp.Chunk(name, offsets, buffer)

    # ------------------------------------------------------------ in the thread that writes

    def _run(self, job: _Job) -> None:
        try:
            verdict = self._write(job)
        except Exception as error:  # noqa: BLE001  a rank that is gone, say: training finds that out by itself
            verdict = _Verdict(None, f"the ranks could not agree on it: {_sentence(error)}")
        job.path, job.reason, job.notes = verdict.path, verdict.reason, list(verdict.notes)
        job.chunks = []
        job.ended = time.monotonic()

    def _write(self, job: _Job) -> _Verdict:
        """Write this rank's part; what all ranks agree has come of it."""
        step = job.progress.step
        partial, reason = self._peers.from_first(lambda: _begin(self.folder, step))
        if partial is None:
            return _Verdict(None, reason)
        written: list[dcp.Written] | str = job.problem or []
        if job.problem is None:
            try:
                written = dcp.write_chunks(partial / f"__{self._peers.index}_0.distcp", job.chunks)
            except Exception as error:  # noqa: BLE001  whatever it is, the other ranks wait to hear of it
                written = f"rank {self._peers.index} cannot write: {_sentence(error)}"
        parts = self._peers.to_first(written)
        return self._peers.from_first(lambda: self._finish(job, partial, parts))

    def _finish(self, job: _Job, partial: Path, parts: list[list[dcp.Written] | str]) -> _Verdict:
        """On rank 0: commit what all have written, or remove it."""
        try:
            problems = [part for part in parts if isinstance(part, str)]
            if problems:
                more = f" (and {len(problems) - 1} more ranks)" if len(problems) > 1 else ""
                raise UserError(problems[0] + more)
            path = self._commit(job, partial, [block for part in parts if not isinstance(part, str) for block in part])
        except Exception as error:  # noqa: BLE001  whatever it is, the other ranks wait to hear of it
            folders.remove(partial)
            return _Verdict(None, str(error) if isinstance(error, UserError) else _sentence(error))
        try:
            folders.keep_newest(self.folder, self._plan.checkpoint.keep)
        except OSError as error:
            return _Verdict(path, notes=(f"an old checkpoint could not be removed: {_sentence(error)}",))
        return _Verdict(path)

    def _commit(self, job: _Job, partial: Path, written: list[dcp.Written]) -> Path:
        _refuse_holes(job.specs, written)
        sums: dict[str, dict[int, int]] = {}
        for block in written:
            sums.setdefault(block.span.file, {})[block.span.offset] = block.crc32
        files = {name: FileMark((partial / name).stat().st_size, some) for name, some in sums.items()}
        size, crc = dcp.write_index(partial, job.specs, written)
        marker = Marker(
            serial=folders.next_serial(self.folder),
            progress=asdict(job.progress),
            about=job.about,
            digest=folders.digest(job.specs),
            frozen=job.frozen,
            files={**files, dcp.INDEX: FileMark(size, {0: crc})},
        )
        return folders.commit(partial, job.progress.step, marker)


def _begin(folder: Path, step: int) -> tuple[Path | None, str]:
    try:
        return folders.begin(folder, step), ""
    except OSError as error:
        return None, f"the folder of the checkpoint cannot be made: {_sentence(error)}"


def _refuse_holes(specs: Mapping[str, TensorSpec], written: list[dcp.Written]) -> None:
    """Prove that every element of every tensor was written once."""
    parts: dict[str, list[Region]] = {name: [] for name in specs}
    for block in written:
        parts[block.name].append(Region.box(block.offsets, block.sizes))
    for name, spec in specs.items():
        if len(parts[name]) == 1 and parts[name][0] == Region.full(spec.shape):
            continue
        found = coverage(Region.full(spec.shape), parts[name])
        if not found.exact:
            raise RuntimeError(f"of {name} no rank wrote {found.missing}, and several wrote {found.doubled}")


def _events(job: _Job) -> Iterator[Saved | SaveFailed | Note]:
    step = job.progress.step
    if job.path is None:
        yield SaveFailed(step, job.reason)
    else:
        yield Saved(step, str(job.path), job.blocked, job.ended - job.begun, job.asynchronous)
    for text in job.notes:
        yield Note(text)


def _blocks(entry: Entry) -> Iterator[tuple[str, tuple[int, ...], Tensor]]:
    """What a rank holds of a tensor as blocks without gaps: name, offsets, values."""
    if len(entry.region.boxes) > 1:
        raise RuntimeError(f"{entry.name} is held in {len(entry.region.boxes)} parts: {entry.region}")
    for box in entry.region.boxes:
        for runs in itertools.product(*([(run, intervals.rank(s, (run,))) for run in s] for s in box)):
            values = entry.local
            for dim, (_, place) in enumerate(runs):
                ((start, stop),) = place
                if stop - start < values.shape[dim]:
                    values = values.narrow(dim, start, stop - start)
            yield entry.name, tuple(run[0] for run, _ in runs), values


def _sentence(error: BaseException) -> str:
    if isinstance(error, OSError) and error.strerror:
        return f'"{error.filename}": {error.strerror}' if error.filename else error.strerror
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


class _Peers:
    """The ranks that save together, over a group of their own; or this process alone."""

    def __init__(self, world: World | None) -> None:
        self.index = world.index if world is not None else 0
        self._group: dist.ProcessGroup | None = None
        if world is not None and world.size > 1:
            self._ranks = dist.get_process_group_ranks(world.group)
            group = dist.new_group(self._ranks, backend="gloo", timeout=LONGEST_WRITE)
            assert isinstance(group, dist.ProcessGroup)  # every rank is a member
            self._group = group

    def from_first(self, make: Any) -> Any:
        """What `make` gives on the first rank, on all; it must not raise."""
        box = [make() if self.index == 0 else None]
        if self._group is not None:
            dist.broadcast_object_list(box, src=self._ranks[0], group=self._group)
        return box[0]

    def to_first(self, own: T) -> list[T]:
        """Every rank's own, in order, on the first rank; nothing on the others."""
        if self._group is None:
            return [own]
        box: list[Any] | None = [None] * len(self._ranks) if self.index == 0 else None
        dist.gather_object(own, box, dst=self._ranks[0], group=self._group)
        return box or []
