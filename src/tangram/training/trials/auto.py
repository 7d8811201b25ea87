"""Plans that are measured before one is taken: rank, run the best for a few steps each, learn, rank again.

A trial is a plan really run for a few steps as `tangram train` would run it, without checkpoints, evaluation and
export, all in a helper process with a time limit, so that ranks that hang, run out of memory or take the whole helper
with them cost only the trial. The first steps, in which caches fill and blocks are compiled, do not count. The trade-
off: fresh processes cost seconds for each trial, and a few steps say less than many.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch

from tangram.errors import UserError
from tangram.hardware.host.machine import peak_resident_mb, pick_device
from tangram.hardware.host.workers import Job as Helper
from tangram.hardware.host.workers import run
from tangram.hardware.measuring.rates import rates
from tangram.planner.cost import history
from tangram.planner.cost.history import Entry, Here, History, likely
from tangram.planner.local.estimate import Estimate
from tangram.planner.local.rank import Ranked
from tangram.planner.local.rerank import predicted_plan
from tangram.planner.local.trials import Trial, Tried, tried
from tangram.schema.files import dumps, load
from tangram.schema.plan import Plan
from tangram.training.data import open_corpus, prepare, tokens_of
from tangram.training.observe.events import Doing, Note, Record
from tangram.training.observe.summary import Summary, step_seconds
from tangram.training.run.launch import Rank, RankError, run_ranks
from tangram.training.run.out_of_memory import NoMemoryError, explained
from tangram.training.run.rank import RankJob, begin, highest
from tangram.training.state.checkpointer import Checkpointer
from tangram.training.step import loop
from tangram.training.trials.local_plans import Planned, here_of, known

STEPS = 12
LIMIT = 120.0
"""Seconds for one trial, its start included."""
SIGKILL = "killed by signal 9"
ENDED = ("SIGKILL", SIGKILL)
"""In what is said of processes that the kernel ends where memory runs out."""


def measured(plan: Plan, *, steps: int = STEPS, limit: float = LIMIT) -> Trial:
    """Run a plan for so many steps, in at most so many seconds."""
    wanted = {"plan": dumps(shortened(plan, steps))}
    outcome = run([Helper("tangram.training.trials.auto:helped", wanted)], limit)[0]
    if outcome.ok:
        return Trial(**cast("dict[str, Any]", outcome.value))
    said = outcome.error or ""
    if said.startswith("not done within"):
        return Trial("not done", why=f"{steps} steps were {said}: it hangs, or is too slow to be tried (--limit)")
    if any(word in said for word in ENDED):
        return Trial("out of memory", why=f"the trial was {SIGKILL}, as the kernel does when memory runs out")
    return Trial("failed", why=said)


def shortened(plan: Plan, steps: int) -> Plan:
    """The same plan for a few steps, with nothing between them but training."""
    tables = plan.model_dump()
    tables["run"] |= {
        "steps": steps,
        "max_seconds": float("inf"),
        "evaluate_every": 0,
        "patience": 0,
        "count_experts": 0,
    }
    tables["optimiser"] |= {"schedule": "constant", "warmup_steps": 0, "decay_steps": 0}
    tables["checkpoint"] = {"asynchronous": False}
    return Plan.model_validate(tables)


def helped(plan: str) -> dict[str, Any]:
    """In the helper: a `Trial` as a table. What goes wrong in the run is its outcome, not an error."""
    with tempfile.TemporaryDirectory(prefix="tangram-trial-") as folder:
        file = Path(folder, "plan.toml")
        file.write_text(plan, encoding="utf-8")
        found = load(file)
        assert isinstance(found, Plan)
        try:
            return asdict(_run(found, Path(folder)))
        except UserError as error:
            return asdict(Trial("failed", why=str(error)))
        except RankError as error:
            why = str(error)
            short = NoMemoryError.__name__ in why or SIGKILL in why
            return asdict(Trial("out of memory" if short else "failed", why=why))


def _run(plan: Plan, folder: Path) -> Trial:
    record = Record()
    tokens = tokens_of(plan)
    prepare(plan.data, tokens, record)
    job = RankJob(plan, folder, open_corpus(plan.data, tokens).digest, loop.StepCosts(0.0, 0.0))
    used = run_ranks(rank_of_trial, job, world=plan.ranks, on_event=record, device=plan.run.device)
    seconds = step_seconds(record)
    if seconds is None:
        return Trial("failed", why="no step could be timed")
    return Trial("measured", seconds, max(used))


def rank_of_trial(rank: Rank, job: RankJob) -> float:
    """The task of a rank: its steps. The most bytes that any rank has had."""
    begun = begin(rank, job)
    hooks = loop.Hooks(rank.emit, rank.stop.requested, folder=job.folder)
    idle = Checkpointer(job.folder / "never", begun.model.plan, begun.model.world)
    with explained(begun.model.module, begun.state.optimiser, job.memory):
        loop.train_steps(begun.model, begun.state, begun.corpus, idle, hooks, job.costs)
    idle.close()
    most = 1e6 * peak_resident_mb() if rank.device.type == "cpu" else float(torch.accelerator.max_memory_reserved())
    return highest(most, begun.model.world)


OnEvent = Callable[[object], None]


def try_plans(planned: Planned, most: int, name: str, on_event: OnEvent, *, limit: float = LIMIT) -> Tried:
    """Really run the best plans of a ranking, at most so many, and write what came of each into the history.

    Their text is read and kept before, so that no trial's time goes there.
    """
    if planned.ranking.fitting:
        plan = planned.ranking.fitting[0].chosen_plan
        on_event(Doing("reading the text"))
        prepare(plan.data, tokens_of(plan), on_event)

    def tell(ranked: Ranked, number: int) -> None:
        on_event(Doing(f"trial {number} of {most}: {words_of(ranked)}"))

    def keep(ranked: Ranked, trial: Trial, before: History) -> Entry:
        entry = _entry(ranked, trial, before, planned.here, name)
        remember(entry, lambda text: on_event(Note(text)))
        on_event(Note(f"trial      {words_of(ranked)}: {_outcome(ranked, trial)}"))
        return entry

    return tried(planned.ranking, most, partial(measured, limit=limit), keep, planned.here, planned.history, tell)


def words_of(ranked: Ranked) -> str:
    return f"{ranked.name}, {ranked.mesh}, micro-batch {ranked.micro_batch}"


def _entry(ranked: Ranked, trial: Trial, before: History, here: Here, name: str) -> Entry:
    assert ranked.estimate is not None  # of a plan that fits
    return entry_of(ranked.chosen_plan, ranked.estimate, here, before, trial, kind="trial", name=name)


def _outcome(ranked: Ranked, trial: Trial) -> str:
    if trial.seconds is None:
        return f"{trial.outcome}: {trial.why}"
    return f"{1e3 * trial.seconds:.0f} ms a step, {1e3 * ranked.step:.0f} expected"


LEAST = 8
"""Steps of a training that says how long one takes."""


def entry_of(
    plan: Plan, predicted: Estimate, here: Here, before: History, trial: Trial, *, kind: str, name: str
) -> Entry:
    """A row of a plan that ran, or did not: what came of it. `before`: what was known when it was predicted."""
    asked = predicted_plan(plan, predicted)
    expected = likely(before.entries, here, [asked])[0]
    return Entry(
        at=time.time(),
        kind=kind,
        name=name,
        plan=dumps(plan),
        key=asked.key,
        family=asked.family,
        device=here.device,
        place=here.place,
        precision=asked.precision,
        model=here.model,
        parts=asked.parts,
        expected=expected.step,
        low=expected.low,
        high=expected.high,
        held=asked.held,
        room=here.room,
        outcome=trial.outcome,
        seconds=trial.seconds,
        used=trial.used,
        why=trial.why,
    )


def remember(entry: Entry, tell: Callable[[str], None]) -> None:
    """Add a row; where that cannot be done it is told, and nothing else is lost."""
    file = history.path()
    if file is None:
        return
    try:
        history.add(entry, file)
    except UserError as error:
        tell(f"this run is not remembered: {error}")


@contextmanager
def remembering(
    plan: Plan, predicted: Estimate | None, name: str, on_event: Callable[[object], None]
) -> Generator[Callable[[Summary], None]]:
    """Around a training: what is called with its summary writes it down, and so does running out of memory."""

    def add(trial: Trial) -> None:
        if predicted is None or history.path() is None:
            return
        here = here_of(rates(pick_device(plan.run.device, 0, 1).type, plan.ranks))
        try:
            before = known()
        except UserError as error:
            on_event(Note(f"this run is not remembered: {error}"))
            return
        entry = entry_of(plan, predicted, here, before, trial, kind="training", name=name)
        remember(entry, lambda text: on_event(Note(text)))

    def done(summary: Summary) -> None:
        steps = summary.steps - (summary.resumed_from or 0)
        if summary.step_seconds and steps >= LEAST:
            used = summary.peak_rss_mb and 1e6 * summary.peak_rss_mb
            add(Trial("measured", summary.step_without_slow_ranks, used))

    try:
        yield done
    except RankError as error:
        if NoMemoryError.__name__ in str(error):
            add(Trial("out of memory", why=str(error)))
        raise
