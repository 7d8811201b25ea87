"""`tangram train`: train a model as a plan says, and prove that what is left behind is what was trained."""

import dataclasses
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from tangram.cli.output import print_json
from tangram.training.folder import run_folder
from tangram.training.plan import load_plan
from tangram.training.progress import ProgressLine

__all__ = ["train"]


def train(
    plan: Annotated[Path, typer.Argument(help="The plan file, for instance examples/quickstart/plan.toml.")],
    processes: Annotated[int | None, typer.Option(help="Must agree with the plan's mesh.")] = None,
    out: Annotated[Path | None, typer.Option(help="An empty or new folder; runs/NAME when not given.")] = None,
    steps: Annotated[int | None, typer.Option(help="Train this many steps instead of the plan's.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the result as one JSON document on stdout.")] = False,
) -> int:
    """Train, checkpoint, reload in one process through relayout, export; exit code 1 when a rank or a proof fails."""
    checked = load_plan(plan, processes=processes, steps=steps)
    with run_folder(out, plan) as folder:
        from tangram.training.job import JOB_FAILURES, run_job  # loads torch and transformers: only for a sound plan

        try:
            with ProgressLine(Console(stderr=json)) as line:
                report = run_job(checked, folder, line)
        except JOB_FAILURES as failure:
            print(f"error: {failure}", file=sys.stderr)
            return 1
    if json:
        print_json(dataclasses.asdict(report))
    return 0
