"""What `tangram plan` is given, a model or a job, and what is written of it; loads torch for no model by name."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from tangram.cli.plan.exports import ExportRequest
from tangram.cli.plan.options import Common, Taking, TrainingOptions
from tangram.errors import UserError
from tangram.models.building.strict import refuse_misspelt
from tangram.models.outlines.catalogue import in_catalogue
from tangram.models.outlines.outline import Outline
from tangram.planner.search.strategy import Ask
from tangram.planner.space.framework_profiles import framework
from tangram.planner.space.tasks import beside, task_of

if TYPE_CHECKING:
    from tangram.cli.plan.plan_files import JobAndOutline

__all__ = ["TANGRAM", "Taking", "own", "read_job", "read_outline", "search_request"]

TANGRAM = "tangram"
"""Of `--to`: the plan that `tangram train` takes."""


def own(wanted: ExportRequest, file: str) -> Taking:
    """What `tangram plan export --to tangram` writes: the plan of a job. Raises UserError where there is none, or no
    file."""
    if Path(file).suffix != ".toml" or wanted.out is None:
        raise UserError("a plan of Tangram is of a job, with data and optimiser: give a job's .toml, and --out")
    if wanted.emit or wanted.submit:
        raise UserError("--to and --job-file write one file each: call the command for each of them")
    return Taking(wanted.out, wanted.pick, runs=True)


def read_job(common: Common, taking: Taking) -> JobAndOutline | None:
    """The job that is named; None where a model is. Raises UserError."""
    if Path(common.model).suffix == ".toml":
        from tangram.cli.plan.plan_files import job_in  # loads torch and transformers
        from tangram.schema.files import changes_of

        changes = changes_of(common.change or [])
        if common.lora_targets:
            raise UserError("--lora-targets is of a model by name: a job says lora.targets, so change them with --set")
        return job_in(common.model, taking, common.typed()[:3], changes, common.lora, common.base)
    if taking.out is not None or taking.runs:
        raise UserError("--out and --runs are for a job, which a plan is written of: give its .toml, or export")
    if common.change:
        raise UserError("--set changes keys of a job or a plan, and a model has none: give a job's .toml")
    return None


def search_request(job: JobAndOutline | None, asked: Ask, training: TrainingOptions, outline: Outline) -> Ask:
    """What is asked of a search, with ways to train as they are typed, as the job has them, or as is usual."""
    if job is None:
        rows, forwards = task_of(training.task or "sft")
        teacher = read_outline(training.teacher) if training.teacher else None
        asked = replace(asked, rows=rows, beside=beside(forwards, outline, teacher))
        return training.of(asked, outline, framework(asked.framework).optimiser)
    if training.task or training.teacher:
        raise UserError("--task and --teacher are of a model by name: a job says its task itself")
    return job.of(training.of(asked, outline, job.optimiser))


def read_outline(model: str) -> Outline:
    """Of a model by its name, directory or file. Raises UserError."""
    known = None if Path(model).exists() else in_catalogue(model)
    if known is not None:
        return known
    refuse_misspelt(model)
    from tangram.models.outlines.outlined import outlined  # loads torch and transformers

    return outlined(model)
