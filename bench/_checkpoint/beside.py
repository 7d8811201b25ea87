"""Saves beside training: how long it stands still, and how much longer its steps get. Every checkpoint is checked.

A step is products of matrices for about as long as the state takes to copy several times, a fence, and an optimiser
that changes every value (here: its sign), so a copy that is not over by then is a wrong checkpoint.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.device_mesh import init_device_mesh

from bench._checkpoint.peers import Contender, Dcp, Ours
from bench._checkpoint.state import State, fill, make, wrong
from tangram.checkpoint.saving.async_saver import AsyncSaver
from tangram.checkpoint.saving.rank_parts import About
from tangram.checkpoint.state.describe import describe
from tangram.relayout.exchange.peers import Peers
from tangram.training.run.launch import Rank

QUIET = 3  # steps without a save, to compare with
LONGEST = 200  # steps that a save may take


@dataclass(frozen=True)
class Task:
    """What two ranks measure in fresh processes."""

    folder: str
    name: str
    nbytes: float
    saves: int


@dataclass
class Beside:
    """Seconds of each save, the worst of all ranks."""

    blocked: list[float] = field(default_factory=list[float])
    """In the call that saves and at the fence."""
    overlapped: list[float] = field(default_factory=list[float])
    """By how much the step that the copy overlaps is longer than one without."""
    all_steps: list[float] = field(default_factory=list[float])
    """The same of all steps until the checkpoint is durable, together."""
    durable: list[float] = field(default_factory=list[float])
    """From the call until then."""
    step: float = 0.0
    """Of a step without a save."""


class Saver:
    """One way to save beside training. All is called on all ranks at once."""

    contender: Contender = Dcp()
    """Which loads what it has saved."""

    def __init__(self, state: State, folder: Path) -> None:
        self.state = state
        self.folder = folder

    def save(self, step: int) -> None:
        """Begin to save."""
        raise NotImplementedError

    def fence(self) -> None:
        """Wait until the state may change."""

    def done(self) -> bool:
        """Whether the last save is durable on this rank's word."""
        raise NotImplementedError

    def path(self, step: int) -> Path:
        """The checkpoint of a step."""
        return self.folder / f"step-{step:08d}"

    def close(self) -> None:
        """Give back what it holds."""


class OursBeside(Saver):
    """This engine: memory and process are there before step 1."""

    contender = Ours()

    def __init__(self, state: State, folder: Path) -> None:
        super().__init__(state, folder)
        self._peers = Peers(_group())
        self._saver = AsyncSaver(folder, self._peers)
        self._over = False
        problem = self._saver.prepare(describe(state.sections(), self._peers).entries)
        if problem:
            raise RuntimeError(problem)

    def save(self, step: int) -> None:
        self._over = False
        self._saver.save(describe(self.state.sections(), self._peers), About(step))

    def fence(self) -> None:
        self._saver.fence()

    def done(self) -> bool:
        found = self._saver.poll()
        if any(saved.reason for saved in found):
            raise RuntimeError(found[0].reason)
        self._over |= bool(found)
        return self._over

    def close(self) -> None:
        self._saver.close()


class DcpBeside(Saver):
    """DCP as it comes: the state is copied before the call returns, into memory that is new each time."""

    def __init__(self, state: State, folder: Path) -> None:
        super().__init__(state, folder)
        self._group = _group()
        self._future: Any = None

    def save(self, step: int) -> None:
        writer = dcp.FileSystemWriter(self.path(step))
        self._future = dcp.async_save(dict(self.state.tensors), storage_writer=writer, process_group=self._group)

    def done(self) -> bool:
        if self._future.done():
            self._future.result()
        return self._future.done()


class DcpStaged(DcpBeside):
    """DCP with its asynchronous staging, into memory that is kept. The options that need CUDA are off."""

    def __init__(self, state: State, folder: Path) -> None:
        super().__init__(state, folder)
        self._stager = DefaultStager(
            StagingOptions(
                use_pinned_memory=False, use_shared_memory=False, use_async_staging=True, use_non_blocking_copy=False
            )
        )
        self._response: Any = None

    def save(self, step: int) -> None:
        self._response = dcp.async_save(
            dict(self.state.tensors),
            storage_writer=dcp.FileSystemWriter(self.path(step)),
            process_group=self._group,
            async_stager=self._stager,
        )
        self._future = self._response.upload_completion

    def fence(self) -> None:
        self._response.staging_completion.result()

    def close(self) -> None:
        self._stager.close()


SAVERS: dict[str, type[Saver]] = {"ours": OursBeside, "DCP": DcpBeside, "DCP staged": DcpStaged}


def measure(rank: Rank, task: Task) -> Beside:
    """On every rank: what each save cost."""
    state = make(task.nbytes, init_device_mesh("cpu", (rank.world,), mesh_dim_names=("dp",)), "rows")
    fill(state)
    saver = SAVERS[task.name](state, Path(task.folder, f"beside-{task.name}"))
    peers = Peers(dist.group.WORLD)
    work = _work(max(0.2, task.nbytes / 1e9), peers)
    quiet = statistics.median(_seconds(work) for _ in range(QUIET))
    found = Beside(step=quiet)
    flat = torch.from_numpy(state.memory).view(torch.float32)
    for step in range(1, task.saves + 1):
        negated = step % 2 == 0
        peers.wait()
        begun = time.monotonic()
        blocked = _seconds(lambda step=step: saver.save(step))
        longer = _seconds(work) - quiet
        blocked += _seconds(saver.fence)
        flat.neg_()
        rest = 0.0
        for _ in range(LONGEST):
            if all(peers.all_words(bool(rest) and saver.done())):
                break
            rest += _seconds(work) - quiet or 1e-9
        else:
            raise RuntimeError(f"{task.name} was not done after {LONGEST} steps")
        row = (blocked, longer, longer + rest, time.monotonic() - begun)
        for table, figure in zip((found.blocked, found.overlapped, found.all_steps, found.durable), row, strict=True):
            table.append(max(peers.all_words(figure)))
        saver.contender.load(state, saver.path(step))
        bad = [names[0] for names in peers.all_words(wrong(state.tensors, negated=negated)[:1]) if names]
        if bad:
            raise RuntimeError(f"{task.name} saved other values of {bad[0]} than there were")
        flat.neg_()
    saver.close()
    return found


def _group() -> dist.ProcessGroup:
    """All ranks, for one thread: two threads in one group mix their words."""
    found = dist.new_group(backend="gloo")
    assert isinstance(found, dist.ProcessGroup)
    return found


def _seconds(act: Callable[[], object]) -> float:
    begin = time.monotonic()
    act()
    return time.monotonic() - begin


def _work(seconds: float, peers: Peers) -> Callable[[], None]:
    """Products of matrices that take about so long."""
    a, b, out = torch.randn(512, 512), torch.randn(512, 512), torch.empty(512, 512)

    def products(count: int) -> None:
        for _ in range(count):
            torch.mm(a, b, out=out)

    products(10)
    peers.wait()
    each = _seconds(lambda: products(50)) / 50
    count = max(1, round(seconds / max(peers.all_words(each))))
    return lambda: products(count)
