"""Seconds of saves and cold loads, all contenders in turns on the same ranks, every load checked value by value."""

import gc
import shutil
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from unittest.mock import patch

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from bench._checkpoint import disk, peers
from bench._checkpoint.peers import Contender, Raw
from bench._checkpoint.state import Cut, State, fill, make, wrong
from tangram.hardware.host import shared
from tangram.relayout.exchange.peers import Peers
from tangram.training.run.launch import Rank


@dataclass(frozen=True)
class Phase:
    """What one world of ranks measures."""

    folder: str
    names: tuple[str, ...]
    """Of the contenders."""
    nbytes: float
    repeats: int
    cut: Cut = "rows"
    save_as: str = ""
    """Saves are measured, and the last of each contender kept under this name; nothing: none are."""
    load_from: tuple[str, ...] = ()
    """The kept checkpoints whose loads are measured."""
    nodes: int = 0
    """On how many nodes the ranks say that they are; 0: as it is."""


@dataclass
class Figures:
    """Medians in seconds by contender, and why some have none."""

    saves: dict[str, float] = field(default_factory=dict[str, float])
    loads: dict[str, dict[str, float]] = field(default_factory=dict[str, dict[str, float]])
    """By the kept checkpoint's name."""
    storage: dict[str, dict[str, float]] = field(default_factory=dict[str, dict[str, float]])
    """Bytes read from storage over all ranks, over the bytes of the state; likewise."""
    calls: dict[str, dict[str, float]] = field(default_factory=dict[str, dict[str, float]])
    """The same of the bytes that came through read()."""
    failures: dict[str, str] = field(default_factory=dict[str, str])
    nbytes: int = 0


class FailedError(Exception):
    """A contender cannot do it here; all ranks know."""


def measure(rank: Rank, phase: Phase) -> Figures:
    """All figures of a phase, on every rank."""
    run = _Run(phase, make(phase.nbytes, init_device_mesh("cpu", (rank.world,), mesh_dim_names=("dp",)), phase.cut))
    node = f"node {rank.index * phase.nodes // rank.world}" if phase.nodes else shared.node()
    with patch.object(shared, "node", lambda: node):
        if phase.save_as:
            run.saves()
        for name in phase.load_from:
            run.loads(name)
    return run.figures


class _Run:
    def __init__(self, phase: Phase, state: State) -> None:
        self._phase = phase
        self._state = state
        self._peers = Peers(dist.group.WORLD)
        self._contenders = peers.contenders(list(phase.names))
        self.figures = Figures(nbytes=state.nbytes)

    def saves(self) -> None:
        fill(self._state)
        taken: dict[str, list[float]] = {}
        for turn in range(self._phase.repeats):
            for contender in self._turn(turn):
                path = self._path(contender, self._phase.save_as)
                self._alone(lambda path=path: _fresh(path))
                self._try(contender, lambda c=contender, p=path: taken.setdefault(c.name, []).append(self._save(c, p)))
        self.figures.saves = _medians(taken)

    def _save(self, contender: Contender, path: Path) -> float:
        return self._timed(lambda: contender.save(self._state, path))

    def loads(self, kept: str) -> None:
        taken: dict[str, list[float]] = {}
        storage: dict[str, list[float]] = {}
        calls: dict[str, list[float]] = {}
        for turn in range(self._phase.repeats):
            for contender in self._turn(turn):
                path = self._path(contender, kept)
                if not path.exists():  # of a contender that works with other numbers of processes
                    continue

                def act(contender: Contender = contender, path: Path = path) -> None:
                    for table, figure in zip((taken, storage, calls), self._load(contender, path), strict=True):
                        table.setdefault(contender.name, []).append(figure)

                self._try(contender, act)
        self.figures.loads[kept] = _medians(taken)
        self.figures.storage[kept] = _medians(storage)
        self.figures.calls[kept] = _medians(calls)

    def _load(self, contender: Contender, path: Path) -> tuple[float, float, float]:
        self._state.memory[:] = 0
        self._alone(lambda: disk.evict(path))
        before = disk.bytes_read()
        found: dict[str, Tensor] = {}
        seconds = self._timed(lambda: found.update(contender.load(self._state, path)))
        after = disk.bytes_read()
        read = self._peers.all_words([b - a for a, b in zip(before, after, strict=True)])
        bad = [names[0] for names in self._peers.all_words(wrong(found)[:1]) if names]
        if bad or not (found or isinstance(contender, Raw)):
            raise FailedError(f"{contender.name} loaded other values of {bad or 'everything'} than were saved")
        storage, calls = (sum(words[i] for words in read) / self._state.nbytes for i in (0, 1))
        return seconds, storage, calls

    def _path(self, contender: Contender, kept: str) -> Path:
        return Path(self._phase.folder, f"{contender.name}-{kept}")

    def _turn(self, turn: int) -> list[Contender]:
        """The contenders that are left, another one first in each turn."""
        left = [c for c in self._contenders if c.name not in self.figures.failures]
        first = turn % len(left)
        return left[first:] + left[:first]

    def _timed(self, act: Callable[[], object]) -> float:
        """Seconds from when all ranks are ready until the last is done. Raises FailedError when one of them cannot."""
        gc.collect()
        self._peers.wait()
        begin = time.monotonic()
        error = ""
        try:
            act()
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as caught:  # noqa: BLE001  a peer's, whatever it is: DCP's own is no Exception
            error = f"{type(caught).__name__}: {str(caught).strip().splitlines()[:1]}"
        words = self._peers.all_words([begin, time.monotonic(), error])
        errors = [word[2] for word in words if word[2]]
        if errors:
            raise FailedError(errors[0])
        return max(word[1] for word in words) - min(word[0] for word in words)

    def _try(self, contender: Contender, act: Callable[[], object]) -> None:
        """Leave a peer out once it has failed; ours and the limit may not."""
        try:
            act()
        except FailedError as error:
            if contender.name in ("ours", "raw"):
                raise
            self.figures.failures[contender.name] = str(error)

    def _alone(self, act: Callable[[], object]) -> None:
        """Have the first rank do something, while the others wait."""
        self._peers.wait()
        if self._peers.index == 0:
            act()
        self._peers.wait()


def _fresh(path: Path) -> None:
    """Remove a checkpoint, and wait until the file system has done so."""
    shutil.rmtree(path, ignore_errors=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    disk.settle(path.parent, [])


def _medians(taken: Mapping[str, list[float]]) -> dict[str, float]:
    return {name: statistics.median(times) for name, times in taken.items() if times}
