"""Weights that are not what they should be, links that are slow, and calls held against a plan: each named, on traces
that no rank has made."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from bench._tracing.synthetic import Cluster, Planted, drawn, names, step_without, write
from tangram.tracing import recorder as recorder_module
from tangram.tracing.blame import findings
from tangram.tracing.conformance import Deviation, Expected, Key
from tangram.tracing.files.format import AXES_AT_MOST, OPS, Phase, file_of
from tangram.tracing.files.ring import TraceFiles
from tangram.tracing.files.stacks import rank_words
from tangram.tracing.planned import CallKind, CallsOfKind, PlanCheck, PlannedCall
from tangram.tracing.reading import read
from tangram.tracing.recorder import Recorder
from tangram.tracing.show.report import report
from tangram.tracing.sites import Site
from tangram.tracing.slow import change, median_of_others, slow_ranks, stands_out
from tangram.tracing.weights import WeightGroup, looks_finite, sums_of
from tangram.training.parallel.due_calls import runs_in_order

GATHER, REDUCE = OPS.index("all-gather"), OPS.index("reduce-scatter")


def rank_of(
    folder: Path,
    rank: int,
    weight: torch.Tensor,
    axes: tuple[str, ...] = ("tp",),
    every: int = 2,
    *,
    in_backward: bool = False,
) -> Recorder:
    """A rank of dp=4 tp=2 that has one layer."""
    recorder = Recorder(TraceFiles(folder, b"r" * 16, rank, 8), {"mesh": "dp=4 tp=2", "stages": []}, every)
    recorder.weights([WeightGroup("layers.0", axes, lambda: [weight])], in_backward=in_backward)
    return recorder


def steps(recorder: Recorder, weight: torch.Tensor, count: int, flip: int = 0, wrong_update: int = 0) -> None:
    """Steps with an update each; one bit flips in the forward of a step, or an update goes wrong."""
    for step in range(1, count + 1):
        recorder.step(step)
        recorder.phase(Phase.FORWARD)
        if step == flip:
            weight.view(torch.int16)[3] ^= 1 << 5
        recorder.phase(Phase.OPTIMISER)
        weight += 0.5 if step != wrong_update else 0.75
        recorder.phase(Phase.OTHER)
    recorder.step(count + 1)


@pytest.mark.parametrize(("excess", "slow"), [
    ([9.6, 1.1, 7.9, 2.0, 10.5, 5.3, 1.4], False),  # of a clean run of four ranks on two busy cores, in milliseconds
    ([52.1, 44.9, 61.0, 49.7, 50.2, 55.8, 47.3], True),
    ([1.2] * 200, True),
])  # fmt: skip
def test_a_rank_is_slow_by_more_than_its_steps_differ(excess: list[float], slow: bool) -> None:
    assert stands_out(np.array(excess)) is slow


def test_a_few_steps_for_which_others_take_the_cores_are_no_change_for_good() -> None:
    # Of a clean run of two ranks on two busy cores: how much longer one of them took, in microseconds.
    excess = [-86e3, 10e3, 31e3, 22e3, -14e3, -9e3, -31e3, -25e3, 37e3, 72e3, 57e3, 105e3, 82e3, 77e3]
    assert change(np.array(excess)) == 0
    assert change(np.array([*excess, 75e3, 80e3, 91e3])) == 9


@pytest.mark.parametrize("flip", [0, 5])
def test_weights_that_a_backward_updates_are_looked_at_before_it(tmp_path: Path, flip: int) -> None:
    weight = torch.ones(7)
    recorder = rank_of(tmp_path, 3, weight, in_backward=True)
    for step in range(1, 9):
        recorder.step(step)
        recorder.phase(Phase.FORWARD)
        if step == flip:
            weight.view(torch.int32)[3] ^= 1 << 5
        recorder.phase(Phase.BACKWARD)
        weight += 0.5
        recorder.phase(Phase.OPTIMISER)
        weight += 0.5  # as of gradients that ranks add up
        recorder.phase(Phase.OTHER)
    assert [one.step for one in findings(read(tmp_path))] == [5] * bool(flip)
    assert [*read(tmp_path)[0].sums] == [2, 4, 6, 8]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_bit_that_flips_between_two_updates_is_found_by_the_rank_itself(tmp_path: Path, dtype: torch.dtype) -> None:
    weight = torch.ones(7, dtype=dtype)
    recorder = rank_of(tmp_path, 3, weight)
    steps(recorder, weight, 8, flip=5)
    (one,) = findings(read(tmp_path))
    assert (one.kind, one.ranks, one.step, one.layer, one.axes) == ("corrupted", (3,), 5, "layers.0", "")
    assert "had other weights in layers.0 before the update of step 5 than after that of 4" in one.text


def test_any_bit_changes_the_sum() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float64, torch.uint8):
        x = torch.arange(9).to(dtype)
        bits = x.view(torch.uint8)
        group = [WeightGroup("", (), lambda x=x: [x]), WeightGroup("", (), list)]
        before = sums_of(group)
        assert before[1] == 0
        for byte in range(len(bits)):
            for bit in range(8):
                bits[byte] ^= 1 << bit
                assert sums_of(group) != before
                bits[byte] ^= 1 << bit
        assert sums_of(group) == before


def test_weights_that_nothing_changes_between_updates_are_left_in_peace(tmp_path: Path) -> None:
    for rank in range(4):
        weight = torch.full((5,), float(rank % 2))
        steps(rank_of(tmp_path, rank, weight), weight, 9)
    traces = read(tmp_path)
    assert sorted(traces[0].sums) == [2, 4, 6, 8]
    assert findings(traces) == []


@pytest.mark.parametrize(
    ("ranks", "blamed", "words"),
    [
        ((0, 2, 4, 6, 1), (4,), "rank 4 has other weights in layers.0 after step 6 than ranks 0, 2, 6"),
        (
            (4, 6, 1),
            (4, 6),
            "ranks 4, 6 have other weights in layers.0 after step 6 than each other, and which is right",
        ),
        ((4, 1), (), ""),
    ],
)
def test_of_replicas_that_differ_the_one_against_most_is_named(
    ranks: Sequence[int], blamed: tuple[int, ...], words: str, tmp_path: Path
) -> None:
    for rank in ranks:
        weight = torch.full((5,), float(rank % 2))
        steps(rank_of(tmp_path, rank, weight), weight, 8, wrong_update=5 * (rank == 4))
    found = [one for one in findings(read(tmp_path)) if one.kind == "replicas"]
    assert [one.ranks for one in found] == ([blamed] if blamed else [])
    assert not found or found[0].text.startswith(words), found


@pytest.mark.parametrize("seed", [0, 1, 2, 3, 4, 6, 7])
def test_what_is_planted_in_a_synthetic_trace_is_named_with_its_axis(seed: int, tmp_path: Path) -> None:
    cluster = Cluster(4, 8, 4)
    planted = drawn(cluster, seed)
    write(tmp_path / "trace", cluster, planted, seed)
    one, *more = report(tmp_path).findings
    assert not more
    assert names(one, planted), one
    assert not names(one, replace(planted, rank=planted.rank ^ 67)), "another rank is none of those"
    assert planted.kind != "stopped" or one.axes in ("tp", "pp")


SHAPES = [Cluster(1, 8, 2), Cluster(4, 8, 4), Cluster(8, 2, 2)]


@pytest.mark.parametrize(("kind", "factor"), [("slow", 1.06), ("slow", 1.4), ("slow host", 1.08), ("slow host", 1.4)])
@pytest.mark.parametrize("cluster", SHAPES, ids=lambda one: one.mesh)
def test_a_step_without_who_is_slow_is_that_of_the_run_without_the_fault(
    cluster: Cluster, kind: str, factor: float, tmp_path: Path
) -> None:
    planted = Planted(kind, 13, "tp", 20, factor)
    write(tmp_path / "trace", cluster, planted, 5)
    made = report(tmp_path)
    if kind == "slow host" and (cluster.stages == 8 or (cluster.ranks == 16 and factor < 1.2)):
        assert made.findings == (), "a host that has whole stages, or half of all ranks and is hardly slower"
        return
    (one,) = made.findings
    assert one.ranks == planted.blamed
    assert one.text.startswith("host node-00001, with ranks 8 to 15, is slow" if len(one.ranks) > 1 else "rank 13 is")
    without, now = 1e3 * step_without(cluster, planted, 5), one.step_ms
    assert one.without_ms == pytest.approx(without, rel=2e-3)
    assert f"would take about {one.without_ms:,.0f} ms instead of {now:,.0f}" in one.text
    assert now * (1 - made.slow_share) == pytest.approx(without, rel=2e-3)


def test_of_two_slow_ranks_the_second_is_taken_away_with_the_first(tmp_path: Path) -> None:
    """Either alone would leave the step as long as it is."""
    cluster, of = Cluster(1, 8, 2), Planted("slow", 3, "tp", 1, 1.4)
    write(tmp_path / "trace", cluster, of, 2)
    write(tmp_path / "other", cluster, replace(of, rank=9, factor=1.3), 2)
    for kind in ("ring", "names.jsonl"):
        (tmp_path / "other" / file_of(9, kind)).replace(tmp_path / "trace" / file_of(9, kind))
    made = report(tmp_path)
    assert [one.ranks for one in made.findings] == [(3,), (9,)]
    first, second = made.findings
    assert "Without it a step" in first.text
    assert "Without it and those above a step" in second.text
    assert first.step_ms > first.without_ms > second.without_ms
    assert second.without_ms == pytest.approx(1e3 * step_without(cluster, of, 2), rel=5e-3)


def test_a_rank_that_others_do_not_wait_for_is_not_slow(tmp_path: Path) -> None:
    """As on a machine that others use: in each step some rank is kept from its work for longer than this one is."""
    rng = np.random.default_rng(1)
    for rank in range(4):
        recorder = Recorder(TraceFiles(tmp_path, b"r" * 16, rank, 4), {"mesh": "dp=4", "stages": []})
        recorder.group("0", "dp", range(4))
        for step in range(20):
            own = 2700 + (1800 if rank == 1 else 9000 * (step % 3 == (0, -1, 1, 2)[rank])) + int(rng.integers(100))
            times = [own * (phase is Phase.FORWARD) for phase in Phase]
            row = (step + 1, 0, 1, step * 10**9, 19_000_000, 1)
            recorder.files.row(step, (*row, *times, *([0] * AXES_AT_MOST), 1800, 2000))
    assert [one.rank for one in slow_ranks(read(tmp_path))] == [1]
    assert findings(read(tmp_path)) == []


@pytest.mark.parametrize("factor", [1.0, 1.015])
def test_ranks_that_hardly_differ_are_not_slow(factor: float, tmp_path: Path) -> None:
    for seed, cluster in enumerate(SHAPES):
        write(tmp_path / str(seed) / "trace", cluster, Planted("slow", 0, "tp", 1, factor), seed)
        assert report(tmp_path / str(seed)).findings == ()


@pytest.mark.parametrize("ranks", [2, 3, 4, 5, 8])
def test_each_rank_is_held_against_the_median_of_all_others(ranks: int) -> None:
    values = np.random.default_rng(ranks).random((ranks, 6))
    values[:, 2] = 1.0  # equal ones
    expected = np.stack([np.median(np.delete(values, i, 0), 0) for i in range(ranks)])
    assert np.allclose(median_of_others(values), expected)


@pytest.mark.parametrize("late", ["the link", "in turn", "short of CPU"])
def test_ranks_that_come_late_in_turn_are_no_slow_link(late: str, tmp_path: Path) -> None:
    """Both ranks of a group wait for long in a step, each for the other; or in every call, also where they are kept
    from seeing that it is over."""
    ticks = iter(range(0, 10**15, 1_000_000))  # a clock of milliseconds
    now = [0]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recorder_module, "_now", lambda: now[0])
        recorders = [
            Recorder(TraceFiles(tmp_path, b"r" * 16, r, 4), {"mesh": "dp=2 tp=2", "stages": []}) for r in range(4)
        ]
        groups = [one.group("0", "dp", [rank % 2, rank % 2 + 2]) for rank, one in enumerate(recorders)]
        for one in recorders if late == "short of CPU" else ():
            patch.setattr(one, "_processor", SimpleNamespace(since=lambda: (1_000_000, 60_000_000)))
        for step in range(1, 14):
            for rank, one in enumerate(recorders):
                now[0] = next(ticks) // 1_000_000 * 200_000_000 if rank == 0 else now[0]
                one.step(step)
                one.phase(Phase.FORWARD)
                begun = now[0]
                for call in range(4):
                    number = one.enter(groups[rank], 0, 64, None, -1)
                    since = one.waits(number)
                    waits = rank % 2 and (late != "in turn" or call % 2 == rank // 2)
                    now[0] += 20_000_000 if waits else 100_000
                    one.waited(number, groups[rank], 0, since)
                now[0] = begun
    found = [one.ranks for one in findings(read(tmp_path)) if one.kind == "slow link"]
    assert found == ([(1, 3)] if late == "the link" else [])


# ------------------------------------------------------------ held against a plan


def check(calls: str, ordered: bool = True) -> list[Deviation]:
    """Gathers of layers a, b, c, then the reduction of c, held against a step's calls: "abcR"."""
    gathers = [PlannedCall(64, torch.float32, one, "parameters") for one in "abc"]
    planned = {
        CallKind("dp", GATHER): CallsOfKind(gathers, ordered),
        CallKind("dp", REDUCE): CallsOfKind([PlannedCall(-1, torch.float32)]),
        CallKind("dp tp", GATHER, late=True): CallsOfKind([PlannedCall(8, torch.float64)]),
    }
    plan, found = PlanCheck(planned), list[Deviation | None]()
    plan.begin()
    for one in calls:
        key = Key(0, REDUCE if one == "R" else GATHER, 32 if one.isupper() else 64, torch.float32, -1)
        came = Expected(key, Site("", "" if one == "R" else one.lower(), "train.py:3"), 1, None)
        found.append(plan.came(came, "dp", False, 1))
    found += plan.missing(late=False, step=1, groups=["dp"])
    return [one for one in found if one is not None]


@pytest.mark.parametrize(
    ("calls", "kind", "text"),
    [
        ("abcR", "", ""),
        (
            "acR",
            "skipped",
            "skipped all-gather over dp for parameters in b in step 1, which the plan has before all-gather",
        ),
        (
            "abR",
            "skipped",
            "without all-gather over dp for parameters in c: 1 of 3 such calls of the plan have not come",
        ),
        ("abc", "skipped", "ended the backward of step 1 without reduce-scatter over dp: 1 of 1"),
        ("abccR", "extra", "called all-gather over dp in c (train.py:3) in step 1 once more than the plan does"),
        ("aBcR", "mis-sized", "with 32 bytes of float32 instead of the plan's 64 bytes of float32"),
    ],
)
def test_a_call_that_is_not_the_plans_is_called_what_it_is(calls: str, kind: str, text: str) -> None:
    found = check(calls)
    assert [one.kind for one in found] == [kind] * bool(kind)
    assert not kind or text in found[0].text, found


def called(folder: Path, first: int, planned: bool) -> Recorder:
    """20 steps from `first` on, each of which calls the plan's two gathers, and another number of others."""
    recorder = Recorder(TraceFiles(folder, b"r" * 16, 0, 2), {"mesh": "dp=2", "stages": []})
    group = recorder.group("0", "dp", [0, 1])
    if planned:
        recorder.expect({CallKind("dp", GATHER): CallsOfKind([PlannedCall(64, torch.float32)] * 2)})

    def gather() -> None:
        recorder.enter(group, GATHER, 64, torch.float32, -1)

    for step in range(first, first + 20):
        recorder.step(step)
        recorder.phase(Phase.FORWARD)
        for _ in range(step % 7):
            recorder.enter(group, REDUCE, 16, torch.float32, -1)
        gather()
        gather()
        recorder.phase(Phase.OPTIMISER)
    recorder.step(first + 20)
    return recorder


def test_steps_that_are_never_alike_are_held_against_the_plan_alone(tmp_path: Path) -> None:
    called(tmp_path, 1, planned=True)
    assert findings(read(tmp_path)) == []


def test_a_run_that_resumed_is_learned_from_as_one_that_began(tmp_path: Path) -> None:
    """The steps that count are those of this trace, whatever their numbers."""
    for first in (1, 101):
        called(tmp_path / str(first), first, planned=False)
    begun, resumed = (read(tmp_path / str(first))[0] for first in (1, 101))
    assert [*begun.sequences] == [1, 2, 3]
    assert [*resumed.sequences] == [101, 102, 103]
    assert len(resumed.sites) == len(begun.sites) == 3, "two gathers from two lines, and the others"


def test_where_the_order_is_not_known_any_will_do() -> None:
    assert check("cRab", ordered=False) == []
    assert [one.kind for one in check("cRaa", ordered=False)] == ["mis-sized"]


def test_calls_beside_the_plans_are_left_in_peace_where_others_may_come() -> None:
    """As all-reduces of buffers, before that of the norm."""
    kind = CallKind("dp", GATHER)
    plan = PlanCheck({kind: CallsOfKind([PlannedCall(8, torch.float64)], alone=False)})
    for sizes, missing in (((8,), 0), ((4, 8, 8, 12), 0), ((4,), 1)):
        plan.begin()
        for nbytes in sizes:
            assert (
                plan.came(Expected(Key(0, GATHER, nbytes, torch.float64, -1), Site(), 1, None), "dp", False, 1) is None
            )
        assert len(plan.missing(late=False, step=1, groups=["dp"])) == missing


@pytest.mark.parametrize(
    ("layers", "said", "more", "in_order"),
    [(3, 3, {}, True), (1, 3, {}, False), (3, 3, {"layerdrop": 0.1}, False), (3, None, {}, False)],
    ids=["a decoder", "one layer run thrice", "at random", "nobody says"],
)
def test_layers_that_may_run_otherwise_than_they_stand_are_not_planned(
    layers: int, said: int | None, more: Mapping[str, Any], in_order: bool
) -> None:
    model = torch.nn.Module()
    model.layers = torch.nn.ModuleList(torch.nn.Linear(2, 2) for _ in range(layers))
    model.config = SimpleNamespace(num_hidden_layers=said, **more)
    model.config.get_text_config = lambda: model.config
    assert runs_in_order(model) == in_order
    model.config = None
    assert not runs_in_order(model)


def test_ranks_in_equal_steps_are_said_shortly() -> None:
    assert rank_words(range(1, 42, 8)) == "ranks 1 to 41 in steps of 8"
    assert rank_words([0, 1, 2, 3]) == "ranks 0 to 3"
    assert rank_words([0, 2, 4]) == "ranks 0, 2, 4"
    assert rank_words([0, 2, 4, 7]) == "ranks 0, 2, 4, 7"


@pytest.mark.parametrize(("shape", "at"), [((64, 48), (63, 0)), ((7, 5, 12), (6, 4, 11)), ((3,), (2,))])
def test_a_row_of_numbers_that_are_not_finite_is_seen_and_no_device_is_waited_for(shape: Any, at: Any) -> None:
    good = torch.zeros(shape)
    bad = good.clone()
    bad[at[:-1]] = float("nan")
    assert looks_finite(good)
    assert not looks_finite(bad)
    assert looks_finite(bad.to("meta")), "a number of an accelerator would be waited for at each call"
