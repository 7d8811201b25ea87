"""From what a person asked for to a job that runs: choose a plan, take a folder, train here or as one of torchrun's.

A job without a strategy is given to the planner, and the first plan that it ranks for the number of processes is run.
"""

import contextlib
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from tangram.planner.plan import Job, Plan
from tangram.planner.read import dumps
from tangram.training.environment import together
from tangram.training.events import Note
from tangram.training.folder import resumed_folder, run_folder
from tangram.training.job import (
    JOB_FAILURES,
    Chosen,
    Prepared,
    Stopped,
    checkpoint_to_resume,
    prepare_job,
    prepare_text,
    run_here,
    train_job,
)
from tangram.training.rank import RankJob, RankReport, train_rank
from tangram.training.torchrun import Meeting, on_one, run_as_rank

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
    """Run it; the exit code, and the summary if it came to one, which is known where rank 0 is."""
    with together() as meeting, contextlib.ExitStack() as opened:
        leads = meeting is None or meeting.place.index == 0
        tell = on_event if leads else _nowhere
        chosen = on_one(meeting, lambda: choose(asked, meeting, tell))
        on_one(meeting, lambda: prepare_text(chosen.plan, tell), per="node")
        folder = on_one(meeting, lambda: opened.enter_context(_folder(asked, chosen.plan)).resolve())
        known: list[Prepared] = []  # on rank 0 alone

        def begin() -> RankJob:
            known.append(prepare_job(chosen, tell))
            ready = known[0]
            resume = checkpoint_to_resume(folder, chosen.plan, ready.corpus) if asked.resume else None
            return RankJob(chosen.plan, folder, ready.corpus.digest, ready.costs, resume, asked.profile)

        job = on_one(meeting, begin)
        if meeting is None:
            outcome = train_job(job, chosen, known[0], tell, run_here)
        elif leads:
            outcome = train_job(job, chosen, known[0], tell, partial(_as_rank, meeting))
        else:
            _as_rank(meeting, job, tell)
            return 0, None
    if isinstance(outcome, Stopped):
        say_stopped(outcome, folder, tell)
        return 0, None
    return 0, outcome.as_json()


def _as_rank(meeting: Meeting, job: RankJob, on_event: OnEvent) -> RankReport:
    device = job.plan.run.device
    return run_as_rank(train_rank, job, world=job.plan.ranks, on_event=on_event, device=device, meeting=meeting)


def _nowhere(event: object) -> None:
    """Only rank 0 tells."""


def say_stopped(outcome: Stopped, folder: Path, on_event: OnEvent) -> None:
    """Tell how to go on."""
    on_event(Note(f"stopped after step {outcome.step}, its checkpoint is {outcome.checkpoint}; to go on:"))
    on_event(Note(f"  tangram train --resume --out {folder}"))


def _folder(asked: Asked, plan: Plan) -> AbstractContextManager[Path]:
    plan_text = dumps(plan)
    if asked.resume is not None:
        return resumed_folder(asked.resume, plan_text)
    return run_folder(asked.out, asked.name, plan_text)


def choose(asked: Asked, meeting: Meeting | None, on_event: OnEvent) -> Chosen:
    """The plan to run, with what it is predicted to need."""
    assert isinstance(asked.job, Plan)
    return Chosen(asked.job, None, 0.0)
