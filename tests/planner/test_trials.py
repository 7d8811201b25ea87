"""Which plans are measured, in which order, what is learned of each, and when it ends. The machine is made up."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedConfig

from tangram.planner.cost.history import Entry, Here, History, key_of
from tangram.planner.local.model_costs import Counted
from tangram.planner.local.rank import Ranked, rank
from tangram.planner.local.ranking_table import Ranking
from tangram.planner.local.rerank import by_history, predicted_plan
from tangram.planner.local.trials import Trial, tried
from tangram.schema.job import Job
from tangram.schema.plan import Plan
from tests.models.tiny import tiny
from tests.planner.machine import rates

HERE = Here("abacus", "abacus, 4 processes", 4e9, 2)
CONFIG: PreTrainedConfig = tiny("qwen3", vocab_size=64)


@pytest.fixture(scope="module")
def four() -> Ranking:
    """All plans over four processes."""
    job = Job.model_validate(
        {
            "model": {"preset": "qwen3-1m"},
            "data": {"sources": [{"path": "stdlib"}], "sequence": 16, "global_batch": 8},
            "optimiser": {"lr": 1e-3},
            "run": {"steps": 10},
        }
    )
    known = rates(4)
    ranked = rank(job, 4, known, CONFIG, Counted(job, CONFIG), stages=0)
    return by_history(Ranking(4, ranked, None, known), History(), HERE)


def remember(ranked: Ranked, trial: Trial, before: History) -> Entry:
    assert ranked.estimate is not None
    asked = predicted_plan(ranked.chosen_plan, ranked.estimate)
    return Entry(
        0.0, "trial", "job", "", asked.key, asked.family, HERE.device, HERE.place, asked.precision, HERE.model,
        asked.parts, ranked.step, 0.0, 0.0, asked.held, HERE.room, trial.outcome, trial.seconds, trial.used, trial.why,
    )  # fmt: skip


def machine(ranking: Ranking, factors: dict[str, float], noise: float = 0.0) -> Callable[[Plan], Trial]:
    """One on which each part takes so many times what is predicted."""
    parts = {key_of(one.chosen_plan): asdict(one.estimate.seconds) for one in ranking.fitting if one.estimate}

    def measure(plan: Plan) -> Trial:
        chance = np.random.default_rng(int(key_of(plan), 16))
        seconds = sum(factors.get(name, 1.0) * part for name, part in parts[key_of(plan)].items())
        return Trial("measured", seconds * float(chance.lognormal(0, noise)), 1e8)

    return measure


def test_all_stages_are_ranked(four: Ranking) -> None:
    schedules = {one.plan.pipeline.schedule for one in four.fitting if one.plan and one.plan.pipeline}
    assert "1F1B" in schedules
    assert {one.mesh.split()[0] for one in four.ranked} >= {"dp=4", "pp=2"}


def test_the_second_is_chosen_with_what_the_first_has_taught(four: Ranking) -> None:
    """Where updates take six times as long as predicted, the order of the ranking is wrong."""
    measure = machine(four, {"optimiser": 6.0})
    seconds = {key_of(one.chosen_plan): measure(one.chosen_plan).seconds or 0.0 for one in four.fitting}
    found = tried(four, 4, measure, remember, HERE, History())
    best = found.ranking.fitting[0]
    assert seconds[key_of(best.chosen_plan)] == pytest.approx(min(seconds.values()))
    assert seconds[key_of(four.fitting[0].chosen_plan)] > 1.1 * min(seconds.values())
    assert len({key_of(one.chosen_plan) for one, _ in found.trials}) == len(found.trials) <= 4


@given(st.dictionaries(st.sampled_from(["products", "moves", "communication", "optimiser"]), st.floats(0.5, 3.0)))
@settings(deadline=None, max_examples=10)
def test_with_enough_trials_the_quickest_is_found(four: Ranking, factors: dict[str, float]) -> None:
    measure = machine(four, factors, noise=0.02)
    seconds = [measure(one.chosen_plan).seconds or 0.0 for one in four.fitting]
    found = tried(four, 99, measure, remember, HERE, History())
    taken = measure(found.ranking.fitting[0].chosen_plan).seconds or 0.0
    assert taken <= 1.1 * min(seconds)
    assert "no other can be expected" in found.ended or len(found.trials) == len(seconds)


def test_what_fails_is_refused_with_the_reason(four: Ranking) -> None:
    first = key_of(four.fitting[0].chosen_plan)
    fine = machine(four, {})

    def measure(plan: Plan) -> Trial:
        return Trial("not done", why="it hangs") if key_of(plan) == first else fine(plan)

    found = tried(four, 2, measure, remember, HERE, History())
    assert [trial.outcome for _, trial in found.trials] == ["not done", "measured"]
    refused = {key_of(one.plan): one.why_not for one in found.ranking.ranked if one.plan and not one.fits}
    assert refused[first] == "it hangs"
    assert found.ranking.fitting[0].likely is not None
    assert found.ranking.fitting[0].likely.measured == 1


def test_what_ran_out_of_memory_takes_what_needs_more_with_it(four: Ranking) -> None:
    small = [one for one in four.fitting if one.name == "DDP"]
    least = min(small, key=lambda one: one.micro_batch)
    ranking = replace(four, ranked=(least, *(one for one in four.ranked if one is not least)))
    found = tried(
        replace(ranking, ranked=(least,)), 1, lambda plan: Trial("out of memory", why="killed"), remember, HERE,
        History(),
    )  # fmt: skip
    entries = [remember(one, trial, History()) for one, trial in found.trials]
    after = by_history(ranking, History(tuple(entries)), HERE)
    refused = [one for one in after.ranked if "ran out of memory" in one.why_not]
    assert {(one.name, one.mesh) for one in refused} == {("DDP", least.mesh)}
    assert all(one.micro_batch >= least.micro_batch for one in refused)


def test_it_ends_where_nothing_is_left(four: Ranking) -> None:
    none = tried(four, 3, lambda plan: Trial("failed", why="broken"), remember, HERE, History())
    assert [trial.outcome for _, trial in none.trials] == ["failed"] * 3
    few = replace(four, ranked=four.fitting[:1])
    assert tried(few, 5, machine(four, {}), remember, HERE, History()).ended == "every plan that fits was measured"
    assert tried(replace(four, ranked=()), 5, machine(four, {}), remember, HERE, History()).ended == "no plan fits"


def test_what_was_measured_before_is_not_measured_again(four: Ranking) -> None:
    once = tried(four, 2, machine(four, {}), remember, HERE, History())
    entries = tuple(remember(one, trial, History()) for one, trial in once.trials)
    again = by_history(four, History(entries), HERE)
    second = tried(again, 2, machine(four, {}), remember, HERE, History(entries))
    assert not {one.key for one in entries} & {key_of(one.chosen_plan) for one, _ in second.trials}


def test_the_table_says_what_was_measured_and_how_sure_the_rest_is(four: Ranking) -> None:
    found = tried(four, 1, machine(four, {}), remember, HERE, History()).ranking
    title, headers, rows = found.tables()[0]
    assert "90 % interval" in headers
    assert sum("measured" in row[5] for row in rows) == 1
    assert all(" to " in row[6] for row in rows)
    assert "corrected by 1 measured here: tangram plan history" in found.notes
    assert title
