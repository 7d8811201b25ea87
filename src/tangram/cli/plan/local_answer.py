"""`tangram plan JOB`: the plans for the processes of this machine, measured first if that is asked for."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tangram.cli.output import print_json, print_table, progress
from tangram.errors import UserError
from tangram.schema.files import dumps
from tangram.schema.job import Job
from tangram.schema.plan import Plan


@dataclass(frozen=True)
class Wish:
    """What the command line says."""

    processes: int
    stages: int
    schedule: str
    anew: bool
    measure: int
    """Trials at most; 0: none."""
    limit: float
    """Seconds of a trial."""
    out: Path | None
    pick: int


def check(file: Path, job: Job | Plan, wish: Wish) -> Job:
    """Raise UserError for what can be seen before anything is loaded."""
    if isinstance(job, Plan):
        raise UserError(f"{file} is a plan already: `tangram plan show {file}` explains it, `tangram train` runs it")
    if wish.pick < 1:
        raise UserError(f"--pick {wish.pick}: rows count from 1")
    if wish.measure < 0 or wish.limit <= 0:
        raise UserError(f"--measure {wish.measure} --limit {wish.limit:g}: give some trials, and each some seconds")
    out = wish.out
    if out is not None and (not out.resolve().parent.is_dir() or out.is_dir()):
        raise UserError(f"the plan cannot be written to {out}: give a file in a folder that is there")
    return job


def planned_here(job: Job, name: str, wish: Wish, *, json: bool) -> int:
    """Rank, try, write, print; exit code 1 where no plan fits."""
    from tangram.training.trials.local_plans import planned  # loads torch and transformers: only for a sound job

    with progress("measuring the machine, counting the model, ranking plans"):
        found = planned(job, wish.processes, stages=wish.stages, schedule=wish.schedule, anew=wish.anew)
    ranking, document, tables = found.ranking, dict[str, object](), []
    if wish.measure and ranking.fitting:
        from tangram.cli.plan.trials import trials_json, trials_table, watching
        from tangram.training.trials.auto import try_plans

        with watching() as line:
            tried = try_plans(found, wish.measure, name, line, limit=wish.limit)
        ranking, document, tables = tried.ranking, trials_json(tried), [trials_table(tried)]
    fitting = ranking.fitting
    if wish.out is not None:
        if wish.pick > len(fitting):
            why = "" if fitting else next((f": {one.why_not}" for one in ranking.ranked if one.why_not), "")
            raise UserError(f"--pick {wish.pick}: there are {len(fitting)} plans that fit this machine{why}")
        _write(dumps(fitting[wish.pick - 1].chosen_plan), wish.out)
    if json:
        print_json({**ranking.as_json(), **document})
        return 0 if fitting else 1
    for title, headers, said in [*tables, *ranking.tables()]:
        print_table(title, headers, said)
    for note in ranking.notes:
        print(note)
    if wish.out is not None:
        print(f"wrote {wish.out}: tangram train {wish.out}")
    return 0 if fitting else 1


def _write(text: str, path: Path) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"the plan cannot be written to {path}: {error.strerror}") from None
