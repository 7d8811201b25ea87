"""How good the plan is that is ranked first on this machine: plans of the quickstart model really run, and compared.

For each number of processes all plans are ranked with nothing known but the machine's rates; the first three and the
best of other kinds are run, some steps each, in rounds one after the other. The regret is how much longer the step of
the one that is ranked first takes than that of the quickest, by medians over the rounds; where the ratio of the two
within a round is sometimes below one, they are not told apart. Then what was measured is played back to the planner as
trials (`planner.local.trials`): the regret after three, and how far the others are off before and after.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

import numpy as np

from bench._planner.ranking import spearman
from tangram.hardware.measuring.measure import Row
from tangram.planner.cost.history import Entry, History, key_of
from tangram.planner.local.rank import Ranked
from tangram.planner.local.rerank import by_history
from tangram.planner.local.trials import Trial, tried
from tangram.schema.files import load
from tangram.schema.plan import Plan
from tangram.training.data import prepare, tokens_of
from tangram.training.observe.events import Record
from tangram.training.trials.auto import entry_of, measured, words_of
from tangram.training.trials.local_plans import Planned, planned

__all__ = ["rows"]

QUICKSTART = Path(__file__).parents[2] / "examples" / "quickstart" / "job.toml"
PLANS = 6
"""Of each number of processes."""
FIRST = 3
ROUNDS = 5
STEPS = 10
TRIALS = 3


@dataclass(frozen=True)
class Measured:
    """A plan, and the seconds of a step in each round."""

    ranked: Ranked
    rounds: tuple[float, ...]

    @property
    def seconds(self) -> float:
        """The median of the rounds."""
        return median(self.rounds)

    @property
    def spread(self) -> float:
        """From the quickest round to the slowest, as a share of the median."""
        return (max(self.rounds) - min(self.rounds)) / self.seconds


def rows(quick: bool) -> Iterator[Row]:
    """Of one, two, four and eight processes; `quick`: of two, in one round."""
    with tempfile.TemporaryDirectory(prefix="tangram-bench-") as folder:
        job = load(QUICKSTART, {"data.cache": folder, "run.steps": str(STEPS), "optimiser.warmup_steps": "0"})
        assert not isinstance(job, Plan)
        prepare(job.data, tokens_of(job), Record())
        for processes in (2,) if quick else (1, 2, 4, 8):
            ranked = _unlearned(planned(job, processes, stages=0))
            found = _measured(_some(ranked.ranking.fitting), 1 if quick else ROUNDS)
            yield from _rows(found, ranked, processes)


def _unlearned(found: Planned) -> Planned:
    """As if nothing had ever been measured."""
    return replace(found, ranking=by_history(found.ranking, History(), found.here), history=History())


def _some(fitting: Sequence[Ranked]) -> list[Ranked]:
    """The first, and the best of kinds that are not among them."""
    found = list(fitting[:FIRST])
    for one in fitting[FIRST:]:
        if len(found) < PLANS and (one.name, one.mesh) not in {(other.name, other.mesh) for other in found}:
            found.append(one)
    return found


def _measured(some: Sequence[Ranked], rounds: int) -> list[Measured]:
    """Those that ran, in the order of the ranking."""
    took: dict[str, list[float]] = {}
    for _ in range(rounds):
        for one in some:
            trial = measured(one.chosen_plan, steps=STEPS)
            if trial.seconds is not None:
                took.setdefault(key_of(one.chosen_plan), []).append(trial.seconds)
    return [Measured(one, tuple(took[key])) for one in some if (key := key_of(one.chosen_plan)) in took]


def _rows(found: list[Measured], planned: Planned, processes: int) -> Iterator[Row]:
    said = (
        f"plans here, {processes} process{'es' if processes > 1 else ''}, {len(found)} of {len(planned.ranking.ranked)}"
    )
    first, best = found[0], min(found, key=lambda one: one.seconds)
    ratios = [own / other for own, other in zip(first.rounds, best.rounds, strict=False)]
    apart = "told apart" if min(ratios) > 1 else "not told apart"
    spread = f"{1e3 * first.seconds:.0f} ms, rounds differ by {first.spread:.0%}"
    regret = 0.0 if min(ratios) <= 1 else first.seconds / best.seconds - 1
    yield Row(
        f"{said}: the first ({words_of(first.ranked)}: {spread}) beyond the best ({words_of(best.ranked)}: "
        f"{1e3 * best.seconds:.0f} ms, {best.spread:.0%}): {first.seconds / best.seconds - 1:.1%}, {apart}",
        "regret", regret, target=0.1, better="lower",
    )  # fmt: skip
    if len(found) < 3:
        return
    predicted, seconds = np.array([one.ranked.step for one in found]), np.array([one.seconds for one in found])
    yield Row(f"{said}: Spearman of predicted and measured", "", spearman(predicted, seconds), better="higher")
    off = float(np.median(abs(predicted / seconds - 1)))
    yield Row(f"{said}: step time, nothing measured", "median error", off, better="lower")
    if len(found) > TRIALS:
        yield from _after(found, planned, said, best.seconds)


def _after(found: list[Measured], planned: Planned, said: str, best: float) -> Iterator[Row]:
    """What trials of the same plans would have led to."""
    seconds = {key_of(one.ranked.chosen_plan): one.seconds for one in found}

    def remember(ranked: Ranked, trial: Trial, before: History) -> Entry:
        assert ranked.estimate is not None
        unused = replace(trial, used=None)
        return entry_of(ranked.chosen_plan, ranked.estimate, planned.here, before, unused, kind="trial", name="bench")

    ranking = replace(planned.ranking, ranked=tuple(one.ranked for one in found))
    done = tried(
        ranking, TRIALS, lambda plan: Trial("measured", seconds[key_of(plan)]), remember, planned.here, History()
    )
    taken = seconds[key_of(done.ranking.ranked[0].chosen_plan)]
    yield Row(f"{said}: the first after {len(done.trials)} trials", "regret", taken / best - 1, target=0.1,
              better="lower")  # fmt: skip
    rest = [one for one in done.ranking.ranked if one.likely is not None and not one.likely.measured]
    off = median(abs(one.step / seconds[key_of(one.chosen_plan)] - 1) for one in rest)
    yield Row(f"{said}: step time of the others after that", "median error", off, better="lower")
