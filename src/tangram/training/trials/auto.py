"""Plans that are measured before one is taken: rank, run the best for a few steps each, learn, rank again."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from tangram.planner.cost.history import Entry, History
from tangram.planner.cost.history_correction import Here
from tangram.planner.local.rank import Ranked
from tangram.planner.local.trials import Trial, Tried, tried
from tangram.training.data import prepare, tokens_of
from tangram.training.observe.events import Doing, Note
from tangram.training.trials.history_rows import entry_of, remember
from tangram.training.trials.local_plans import Planned
from tangram.training.trials.trial import LIMIT, measured

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
    """A plan in a few words."""
    return f"{ranked.name}, {ranked.mesh}, micro-batch {ranked.micro_batch}"


def _entry(ranked: Ranked, trial: Trial, before: History, here: Here, name: str) -> Entry:
    assert ranked.estimate is not None  # of a plan that fits
    return entry_of(ranked.chosen_plan, ranked.estimate, here, before, trial, kind="trial", name=name)


def _outcome(ranked: Ranked, trial: Trial) -> str:
    if trial.seconds is None:
        return f"{trial.outcome}: {trial.why}"
    return f"{1e3 * trial.seconds:.0f} ms a step, {1e3 * ranked.step:.0f} expected"
