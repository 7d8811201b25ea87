"""`tangram plan JOB`: the plans for the processes of this machine, measured first if asked; `tangram plan history`."""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console

from tangram.cli.output import print_json, print_table, progress, size
from tangram.errors import UserError
from tangram.planner.cost import history
from tangram.planner.cost.history import Entry
from tangram.planner.local.trials import Tried
from tangram.schema.files import dumps
from tangram.schema.job import Job
from tangram.schema.plan import Plan
from tangram.text import refuse_unwritable, write_file
from tangram.training.observe.progress import ProgressLine

SHOWN = 40
"""Rows of a history that are printed as a table, the newest; `--json` has all."""
HEADERS = ("when", "what", "job", "mesh", "micro-batch", "estimated", "expected", "measured", "off", "memory", "took")
Titled = tuple[str, tuple[str, ...], list[tuple[str, ...]]]


def watching() -> ProgressLine:
    """For what trials tell: on stderr, live on a terminal."""
    return ProgressLine(Console(stderr=True))


def trials_json(found: Tried) -> dict[str, object]:
    """What was tried, in its order."""
    rows = [
        {"name": one.name, "mesh": one.mesh, "micro_batch": one.micro_batch, "expected_s": one.step,
         **asdict(trial)}
        for one, trial in found.trials
    ]  # fmt: skip
    return {"trials": rows, "ended": found.ended}


def trials_table(found: Tried) -> Titled:
    """The same for a person."""
    rows: list[tuple[str, ...]] = []
    for number, (one, trial) in enumerate(found.trials, start=1):
        expected = f"{1e3 * one.step:.0f} ms"
        measured = f"{1e3 * trial.seconds:.0f} ms" if trial.seconds else trial.outcome
        took = size(trial.used) if trial.used else ""
        rows.append((str(number), one.name, one.mesh, str(one.micro_batch), expected, measured, took, trial.why))
    headers = ("", "plan", "mesh", "micro-batch", "expected", "measured", "took", "why")
    if not any(row[-1] for row in rows):
        headers, rows = headers[:-1], [row[:-1] for row in rows]
    return f"Trials, ended: {found.ended}", headers, rows


def show_history(*, json: bool) -> int:
    """Print what was predicted and measured before; exit code 1 where there is nothing. Raises UserError."""
    file = history.path()
    if file is None:
        raise UserError("TANGRAM_HISTORY is empty, so no history is kept: set it to a file, or unset it")
    found = history.read(file)
    entries = found.entries
    if json:
        document = {"file": str(file), "left_out": found.left_out, "summary": _errors(entries),
                    "runs": [asdict(one) for one in entries]}  # fmt: skip
        print_json(document)
    elif entries:
        said = f"the last {SHOWN} of {len(entries)}" if len(entries) > SHOWN else f"{len(entries)}"
        print_table(f"History: {said} in {file}", HEADERS, [_row(one) for one in entries[-SHOWN:]])
        if errors := _errors(entries):
            print_table("Errors of step times, the median", ("what", "value"), _words(errors))
    if found.left_out:
        print(f"{found.left_out} rows cannot be read and are left out", file=sys.stderr)
    if not entries:
        print(f"nothing was measured yet ({file}): tangram train, or tangram plan JOB --measure 3", file=sys.stderr)
    return 0 if entries else 1


def _row(one: Entry) -> tuple[str, ...]:
    mesh, micro = _of_plan(one.plan)
    estimated = sum(one.parts.values())
    measured = f"{1e3 * one.seconds:.0f} ms" if one.seconds else one.outcome
    off = f"{100 * (one.expected / one.seconds - 1):+.0f} %" if one.seconds else ""
    return (
        datetime.fromtimestamp(one.at).astimezone().strftime("%Y-%m-%d %H:%M"), one.kind, one.name, mesh, micro,
        f"{1e3 * estimated:.0f} ms", f"{1e3 * one.expected:.0f} ms", measured, off, size(one.memory),
        size(one.used) if one.used else "",
    )  # fmt: skip


def _of_plan(text: str) -> tuple[str, str]:
    """The mesh and the micro-batch of a plan that another version may have written."""
    try:
        tables: dict[str, Any] = tomllib.loads(text)
        return str(tables.get("mesh", "")), str(tables.get("data", {}).get("micro_batch", 1))
    except (tomllib.TOMLDecodeError, AttributeError):
        return "", ""


def _errors(entries: Sequence[Entry]) -> dict[str, float]:
    """How far predictions were off, of those that came to a measurement."""
    known = [one for one in entries if one.measured and one.seconds]
    if not known:
        return {}
    within = [one.low <= (one.seconds or 0) <= one.high for one in known]
    return {
        "measured": float(len(known)),
        "estimated": median(abs(sum(one.parts.values()) / (one.seconds or 1) - 1) for one in known),
        "expected": median(abs(one.expected / (one.seconds or 1) - 1) for one in known),
        "within": sum(within) / len(within),
    }


def _words(errors: dict[str, float]) -> list[tuple[str, str]]:
    return [
        ("runs that were measured", f"{errors['measured']:.0f}"),
        ("the estimate alone", f"{100 * errors['estimated']:.0f} %"),
        ("with what was known before each", f"{100 * errors['expected']:.0f} %"),
        ("within the 90 % interval", f"{100 * errors['within']:.0f} %"),
    ]


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
    if wish.out is not None:
        refuse_unwritable(wish.out, "the plan")
    return job


def planned_here(job: Job, name: str, wish: Wish, *, json: bool) -> int:
    """Rank, try, write, print; exit code 1 where no plan fits."""
    from tangram.training.trials.local_plans import planned  # loads torch and transformers: only for a sound job

    with progress("measuring the machine, counting the model, ranking plans"):
        found = planned(job, wish.processes, stages=wish.stages, schedule=wish.schedule, anew=wish.anew)
    ranking, document, tables = found.ranking, dict[str, object](), []
    if wish.measure and ranking.fitting:
        from tangram.training.trials.auto import try_plans

        with watching() as line:
            tried = try_plans(found, wish.measure, name, line, limit=wish.limit)
        ranking, document, tables = tried.ranking, trials_json(tried), [trials_table(tried)]
    fitting = ranking.fitting
    if wish.out is not None:
        if wish.pick > len(fitting):
            why = "" if fitting else next((f": {one.why_not}" for one in ranking.ranked if one.why_not), "")
            raise UserError(f"--pick {wish.pick}: there are {len(fitting)} plans that fit this machine{why}")
        write_file(wish.out, dumps(fitting[wish.pick - 1].chosen_plan), "the plan")
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
