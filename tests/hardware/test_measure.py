"""The timer is fair and the row honest."""

import gc
import math
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tangram.hardware.measuring.measure import Row, interleaved, once

POSITIVE = st.floats(1e-6, 1e6)


def test_slower_is_slower() -> None:
    times = interleaved({"short": lambda: time.sleep(0.002), "long": lambda: time.sleep(0.006)}, repeats=3)
    assert 0.002 <= times["short"] < times["long"]


def test_every_callable_is_run_in_every_turn_and_the_first_one_changes() -> None:
    calls: list[str] = []

    def note(name: str) -> None:
        calls.append(name)
        time.sleep(0.001)

    interleaved({"a": lambda: note("a"), "b": lambda: note("b")}, repeats=4, warmup=2, at_least=0.0005)
    assert "".join(calls) == "aabb" + "ab" + "abbaabba"  # warm-up, one count each, four turns


def test_the_median_ignores_one_bad_turn() -> None:
    pauses = iter([0.0, 0.0, 0.0, 0.05, 0.0, 0.0, 0.0, 0.0])
    assert interleaved({"a": lambda: time.sleep(next(pauses))}, repeats=5, at_least=0)["a"] < 0.01


def test_the_collector_rests_while_the_clock_runs_and_only_then() -> None:
    resting: list[bool] = []
    once(lambda: resting.append(not gc.isenabled()))
    assert resting == [True]
    assert gc.isenabled()


def test_nothing_to_time_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one"):
        interleaved({})


def test_the_limit_goes_before_the_best_peer() -> None:
    assert Row("f", "s", 3, {"a": 2, "b": 1}, limit=1.5).ratio == 2
    assert Row("f", "s", 3, {"a": 2, "b": 1}).ratio == 3
    assert Row("f", "GB/s", 3, {"a": 2, "b": 1}, better="higher").ratio == 1.5
    assert Row("f", "s", 3).ratio is None
    assert Row("f", "bytes", 3, limit=0).ratio is None


@given(ours=POSITIVE, target=POSITIVE)
def test_met_is_what_the_numbers_say(ours: float, target: float) -> None:
    assert Row("f", "s", ours, target=target).met is (ours <= target)
    assert Row("f", "1/s", ours, target=target, better="higher").met is (ours >= target)


@given(ours=POSITIVE, limit=POSITIVE, times=POSITIVE)
def test_a_target_given_as_a_multiple_is_printed_in_the_unit(ours: float, limit: float, times: float) -> None:
    row = Row("f", "s", ours, limit=limit, target_ratio=times)
    assert row.as_json()["target"] == times * limit
    assert row.met is (ours <= times * limit)


def test_just_there_is_met_and_just_short_is_not() -> None:
    assert [Row("f", "s", ours, target=1).met for ours in (0.999, 1, 1.001)] == [True, True, False]
    assert [Row("f", "1/s", ours, target=1, better="higher").met for ours in (0.999, 1, 1.001)] == [False, True, True]


def test_no_target_is_not_a_target_missed() -> None:
    assert Row("f", "s", 3).met is None
    assert Row("f", "s", 3, target=2).met is False


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_only_finite_numbers(bad: float) -> None:
    with pytest.raises(ValueError, match="finite"):
        Row("f", "s", bad)
    with pytest.raises(ValueError, match="peer is"):
        Row("f", "s", 1, {"peer": bad})


def test_two_targets_or_a_multiple_of_nothing_are_refused() -> None:
    with pytest.raises(ValueError, match="not both"):
        Row("f", "s", 1, limit=1, target=1, target_ratio=1)
    with pytest.raises(ValueError, match="multiple of"):
        Row("f", "s", 1, target_ratio=1)
