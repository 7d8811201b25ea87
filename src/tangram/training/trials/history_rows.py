"""What trainings and trials leave in the history of this machine, and where this machine is in it."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from contextlib import contextmanager

from tangram.errors import UserError
from tangram.hardware.host.machine import pick_device
from tangram.hardware.measuring.rates import rates
from tangram.planner.cost import history
from tangram.planner.cost.history import Entry, History
from tangram.planner.cost.history_correction import Here, likely
from tangram.planner.local.estimate import Estimate
from tangram.planner.local.rerank import predicted_plan
from tangram.planner.local.trials import Trial
from tangram.schema.files import dumps
from tangram.schema.plan import Plan
from tangram.training.observe.events import Note
from tangram.training.observe.summary import Summary
from tangram.training.run.launch import RankError
from tangram.training.run.out_of_memory import NoMemoryError
from tangram.training.trials.local_plans import here_of, known

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
            add(Trial("measured", summary.step_seconds, used))

    try:
        yield done
    except RankError as error:
        if NoMemoryError.__name__ in str(error):
            add(Trial("out of memory", why=str(error)))
        raise
