"""A trial: a plan really run for a few steps, in processes of its own, to see how long a step takes and what it needs.

The job's own model, text and ranks run as `tangram train` would run them, without checkpoints, evaluation and export.
All of it is in a helper process with a time limit, so that ranks that hang, run out of memory or take the whole helper
with them cost only the trial. The first steps, in which caches fill and blocks are compiled, do not count.

The trade-off: fresh processes cost seconds for each trial, and a few steps say less than many.
"""

from __future__ import annotations

import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

import torch

from tangram.errors import UserError
from tangram.hardware.host.machine import peak_resident_mb
from tangram.hardware.host.workers import Job as Helper
from tangram.hardware.host.workers import run
from tangram.planner.local.trials import Trial
from tangram.schema.files import dumps, load
from tangram.schema.plan import Plan
from tangram.training.data import open_corpus, prepare, tokens_of
from tangram.training.observe import throughput
from tangram.training.observe.events import Record
from tangram.training.run.launch import Rank, RankError, run_ranks
from tangram.training.run.out_of_memory import NoMemoryError, explained
from tangram.training.run.rank import RankJob, begin, highest
from tangram.training.state.checkpointer import Checkpointer
from tangram.training.step import loop

STEPS = 12
LIMIT = 120.0
"""Seconds for one trial, its start included."""
SIGKILL = "killed by signal 9"
ENDED = ("SIGKILL", SIGKILL)
"""In what is said of processes that the kernel ends where memory runs out."""


def measured(plan: Plan, *, steps: int = STEPS, limit: float = LIMIT) -> Trial:
    """Run a plan for so many steps, in at most so many seconds."""
    wanted = {"plan": dumps(shortened(plan, steps))}
    outcome = run([Helper("tangram.training.trials.trial:helped", wanted)], limit)[0]
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
    seconds = throughput.step_seconds(record)
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
