"""The plans for a job on the machine at hand: its tokens and model, the machine's rates, the planner's ranking, and
what this machine's history says of it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TypeVar, cast

import torch
from torch import nn

from tangram.errors import UserError
from tangram.hardware.host.machine import pick_device, usable_cores
from tangram.hardware.measuring.rates import Rates, rates
from tangram.models.building.build import build_on_meta
from tangram.models.capturing.attention import TOKENS, by_tokens, mode_of
from tangram.models.outlines.outlined import FIELDS, int_field
from tangram.planner.cost import history
from tangram.planner.cost.history import Here, History
from tangram.planner.local import estimate
from tangram.planner.local.model_costs import Counted, Rows, one_of
from tangram.planner.local.rank import MOST_PROCESSES, rank
from tangram.planner.local.ranking_table import Ranking
from tangram.planner.local.rerank import by_history
from tangram.planner.local.strategies import PIPELINE
from tangram.schema.job import Job
from tangram.schema.plan import Plan, matches
from tangram.training.data import Tokens, open_corpus, prepare, step_lengths, tokens_of
from tangram.training.objective.packing import respects_documents
from tangram.training.state.build_model import shallow, source_of

MOST_ASKED, MOST_NARROW, NARROWER = 100_000_000, 600_000_000, 64
"""Parameters of a model that is asked about documents, and of a narrower one; by which that is narrower inside."""
J = TypeVar("J", Job, Plan)


def here_of(rates: Rates) -> Here:
    """This machine as one of so many ranks sees it."""
    cores = "" if rates.device != "cpu" else f", {usable_cores():g} cores"
    place = f"{rates.name}{cores}, {rates.processes} processes, torch {torch.__version__}"
    return Here(rates.name, place, rates.memory, estimate.VERSION)


def known() -> History:
    """All that is there. Raises UserError for a file that is no history."""
    file = history.path()
    return history.read(file) if file is not None else History()


@dataclass(frozen=True)
class Planned:
    """A ranking, and what it was made with."""

    ranking: Ranking
    here: Here
    history: History


def plans_of(job: Job, processes: int, *, stages: int = 1, schedule: str = PIPELINE, anew: bool = False) -> Ranking:
    """Rank the plans, of pipelines with so many stages by this schedule; 0: with and without stages.

    `anew` measures the machine even where it is known.

    Raises UserError for a job without a plan.
    """
    return planned(job, processes, stages=stages, schedule=schedule, anew=anew).ranking


def planned(job: Job, processes: int, *, stages: int = 1, schedule: str = PIPELINE, anew: bool = False) -> Planned:
    """The same with what it was made with, for who goes on from there."""
    if not 1 <= processes <= MOST_PROCESSES:
        raise UserError(f"--processes {processes}: plans are made for 1 to {MOST_PROCESSES}")
    history, lost = _known()
    tokens = tokens_of(job)
    config, (rows, unread) = source_of(job, tokens).config, rows_of_steps(job, tokens)
    wrapped = config.get_text_config() is not config
    job, beside = text_alone(job, build_on_meta(config)) if wrapped else (job, ())
    device = pick_device(job.run.device, 0, 1).type
    found, one = rates(device, processes, anew=anew), rates(device, 1, anew=anew)
    counted = Counted(job, config, rows)
    ranked = rank(job, processes, found, config, counted, stages, schedule)
    alone = rank(job, 1, one, config, counted)[0] if processes > 1 else None
    here = here_of(found)
    ranking = by_history(Ranking(processes, ranked, alone, found), history, here, here_of(one))
    return Planned(replace(ranking, notes=(*ranking.notes, *lost, *unread, *beside)), here, history)


def beside_text(model: nn.Module) -> list[str]:
    """Patterns of the names of parameters that text alone does not reach, as `model.vision_tower.*`."""
    prefix = str(getattr(model, "base_model_prefix", ""))
    base = getattr(model, prefix, None)
    if not isinstance(base, nn.Module) or not isinstance(getattr(base, "language_model", None), nn.Module):
        return []
    others = (name for name, one in base.named_children() if name != "language_model" and [*one.parameters()])
    return [f"{prefix}.{name}.*" for name in others]


def text_alone(job: J, model: nn.Module) -> tuple[J, tuple[str, ...]]:
    """A job that leaves what reads images or sounds as it is, since text trains none of it, and a note that says so."""
    left = job.model.freeze if job.lora is None else job.lora.exclude
    modules = cast("Iterable[tuple[str, nn.Module]]", model.named_modules())
    linear = (name for name, one in modules if isinstance(one, nn.Linear))
    trained = (name for name, _ in model.named_parameters()) if job.lora is None else linear
    names = [name for name in trained if not matches(left, name)]
    found = tuple(one for one in beside_text(model) if any(matches((one,), name) for name in names))
    if not found:
        return job, ()
    if job.lora is None:
        now = job.model_copy(update={"model": job.model.model_copy(update={"freeze": (*left, *found)})})
    else:
        now = job.model_copy(update={"lora": job.lora.model_copy(update={"exclude": (*left, *found)})})
    return now, (f"not trained, since text does not reach it: {', '.join(found)}",)


def rows_of_steps(job: Job, tokens: Tokens) -> tuple[Rows | None, tuple[str, ...]]:
    """How long rows are, as the text says that is read for it (and kept for the training); else that it cannot be.

    None: all are of `data.sequence`.
    """
    if job.data.packing in ("packed", "best-fit") or job.run.compile:
        return None, ()
    try:
        if job.data.packing == "auto" and _shares_rows(job, tokens):
            return None, ()
        data = job.data.model_copy(update={"packing": "single"})
        prepare(data, tokens, _nowhere)
        rows = Rows(*step_lengths(open_corpus(data, tokens), data, job.seed, job.run.steps))
    except UserError as error:
        return None, (f"planned as if each row had {job.data.sequence} tokens: {error}",)
    most = "" if rows.longest == job.data.sequence else f" and at most {rows.longest}"
    return rows, (f"rows have {rows.mean} of {job.data.sequence} tokens in the mean{most}: time is of the mean",)


def _shares_rows(job: Job, tokens: Tokens) -> bool:
    """Whether documents share samples, as a model of the job's says: the code tells, and not how many blocks there are,
    nor, where these are large, how wide inside. Raises UserError."""
    source = source_of(job, tokens)
    if mode_of(source.config) not in (None, TOKENS):
        source = replace(source, config=by_tokens(source.config))
    try:
        return respects_documents(shallow(job, source, MOST_ASKED))
    except UserError as large:
        config = one_of(source.config, NARROWER, vocabulary=True)
        try:
            if config is None:
                raise large
            if (inside := int_field(config, FIELDS["expert_ffn"])) is not None:
                setattr(config, inside[0], -(-inside[1] // NARROWER))
            return respects_documents(shallow(job, replace(source, config=config), MOST_NARROW))
        except (UserError, RuntimeError):  # some types' sizes hang together in ways that no field says
            raise UserError(f'{large}: give data.packing = "single" or "packed", as it is to be') from None


def _nowhere(event: object) -> None:
    """What reading the text tells of."""


def _known() -> tuple[History, tuple[str, ...]]:
    """The history; one that cannot be read is told of and stops nobody from planning and training."""
    try:
        return known(), ()
    except UserError as error:
        return History(), (f"planned without what was measured before: {error}",)
