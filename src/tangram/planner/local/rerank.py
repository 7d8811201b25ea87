"""A ranking of plans for this machine, with what its history says: steps corrected, those without hope refused."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, replace

from tangram.planner.cost.history import Here, History, PredictedPlan, family_of, hopeless, key_of, likely
from tangram.planner.local.estimate import Estimate
from tangram.planner.local.rank import Ranked, in_order
from tangram.planner.local.ranking_table import Ranking
from tangram.schema.plan import Plan


def predicted_plan(plan: Plan, estimate: Estimate) -> PredictedPlan:
    """What the history is asked for."""
    full = plan.data.global_batch * plan.rows_per_sample * plan.data.sequence
    return PredictedPlan(
        key=key_of(plan, estimate.tokens if estimate.tokens < full else 0),
        family=family_of(plan),
        precision=plan.precision.compute,
        parts=asdict(estimate.seconds),
        held=asdict(estimate.memory),
    )


def by_history(ranking: Ranking, history: History, here: Here, alone: Here | None = None) -> Ranking:
    """The same rows in the order of what is likely. `alone`: where one process would run."""
    rows = _corrected(ranking.ranked, history, here)
    one = ranking.alone
    if one is not None and alone is not None:
        one = _corrected([one], history, alone)[0]
    return replace(ranking, ranked=in_order(rows), alone=one, notes=notes_of(history, here))


def _corrected(rows: Iterable[Ranked], history: History, here: Here) -> list[Ranked]:
    found = list(rows)
    places: list[int] = []
    asked: list[PredictedPlan] = []
    for i, one in enumerate(found):
        if one.plan is not None and one.estimate is not None:
            places.append(i)
            asked.append(predicted_plan(one.plan, one.estimate))
    for i, wanted, step in zip(places, asked, likely(history.entries, here, asked), strict=True):
        why = found[i].why_not or hopeless(history.entries, here, wanted)
        found[i] = replace(found[i], likely=step, why_not=why)
    return found


def notes_of(history: History, here: Here) -> tuple[str, ...]:
    """What counts of a history, in sentences."""
    found: list[str] = []
    own = sum(one.measured and one.place == here.place and one.model == here.model for one in history.entries)
    others = sum(one.measured and one.place != here.place and one.model == here.model for one in history.entries)
    if own or others:
        elsewhere = f", {others} elsewhere" if others else ""
        found.append(f"corrected by {own} measured here{elsewhere}: tangram plan history")
    if history.left_out:
        found.append(f"{history.left_out} rows of the history cannot be read and are left out")
    return tuple(found)
