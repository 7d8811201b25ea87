"""The whole of `tangram train`: train on many ranks, then prove in one process that the state survived.

    read the text -> train on the mesh, saving -> newest checkpoint, loaded whole in one process -> same held-out loss,
    same logits? -> a sample of text -> export -> does transformers load it with the same logits? -> report

The questions are answered by measuring, and a wrong answer fails the job.
"""

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tangram.checkpoint.conversion.adapter_config import made_beside
from tangram.checkpoint.store.commits import read_marker
from tangram.errors import UserError
from tangram.hardware.host.machine import describe, versions
from tangram.models.building.build import Source, build_on_meta
from tangram.models.lora.adapters import adapted_layers
from tangram.models.outlines.costs import costs as model_costs
from tangram.planner.local.estimate import Estimate
from tangram.planner.report import figures
from tangram.schema.plan import Plan
from tangram.tracing.show.report import TraceReport
from tangram.tracing.show.report import report as trace_report
from tangram.training.data import (
    Corpus,
    Tokens,
    measured_and_trained,
    open_corpus,
    prepare,
    repeats,
    times_seen,
    tokens_of,
    unigram_entropy,
)
from tangram.training.mesh.layout_to_torch import cuts_of
from tangram.training.observe.boards import BOARD_FOLDER, Boards
from tangram.training.observe.events import CheckpointSaved, Doing, Note, Record, StepsFile, TableEvent
from tangram.training.observe.summary import Summary, summarise
from tangram.training.observe.text_tables import count
from tangram.training.parallel.apply import freeze
from tangram.training.run.end_proofs import ProofError, prove
from tangram.training.run.environment import refuse_too_many
from tangram.training.run.launch import RankError, computing_as_a_rank, run_ranks
from tangram.training.run.live_page import LivePage
from tangram.training.run.rank import RankJob, RankReport, empty_places, train_rank, with_packing
from tangram.training.run.report import write_report
from tangram.training.run.run_folder import CHECKPOINTS, SUMMARY_FILE, near
from tangram.training.run.uploads import sending
from tangram.training.state.build_model import has_dropout, source_of
from tangram.training.state.carried import carried_by
from tangram.training.state.checkpointer import newest
from tangram.training.state.stored_codes import only_configured
from tangram.training.state.teacher import teacher_source
from tangram.training.step import loop

REPORT_FILE = "report.html"
FAILURE_FILE = "failure.txt"  # the stack trace of the rank that ended a job

JOB_FAILURES = (RankError, ProofError)
OnEvent = Callable[[object], None]


@dataclass(frozen=True)
class ChosenPlan:
    """The plan to run, with what is predicted of it."""

    plan: Plan
    predicted: Estimate | None
    peak_flops: float
    """What the devices of all ranks can do in a second; 0: unknown."""


@dataclass(frozen=True)
class PreparedJob:
    """What is known before a rank starts."""

    source: Source
    tokens: Tokens
    corpus: Corpus
    costs: loop.StepCosts
    parameters: int
    trained: int
    """How many of them are not frozen."""
    adapted: tuple[list[str], list[str]]
    """Of fine-tuning by adapters the layers that have some, and the linear ones that have none."""
    carried: str
    """In words, what the model's directory has that no part of the model is made of."""
    begun: float
    """When the job began, by the monotonic clock."""


@dataclass(frozen=True)
class Stopped:
    """A job that somebody asked to stop: its state is saved, and it can go on."""

    step: int
    checkpoint: Path | None


Run = Callable[[RankJob, OnEvent], RankReport]
"""Runs the ranks, or this one of them; the report of rank 0."""


def run_here(job: RankJob, on_event: OnEvent) -> RankReport:
    refuse_too_many(job.plan.ranks)
    plan = job.plan
    spare = plan.checkpoint.asynchronous and plan.checkpoint.every_steps > 0
    device, trace = plan.run.device, job.trace
    return run_ranks(train_rank, job, world=plan.ranks, on_event=on_event, device=device, spare=spare, trace=trace)[0]


def train_job(job: RankJob, chosen: ChosenPlan, ready: PreparedJob, on_event: OnEvent, run: Run) -> Summary | Stopped:
    """Train as planned; leave checkpoints, export, report and summary in the job's folder."""
    show(chosen, ready, job.resume, on_event)
    after = 0 if job.resume is None else read_marker(job.resume).step
    record, boards = Record(), Boards(job.folder, chosen.plan, on_event, after)
    steps = StepsFile(job.folder, on_event, after)
    known: dict[str, Any] = {
        "model": ready.source.name,
        "parameters": ready.parameters,
        "predicted": _predicted(chosen.predicted),
        "text": reading(job.plan, ready.corpus),
    }
    ended: str | None = "failure"
    with sending(job.plan, job.folder / CHECKPOINTS, on_event) as send:
        live = LivePage(job.folder / REPORT_FILE, job.plan, record, describe().in_words(), known, on_event)

        def everybody(event: object) -> None:
            on_event(event)
            record(event)
            boards(event)
            steps(event)
            send(event)

        try:
            on_event(Doing("starting the ranks"))
            report = run(job, everybody)
            ended = report.trained.stopped
            if job.resume is not None and newest(job.folder / CHECKPOINTS) == job.resume:  # no step was left
                send(CheckpointSaved(after, str(job.resume), 0.0, 0.0, asynchronous=False))
        except RankError as failure:  # its stack trace goes to a file
            with contextlib.suppress(OSError):  # of a disk that is full, say
                (job.folder / FAILURE_FILE).write_text(f"{failure}\n\n{failure.details}", encoding="utf-8")
                if failure.details:
                    on_event(Note(f"where rank {failure.rank} was, line by line: {near(job.folder / FAILURE_FILE)}"))
            raise
        finally:
            boards.close()
            live.close(ended)
        return finish(job, chosen, ready, record, report, on_event)


def prepare_text(plan: Plan, on_event: OnEvent) -> None:
    """Make the tokens that the ranks of this machine will read, unless they are there."""
    on_event(Doing("reading the text"))
    prepare(plan.data, tokens_of(plan), on_event)


def prepare_job(chosen: ChosenPlan, on_event: OnEvent) -> PreparedJob:
    """Read model and text, and refuse here what would else be refused on every rank."""
    begun, plan = time.monotonic(), chosen.plan
    on_event(Doing("building the model without values"))
    tokens = tokens_of(plan)
    source = source_of(plan, tokens)
    model = build_on_meta(source.config)
    freeze(model, plan)
    cuts_of(model, plan)
    corpus = open_corpus(plan.data, tokens)
    counted = model_costs(model, plan.data.sequence, plan.data.micro_batch * plan.rows_per_sample)
    again = counted.forward_flops_per_sample * plan.other_forwards
    if (teacher := teacher_source(plan, tokens)) is not None:
        of_teacher = model_costs(build_on_meta(teacher.config), plan.data.sequence, plan.data.micro_batch)
        again += of_teacher.forward_flops_per_sample
    flops = (counted.flops_per_sample + again) * plan.rows_per_sample
    parameters = sum(parameter.numel() for parameter in model.parameters())
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    return PreparedJob(
        source=source,
        tokens=tokens,
        corpus=corpus,
        costs=loop.StepCosts(flops, chosen.peak_flops),
        parameters=parameters,
        trained=trained,
        adapted=adapted_layers(model) if plan.lora is not None else ([], []),
        carried=carried.words() if (carried := carried_by(model, source.weights)) else "",
        begun=begun,
    )


def show(chosen: ChosenPlan, ready: PreparedJob, resume: Path | None, on_event: OnEvent) -> None:
    """The machine, the model, the plan and what it is predicted to need, as short tables."""
    plan = chosen.plan
    machine = describe().in_words()
    machine["cores"] = f"cores: {machine['cores']}"
    found = versions()
    on_event(
        TableEvent(
            "This run",
            ("what", "found"),
            (
                ("machine", ", ".join(machine[key] for key in ("processor", "cores", "memory"))),
                ("software", ", ".join(f"{name} {found[name]}" for name in ("torch", "transformers") if found[name])),
                ("model", _model_words(ready)),
                *_carried_rows(ready),
                *_adapters_rows(ready),
                ("text", ready.corpus.summary()),
                *reading(plan, ready.corpus).items(),
                ("mesh", f"{plan.mesh} ({count(plan.ranks, 'process', 'es')})"),
                *((("resumed from", str(resume)),) if resume else ()),
            ),
        )
    )
    if chosen.predicted is not None:
        on_event(TableEvent("Predicted for a rank", ("what", "predicted"), tuple(chosen.predicted.in_words())))
    if has_dropout(ready.source.config):
        compiled = "; run.compile compiles nothing that draws" if plan.run.compile else ""
        on_event(Note(f"the model has dropout: its masks are those of one process, at any layout{compiled}"))
    if configured := only_configured(ready.source.config, ready.source.weights):
        on_event(Note(configured))
    start = plan.lora.start if plan.lora is not None else None
    if start is not None and (other := made_beside(Path(start), Path(str(plan.model.path)))):
        on_event(Note(other))


def reading(plan: Plan, corpus: Corpus) -> dict[str, str]:
    """What was taken of each source and what was left out, and how often the run takes its text."""
    words: dict[str, str] = {}
    seen = times_seen(corpus, plan.data, plan.run.steps)
    for source, line in zip((*plan.data.sources, *(plan.data.evaluation or ())), corpus.read, strict=True):
        words[f"files of {source.path}" if len(corpus.read) > 1 else "files"] = line
    if both := measured_and_trained(plan.data, corpus):
        words["held-out loss"] = both
    for source, split, times in zip(plan.data.sources, corpus.training, seen, strict=True):
        of = f" of {source.path}" if len(plan.data.sources) > 1 else ""
        if again := repeats(split):
            words[f"repeated{of}"] = f"{again:,} of {len(split.end_D):,} conversations are there before"
        words[f"text{of} is seen"] = f"{figures.three(times)} times in {plan.run.steps:,} steps"
    return words


def _carried_rows(ready: PreparedJob) -> Iterator[tuple[str, str]]:
    if ready.carried:
        yield "beside it", ready.carried


def _adapters_rows(ready: PreparedJob) -> Iterator[tuple[str, str]]:
    have, have_none = ready.adapted
    if have:
        rest = f"; none beside {', '.join(have_none)}" if have_none else ""
        yield "adapters", f"beside {', '.join(have)}{rest}"


def _model_words(ready: PreparedJob) -> str:
    source, some = ready.source, "" if ready.trained == ready.parameters else f" ({ready.trained:,} trained)"
    begin = f"weights of {source.weights}" if source.weights else "from scratch"
    return f"{source.name} ({source.config.model_type}), {ready.parameters:,} parameters{some}, {begin}"


def finish(
    job: RankJob, chosen: ChosenPlan, ready: PreparedJob, record: Record, report: RankReport, on_event: OnEvent
) -> Summary | Stopped:
    """What comes after the ranks: proofs, export, report, summary."""
    plan, out = with_packing(job.plan, report.packing), job.folder
    checkpoint = newest(out / CHECKPOINTS)
    if report.trained.stopped == "signal":
        return Stopped(report.step, checkpoint)
    if checkpoint is None:
        raise ProofError(f'there is no complete checkpoint in "{out / CHECKPOINTS}" after training')
    trained = report.trained
    on_event(
        Note(f"trained    {len(trained.losses)} steps, {trained.tokens:,} tokens in {figures.seconds(trained.seconds)}")
    )
    by_token = plan.data.measured and plan.by_token  # else no model's entropy bounds the loss
    entropy = unigram_entropy(ready.corpus, plan.data) if by_token else None
    if (loss := report.held_out_loss) is not None:
        beside = f"; unigram entropy {entropy:.4f}, ratio {loss / entropy:.2f}" if entropy else ""
        on_event(Note(f"held out   loss {loss:.6f} on {count(report.ranks, 'rank')}{beside}"))
    with computing_as_a_rank(report.ranks):
        proved = prove(plan, ready.source, ready.tokens, ready.corpus, checkpoint, out, report, on_event)
    trace = _traced(job)
    summary = summarise(
        plan=plan,
        record=record,
        stopped=trained.stopped,
        wall_s=time.monotonic() - ready.begun,
        model=ready.source.name,
        parameters=ready.parameters,
        eval_loss=loss,
        unigram_entropy=entropy,
        packing=report.packing,
        padding=empty_places(plan, ready.corpus),
        text=reading(plan, ready.corpus),
        eval_loss_relayout=proved.loss,
        relayout_relative_difference=proved.relative,
        relayout_logits_max_diff=proved.logits,
        export_logits_max_diff=proved.export,
        peak_rss_mb=report.peak_rss_mb,
        checkpoint=str(checkpoint),
        predicted=_predicted(chosen.predicted),
        resumed_from=report.first or None,
        slow_ranks_share=trace.slow_share if trace else None,
        **{what: str(path) for what, path in _paths(out, plan).items() if what != "summary"},
    )
    sample = f"{proved.prompt}{proved.written}"
    machine = describe().in_words()
    write_report(
        out / REPORT_FILE,
        plan=plan,
        record=record,
        summary=summary,
        machine=machine,
        sample=sample,
        trace=trace,
    )
    summary.write(out / SUMMARY_FILE)
    rows = tuple((what, str(near(path))) for what, path in _paths(out, plan).items())
    on_event(TableEvent("Results", ("what", "where"), rows))
    return summary


def _traced(job: RankJob) -> TraceReport | None:
    """What the newest trace of the run says; None where it was not traced, or its files cannot be read."""
    if job.trace is None:
        return None
    try:
        return trace_report(job.folder)
    except UserError:
        return None


def _predicted(estimate: Estimate | None) -> dict[str, object] | None:
    """What was predicted, by the names of what was measured."""
    if estimate is None:
        return None
    return {
        "step_seconds": estimate.seconds.total,
        "tokens_per_s": estimate.tokens_per_second,
        "memory_mb": estimate.memory.total / 1e6,
        "parts": estimate.as_json(),
    }


def _paths(out: Path, plan: Plan) -> dict[str, Path]:
    board = {"tensorboard": out / BOARD_FOLDER} if "tensorboard" in plan.run.boards else {}
    return {"export": out / "export", "report": out / REPORT_FILE, **board, "summary": out / SUMMARY_FILE}
