"""A rank is killed: how long until the next step, what is lost, what snapshots cost; torchrun's restart beside it.

    killed    the quickstart's model on four ranks; a drawn one is killed within a step, again and again, and the run is
              compared with the one that nobody disturbed
    cost      the same run with snapshots into memory and without, in turns
    nodes     the same on two nodes, a launcher on each: a rank of the second is killed; that node is lost
    goodput   the same model while ranks are killed at any time, half a minute apart in the mean: how much of the time
              is progress, beside what the planner's model says of it
    torchrun  `torchrun --max-restarts` with `tangram train --resume`, one of whose workers is killed

`--only` takes one of these groups. `--repeats`: of how many kills, turns, or, for goodput, minutes.
"""

from __future__ import annotations

import re
import statistics
import tempfile
from collections.abc import Callable, Iterable, Mapping
from itertools import pairwise
from pathlib import Path

from bench._faults import nodes, torchrun
from bench._faults.killed import RANKS, Watched, alone, job_of, kept_going, plan_of
from tangram.errors import UserError
from tangram.hardware.measuring.measure import Row
from tangram.planner.cost.goodput import Goodput

APART = 30.0
"""Seconds from one kill to the next in the mean, for what the goodput is measured with."""


def killed(quick: bool, folder: Path, repeats: int | None = None) -> Iterable[Row]:
    """Of a run that is killed and one that is not."""
    kills = repeats or (3 if quick else 20)
    plan = plan_of(folder, steps=6 * kills + 10, every=20)
    undisturbed = Watched()
    before = alone(job_of(plan, folder / "undisturbed"), undisturbed)
    seen = Watched(steps_of_kills=frozenset(range(6, 6 * kills + 1, 6)), seed=1)
    report = kept_going(1, restarts=kills)(job_of(plan, folder / "killed"), seen)
    count = len(seen.kills)
    yield Row("SIGKILL of one of 4 ranks, to the next new step: median", "s", statistics.median(seen.back), target=4.0)
    yield Row("the same, the longest", "s", max(seen.back), target=8.0)
    yield Row(f"recovered of {count} kills", "share", len(seen.recovered) / count, target=1.0, better="higher")
    yield Row("of them from memory", "share", sum(r.memory for r in seen.recovered) / count, better="higher")
    yield Row("steps done again after a kill, at most", "steps", max(r.lost_steps for r in seen.recovered), target=1)
    off = max(abs(loss - undisturbed.losses[step]) for step, loss in seen.losses.items())
    yield Row("losses beside the undisturbed run, largest difference", "nats", off, target=1e-5)
    yield Row(
        "steps of the undisturbed run that are missing",
        "steps",
        len(undisturbed.losses.keys() - seen.losses.keys()),
        target=0,
    )
    yield Row("tokens trained on, beside it", "tokens", abs(report.trained.tokens - before.trained.tokens), target=0)


def cost(quick: bool, folder: Path, repeats: int | None = None) -> Iterable[Row]:
    """Whole runs in turns; the ratio of medians of a step's time."""
    plan = plan_of(folder, steps=30 if quick else 60, every=0)
    ways = {
        "as often as it chooses": kept_going(None),
        "every step": kept_going(1),
        "every 10 steps": kept_going(10),
        "none": kept_going(0),
    }
    found: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(repeats or (2 if quick else 5)):
        for name, run in ways.items():
            seen = Watched()
            run(job_of(plan, folder / f"{name.replace(' ', '-')}-{turn}"), seen)
            found[name].append(statistics.median(seen.step_seconds()))
    base = statistics.median(found["none"])
    for name, target in (("as often as it chooses", 1.03), ("every step", 1.03), ("every 10 steps", 1.01)):
        pairs = [ours / theirs for ours, theirs in zip(found[name], found["none"], strict=True)]
        yield Row(
            f"a step with a snapshot {name}, beside one without", "ratio", statistics.median(pairs), target=target
        )
    yield Row("a step without", "s", base)


def several(quick: bool, folder: Path, repeats: int | None = None) -> Iterable[Row]:
    """Of two nodes."""
    plan = plan_of(folder, steps=60, every=0)
    undisturbed = Watched()
    alone(job_of(plan, folder / "undisturbed"), undisturbed)
    turns = repeats or (1 if quick else 5)
    ranks = [nodes.rank_lost(plan, folder / f"rank-{turn}", 10 + 3 * turn) for turn in range(turns)]
    gone = [nodes.node_lost(plan, folder / f"node-{turn}", 10 + 3 * turn) for turn in range(turns)]
    seconds = statistics.median(one.seconds for one in ranks)
    yield Row("two nodes: SIGKILL of a rank of the second, to the next new step: median", "s", seconds, target=4.0)
    yield Row("two nodes: recovered", "share", sum(one.good for one in ranks) / turns, target=1.0, better="higher")
    yield Row("two nodes: steps done again, at most", "steps", max(one.again for one in ranks), target=1)
    yield Row("a node lost with its memory: started again, gone on", "share", sum(one.good for one in gone) / turns)
    yield Row("a node lost: steps done again, at most", "steps", max(one.again for one in gone))
    yield Row("a node lost: until the other launcher has ended", "s", statistics.median(one.seconds for one in gone))
    off = [abs(loss - undisturbed.losses[step]) for one in (*ranks, *gone) for step, loss in one.losses.items()]
    yield Row("two nodes: losses beside the undisturbed run, largest difference", "nats", max(off), target=1e-5)


def goodput(quick: bool, folder: Path, repeats: int | None = None) -> Iterable[Row]:
    """Of a run whose ranks are killed at any time; by the model with what its first half has shown of restarts."""
    seconds = 60 * (repeats or (2 if quick else 20))
    seen = Watched(apart=APART, seed=2)
    run = kept_going(None, restarts=10_000)  # as many as come: an hour has more than the 100 of `tangram launch`
    run(job_of(plan_of(folder, steps=100_000, every=0, seconds=seconds), folder / "killed"), seen)
    begun, ended = min(seen.times.values()), max(seen.times.values())
    half = (begun + ended) / 2
    later = sum(at > half for at in seen.times.values())
    count = sum(at > half for at in seen.kills)
    gaps = [b - a for a, b in pairwise(at for at in sorted(seen.times.values()) if at > half)]
    step = statistics.mean(gap for gap in gaps if gap < 3 * statistics.median(gaps))  # the others are restarts
    first = [back for back, at in zip(seen.back, seen.kills, strict=False) if at <= half]
    told = re.search(r"a snapshot every (?:(\d+) steps|step): one costs (\d+) ms", " ".join(seen.notes))
    every, pause = (int(told[1] or 1), 1e-3 * float(told[2])) if told else (1, 1e-3)
    # As often as they came: of a few that are drawn there may be half or twice as many.
    model = Goodput(3600 * max(count, 1) / (ended - half) / RANKS, max(pause, 1e-3), statistics.mean(first))
    expected, share = 100 * model.share(RANKS, every * step), 100 * later * step / (ended - half)
    what = f"ranks killed {len(seen.kills)} times in {ended - begun:.0f} s, a step {1e3 * step:.0f} ms"
    good = sum(kill < ended for kill in seen.kills) / len(seen.kills)
    yield Row(f"{what}: share of kills after which a new step came", "share", good, target=1.0, better="higher")
    yield Row(f"of the second half of them, with {count} kills, progress", "%", share, better="higher")
    yield Row("the same by the planner's model, with as many kills and the restarts of the first half", "%", expected)
    yield Row("apart", "points", abs(share - expected), target=3)


def restarted(quick: bool, folder: Path, repeats: int | None = None) -> Iterable[Row]:
    """torchrun's own."""
    plan = plan_of(folder, steps=2000, every=10)
    turns = repeats or (1 if quick else 5)
    found = [torchrun.seconds(plan, folder / f"torchrun-{turn}") for turn in range(turns)]
    good = [one for one in found if one is not None]
    yield Row(f"torchrun: recovered of {len(found)} kills", "share", len(good) / len(found), better="higher")
    if good:
        yield Row("torchrun: SIGKILL of a worker to the next step, median of those", "s", statistics.median(good))


GROUPS: Mapping[str, Callable[[bool, Path, int | None], Iterable[Row]]] = {
    "killed": killed,
    "cost": cost,
    "nodes": several,
    "goodput": goodput,
    "torchrun": restarted,
}


def rows(quick: bool, only: tuple[str, ...] | None = None, repeats: int | None = None) -> Iterable[Row]:
    """The figures; `quick` takes fewer turns."""
    for name in only or tuple(GROUPS):
        if name not in GROUPS:
            raise UserError(f"the bench of faults has no group {name!r}: it has {', '.join(GROUPS)}")
        with tempfile.TemporaryDirectory() as folder:
            yield from GROUPS[name](quick, Path(folder), repeats)
