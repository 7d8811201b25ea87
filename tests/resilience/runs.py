"""Small runs whose ranks are killed as they train, beside the run that nobody disturbs."""

import os
import signal
import socket
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tangram.checkpoint.store.commits import committed
from tangram.resilience.supervise import Recovered, Settings, supervised
from tangram.resilience.tiers import memory_of
from tangram.training.data import open_corpus, prepare, tokens_of
from tangram.training.observe.events import CheckpointSaved, Note, SaveFailed, StepDone
from tangram.training.run.rank import RankJob, RankReport
from tangram.training.step.loop import StepCosts
from tests.training.small import small_plan, write_text


@dataclass
class Run:
    """What was told of one, and who its ranks are now."""

    at: Mapping[int, int] = field(default_factory=dict[int, int])
    """By step: the rank that is killed when there is a snapshot of that step, or of a later one."""
    signal: int = signal.SIGKILL
    memory: Path | None = None
    on_note: Callable[[str], None] = lambda text: None
    pids: Sequence[int] = ()
    steps: list[StepDone] = field(default_factory=list[StepDone])
    notes: list[str] = field(default_factory=list[str])
    saved: list[CheckpointSaved] = field(default_factory=list[CheckpointSaved])
    failed: list[SaveFailed] = field(default_factory=list[SaveFailed])
    recovered: list[Recovered] = field(default_factory=list[Recovered])
    starts: int = 0
    killed: list[int] = field(default_factory=list[int])

    def started(self, pids: Sequence[int]) -> None:
        self.pids, self.starts = pids, self.starts + 1

    def __call__(self, event: object) -> None:
        match event:
            case StepDone():
                self.steps.append(event)
                self._kill()
            case Note():
                self.notes.append(event.text)
                self.on_note(event.text)
            case CheckpointSaved():
                self.saved.append(event)
            case SaveFailed():
                self.failed.append(event)
            case Recovered():
                self.recovered.append(event)
            case _:
                pass

    def _kill(self) -> None:
        due = [step for step in self.at if step not in self.killed]
        if due and self.memory is not None:
            there = [marker.step for path in self.memory.glob("attempt-*") for _, marker in committed(path)]
            if max(there, default=0) >= due[0]:
                self.killed.append(due[0])
                os.kill(self.pids[self.at[due[0]]], self.signal)

    @property
    def losses(self) -> list[float]:
        return [step.loss for step in self.steps]


def job_of(folder: Path, text: Path, **changes: Any) -> RankJob:
    """A job whose text is read."""
    plan = small_plan(text, **changes)
    tokens = tokens_of(plan)
    prepare(plan.data, tokens, lambda event: None)
    folder.mkdir(parents=True)
    return RankJob(plan, folder, open_corpus(plan.data, tokens).digest, StepCosts())


def run(job: RankJob, seen: Run, settings: Settings | None = None) -> RankReport:
    seen.memory = memory_of(job.folder)
    return supervised(job, seen, settings or Settings(1), seen.started)


def free_port() -> int:
    with closing(socket.socket()) as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def text_in(folder: Path) -> Path:
    (folder / "text").mkdir()
    return write_text(folder / "text")
