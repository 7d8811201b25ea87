"""The ranking of plans for people and programs: the best plan of each row, one process beside it, what did not fit.

Measuring the best plans of a ranking, learning from each: which one next, and when no other can be better.

The planner asks, somebody else runs: `measure(plan) -> Trial` is all that is known here of a machine. After each trial
the ranking is made again with what it has taught (`planner.local.rerank`), so that the second trial is already chosen
by a corrected estimate. It ends after as many trials as were asked for, when all that fits was measured, or when it is
all but sure (three standard deviations) that no other plan is quicker than the quickest that was measured.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING

from tangram.planner.cost.history import Entry, Here, History, key_of
from tangram.planner.local.rank import Ranked, by_history, in_order
from tangram.schema.plan import Plan

if TYPE_CHECKING:  # these load torch, and tables of clusters need the type of a table alone
    from tangram.hardware.measuring.rates import Rates
    from tangram.planner.local.rank import Ranked

Titled = tuple[str, tuple[str, ...], list[tuple[str, ...]]]

HEADERS = ("", "plan", "mesh", "micro-batch", "memory", "step", "90 % interval", "tokens/s")


@dataclass(frozen=True)
class Ranking:
    """Every plan for a job on so many processes of this machine."""

    processes: int
    ranked: tuple[Ranked, ...]
    alone: Ranked | None
    """The best plan for one process; None where one process is what was asked for."""
    rates: Rates
    notes: tuple[str, ...] = ()
    """What it was corrected by, in sentences."""

    @property
    def fitting(self) -> tuple[Ranked, ...]:
        """The plans that can be run here, the best first."""
        return tuple(one for one in self.ranked if one.fits)

    def tables(self) -> list[Titled]:
        """Titles, headers and rows: what can be taken, the memory of it, and what cannot."""
        fitting = self.fitting
        rows = [_row(str(number), one) for number, one in enumerate(fitting, start=1)]
        if self.alone is not None and self.alone.estimate is not None:
            rows.append(_row("-", self.alone))
        seconds = [_seconds(str(number), one) for number, one in enumerate(fitting, start=1)]
        memory = [_memory(str(number), one) for number, one in enumerate(fitting, start=1)]
        tables: list[Titled] = []
        if rows:
            word = "process" if self.processes == 1 else "processes"
            tables.append((f"Plans for {self.processes} {word}, predicted", HEADERS, rows))
        if fitting and fitting[0].estimate:
            from tangram.planner.local.estimate import WORDS  # it is there already where something is estimated

            parts = tuple(WORDS.get(name, name) for name in asdict(fitting[0].estimate.seconds))
            tables.append(("A step, as estimated without what was measured", ("", "total", *parts), seconds))
        if memory:
            parts = tuple(asdict(fitting[0].estimate.memory)) if fitting[0].estimate else ()
            tables.append((f"Memory of a rank, of {megabytes(self.rates.memory)}", ("", "total", *parts), memory))
        refused = [one for one in self.ranked if not one.fits]
        if refused:
            said = [(one.name, one.mesh, str(one.micro_batch or ""), one.why_not) for one in refused]
            tables.append(("Not possible", ("plan", "mesh", "micro-batch", "why not"), said))
        return tables

    def as_json(self) -> dict[str, object]:
        """The same for programs; `plans` have the ones that fit first."""
        return {
            "processes": self.processes,
            "rates": asdict(self.rates),
            "notes": list(self.notes),
            "plans": [one.as_json() for one in self.ranked],
            "one_process": self.alone.as_json() if self.alone else None,
        }


def megabytes(nbytes: float) -> str:
    """As `planner.local.estimate` writes them."""
    from tangram.planner.local import estimate

    return estimate.megabytes(nbytes)


def _row(number: str, one: Ranked) -> tuple[str, ...]:
    if one.estimate is None:
        raise ValueError(f"{one.name} has no estimate")
    return (
        number,
        one.name,
        one.mesh,
        str(one.micro_batch),
        megabytes(one.estimate.memory.total),
        f"{1e3 * one.step:.0f} ms{', measured' if one.likely and one.likely.measured else ''}",
        f"{1e3 * one.likely.low:.0f} to {1e3 * one.likely.high:.0f} ms" if one.likely else "",
        f"{one.tokens_per_second:,.0f}",
    )


def _seconds(number: str, one: Ranked) -> tuple[str, ...]:
    if one.estimate is None:
        raise ValueError(f"{one.name} has no estimate")
    seconds = one.estimate.seconds
    return (number, *(f"{1e3 * part:.1f} ms" for part in (seconds.total, *asdict(seconds).values())))


def _memory(number: str, one: Ranked) -> tuple[str, ...]:
    if one.estimate is None:
        raise ValueError(f"{one.name} has no estimate")
    return (number, megabytes(one.estimate.memory.total), *map(megabytes, asdict(one.estimate.memory).values()))


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
