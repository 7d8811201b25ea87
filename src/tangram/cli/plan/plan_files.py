"""`tangram plan JOB --cluster C`: a job planned for a cluster, and a row of the ranking as a plan to train by."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from pydantic import ValidationError

from tangram.cli.plan.exports import Typed
from tangram.cli.plan.options import Taking
from tangram.errors import UserError
from tangram.models.building.build import read_source
from tangram.models.lora.outline import adapted
from tangram.models.outlines.outline import Outline
from tangram.models.outlines.outlined import outline_of
from tangram.planner.imports.tangram import TYPES
from tangram.planner.local.model_costs import Counted, Rows
from tangram.planner.local.plan_from_cluster import plan_to_train, why_not
from tangram.planner.local.ranking_table import Titled
from tangram.planner.search.strategy import Ask, Choice
from tangram.planner.space.setting import Beside
from tangram.planner.space.tasks import beside
from tangram.schema.files import dumps, load, mistakes
from tangram.schema.job import Job
from tangram.schema.plan import Plan
from tangram.text import refuse_unwritable, write_file
from tangram.training.data import tokens_of
from tangram.training.state.build_model import source_of
from tangram.training.trials.local_plans import rows_of_steps

ENDS = ("embed_tokens", "lm_head", "wte", "embed_in", "embed_out")
"""What embedding and head are called in models."""


@dataclass(frozen=True)
class JobAndOutline:
    """A job, and the outline of its model, with its adapters."""

    job: Job
    outline: Outline
    counted: Counted
    rows: Rows | None = None
    """How long rows are; None: all are of `data.sequence`."""
    notes: tuple[str, ...] = ()
    """Of them, for a person."""
    beside: Beside | None = None
    """What a step asks beside the model."""

    def typed(self, typed: Typed) -> Typed:
        """What was typed, with what the job says."""
        data, longest = self.job.data, self.rows.longest if self.rows else self.job.data.sequence
        return (
            str(data.global_batch * self.job.rows_per_sample * longest),
            longest,
            TYPES[self.job.precision.compute],
            *typed[3:],
        )

    def of(self, asked: Ask) -> Ask:
        """With how much of the longest rows those of a step are in the mean, and when parameters are updated."""
        filled = self.rows.mean / self.rows.longest if self.rows else 1.0
        early = asked.in_backward or self.job.optimiser.in_backward
        return replace(asked, filled=filled, in_backward=early, rows=self.job.rows_per_sample, beside=self.beside)

    @property
    def optimiser(self) -> str:
        """The planner's name of the kind that the job has."""
        return self.job.optimiser.kind

    def take(self, choices: Sequence[Choice], taking: Taking, document: dict[str, object]) -> list[Titled]:
        """Write what is taken, and say in the document and in a table what is not run. Raises UserError."""
        if choices:
            self._write(choices, taking)
        others = not_run(choices, self.outline)
        document["not_run"] = [] if others is None else [row[0] for row in others[2]]
        document["rows"] = self.notes
        rows = [("Rows", ("",), [(one,) for one in self.notes])] if self.notes else []
        return [*rows, *([] if others is None else [others])]

    def _write(self, choices: Sequence[Choice], taking: Taking) -> None:
        """The picked row as a plan. Raises UserError, with the rows that can be written."""
        if taking.out is None:
            return
        if not 1 <= taking.pick <= len(choices):
            raise UserError(f"--pick {taking.pick}: the rows of the ranking are 1 to {len(choices)}")
        try:
            plan = plan_to_train(choices[taking.pick - 1], self.job, self.outline, self.counted)
        except UserError as reason:
            rows = [str(row) for row, one in enumerate(choices, start=1) if self._can(one)]
            said = f"rows that can be are {', '.join(rows)}" if rows else "no row can be: search only those with --runs"
            raise UserError(f"row {taking.pick} cannot be written as a plan: {reason}; {said}") from None
        write_file(taking.out, dumps(plan), "the plan")

    def _can(self, choice: Choice) -> bool:
        try:
            plan_to_train(choice, self.job, self.outline, self.counted)
        except UserError:
            return False
        return True


def job_in(
    file: str,
    taking: Taking,
    typed: Sequence[object],
    changes: Mapping[str, str],
    lora: int = 0,
    base: str | None = None,
) -> JobAndOutline:
    """The job in a file. `typed`: what a job says by itself; `lora`, `base`: adapters that are typed beside it. Raises
    UserError."""
    path = Path(file)
    if any(one is not None for one in typed):
        raise UserError(
            f"{file} says batch, sequence and precision itself: leave them out, or change its keys with --set"
        )
    if taking.out is not None:
        refuse_unwritable(taking.out, "the plan")
    job = load(path, changes)
    if isinstance(job, Plan):
        raise UserError(f"{file} is a plan already: `tangram plan show {file}` explains it, `tangram train` runs it")
    job = _adapted(job, file, lora)
    if base not in (None, "bf16") and (taking.out is not None or taking.runs):
        raise UserError(f"--base {base}: tangram train keeps frozen weights as precision.parameters says: leave it out")
    tokens = tokens_of(job)
    config, (rows, notes) = source_of(job, tokens).config, rows_of_steps(job, tokens)
    outline = outline_of(config, path.stem)
    if job.lora is not None:
        if others := [one for one in job.lora.modules_to_save if not one.endswith(ENDS)]:
            raise UserError(
                f"{file}: {others[0]}, which lora.modules_to_save trains whole, is not planned for on a cluster, as "
                "embedding and head are: plan without"
            )
        outline = adapted(outline, max(job.lora.rank, *job.lora.ranks.values(), 0), job.lora.targets)
        outline = replace(outline, trained_ends=bool(job.lora.modules_to_save))
    teacher = None
    if job.distill is not None and job.runs_teacher:
        teacher = outline_of(read_source(None, job.distill.teacher, {}).config, "the teacher")
    asked = beside(job.other_forwards, outline, teacher)
    return JobAndOutline(job, outline, Counted(job, config), rows, notes, asked)


def _adapted(job: Job, file: str, rank: int) -> Job:
    """With adapters of a rank, 0: those that it has. Raises UserError where it has others, or can have none."""
    if rank <= 0 or job.lora is None:
        if rank <= 0:
            return job
        try:
            return Job.model_validate({**job.model_dump(), "lora": {"rank": rank}})
        except ValidationError as error:
            raise UserError(f"--lora {rank} of {file}: {mistakes(error)}") from None
    if job.lora.rank != rank:
        raise UserError(f"--lora {rank}: {file} has adapters of rank {job.lora.rank} itself: change it with --set")
    return job


def not_run(choices: Sequence[Choice], outline: Outline) -> Titled | None:
    """The rows of a ranking that `tangram train` does not run, and why; None where it runs all."""
    rows = [(str(row), one.mesh, why) for row, one in enumerate(choices, start=1) if (why := why_not(one, outline))]
    return ("Not run by tangram train", ("", "mesh", "since"), rows) if rows else None
