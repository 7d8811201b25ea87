"""From what a person asked for to a job that runs: choose a plan, take a folder, train here or as one of torchrun's.

A job without a strategy is given to the planner, and the first plan that it ranks for the number of processes is run.
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tangram.planner.estimate import Estimate
from tangram.planner.plan import Job, Plan
from tangram.planner.read import dumps
from tangram.training.events import Note
from tangram.training.folder import resumed_folder, run_folder
from tangram.training.job import JOB_FAILURES, Options, Stopped, run_job

FAILURES = JOB_FAILURES

OnEvent = Callable[[object], None]


@dataclass(frozen=True)
class Asked:
    """What the command line says."""

    job: Job | Plan
    name: str
    """Of the run, when no folder is given."""
    processes: int | None
    out: Path | None
    resume: Path | None
    """The folder of the run to go on with."""
    profile: bool


def train_as_asked(asked: Asked, on_event: OnEvent) -> tuple[int, Mapping[str, Any] | None]:
    """Run it; the exit code, and the summary if it came to one."""
    plan, predicted, peak = choose(asked, on_event)
    options = Options(resume=asked.resume is not None, profile=asked.profile)
    with _folder(asked, dumps(plan)) as folder:
        outcome = run_job(plan, folder, on_event, options=options, predicted=predicted, peak_flops=peak)
    if isinstance(outcome, Stopped):
        say_stopped(outcome, folder, on_event)
        return 0, None
    return 0, outcome.as_json()


def say_stopped(outcome: Stopped, folder: Path, on_event: OnEvent) -> None:
    """Tell how to go on."""
    on_event(Note(f"stopped after step {outcome.step}, its checkpoint is {outcome.checkpoint}; to go on:"))
    on_event(Note(f"  tangram train --resume --out {folder}"))


def _folder(asked: Asked, plan_text: str) -> AbstractContextManager[Path]:
    if asked.resume is not None:
        return resumed_folder(asked.resume, plan_text)
    return run_folder(asked.out, asked.name, plan_text)


def choose(asked: Asked, on_event: OnEvent) -> tuple[Plan, Estimate | None, float]:
    """The plan to run, what it is predicted to need, and what the devices of all its ranks can do in a second."""
    raise NotImplementedError
