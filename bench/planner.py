"""The planner on published runs that it has not seen: step time, memory, ranking, intervals, and how fast it is.

Each run is predicted from what runs of other sources and of models of other names have taught. `--runs`, `--sets` and
`--members` take any files with the columns of data/published; what is learned from stays data/published.

`--only`: "time", "ranking", "memory", "speed", and "here", which runs plans on this machine: some twenty minutes, and
left out where runs are given.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from bench._planner import memories, predict, ranking, times
from bench._planner.predict import HeldOut, predictable
from bench._planner.rows import Case, cases, read
from bench._planner.times import GroupError
from tangram.errors import UserError
from tangram.hardware.catalogue.devices import device
from tangram.hardware.measuring.measure import Row
from tangram.models.outlines.outlined import outlined
from tangram.planner.cost.calibration import Run
from tangram.planner.cost.memory import memory
from tangram.planner.cost.step_time import seconds
from tangram.planner.legality.enumerate import Request, meshes, of_mesh
from tangram.planner.search.branch_and_bound import search
from tangram.planner.space.framework_profiles import framework
from tangram.planner.space.schedule_formulas import SCHEDULES
from tangram.planner.space.setting import Setting

PUBLISHED = Path(__file__).parents[1] / "data" / "published"
GROUPS = ("time", "ranking", "memory", "speed")
HERE = "here"


def rows(
    quick: bool,
    only: tuple[str, ...] | None = None,
    runs: Path | None = None,
    sets: Path | None = None,
    members: Path | None = None,
) -> Iterator[Row]:
    """The error card; `quick`: fewer draws."""
    wanted = only or (GROUPS if runs else (*GROUPS, HERE))
    if unknown := sorted({*wanted} - {*GROUPS, HERE}):
        raise UserError(f"--only {unknown[0]}: give one of {', '.join((*GROUPS, HERE))}")
    given = None if runs is None else read(runs)  # all tables before the first prediction: a wrong one shows at once
    origin = ranking.sources(sets or PUBLISHED / "ranking_sets.csv")
    listed = ranking.members(members or PUBLISHED / "ranking_set_members.csv")
    taught = list(cases(read(PUBLISHED / "runs.csv")))
    asked = taught if given is None else list(cases(given))
    if {"time", "ranking"} & set(wanted):
        known = HeldOut(predictable(taught))
        timed = predictable(asked)
        if "time" in wanted:
            yield from _times(timed, known, 4 if quick else times.DRAWS)
            if given is not None:
                yield from _left_out(given)
        if "ranking" in wanted:
            yield from _ranking(timed, known, origin, listed)
    if "memory" in wanted:
        yield from memories.rows(asked, taught)
    if "speed" in wanted:
        yield from _speed(quick)
    if HERE in wanted:
        from bench._planner import here  # loads torch and transformers

        yield from here.rows(quick)


def _times(timed: list[Case], known: HeldOut, draws: int) -> Iterator[Row]:
    said = predict.runs(timed)
    found = times.errors(timed, said, known, draws)
    for one in found:
        name = "/".join(one.group)
        yield Row(
            f"step time, zero-shot, {name} ({one.runs} runs; nothing learned {one.physics:.3f}, 90th percentile "
            f"{one.worst:.3f}, in the interval {one.covered:.2f})",
            "median error", one.zero, peers={"constant MFU": one.constant},
            target=one.constant if one.counts else None, better="lower",
        )  # fmt: skip
        if not np.isnan(one.few):
            yield Row(f"step time after {times.FEW} runs, {name}", "median error", one.few, better="lower")
    large = [one for one in found if one.counts]
    if large:
        yield from _groups(large)
    if timed:
        yield from _intervals(timed, said, known)


def _left_out(given: Sequence[Mapping[str, str]]) -> Iterator[Row]:
    """Rows that have a step and cannot be predicted, by why."""
    reasons = Counter(why for row in given if (why := predict.why_left_out(row)))
    for why, count in sorted(reasons.items()):
        yield Row(f"runs of step time that are left out: {why}", "runs", count, better="lower")


def _groups(large: list[GroupError]) -> Iterator[Row]:
    """Of those that count, together."""
    median = float(np.median([one.zero for one in large]))
    yield Row(f"step time, zero-shot: median of {len(large)} groups of {times.SMALLEST} runs or more", "median error",
              median, target=0.15, better="lower")  # fmt: skip
    yield Row("the same with nothing learned, curves of kernels alone", "median error",
              float(np.median([one.physics for one in large])), better="lower")  # fmt: skip
    below = sum(one.zero < one.constant for one in large) / len(large)
    yield Row("groups below the constant MFU of the same other runs", "share", below, target=1.0, better="higher")
    few = float(np.median([one.few for one in large]))
    yield Row(f"step time after {times.FEW} runs: median of the groups", "median error", few, target=0.08,
              better="lower")  # fmt: skip


def _intervals(timed: list[Case], said: list[Run], known: HeldOut) -> Iterator[Row]:
    """How many runs lie where 90 of 100 are meant to, and how far their ends are from the prediction."""
    zero, sure = known.predict(timed, said)
    within = times.covered(timed, zero, sure)
    share = float(within.mean())
    yield Row(f"runs in their 90 % interval: {share:.3f}; how far from 0.9", "share", abs(share - 0.9),
              target=0.05, better="lower")  # fmt: skip
    sources = times.together([one.source for one in timed])
    by = float(np.mean([within[at].mean() for at in sources.values()]))
    yield Row(f"the same, mean of {len(sources)} sources: {by:.3f}; how far from 0.9", "share", abs(by - 0.9),
              target=0.05, better="lower")  # fmt: skip
    large = [at for at in times.together([one.group for one in timed]).values() if len(at) >= times.SMALLEST]
    if large:
        held = float(np.mean([0.85 <= within[at].mean() <= 0.95 for at in large]))
        yield Row(f"the same, of {len(large)} groups those that hold 85 to 95 of 100 runs", "share", held, target=1.0,
                  better="higher")  # fmt: skip
        wide = float(np.mean([sure[at].mean() for at in large]))
        posterior = known.posterior(timed, said)
        own = float(np.mean([posterior[at].mean() for at in large]))
        yield Row(f"the same, logarithm of an interval's end over the prediction, mean of these groups; by the "
                  f"posterior alone {own:.3f}", "", wide, better="lower")  # fmt: skip


def _ranking(
    timed: list[Case], known: HeldOut, origin: dict[str, str], listed: dict[str, dict[str, float]]
) -> Iterator[Row]:
    zero, _ = known.predict(timed, predict.runs(timed))
    predicted = {one.row["row"]: float(step) for one, step in zip(timed, zero, strict=True)}
    found = ranking.scores(listed, origin, predicted)
    groups: dict[str, list[ranking.SetScore]] = {}
    for one in found:
        groups.setdefault("vTrain sets" if one.source.startswith("vtrain") else one.source, []).append(one)
    for name, of in sorted(groups.items()):
        vtrain = name == "vTrain sets"
        said = f"{name} ({len(of)})"
        yield Row(f"ranking, {said}: mean Spearman", "", float(np.mean([one.spearman for one in of])),
                  target=0.85 if vtrain else 0.6, better="higher")  # fmt: skip
        first, third = float(np.median([one.first for one in of])), float(np.mean([one.third for one in of]))
        yield Row(f"ranking, {said}: median regret of the first choice", "share", first,
                  target=0.03 if vtrain else None, better="lower")  # fmt: skip
        yield Row(f"ranking, {said}: mean regret of the best of the first three", "share", third,
                  target=0.03 if vtrain else 0.05, better="lower")  # fmt: skip


def _speed(quick: bool) -> Iterator[Row]:
    outline, request = outlined("llama-3-70b"), Request(64, 512, 8192)
    setting = Setting(device("h100"), framework("megatron-core"))
    grids = [of_mesh(outline, request, mesh) for mesh in meshes(outline, request)]
    every = max(grids, key=len)
    took: list[float] = []
    for _ in range(1 if quick else 5):
        start = time.perf_counter()
        seconds(outline, every, setting)
        memory(outline, every, setting)
        took.append(time.perf_counter() - start)
    rate = len(every) / float(np.median(took))
    yield Row("configurations of Llama-3-70B a second, memory and time", "1/s", rate, target=1e5, better="higher")
    sizes = ((2048, 15360, 10.0),) if quick else ((2048, 15360, 10.0), (100_000, 100_000, 60.0))
    for devices, batch, limit in sizes:
        request = Request(devices, batch, 4096, schedules=tuple(one.name for one in SCHEDULES), node=setting.node)
        start = time.perf_counter()
        found = search(outlined("deepseek-v3"), request, setting, 0.9 * 80e9)
        spent = time.perf_counter() - start
        yield Row(f"DeepSeek-V3 on {devices:,} H100: search ({found.looked:,} configurations looked at)", "s", spent,
                  target=limit, better="lower")  # fmt: skip
