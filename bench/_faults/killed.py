"""A run of the quickstart's model on four ranks, of which one is killed now and then, beside the run left alone."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from tangram.resilience.policy import Limits
from tangram.resilience.supervise import Recovered, Settings, supervised
from tangram.schema.files import load
from tangram.schema.plan import Plan
from tangram.training.data import open_corpus, prepare, tokens_of
from tangram.training.observe.events import Note, StepDone
from tangram.training.run.fork_server import make_ready
from tangram.training.run.job import run_here
from tangram.training.run.rank import RankJob, RankReport
from tangram.training.step.loop import StepCosts
from tangram.training.trials.local_plans import plans_of

QUICKSTART = Path(__file__).parents[2] / "examples" / "quickstart" / "job.toml"
RANKS = 4


def plan_of(folder: Path, steps: int, every: int, seconds: float = 3600) -> Plan:
    """The quickstart's, as `tangram launch` has it for four processes."""
    changes = {"run.steps": f"{steps}", "run.max_seconds": f"{seconds}", "checkpoint.every_steps": f"{every}"}
    changes |= {"data.cache": f'"{folder / "tokens"}"', "run.evaluate_every": "0"}
    plan = plans_of(load(QUICKSTART, changes), RANKS).ranked[0].plan
    assert plan is not None
    return plan


def job_of(plan: Plan, folder: Path) -> RankJob:
    """What a rank is told; its text is read."""
    make_ready()
    tokens = tokens_of(plan)
    prepare(plan.data, tokens, lambda event: None)
    folder.mkdir()
    return RankJob(plan, folder, open_corpus(plan.data, tokens).digest, StepCosts())


@dataclass
class Watched:
    """What was told of a run, with the times; kills a drawn rank at drawn steps, somewhere in the step after."""

    steps_of_kills: frozenset[int] = frozenset()
    apart: float = 0.0
    """Seconds between two kills in the mean, which come at any time; 0: none but those at steps."""
    seed: int = 0
    pids: Sequence[int] = ()
    losses: dict[int, float] = field(default_factory=dict[int, float])
    times: dict[int, float] = field(default_factory=dict[int, float])
    kills: list[float] = field(default_factory=list[float])
    back: list[float] = field(default_factory=list[float])
    """Seconds from a kill to the first new step."""
    recovered: list[Recovered] = field(default_factory=list[Recovered])
    notes: list[str] = field(default_factory=list[str])

    def __post_init__(self) -> None:
        self._draw = random.Random(self.seed)

    def started(self, pids: Sequence[int]) -> None:
        self.pids = pids

    def __call__(self, event: object) -> None:
        if isinstance(event, StepDone):
            self.losses[event.step], self.times[event.step] = event.loss, time.monotonic()
            if event.step in self.steps_of_kills:
                threading.Timer(self._draw.uniform(0, 0.2), self._kill, [self._draw.choice(self.pids)]).start()
            if self.apart and len(self.times) == 1:
                self._kill_later()
        if isinstance(event, Note):
            self.notes.append(event.text)
        if isinstance(event, Recovered):
            self.recovered.append(event)
            self.back.append(time.monotonic() - self.kills[-1])

    def _kill_later(self) -> None:
        timer = threading.Timer(self._draw.expovariate(1 / self.apart), self._kill_any)
        timer.daemon = True
        timer.start()

    def _kill_any(self) -> None:
        with contextlib.suppress(ProcessLookupError):  # the run has ended, or is between two attempts
            self._kill(self._draw.choice(self.pids))
        self._kill_later()

    def _kill(self, pid: int) -> None:
        self.kills.append(time.monotonic())
        os.kill(pid, signal.SIGKILL)

    def step_seconds(self) -> list[float]:
        """Of single steps, but the first three."""
        times = [self.times[step] for step in sorted(self.times)][3:]
        return [b - a for a, b in pairwise(times)]


Run = Callable[[RankJob, Watched], RankReport]


def kept_going(snapshot_every: int | None, restarts: int = Limits().restarts) -> Run:
    """By `tangram launch`; None: with as many snapshots as it chooses itself. `restarts`: as `--restarts`."""
    return lambda job, seen: supervised(job, seen, Settings(snapshot_every, Limits(restarts)), seen.started)


def alone(job: RankJob, seen: Watched) -> RankReport:
    """By `tangram train`."""
    return run_here(job, seen)
