"""How a run is traced, and the trace of one of its ranks while that lives."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import uuid
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tangram.errors import UserError
from tangram.layout import Mesh
from tangram.tracing.files.format import End, Phase, file_of
from tangram.tracing.files.ring import TraceFiles
from tangram.tracing.files.stacks import SIGNAL
from tangram.tracing.groups import back_end
from tangram.tracing.recorder import Recorder
from tangram.tracing.trace import UNTRACED, Trace


@dataclass(frozen=True)
class TraceSettings:
    """Of all ranks of a run."""

    folder: Path
    run: bytes = field(default_factory=lambda: uuid.uuid4().bytes)
    """The same on all ranks, and another one for another run."""
    mesh: str = ""
    """In the notation; "": groups are called by their own names."""
    stages: tuple[str, ...] = ()
    """The axes of pipeline stages, whose ranks do unlike work."""
    hang_seconds: float = 60.0
    """After so many without an event a run is taken to hang; 0: never."""
    digest_steps: int = 50
    """After so many the bits of weights are summed, for silent data corruption; 0: never."""


@dataclass
class TracedRank:
    """A rank that may be traced."""

    trace: Trace
    backend: str
    """For `init_process_group`."""
    note: str = ""
    """Why it is not traced, where it should have been."""


def fresh_folder(run: Path) -> Path:
    """The folder of the next trace of a run: `trace`, `trace-2` and so on, one for each time that it goes on."""
    taken = {path.name for path in run.glob("trace*")} if run.is_dir() else set[str]()
    names = ("trace", *(f"trace-{n}" for n in range(2, len(taken) + 2)))
    return run / next(name for name in names if name not in taken)


@contextlib.contextmanager
def traced_rank(settings: TraceSettings | None, rank: int, world: int, backend: str) -> Generator[TracedRank]:
    """Trace this process as a rank for as long as the context lasts. `backend`: torch's, of its device.

    Without settings, and where files cannot be made, nothing is traced and nothing else changes.
    """
    if settings is None:
        yield TracedRank(UNTRACED, backend)
        return
    try:
        files = TraceFiles(settings.folder, settings.run, rank, world)
        stacks = (settings.folder / file_of(rank, "stacks")).open("wb")
    except OSError as error:
        where = error.filename or settings.folder
        yield TracedRank(UNTRACED, backend, f'not traced: "{where}": {error.strerror}')
        return
    about = {"mesh": settings.mesh, "stages": [*settings.stages], "hang_seconds": settings.hang_seconds}
    recorder = Recorder(files, about, settings.digest_steps)
    faulthandler.register(SIGNAL, file=stacks, all_threads=True, chain=False)
    named = back_end(recorder, settings.mesh, world) if backend == "gloo" else backend
    end = End.FAILED
    try:
        yield TracedRank(recorder, named)
        end = End.FINISHED
    except BaseException as error:
        files.name({"failed": type(error).__name__})
        raise
    finally:
        recorder.close(end)
        faulthandler.unregister(SIGNAL)
        stacks.close()


@dataclass(frozen=True)
class Recording:
    """The trace of a program of one's own."""

    trace: Trace
    backend: str
    """What `torch.distributed.init_process_group` is to be given as its backend."""

    def step(self, number: int) -> None:
        """A training step begins, from 1. Its calls are held against those of other steps, until another phase."""
        self.trace.step(number)
        self.trace.phase(Phase.STEP)


@contextlib.contextmanager
def record(folder: Path | str, mesh: str = "", stages: Sequence[str] = ("pp",)) -> Generator[Recording]:
    """Trace a program of one's own, on every rank that torchrun or the like has started, on the CPU.

    with tangram.tracing.record("trace") as recording:
        torch.distributed.init_process_group(recording.backend)

    `mesh`: as "dp=2 tp=2" over all ranks, so that groups are called by its axes. `stages`: which of these are of
    pipeline stages, whose ranks do unlike work and are not held against each other. Raises UserError where the folder
    cannot be written, or for a mesh of other than all ranks.
    """
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    attempt = os.environ.get("TORCHELASTIC_RUN_ID", "") + os.environ.get("MASTER_PORT", "")
    run = uuid.uuid5(uuid.NAMESPACE_URL, f"{folder} {attempt} {world}").bytes
    devices = Mesh.parse(mesh) if mesh else None
    if devices is not None and devices.size != world:
        raise UserError(f'the mesh "{mesh}" has {devices.size} ranks, and there are {world}: give that of this run')
    of_stages = tuple(axis for axis in stages if devices is not None and axis in devices.axes)
    settings = TraceSettings(Path(folder), run, mesh, of_stages)
    with traced_rank(settings, rank, world, "gloo") as traced:
        if traced.note:
            raise UserError(f"{traced.note}: give another folder")
        yield Recording(traced.trace, traced.backend)
