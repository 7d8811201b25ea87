"""Measuring the best plans of a ranking, learning from each: which one next, and when no other can be better.

The planner asks, somebody else runs: `measure(plan) -> Trial` is all that is known here of a machine. After each trial
the ranking is made again with what it has taught (`planner.local.rerank`), so that the second trial is already chosen
by a corrected estimate. It ends after as many trials as were asked for, when all that fits was measured, or when it is
all but sure (three standard deviations) that no other plan is quicker than the quickest that was measured.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from tangram.planner.cost.history import Entry, Here, History, key_of
from tangram.planner.local.rank import Ranked, in_order
from tangram.planner.local.ranking_table import Ranking
from tangram.planner.local.rerank import by_history
from tangram.schema.plan import Plan


@dataclass(frozen=True)
class Trial:
    """What came of running a plan for a few steps."""

    outcome: str
    """One of `history.OUTCOMES`."""
    seconds: float | None = None
    """Of a step: the median."""
    used: float | None = None
    """Bytes of the rank that took most."""
    why: str = ""
    """In a sentence, where nothing was measured."""


Measure = Callable[[Plan], Trial]
"""Runs a plan; it never raises for what goes wrong in the run."""
Remember = Callable[[Ranked, Trial, History], Entry]
"""Makes a row of the history, which is already written where one is kept."""


@dataclass(frozen=True)
class Tried:
    """All trials of a call."""

    ranking: Ranking
    """With what they have taught; plans that failed are refused with the reason."""
    trials: tuple[tuple[Ranked, Trial], ...]
    """What was tried, as it was ranked just before, and what came of it."""
    ended: str
    """Why there were no more."""


def tried(
    ranking: Ranking, most: int, measure: Measure, remember: Remember, here: Here, history: History,
    tell: Callable[[Ranked, int], None] = lambda ranked, number: None,
) -> Tried:  # fmt: skip
    """Measure at most so many plans of a ranking that `by_history` made with this history.

    `tell` is told before each. What was measured here before is not measured again.
    """
    done: list[tuple[Ranked, Trial]] = []
    failed: dict[str, str] = {}
    for number in range(most):
        wanted = _next(ranking)
        if isinstance(wanted, str):
            return Tried(ranking, tuple(done), wanted)
        tell(wanted, number + 1)
        trial = measure(wanted.chosen_plan)
        done.append((wanted, trial))
        history = replace(history, entries=(*history.entries, remember(wanted, trial, history)))
        if trial.outcome != "measured":
            failed[key_of(wanted.chosen_plan)] = trial.why
        ranking = _without(by_history(ranking, history, here), failed)
    return Tried(ranking, tuple(done), f"{most} asked for")


def _next(ranking: Ranking) -> Ranked | str:
    """What to measure, or why nothing is left to."""
    known = [one for one in ranking.fitting if one.likely is not None and one.likely.measured]
    left = [one for one in ranking.fitting if one.likely is not None and not one.likely.measured]
    if not left:
        return "every plan that fits was measured" if known else "no plan fits"
    best = min((one.step for one in known), default=float("inf"))
    hopeful = [one for one in left if one.likely is not None and one.likely.least < best]
    if not hopeful:
        return f"no other can be expected to be quicker than {1e3 * best:.0f} ms"
    return min(hopeful, key=lambda one: one.step)


def _without(ranking: Ranking, failed: dict[str, str]) -> Ranking:
    """The ranking in which plans that failed just now are refused."""
    rows = [
        replace(one, why_not=one.why_not or failed.get(key_of(one.plan), "")) if one.plan is not None else one
        for one in ranking.ranked
    ]
    return replace(ranking, ranked=in_order(rows))
