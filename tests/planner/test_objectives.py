"""Objectives, fronts and goodput: laws of the formulas, and searches beside trying everything."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tangram.errors import UserError
from tangram.hardware.catalogue.cluster import Cluster, builtin
from tangram.hardware.catalogue.devices import device
from tangram.models.outlines.outline import Dims, Outline, decoder
from tangram.planner.cost.calibration import PARTS, published
from tangram.planner.cost.goodput import Goodput, Snapshots
from tangram.planner.cost.memory import memory
from tangram.planner.cost.step_time import scaled, seconds
from tangram.planner.legality.enumerate import Able, Request, meshes, of_mesh
from tangram.planner.report.answer_tables import tables
from tangram.planner.search import by_device_count
from tangram.planner.search.branch_and_bound import exhaustive, search
from tangram.planner.search.by_device_count import Budget, best, by_size, durations, fewest, sizes
from tangram.planner.search.objectives import OBJECTIVES, Aim, Terms, aim_of, objective
from tangram.planner.search.pareto import REACH, front, fronts, memory_front
from tangram.planner.search.query import plan, requested
from tangram.planner.search.strategy import Ask, Choice, described, limit_of, safe, setting_of, unlike
from tangram.planner.space.framework_profiles import framework
from tangram.planner.space.grid import joined
from tangram.planner.space.recompute import is_free
from tangram.planner.space.schedule_formulas import SCHEDULES
from tangram.planner.space.setting import Setting

DENSE = decoder(Dims(12, 1024, 16, 32000, ffn=4096, kv_heads=4), "dense")
MIXED = decoder(
    Dims(6, 512, 8, 32000, ffn=2048, experts=16, per_token=2, expert_ffn=512, shared_ffn=512, dense_layers=1), "mixed"
)
SETTING = Setting(device("h100"), framework("megatron-core"))
SCALES = st.none() | st.fixed_dictionaries({name: st.floats(0.3, 3.0) for name in PARTS})
GOODPUTS = st.builds(
    Goodput, failures=st.floats(1e-6, 1e-2), checkpoint=st.floats(0.1, 600), restart=st.floats(0, 3600)
)
TERMS = st.builds(
    Terms, tokens=st.just(2**20), price=st.floats(0.01, 100), training=st.integers(2**20, 2**40),
    hours=st.floats(0.01, 1e5), goodput=st.none() | GOODPUTS,
)  # fmt: skip
DEVICES = st.sampled_from([1, 2, 8, 64, 2048, 16384])


# -------------------------------------------------------------------------------------------------------------- goodput
@given(GOODPUTS, DEVICES, st.floats(1e-3, 1e3))
def test_no_other_interval_is_better(goodput: Goodput, devices: int, times: float) -> None:
    found = goodput.share(devices)
    assert 0 <= found < 1
    assert goodput.share(devices, times * goodput.interval(devices)) <= found * (1 + 1e-9)


@given(GOODPUTS, DEVICES)
def test_more_devices_more_failures_or_longer_pauses_are_never_better(goodput: Goodput, devices: int) -> None:
    share = goodput.share(devices) * (1 + 1e-9)
    assert goodput.share(2 * devices) <= share
    assert replace(goodput, failures=2 * goodput.failures).share(devices) <= share
    assert replace(goodput, checkpoint=2 * goodput.checkpoint).share(devices) <= share
    assert replace(goodput, restart=goodput.restart + 60).share(devices) <= share


PUBLISHED = [
    # devices, failures of a device in an hour, seconds of a checkpoint and of a restart: interval and share
    (1024, 3.39e-5, 30, 600, 2475, 0.9705),
    (16_384, 1.97e-5, 30, 600, 798, 0.880),  # Llama 3's rate
    (16_384, 3.39e-5, 30, 600, 604, 0.827),  # Meta's RSC-1
    (16_384, 3.39e-5, 1, 600, 113, 0.896),
    (100_000, 3.39e-5, 10, 600, 139, 0.494),
    (100_000, 3.39e-5, 0.2, 180, 20.5, 0.828),
]
"""Worked out by Lambert's function, and played, apart from this code; rates as published."""


@pytest.mark.parametrize(("devices", "rate", "pause", "restart", "interval", "share"), PUBLISHED)
def test_published_rates(
    devices: int, rate: float, pause: float, restart: float, interval: float, share: float
) -> None:
    goodput = Goodput(rate, pause, restart)
    assert goodput.interval(devices) == pytest.approx(interval, rel=0.01)
    assert goodput.share(devices) == pytest.approx(share, abs=0.001)


@pytest.mark.parametrize(("devices", "rate"), [(1024, 1.2e-4), (16_384, 3.39e-5)])
def test_two_tiers_played_with_failures_drawn_at_random(devices: int, rate: float) -> None:
    """An oracle of its own: after a failure the newest snapshot is there, or with the other ones the checkpoint."""
    near = Snapshots(0.5, 60, 0.8)
    goodput = Goodput(rate, 2.0, 600, near)
    drawn = np.random.default_rng(1)
    mean, apart, often = goodput.between(devices), goodput.interval(devices), goodput.between_snapshots(devices)
    clock = done = snapshot = checkpoint = 0.0
    failure = float(drawn.exponential(mean))
    while clock < 3000 * mean:
        stop = min(snapshot + often, checkpoint + apart)
        pause = goodput.checkpoint if stop == checkpoint + apart else near.pause
        if clock + stop - done + pause <= failure:
            clock, done = clock + stop - done + pause, stop
            snapshot = stop
            checkpoint = stop if pause == goodput.checkpoint else checkpoint
            continue
        kept = drawn.random() < near.covers
        clock = failure + (near.restart if kept else goodput.restart)
        done = snapshot = snapshot if kept else checkpoint
        failure = max(clock, failure) + float(drawn.exponential(mean))
    assert goodput.share(devices) == pytest.approx(done / clock, abs=0.01)
    assert goodput.share(devices) > replace(goodput, snapshots=None).share(devices)


@pytest.mark.parametrize("numbers", [(0, 60, 0.8), (0.5, -1, 0.8), (0.5, 60, 0), (0.5, 60, 1), (math.inf, 60, 0.5)])
def test_snapshots_that_cannot_be(numbers: tuple[float, float, float]) -> None:
    with pytest.raises(UserError, match="--snapshots PAUSE,RESTART,SHARE"):
        Snapshots(*numbers)


def test_short_pauses_are_youngs() -> None:
    goodput = Goodput(1e-4, 0.01, 0.0)
    mean = 3600 / 1e-4 / 8
    assert goodput.between(8) == pytest.approx(mean)
    assert goodput.interval(8) == pytest.approx(math.sqrt(2 * 0.01 * mean), rel=1e-3)
    assert 1 - goodput.share(8) == pytest.approx(math.sqrt(2 * 0.01 / mean), rel=1e-3)


@pytest.mark.parametrize(
    ("goodput", "devices"), [(Goodput(1e-3, 30, 300), 512), (Goodput(1 / 50_000, 60, 900), 16_384)]
)
def test_played_with_failures_drawn_at_random_it_is_as_much(goodput: Goodput, devices: int) -> None:
    """An oracle of its own: progress of cycles that failures, some of them while it starts again, throw back."""
    drawn = np.random.default_rng(0)
    mean, apart = goodput.between(devices), goodput.interval(devices)
    clock = done = 0.0
    failure = float(drawn.exponential(mean))
    while done < 4000 * apart:
        if clock + apart + goodput.checkpoint <= failure:
            clock, done = clock + apart + goodput.checkpoint, done + apart
            continue
        clock = failure
        failure = clock + float(drawn.exponential(mean))
        while failure < clock + goodput.restart:
            clock, failure = failure, failure + float(drawn.exponential(mean))
        clock += goodput.restart
    assert done / clock == pytest.approx(goodput.share(devices), rel=0.02)


@pytest.mark.parametrize(
    "numbers", [(0.0, 1, 1), (-1.0, 1, 1), (math.nan, 1, 1), (1, 0, 1), (1, math.inf, 1), (1, 1, -1)]
)
def test_failures_that_cannot_be(numbers: tuple[float, float, float]) -> None:
    with pytest.raises(UserError, match="is a number of"):
        Goodput(*numbers)


# ----------------------------------------------------------------------------------------------------------- the table
@given(TERMS, DEVICES, st.floats(1e-3, 1e3), st.floats(1, 100), st.sampled_from(OBJECTIVES))
def test_a_longer_step_is_never_worth_more(terms: Terms, devices: int, step: float, times: float, one: Any) -> None:
    aim = Aim(one, terms)
    value = aim.value(devices, step)
    assert aim.value(devices, times * step) >= value
    if math.isfinite(value):
        assert aim.longest(devices, value) >= step
        assert aim.value(devices, 1.001 * aim.longest(devices, value)) > value


@given(TERMS, DEVICES, st.floats(1e-3, 1e3), st.sampled_from(OBJECTIVES), st.floats(0.1, 0.999))
def test_a_value_that_is_not_reached_has_no_such_step(
    terms: Terms, devices: int, step: float, one: Any, less: float
) -> None:
    aim = Aim(one, terms)
    value = aim.value(devices, step)
    if math.isfinite(value) and value > 0:
        assert aim.longest(devices, less * value) < step


def test_what_an_objective_needs_is_said() -> None:
    assert aim_of("per-device", Terms(2**20)).objective.sizes
    for name, terms, said in (
        ("cost", Terms(1), "needs --price"),
        ("cost", Terms(1, 0.0), "needs a --price above 0"),
        ("devices", Terms(1, hours=3.0), "needs --train-tokens"),
        ("devices", Terms(1), "needs --train-tokens and --hours"),
        ("tme", Terms(1), 'there is no objective "tme" \\(did you mean time\\?\\): give one of time, per-device'),
    ):
        with pytest.raises(UserError, match=said):
            aim_of(name, terms)
    for wrong in ({"price": -1.0}, {"price": math.nan}, {"hours": 0.0}, {"hours": math.nan}, {"training": 5}):
        with pytest.raises(UserError):
            Terms(10, **wrong)


# ------------------------------------------------------------------------------------------------------------ the sizes
CLUSTER = builtin("h100-8x8")
ASK = Ask(48 * 2048, 2048, framework="megatron-core", devices=8, memory=6e9, most=6, able=Able(uneven=1))


def everything(outline: Outline, cluster: Cluster, ask: Ask, aim: Aim) -> list[tuple[float, float]]:
    """Devices and steps of the best, by trying every configuration of every size."""
    setting, limit, learned = setting_of(cluster, ask), limit_of(cluster, ask), published()
    scales = learned.scales(setting.device.name, setting)
    found: list[tuple[float, float, float, Choice]] = []
    for devices in sizes(CLUSTER, ask):
        request = requested(cluster, ask.on(devices))
        if not list(meshes(outline, request)):
            continue
        g = exhaustive(outline, request, setting, safe(limit), 4 * ask.most, scales).grid
        choices = unlike(described(outline, g, setting, ask, limit, learned))
        found += [(aim.value(devices, one.step), one.step, one.memory, one) for one in choices]
    kept = sorted((row for row in found if math.isfinite(row[0])), key=lambda row: row[:3])[: ask.most]
    return [(one.devices, one.step) for *_, one in kept]


@given(
    st.sampled_from([DENSE, MIXED]), st.sampled_from(["time", "per-device", "cost", "devices"]), st.none() | GOODPUTS,
    st.floats(4e9, 12e9), st.floats(0.5, 20), st.integers(1, 6), st.sampled_from([0, 3]),
)  # fmt: skip
@settings(deadline=None, max_examples=12)
def test_the_best_of_all_sizes_are_those_of_trying_everything(
    outline: Outline, name: str, goodput: Goodput | None, room: float, hours: float, most: int, fewest: int
) -> None:
    ask = replace(ASK, memory=room, most=most, fewest=3 if name == "time" else fewest)
    aim = aim_of(name, Terms(ask.tokens, 2.0, 10**10, hours, goodput))
    answer = best(outline, CLUSTER, ask, aim, what_if=False)
    assert [(one.devices, one.step) for one in answer.choices] == everything(outline, CLUSTER, ask, aim)


def test_sizes_of_a_range_are_powers_of_two_whole_nodes_and_its_ends() -> None:
    assert sizes(CLUSTER, replace(ASK, devices=64, fewest=3)) == [3, 4, 8, 16, 24, 32, 40, 48, 56, 64]
    assert sizes(CLUSTER, replace(ASK, devices=30, fewest=9)) == [9, 16, 24, 30]
    assert sizes(CLUSTER, replace(ASK, devices=12)) == [3, 6, 12]
    with pytest.raises(UserError, match="8 to 1024 devices are 128 sizes, and 64 at most are searched"):
        sizes(CLUSTER, replace(ASK, devices=1024, fewest=8))
    with pytest.raises(UserError, match="h100-8x8 has 64 devices, and 72 are asked for"):
        best(DENSE, CLUSTER, replace(ASK, devices=72, fewest=8), aim_of("time", Terms(ASK.tokens)))
    with pytest.raises(UserError, match="give --gpus a number, and no range"):
        plan(DENSE, CLUSTER, replace(ASK, fewest=4))


def test_a_range_of_devices_is_ranked_by_the_objective() -> None:
    ask = replace(ASK, devices=24, fewest=8, memory=0.0, most=4)
    quick = best(DENSE, CLUSTER, ask, aim_of("time", Terms(ask.tokens)), what_if=False)
    assert quick.several
    assert quick.choices[0].devices == 24
    each = best(DENSE, CLUSTER, ask, aim_of("per-device", Terms(ask.tokens)), what_if=False)
    assert each.choices[0].devices == 8
    assert [one.devices for one in by_size(DENSE, CLUSTER, ask)] == [24, 16, 8]
    found = fronts(DENSE, CLUSTER, ask, Terms(ask.tokens), quick.choices[0])
    assert {one.devices for one in found.memory} == {24}
    assert [one.devices for one in found.sizes] == [24, 16, 8]


def test_where_no_size_has_a_layout_the_largest_is_named() -> None:
    with pytest.raises(UserError, match="37 devices and 48 samples of 2048 tokens have no legal layout"):
        best(DENSE, CLUSTER, replace(ASK, devices=37, fewest=37), aim_of("time", Terms(ASK.tokens)))


def test_failures_that_leave_no_time_are_said() -> None:
    always = Terms(ASK.tokens, goodput=Goodput(1e4, 10, 1e6))
    for ask in (ASK, replace(ASK, fewest=4)):
        found = best(DENSE, CLUSTER, ask, aim_of("per-device", always), what_if=False)
        assert not found.choices
        assert found.missed == "devices of h100-8x8 fail so often that no part of it ever gets anything done"
        assert [title for title, *_ in tables(found)] == ["Nothing is ever trained"]


def largest_first(found: list[int], _: Aim) -> list[int]:
    """Not the order in which sizes are searched for this objective."""
    return sorted(found, reverse=True)


def test_a_longest_step_that_is_too_short_loses_the_best(monkeypatch: pytest.MonkeyPatch) -> None:
    """A planted mistake: sizes are given up too early, and the comparison above would show it."""
    short = replace(objective("per-device"), longest=lambda terms, devices, bar: 0.05 * bar * terms.tokens / devices)
    ask = replace(ASK, devices=64, memory=0.0, most=1)
    terms = Terms(ask.tokens)
    right = best(DENSE, CLUSTER, ask, aim_of("per-device", terms), what_if=False).choices
    monkeypatch.setattr(by_device_count, "in_order", largest_first)
    turned = best(DENSE, CLUSTER, ask, aim_of("per-device", terms), what_if=False).choices
    wrong = best(DENSE, CLUSTER, ask, Aim(short, terms), what_if=False).choices
    assert turned[0].step == right[0].step
    assert wrong[0].devices != right[0].devices


def test_the_fewest_devices_are_those_of_the_budget() -> None:
    ask = replace(ASK, memory=0.0, devices=64)
    for hours in (1.0, 3.0, 8.0):
        budget = Budget(10**11, hours)
        least = fewest(durations(DENSE, CLUSTER, ask, budget), budget)
        aim = aim_of("devices", Terms(ask.tokens, training=10**11, hours=hours))
        answer = best(DENSE, CLUSTER, ask, aim, what_if=False)
        assert [one.devices for one in answer.choices[:1]] == ([least.devices] if least else [])
        assert (answer.missed == "") == (least is not None)
    assert (
        "in 0.001 hours: the quickest plan takes"
        in best(
            DENSE, CLUSTER, ask, aim_of("devices", Terms(ask.tokens, training=10**11, hours=0.001)), what_if=False
        ).missed
    )


def test_failures_make_many_devices_cost_more() -> None:
    ask = replace(ASK, memory=0.0, devices=64)
    goodput = Goodput(1e-2, 60, 600)
    whole, failing = (
        [one.hours for one in durations(DENSE, CLUSTER, ask, Budget(10**11, goodput=failures))]
        for failures in (None, goodput)
    )
    assert [a * goodput.share(n) for a, n in zip(failing, reversed(sizes(CLUSTER, ask)), strict=True)] == pytest.approx(
        whole
    )


# --------------------------------------------------------------------------------------------------------------- fronts
POINTS = st.lists(st.tuples(st.integers(0, 8), st.integers(0, 8)), max_size=30)


def dominates(one: Any, other: Any) -> bool:
    """Not more in either, and less in one."""
    return bool((one <= other).all() and (one < other).any())


@given(POINTS)
def test_no_member_of_a_front_is_dominated_and_every_other_is(drawn: list[tuple[int, int]]) -> None:
    points = np.array(drawn, dtype=float).reshape(-1, 2)
    on = front(points)
    members = points[on]
    assert not any(dominates(a, b) for a in points for b in members)
    assert len({tuple(one) for one in members.tolist()}) == len(members)
    for one in points[~on]:
        assert any(dominates(a, one) or (a == one).all() for a in members)


@given(
    st.sampled_from([DENSE, MIXED]), st.sampled_from([1, 4, 12]), st.sampled_from([16, 48]),
    st.floats(0.2, 4.0), SCALES, st.floats(1.0, 3.0),
)  # fmt: skip
@settings(deadline=None, max_examples=20)
def test_the_front_of_time_and_memory_is_that_of_everything(
    outline: Outline, devices: int, batch: int, room: float, scales: dict[str, float] | None, reach: float
) -> None:
    names = tuple(one.name for one in SCHEDULES)
    request = Request(devices, batch, 2048, schedules=names, able=Able(uneven=0))
    limit = 3e9 + room * 2e9
    branches = [of_mesh(outline, request, mesh) for mesh in meshes(outline, request)]
    if not branches:
        return
    g = memory_front(outline, request, SETTING, limit, scales, reach)
    points = np.stack([scaled(seconds(outline, g, SETTING), scales), memory(outline, g, SETTING).device], axis=1)
    ladder = request.able.ladder
    assert ladder is not None
    every = joined(branches)
    every = ladder.coarse.all_of(outline, every, is_free(every))
    every = joined([every, search(outline, request, SETTING, limit, 1, scales).grid])
    step, need = scaled(seconds(outline, every, SETTING), scales), memory(outline, every, SETTING).device
    step, need = step[need <= limit], need[need <= limit]
    if not len(step):
        assert not len(g)
        return
    near = step <= reach * step.min()
    right = np.stack([step[near], need[near]], axis=1)
    right = right[front(right)]
    assert points.tolist() == right[np.argsort(right[:, 0])].tolist()


def test_both_fronts_of_a_question() -> None:
    ask = replace(ASK, memory=0.0)
    found = fronts(DENSE, CLUSTER, ask, Terms(ask.tokens, 2.0))
    steps = [one.step for one in found.memory]
    assert steps == sorted(steps)
    assert [one.memory for one in found.memory] == sorted((one.memory for one in found.memory), reverse=True)
    assert steps[-1] <= REACH * steps[0]
    first = best(DENSE, CLUSTER, ask, aim_of("time", Terms(ask.tokens)), what_if=False).choices[0]
    assert fronts(DENSE, CLUSTER, ask, Terms(ask.tokens, 2.0), first) == found
    places = found.sizes
    assert [one.devices for one in places] == [one.devices for one in by_size(DENSE, CLUSTER, ask) if one.choice]
    for one in places:
        better = [a for a in places if a.rate >= one.rate and (a.cost or 0) <= (one.cost or 0) and a != one]
        assert one.on_front == (not better)
        assert one.cost == pytest.approx(2.0 * one.devices / 3600 / one.rate * 1e6)
    nothing = fronts(DENSE, CLUSTER, replace(ask, memory=1e8), Terms(ask.tokens))
    assert nothing.memory == nothing.sizes == ()
