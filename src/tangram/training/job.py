"""The whole of `tangram train`: train on many ranks, then prove in one process that the state survived.

    read the text -> train on the mesh, saving -> newest checkpoint, loaded whole in one process -> same held-out loss,
    same logits? -> a sample of text -> export -> does transformers load it with the same logits? -> report

The questions are answered by measuring, and a wrong answer fails the job.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig

from tangram.errors import UserError
from tangram.hardware.machine import describe, versions
from tangram.layout import Mesh
from tangram.models.build import build_on_meta
from tangram.models.costs import costs as model_costs
from tangram.models.source import Source
from tangram.planner.estimate import Estimate
from tangram.planner.plan import Plan
from tangram.planner.read import dumps
from tangram.training import loop, summary
from tangram.training.boards import TensorBoard
from tangram.training.building import has_dropout, source_of
from tangram.training.checkpoints import describe as describe_checkpoint
from tangram.training.checkpoints import newest
from tangram.training.cuts import cuts_of
from tangram.training.data import Corpus, Tokens, load_tokens, open_corpus, prepare, unigram_entropy
from tangram.training.events import Note, Record, Table
from tangram.training.launch import RankError, computing_as_a_rank, pick_device, refuse_too_many, run_ranks
from tangram.training.proofs import ProofError, Proved, prove
from tangram.training.rank import CHECKPOINTS, RankJob, RankReport, train_rank
from tangram.training.report import write_report

SUMMARY_FILE = "summary.json"  # written last, so it says that all proofs held
REPORT_FILE = "report.html"
FAILURE_FILE = "failure.txt"  # the stack trace of the rank that ended a job
BOARD_FOLDER = "tensorboard"

JOB_FAILURES = (RankError, ProofError)
OnEvent = Callable[[object], None]


@dataclass(frozen=True)
class Options:
    """What the command line adds to a plan."""

    resume: bool = False
    profile: bool = False


@dataclass(frozen=True)
class Prepared:
    """What is known before a rank starts."""

    source: Source
    tokens: Tokens
    corpus: Corpus
    costs: loop.Costs
    parameters: int
    entropy: float


@dataclass(frozen=True)
class Stopped:
    """A job that somebody asked to stop: its state is saved, and it can go on."""

    step: int
    checkpoint: Path | None


def run_job(
    plan: Plan, out: Path, on_event: OnEvent, *, options: Options, predicted: Estimate | None, peak_flops: float = 0.0
) -> "summary.Summary | Stopped":
    """Train as planned; leave checkpoints, export, report and summary in `out`, the folder from `run_folder`."""
    begun = time.monotonic()
    refuse_too_many(plan.ranks)
    ready = prepare_job(plan, peak_flops, on_event)
    resume = checkpoint_to_resume(out, plan, ready.corpus) if options.resume else None
    show(plan, ready, predicted, resume, on_event)
    record, board = Record(), TensorBoard(out / BOARD_FOLDER)

    def everybody(event: object) -> None:
        on_event(event)
        record(event)
        board(event)

    job = RankJob(plan, out, ready.corpus.digest, ready.costs, resume, options.profile)
    try:
        reports = _run_ranks(job, everybody)
    finally:
        board.close()
    return finish(plan, out, on_event, ready, record, reports, predicted, begun)


def prepare_job(plan: Plan, peak_flops: float, on_event: OnEvent) -> Prepared:
    """Read model and text, and refuse here what would else be refused on every rank."""
    tokens = load_tokens(plan.data, plan.model.path)
    source = source_of(plan, tokens)
    model = build_on_meta(source.config)
    cuts_of(model, plan)
    prepare(plan.data, tokens, on_event)
    corpus = open_corpus(plan.data, tokens)
    counted = model_costs(model, plan.data.sequence, plan.data.micro_batch)
    flops = counted.forward_flops_per_sample + counted.backward_flops_per_sample
    parameters = sum(parameter.numel() for parameter in model.parameters())
    return Prepared(
        source, tokens, corpus, loop.Costs(flops, peak_flops), parameters, unigram_entropy(corpus, plan.data)
    )


def checkpoint_to_resume(out: Path, plan: Plan, corpus: Corpus) -> Path:
    """The newest good checkpoint of a run, if this plan can go on from it. Raises UserError otherwise."""
    found = newest(out / CHECKPOINTS)
    if found is None:
        raise UserError(f'there is no complete checkpoint in "{out / CHECKPOINTS}" to resume from')
    told = describe_checkpoint(found)
    step = told.progress.step
    if step >= plan.run.steps:
        raise UserError(
            f'the newest checkpoint in "{out}" is of step {step}, and run.steps is {plan.run.steps}: nothing is left '
            "to do; raise it with --set run.steps=N"
        )
    if told.about.get("text") != corpus.digest:
        raise UserError(f'"{found}" was trained on another text than [data] gives now: resume on the same files')
    if told.about.get("seed") != plan.seed:
        raise UserError(f'"{found}" was trained with seed {told.about.get("seed")}, and the plan has {plan.seed}')
    return found


def show(plan: Plan, ready: Prepared, predicted: Estimate | None, resume: Path | None, on_event: OnEvent) -> None:
    """The machine, the model, the plan and what it is predicted to need, as short tables."""
    machine = describe().in_words()
    found = versions()
    on_event(
        Table(
            "This run",
            ("what", ""),
            (
                ("machine", ", ".join(machine[key] for key in ("processor", "cores", "memory") if key in machine)),
                ("software", ", ".join(f"{name} {found[name]}" for name in ("torch", "transformers") if found[name])),
                ("model", _model_words(ready.source.config, ready.source, ready.parameters)),
                ("text", ready.corpus.summary()),
                ("mesh", f"{plan.mesh} ({plan.ranks} processes)"),
                *((("resumed from", str(resume)),) if resume else ()),
            ),
        )
    )
    if predicted is not None:
        on_event(Table("Predicted for a rank", ("what", "predicted"), tuple(predicted.in_words())))
    if has_dropout(ready.source.config):
        on_event(Note("the model has dropout: its masks depend on how the batch is cut over ranks"))


def _model_words(config: PreTrainedConfig, source: Source, parameters: int) -> str:
    begin = f"weights of {source.weights}" if source.weights else "from scratch"
    return f"{source.name} ({config.model_type}), {parameters:,} parameters, {begin}"


def _run_ranks(job: RankJob, on_event: OnEvent) -> list[RankReport]:
    """Run the ranks. The stack trace of a rank that fails goes to a file."""
    try:
        return run_ranks(train_rank, job, world=job.plan.ranks, on_event=on_event, device=job.plan.run.device)
    except RankError as failure:
        (job.folder / FAILURE_FILE).write_text(f"{failure}\n\n{failure.details}", encoding="utf-8")
        raise


def finish(
    plan: Plan,
    out: Path,
    on_event: OnEvent,
    ready: Prepared,
    record: Record,
    reports: list[RankReport],
    predicted: Estimate | None,
    begun: float,
) -> "summary.Summary | Stopped":
    """What comes after the ranks: proofs, export, report, summary."""
    first = reports[0]
    checkpoint = newest(out / CHECKPOINTS)
    if first.held_out_loss is None:
        return Stopped(first.step, checkpoint)
    if checkpoint is None:
        raise ProofError(f'there is no complete checkpoint in "{out / CHECKPOINTS}" after training')
    trained = first.trained
    on_event(Note(f"trained    {len(trained.losses)} steps, {trained.tokens:,} tokens in {trained.seconds:.0f} s"))
    on_event(
        Note(
            f"held out   loss {first.held_out_loss:.6f} on {plan.ranks} rank(s); unigram entropy {ready.entropy:.4f}, "
            f"ratio {first.held_out_loss / ready.entropy:.2f}"
        )
    )
    with computing_as_a_rank(plan.ranks):
        device = pick_device(plan.run.device, 0, 1)
        proved = prove(plan, ready.source, ready.tokens, ready.corpus, checkpoint, out, first, device, on_event)
    made = summary.summarise(
        plan=plan,
        record=record,
        wall_s=time.monotonic() - begun,
        eval_loss=first.held_out_loss,
        unigram_entropy=ready.entropy,
        peak_rss_mb=max(report.peak_rss_mb for report in reports),
        stopped=trained.stopped,
        **_found(plan, out, ready, proved, checkpoint, first, predicted),
    )
    write_report(
        out / REPORT_FILE, plan=plan, record=record, summary=made, machine=describe().in_words(), sample=proved.sample
    )
    made.write(out / SUMMARY_FILE)
    on_event(Table("Results", ("what", "where"), tuple((what, str(path)) for what, path in _paths(out).items())))
    return made


def _found(
    plan: Plan,
    out: Path,
    ready: Prepared,
    proved: Proved,
    checkpoint: Path,
    first: RankReport,
    predicted: Estimate | None,
) -> Mapping[str, Any]:
    return {
        "model": ready.source.name,
        "parameters": ready.parameters,
        "mesh": str(Mesh.parse(plan.mesh)),
        "eval_loss_relayout": proved.loss,
        "relayout_relative_difference": proved.relative,
        "relayout_logits_max_diff": proved.logits,
        "export_logits_max_diff": proved.export,
        "checkpoint": str(checkpoint),
        "predicted": predicted.as_json() if predicted else None,
        "resumed_from": first.first or None,
        **{what: str(path) for what, path in _paths(out).items() if what != "summary"},
    }


def _paths(out: Path) -> dict[str, Path]:
    return {
        "export": out / "export",
        "report": out / REPORT_FILE,
        "tensorboard": out / BOARD_FOLDER,
        "summary": out / SUMMARY_FILE,
    }


def write_plan(plan: Plan, path: Path) -> None:
    """Write the plan that is run, complete, as a file that `tangram train` reads."""
    path.write_text(dumps(plan), encoding="utf-8")
