"""`tangram train`: train a model as a plan says, and prove that what is left behind is what was trained."""

from __future__ import annotations

import contextlib
import time
from json import dumps as json_text  # a JSON string is a TOML string
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from tangram.cli.errors import say
from tangram.cli.output import print_json, print_table, progress, size
from tangram.errors import UserError
from tangram.models.building.directory import refuse_missing
from tangram.schema.files import changes_of, load
from tangram.schema.job import Job
from tangram.schema.plan import Plan
from tangram.training.observe.progress import ProgressLine, Startup
from tangram.training.run.environment import speaks, started_by_torchrun
from tangram.training.run.fork_server import make_ready
from tangram.training.run.run_folder import PLAN_FILE, folder_to_resume, run_name

if TYPE_CHECKING:
    from tangram.training.run.torchrun import Meeting
    from tangram.training.start import TrainRequest
    from tangram.training.trials.dry_run import Needs


def train(
    plan: Annotated[Path | None, typer.Argument(help="A plan, or a job that a plan is made for.")] = None,
    processes: Annotated[int | None, typer.Option("--processes", "-n", help="How many ranks a job gets.")] = None,
    model: Annotated[str | None, typer.Option(help="A Hugging Face directory or config.json instead.")] = None,
    out: Annotated[Path | None, typer.Option(help="An empty or new folder; runs/NAME when not given.")] = None,
    resume: Annotated[
        bool,
        typer.Option("--resume", help="Go on from the newest good checkpoint; begin a run where there is none."),
    ] = False,
    allow: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY", help="Of --resume: let it change this key, as run.steps; may be repeated."),
    ] = None,
    change: Annotated[list[str] | None, typer.Option("--set", help="Change a key, as in run.steps=300.")] = None,
    steps: Annotated[int | None, typer.Option(help="Short for --set run.steps=N.")] = None,
    seed: Annotated[int | None, typer.Option(help="Short for --set seed=N.")] = None,
    auto: Annotated[
        bool, typer.Option("--auto", help="Try the best plans of a job for a few steps each, then train by the best.")
    ] = False,
    trials: Annotated[int, typer.Option(min=1, help="Of --auto: how many plans at most.")] = 3,
    deterministic: Annotated[bool, typer.Option("--deterministic", help="Refuse what is not repeatable.")] = False,
    profile: Annotated[bool, typer.Option("--profile", help="Profile a few steps into the run's folder.")] = False,
    profile_startup: Annotated[
        bool, typer.Option("--profile-startup", help="Say where the time goes until the first step is done.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what a rank of the plan would need; run nothing.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print the summary as one JSON document on stdout.")] = False,
) -> int:
    """Train, save, reload in one process, export, report; exit code 1 when a rank or a proof fails."""
    changes = {} if model is None else _of_model(Path(model).expanduser())  # first: its keys may then be set
    short = {"run.steps": steps, "seed": seed, "run.deterministic": True if deterministic else None}
    with met_others() as meeting:  # so that of ranks that torchrun started only one tells of a mistake
        changes |= changes_of(change or [])
        changes |= {key: str(value).lower() for key, value in short.items() if value is not None}
        folder = folder_to_resume(out, run_name(plan) if plan else None) if resume else None
        if allow and not resume:
            raise UserError("--allow says what --resume may change: give both, or neither")
        if plan is None:
            if folder is None:
                what = f'there is no run to resume in "{out}": ' if resume else ""
                raise UserError(f"{what}give a plan or a job, for instance examples/quickstart/job.toml")
            plan = folder / PLAN_FILE
        asked = load(plan, changes)
        if dry_run:
            if meeting is not None or resume or out is not None:
                raise UserError("--dry-run runs nothing: leave --out, --resume and torchrun out")
            return dry(asked, json=json)

        if meeting is None:
            make_ready()  # it loads torch and more for the ranks, beside this process
        from tangram.training.run.resume import refuse_unknown  # these load torch: only for a sound plan
        from tangram.training.start import TrainRequest

        refuse_unknown(allow or [])
        tries, begins = trials if auto else 0, resume and folder is None
        told = TrainRequest(asked, run_name(plan), processes, out, folder, profile, tries, tuple(allow or ()), begins)
        return _trained(told, meeting, profile_startup=profile_startup, json=json)


def _of_model(path: Path) -> dict[str, str]:
    """The change that gives a plan another model, in the place of the whole table. Raises UserError for none."""
    refuse_missing(path)
    return {"model": f"{{path = {json_text(str(path.resolve()))}}}"}


def _trained(told: TrainRequest, meeting: Meeting | None, *, profile_startup: bool, json: bool) -> int:
    from tangram.resilience.rescue import forget_others, rescue
    from tangram.training.start import FAILURES, train_request

    try:
        with ProgressLine(Console(stderr=json, quiet=not speaks())) as line:
            if told.resume is not None and (meeting is None or meeting.place.index == 0):
                rescue(told.resume, line)  # what the launcher of a run, who was killed, has left in memory
            tell = Startup(line) if profile_startup else line
            summary = train_request(told, tell, meeting, before=forget_others)
    except FAILURES as failure:
        say(str(failure))
        return 1
    if json and summary is not None:
        print_json(summary)
    return 0


def met_others() -> contextlib.AbstractContextManager[Meeting | None]:
    """The meeting of torchrun's ranks, or None: torch is loaded only where there is one."""
    if not started_by_torchrun():
        return contextlib.nullcontext()
    from tangram.training.run.torchrun import met

    return met()


HEADERS = ("rank", "stage", "keeps", "parameters", "gradients", "optimiser", "gathered", "activations", "at the peak")


def dry(plan: Job, *, json: bool) -> int:
    """Print memory by what it is, and collectives with their bytes. Raises UserError where the plan cannot start."""
    if not isinstance(plan, Plan):
        raise UserError("--dry-run takes a plan, and this is a job: `tangram plan JOB --out plan.toml` makes one of it")
    from tangram.training.trials.dry_run import dry_run  # loads torch: only for a sound plan

    begun = time.monotonic()
    with progress("reading") as line:
        found = dry_run(plan, line.update)
    seconds = time.monotonic() - begun
    if json:
        print_json({"ranks": plan.ranks, "seconds": seconds, "needs": [_as_json(one) for one in found]})
        return 0

    def row(one: Needs) -> tuple[str, ...]:
        kinds = (size(nbytes) for nbytes in one.memory.values())
        return str(one.rank), str(one.place), f"{one.kept:g}", *kinds, size(one.peak)

    fullest = max(found, key=lambda one: one.peak)
    titled = f"Memory of a rank of {plan.ranks:,}" + (" (the first of each stage)" if len(found) > 1 else "")
    print_table(titled, HEADERS, [row(one) for one in found])
    moved = [(one.axis, one.kind, f"{one.times:,}", size(one.nbytes)) for one in fullest.traffic]
    print_table(
        f"What rank {fullest.rank} sends and receives in a step", ("axis", "collective", "times", "bytes"), moved
    )
    print(f"dry run of one step in {seconds:.1f} s: nothing was computed, sent or written")
    return 0


def _as_json(one: Needs) -> dict[str, object]:
    return {
        "rank": one.rank,
        "stage": one.place,
        "kept_micro_batches": one.kept,
        "memory_bytes": {kind: round(nbytes) for kind, nbytes in one.memory.items()},
        "peak_bytes": round(one.peak),
        "traffic": [
            {"axis": x.axis, "collective": x.kind, "times": x.times, "received_bytes": round(x.nbytes)}
            for x in one.traffic
        ],
    }
