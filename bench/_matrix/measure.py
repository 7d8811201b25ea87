"""Run some cells: plan, train, compare, and put what was predicted beside what was measured."""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from bench._matrix.cells import Cell, Name, Planned, planned
from bench._matrix.models import BATCH, SEQUENCE
from bench._matrix.ranks import WORLD, Found, Run, Todo, work
from bench._matrix.results import Result, beside, slower, wrong_of
from tangram.errors import UserError
from tangram.hardware.measuring.rates import rates
from tangram.planner.local.rank import predict
from tangram.schema.plan import Plan
from tangram.training.data import BYTES, prepare
from tangram.training.run.launch import RankError, run_ranks
from tests.training.small import write_text

STEPS = 5
Tell = Callable[[str], None]


def oracle_of(cell: Cell) -> str:
    """The plain run that a cell is compared with: its model with as many layers."""
    return f"{cell.model} of {cell.layers} layers.pickle"


def train(found: Planned, runs: Sequence[Run], tell: Tell) -> list[list[Found]]:
    """What all ranks found, by run, on a start of the processes."""
    if not runs:
        return []
    plans: dict[str, Plan] = {run.oracle: run.plan for run in runs}
    prepare(runs[0].plan.data, BYTES, lambda event: None)
    count = 0

    def heard(event: object) -> None:
        nonlocal count
        count += 1
        tell(f"{count} of {len(runs)}: {event}")

    try:
        with tempfile.TemporaryDirectory(dir=found.folder) as folder:  # where ranks meet, which nobody has met before
            done = run_ranks(work, Todo(runs, plans, Path(folder)), world=WORLD, on_event=heard, device="cpu")
    except RankError as error:
        raise RuntimeError(error.details or str(error)) from error
    return [[rank[number] for rank in done if number in rank] for number in range(len(runs))]


def measure(names: Iterable[Name], before: Mapping[Name, Result], tell: Tell, steps: int = STEPS) -> list[Result]:
    """The results of some cells; `before`: of the last run on this machine."""
    with tempfile.TemporaryDirectory() as folder:
        found = planned(Path(folder), write_text(Path(folder) / "text"), names, steps, tell)
        cells = list(found.cells.values())
        first = _measured(found, cells, tell, steps)
        doubtful = [cell for cell in cells if slower(first[cell.name], before.get(cell.name))]
        again = _measured(found, doubtful, tell, steps) if doubtful else {}
    return [beside(one, again.get(name), before.get(name)) for name, one in first.items()]


def _measured(found: Planned, cells: Sequence[Cell], tell: Tell, steps: int) -> dict[Name, Result]:
    runs = [Run(c.name, c.plan, oracle_of(c), steps, measured=True) for c in cells if c.plan is not None]
    by_name = dict(zip((run.name for run in runs), train(found, runs, tell), strict=True))
    commit, day = commit_of_this(), datetime.now(UTC).date().isoformat()
    results: dict[Name, Result] = {}
    for cell in cells:
        one = Result(
            cell.model, cell.strategy.name, cell.strategy.ranks, "refused", cell.why_not, commit=commit, day=day
        )
        if cell.plan is not None:
            one = _judged(one, cell, cell.plan, by_name[cell.name], found, steps)
        results[cell.name] = one
    return results


def _judged(one: Result, cell: Cell, plan: Plan, ranks: Sequence[Found], found: Planned, steps: int) -> Result:
    wrong = wrong_of(ranks, found.trained(cell))
    done = [rank for rank in ranks if not rank.failed]
    seconds = max((rank.step_s for rank in done), default=0.0)
    tokens, memory = _predicted(plan, cell, found)
    return replace(
        one,
        state="broken" if wrong else "same",
        why=wrong[0] if wrong else "",
        apart=max((rank.apart for rank in done), default=0.0),
        steps=steps,
        loss=done[0].losses[-1] if done else 0.0,
        tokens_per_s=BATCH * SEQUENCE / seconds if seconds else 0.0,
        predicted_tokens_per_s=tokens,
        memory=float(max((rank.peak for rank in done), default=0)),
        predicted_memory=memory,
    )


def _predicted(plan: Plan, cell: Cell, found: Planned) -> tuple[float, float]:
    """Tokens a second, and bytes of a rank's tensors; zeros where the planner cannot say."""
    counted = found.counted(cell)
    try:
        needs = predict(plan, rates("cpu", plan.ranks), counted.config, counted)
    except UserError:
        return 0.0, 0.0
    return needs.tokens_per_second, needs.memory.total - needs.memory.process


def commit_of_this() -> str:
    """The commit of the checkout, with a mark where its code is not all that runs."""

    def say(*words: str) -> str:
        here = Path(__file__).parents[2]
        return subprocess.run(["git", *words], cwd=here, capture_output=True, text=True, check=False).stdout.strip()

    changed = say("status", "--porcelain", "--untracked-files=no", "--", "src", "bench")
    return say("describe", "--always", "--exclude=*") + ("-dirty" if changed else "")
