"""From what a person asked for to a job that runs: choose a plan, take a folder, train here or as one of torchrun's.

A job without a strategy is given to the planner, and the first plan that it ranks for the number of processes is run.
"""

import contextlib
import shlex
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from tangram.checkpoint.store.commits import read_marker
from tangram.errors import UserError
from tangram.hardware.host.machine import accelerators, pick_device
from tangram.hardware.measuring.rates import rates
from tangram.models.building.build import build_on_meta, read_source
from tangram.planner.local.estimate import megabytes
from tangram.planner.local.model_costs import Counted
from tangram.planner.local.rank import MOST_PROCESSES, predict
from tangram.planner.local.ranking_table import Ranking
from tangram.schema.files import dumps, load
from tangram.schema.job import Job
from tangram.schema.plan import Plan
from tangram.tracing.settings import TraceSettings, fresh_folder
from tangram.training.data import tokens_of
from tangram.training.mesh.world import axes_of
from tangram.training.objective import expert_capacity, router_loss
from tangram.training.observe.events import CheckpointSaved, Doing, Note, TableEvent
from tangram.training.observe.text_tables import count
from tangram.training.parallel.apply import freeze
from tangram.training.run.fork_server import make_ready
from tangram.training.run.job import (
    JOB_FAILURES,
    ChosenPlan,
    PreparedJob,
    Run,
    Stopped,
    prepare_job,
    prepare_text,
    run_here,
    train_job,
)
from tangram.training.run.rank import RankJob, RankReport, train_rank
from tangram.training.run.resume import checkpoint_to_resume
from tangram.training.run.run_folder import (
    CHECKPOINTS,
    PLAN_FILE,
    alone,
    near,
    proved,
    refuse_in_use,
    replace_plan,
    run_folder,
)
from tangram.training.run.torchrun import Meeting, on_one, run_as_rank
from tangram.training.run.uploads import bring_here, sending
from tangram.training.state.build_model import source_of
from tangram.training.state.load_weights import begun_with
from tangram.training.state.teacher import teacher_source
from tangram.training.trials.auto import remembering, try_plans
from tangram.training.trials.local_plans import planned, plans_of, rows_of_steps, text_alone

FAILURES = JOB_FAILURES

OnEvent = Callable[[object], None]


@dataclass(frozen=True)
class TrainRequest:
    """What the command line says."""

    job: Job | Plan
    name: str
    """Of the run, when no folder is given."""
    processes: int | None
    out: Path | None
    resume: Path | None
    """The folder of the run to go on with."""
    profile: bool
    trials: int = 0
    """Plans of a job that are tried before one is taken, at most."""
    allow: tuple[str, ...] = ()
    """Keys that a resume may change (`training.run.resume`)."""
    from_store: bool = False
    """Whether a run that has no folder yet goes on from the checkpoints of its store."""


def train_request(
    request: TrainRequest,
    on_event: OnEvent,
    meeting: Meeting | None,
    run_ranks: Run | None = None,
    before: Callable[[RankJob], None] = lambda job: None,
) -> Mapping[str, Any] | None:
    """Run it; the summary, where rank 0 is and if it came to one. `meeting`: of the ranks that torchrun started, or,
    with `run_ranks`, of processes that run a node's ranks by it. `before`: what each machine does before them."""
    with contextlib.ExitStack() as opened:
        if meeting is None:
            make_ready()  # while this process reads and plans
        leads = meeting is None or meeting.place.index == 0
        tell = on_event if leads else _nowhere
        if request.out is not None and request.resume is None:
            on_one(meeting, partial(refuse_in_use, request.out))  # before anything is measured
        started = None if run_ranks is not None else meeting
        chosen = on_one(meeting, lambda: choose(request, started, tell))
        on_one(meeting, lambda: prepare_text(chosen.plan, tell), per="node")
        folder = on_one(meeting, lambda: opened.enter_context(_folder(request, chosen.plan)).resolve())
        known: list[PreparedJob] = []  # on rank 0 alone

        def begin() -> RankJob | dict[str, Any]:
            known.append(prepare_job(chosen, tell))
            ready = known[0]
            resume, going_on = None, request.resume is not None
            if chosen.plan.checkpoint.store:
                wanted = going_on or request.from_store
                there = bring_here(chosen.plan, folder / CHECKPOINTS, resume=wanted, tell=tell)
                going_on = going_on or there
            if going_on:
                config = ready.source.config
                resume = checkpoint_to_resume(folder, chosen.plan, ready.corpus, config, request.allow, tell)
                if (done := ended_before(folder, resume, chosen.plan, tell)) is not None:
                    return done
                replace_plan(folder, dumps(chosen.plan))
            memory = None if chosen.predicted is None else chosen.predicted.memory
            trace, digest = _trace_settings(chosen.plan, folder), ready.corpus.digest
            return RankJob(chosen.plan, folder, digest, ready.costs, resume, request.profile, memory, trace=trace)

        job = on_one(meeting, begin)
        if not isinstance(job, RankJob):
            return job if leads else None
        on_one(meeting, partial(before, job), per="node")
        run = run_ranks or (run_here if meeting is None else partial(_as_rank, meeting))
        if not leads:
            run(job, tell)
            return None
        with remembering(chosen.plan, chosen.predicted, request.name, tell) as remember:
            outcome = train_job(job, chosen, known[0], tell, run)
            if not isinstance(outcome, Stopped) and not request.profile:
                remember(outcome)
    if isinstance(outcome, Stopped):
        say_stopped(outcome, folder, tell, "train" if run_ranks is None else "launch")
        return None
    return outcome.as_json()


def ended_before(folder: Path, resume: Path | None, plan: Plan, tell: OnEvent) -> dict[str, Any] | None:
    """The summary of a run that has come to its end by this plan: whoever starts it again, as a platform does, is not
    to do so for ever. None where training, or what comes after, is still to be done.

    Raises UserError where the plan has a store and the last checkpoint can still not be sent there.
    """
    if resume is None or (summary := proved(folder, resume)) is None:
        return None
    step, more = read_marker(resume).step, "nothing is left to do (for more, --set run.steps=N)"
    if step < plan.run.steps:
        patience = summary.get("stopped_early") == "patience" and load(folder / PLAN_FILE).run.patience
        if not 0 < plan.run.patience <= patience:
            return None
        more = "the held-out loss had fallen no further (to go on, raise run.patience)"
    with sending(plan, folder / CHECKPOINTS, tell) as send:
        send(CheckpointSaved(step, str(resume), 0.0, 0.0, asynchronous=False))
    tell(Note(f'the run in "{near(folder)}" has ended after step {step} of {plan.run.steps}: {more}'))
    return summary


def _as_rank(meeting: Meeting, job: RankJob, on_event: OnEvent) -> RankReport:
    device = job.plan.run.device
    ranks = job.plan.ranks
    return run_as_rank(train_rank, job, world=ranks, on_event=on_event, device=device, meeting=meeting, trace=job.trace)


def _trace_settings(plan: Plan, folder: Path) -> TraceSettings | None:
    if not plan.run.trace:
        return None
    stages = axes_of(plan).pipeline
    return TraceSettings(fresh_folder(folder), mesh=plan.mesh, stages=stages, hang_seconds=plan.run.hang_seconds)


def _nowhere(event: object) -> None:
    """Only rank 0 tells."""


def say_stopped(outcome: Stopped, folder: Path, on_event: OnEvent, command: str) -> None:
    on_event(Note(f"stopped after step {outcome.step}, its checkpoint is {outcome.checkpoint}; to go on:"))
    on_event(Note(f"  tangram {command} --resume --out {shlex.quote(str(folder))}"))


def _folder(request: TrainRequest, plan: Plan) -> AbstractContextManager[Path]:
    if request.resume is not None:
        return alone(request.resume)
    return run_folder(request.out, request.name, dumps(plan))


def choose(request: TrainRequest, meeting: Meeting | None, on_event: OnEvent) -> ChosenPlan:
    """The plan to run, with what it is predicted to need; of a job, the first that the planner ranks."""
    started = meeting.place.world if meeting else None
    processes = _processes(request.job, request.processes, started)
    job = resumed(request, processes)
    _refuse_trials(job, request, meeting)
    on_event(Doing("reading the model, measuring the machine, planning"))
    read_source(job.model.preset, job.model.path, {})  # a model that is not there is told of before its tokenizer
    tokens = tokens_of(job)
    config = source_of(job, tokens).config
    teacher_source(job, tokens)  # refused before anything is planned
    model = build_on_meta(config)
    if not isinstance(request.job, Plan):  # which says itself what it freezes
        job, beside = text_alone(job, model)
        for note in beside:
            on_event(Note(note))
    freeze(model, job)
    if job.lora is not None and job.lora.start is not None and request.resume is None:
        deque(begun_with(model, Path(job.lora.start)), maxlen=0)  # refused before anything is planned
    router_loss.refuse(model, job)
    expert_capacity.refuse(model, job)
    if isinstance(job, Plan):
        found = rates(pick_device(job.run.device, 0, 1).type, processes)
        predicted = predict(job, found, config, Counted(job, config, rows_of_steps(job, tokens)[0]))
        return ChosenPlan(job, predicted, processes * found.peak_flops(job.precision.compute))
    ranking = _ranked(job, processes, request, on_event) if request.trials else plans_of(job, processes)
    on_event(_shown(ranking))
    for note in ranking.notes:
        on_event(Note(note))
    first = ranking.ranked[0]
    if first.plan is None or not first.fits:
        raise UserError(
            f"no plan for {count(processes, 'process', 'es')} can be run here: {first.name}: {first.why_not}"
        )
    return ChosenPlan(first.plan, first.estimate, processes * ranking.rates.peak_flops(job.precision.compute))


def resumed(request: TrainRequest, processes: int) -> Job | Plan:
    """What was asked for; a job with which a run is resumed on as many ranks, by the strategy of that run."""
    job = request.job
    if request.resume is None or isinstance(job, Plan) or not (request.resume / PLAN_FILE).is_file():
        return job
    before = load(request.resume / PLAN_FILE)
    if not isinstance(before, Plan) or before.ranks != processes:
        return job
    tables = {name: getattr(job, name) for name in Job.model_fields}
    tables["data"] = job.data.model_copy(update={"micro_batch": before.data.micro_batch})
    strategy = {name: getattr(before, name) for name in Plan.model_fields if name not in Job.model_fields}
    try:
        return Plan(**tables, **strategy)
    except ValidationError:  # of another batch, say
        return job


def _refuse_trials(job: Job | Plan, request: TrainRequest, meeting: Meeting | None) -> None:
    if request.trials and isinstance(request.job, Plan):
        raise UserError("--auto chooses a plan, and this is one already: leave it out, or give a job")
    if request.trials and meeting is not None:
        raise UserError("--auto starts its trials itself, on this machine: leave torchrun out")
    if request.trials and request.resume is not None and not isinstance(job, Plan):
        raise UserError("--auto tries plans before a run begins, and this one has begun: leave it out")


def _ranked(job: Job, processes: int, request: TrainRequest, on_event: OnEvent) -> Ranking:
    """With and without stages, the best of them tried."""
    tried = try_plans(planned(job, processes, stages=0), request.trials, request.name, on_event)
    on_event(Note(f"trials     {count(len(tried.trials), 'plan')} measured; {tried.ended}"))
    return tried.ranking


def _processes(job: Job, requested: int | None, started: int | None) -> int:
    """How many ranks there will be: as asked, as a plan's mesh says, as torchrun started, else one per accelerator."""
    if isinstance(job, Plan):
        if requested not in (None, job.ranks):
            raise UserError(
                f'--processes {requested} does not agree with the plan\'s mesh "{job.mesh}" of '
                f"{count(job.ranks, 'rank')}: leave the option out, or change the mesh"
            )
        return job.ranks
    if started is not None and requested not in (None, started):
        raise UserError(f"--processes {requested}, but {started} were started: leave the option out")
    if requested is not None and not 1 <= requested <= MOST_PROCESSES:
        raise UserError(f"--processes {requested}: plans are made for 1 to {MOST_PROCESSES}")
    return started or requested or max(1, len(accelerators()) if job.run.device == "auto" else 1)


def processes_of_nodes(request: TrainRequest, meeting: Meeting) -> int | None:
    """How many ranks a job gets on the nodes of a meeting: as asked, else one per accelerator of each."""
    if request.processes is not None or isinstance(request.job, Plan):
        return request.processes
    return meeting.place.world * _processes(request.job, None, None)


def _shown(ranking: Ranking) -> TableEvent:
    """The best micro-batch of every strategy, and beside them what one process would do."""
    rows: dict[tuple[str, str], tuple[str, ...]] = {}
    for one in (*ranking.ranked, *([ranking.alone] if ranking.alone else [])):
        needs = one.estimate
        what = ("", "", "")
        if needs is not None:
            what = (megabytes(needs.memory.total), f"{1e3 * one.step:.0f} ms", f"{one.tokens_per_second:,.0f}")
        rows.setdefault((one.name, one.mesh), (one.name, one.mesh, str(one.micro_batch or ""), *what, one.why_not))
    headers = ("plan", "mesh", "micro-batch", "memory of a rank", "step", "tokens/s", "why not")
    why = any(row[-1] for row in rows.values())
    shown = tuple(row if why else row[:-1] for row in rows.values())
    title = f"Plans for {count(ranking.processes, 'process', 'es')}, as predicted; the first is run"
    return TableEvent(title, headers if why else headers[:-1], shown)
