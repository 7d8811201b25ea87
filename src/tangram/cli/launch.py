"""`tangram launch`: train as `tangram train` does, and go on when a rank is lost."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from tangram.cli.errors import MISTAKE, reported, say
from tangram.cli.output import print_json
from tangram.cli.train import met_others
from tangram.errors import UserError
from tangram.schema.files import changes_of, load
from tangram.schema.job import Job
from tangram.schema.plan import Plan
from tangram.training.observe.progress import ProgressLine
from tangram.training.run.environment import ReportedElsewhere, final, speaks
from tangram.training.run.run_folder import PLAN_FILE, folder_to_resume, run_name

if TYPE_CHECKING:
    from tangram.resilience.supervise import Settings
    from tangram.training.run.torchrun import Meeting
    from tangram.training.start import TrainRequest


def launch(
    plan: Annotated[Path | None, typer.Argument(help="A plan, or a job that a plan is made for.")] = None,
    processes: Annotated[int | None, typer.Option("--processes", "-n", help="How many ranks a job gets.")] = None,
    out: Annotated[Path | None, typer.Option(help="An empty or new folder; runs/NAME when not given.")] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with the run of --out; begin where there is none.")
    ] = False,
    change: Annotated[list[str] | None, typer.Option("--set", help="Change a key, as in run.steps=300.")] = None,
    snapshot_every: Annotated[
        str, typer.Option(help="Steps from one snapshot in memory to the next; auto: at most 3 % of training; 0: none.")
    ] = "auto",
    restarts: Annotated[
        int, typer.Option(min=0, help="How often the ranks are started again in a day, at most.")
    ] = 100,
    min_ranks: Annotated[
        int | None,
        typer.Option(min=1, help="Where not all ranks can be kept alive, go on with at least so many."),
    ] = None,
    copies: Annotated[
        int, typer.Option(min=0, help="On several nodes: how many others keep what a node has written of a snapshot.")
    ] = 1,
    memory: Annotated[Path | None, typer.Option(help="The folder for snapshots; /dev/shm when not given.")] = None,
    what_if_lost: Annotated[
        str | None,
        typer.Option(metavar="rank:N,M|node:N/K", help="Say what of a plan's state is lost with these; run nothing."),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the summary as one JSON document on stdout.")] = False,
) -> int:
    """Train and recover: a lost rank costs seconds, and no step; exit code 1 when that fails. On several nodes torchrun
    or Slurm starts one on each."""
    every = _steps(snapshot_every)
    try:
        with met_others() as meeting:  # so that of the launchers of several nodes only one tells of a mistake
            folder = folder_to_resume(out, run_name(plan) if plan else None) if resume else None
            if plan is None:
                if folder is None:
                    raise UserError("give a plan or a job, for instance examples/quickstart/job.toml")
                plan = folder / PLAN_FILE
            job = load(plan, changes_of(change or []))

            if what_if_lost is not None:
                return _what_if(job, what_if_lost, copies, json=json)

            from tangram.resilience.policy import Limits  # these load torch: only for a sound plan
            from tangram.resilience.supervise import Settings
            from tangram.training.start import TrainRequest

            settings = Settings(every, Limits(restarts), min_ranks, copies, memory)
            request = TrainRequest(
                job, run_name(plan), processes, out, folder, profile=False, from_store=resume and folder is None
            )
            return _launched(request, settings, meeting, json=json)
    except (UserError, ReportedElsewhere) as error:
        return _ended(error)


def _ended(error: Exception) -> int:
    """Say why it ends; the exit code."""

    def again() -> None:
        raise error

    code = reported(again)
    return final(code, mistake=True) if code == MISTAKE else code


def _launched(request: "TrainRequest", settings: "Settings", meeting: "Meeting | None", *, json: bool) -> int:
    from tangram.resilience.nodes import LauncherGoneError
    from tangram.resilience.rescue import rescue
    from tangram.resilience.supervise import supervised
    from tangram.training.run.torchrun import on_one
    from tangram.training.start import FAILURES, processes_of_nodes, train_request

    # What the first sees holds: another may look into the folder when a run has begun there.
    request = replace(request, resume=on_one(meeting, lambda: request.resume))
    if meeting is not None:
        request = replace(request, processes=processes_of_nodes(request, meeting))
    try:
        with ProgressLine(Console(stderr=json, quiet=not speaks())) as line:
            if request.resume is not None:
                rescue(request.resume, line, settings.memory, meeting)
            summary = train_request(
                request, line, meeting, lambda job, tell: supervised(job, tell, settings, meeting=meeting)
            )
    except FAILURES as failure:
        say(str(failure))
        return 1 if isinstance(failure, LauncherGoneError) else final(1)
    if json and summary is not None:
        print_json(summary)
    return 0


def _what_if(job: Job | Plan, what: str, copies: int, *, json: bool) -> int:
    if not isinstance(job, Plan):
        raise UserError("--what-if-lost asks of a plan, and this is a job: give the plan.toml of a run")
    from tangram.resilience.what_if import lost, ranks_named, survives_on

    found = lost(job, ranks_named(what, job), survives=survives_on(what, job, copies))
    if json:
        print_json(vars(found))
    else:
        print("\n".join(found.sentences()))
    return 0


def _steps(text: str) -> int | None:
    """What --snapshot-every says; None is auto."""
    if text == "auto":
        return None
    if not text.isascii() or not text.isdigit():
        raise UserError(f"--snapshot-every {text}: give a number of steps, 0 for none, or auto")
    return int(text)
