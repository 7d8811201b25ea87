"""Jobs with one fault each, drawn by seed, and whether the report names it: the rank, and the cause."""

from __future__ import annotations

import contextlib
import random
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bench._tracing.jobs import LAYERS, SLOW, Case, train
from tangram.tracing.files.format import (
    EVENT_DTYPE,
    EVENTS,
    HEADER,
    HEADER_BYTES,
    LIVE,
    LIVE_AT,
    ROW_DTYPE,
    ROWS,
    file_of,
    ring_bytes,
)
from tangram.tracing.finding import Finding
from tangram.tracing.reading import read
from tangram.tracing.settings import TraceSettings
from tangram.tracing.show.report import report
from tangram.training.run.launch import RankError, run_ranks

HANG = 2.0
MESHES = ((2, 2), (2, 2), (2, 2), (3, 1), (2, 1), (4, 2), (2, 4))
"""Sizes of dp and tp."""
VARIED = 0.25
"""The share of jobs whose rows are as long as each step needs."""
CAUSES: Mapping[str, frozenset[str]] = {
    "skip": frozenset({"skipped", "unlike"}),
    "skip-grad": frozenset({"skipped", "unlike"}),
    "extra": frozenset({"extra", "unlike"}),
    "reorder": frozenset({"skipped", "reordered", "unlike"}),
    "size": frozenset({"mis-sized", "unlike"}),
    "dtype": frozenset({"mis-sized", "unlike"}),
    "group": frozenset({"extra", "skipped", "unlike"}),
    "stop": frozenset({"stopped"}),
    "kill": frozenset({"died"}),
    "sleep": frozenset({"absent"}),
    "slow": frozenset({"slow"}),
    "slow-data": frozenset({"slow"}),
    "slow-disk": frozenset({"slow"}),
    "starved": frozenset({"slow"}),
    "nan": frozenset({"not finite"}),
    "slow-link": frozenset({"slow link"}),
    "bit-flip": frozenset({"corrupted"}),
    "clock-skew": frozenset({"slow"}),
    "pause": frozenset({"stood still"}),
}
"""The kinds of findings that name a fault; before the sequence of a step is known a wrong call is "unlike"."""


@dataclass(frozen=True)
class Score:
    """How many of some faults were found, put down to the right rank, and to the right cause."""

    cases: int
    found: int
    rank: int
    cause: int
    missed: tuple[str, ...]
    late: float
    """Seconds after a hang's own time until the run had ended, at most."""
    steps: int
    """Steps after that of a wrong call which its finding is of, at most."""


def drawn(seed: int, count: int) -> Iterator[Case]:
    """Cases, all kinds of faults in turn."""
    draw = random.Random(seed)
    kinds = [*CAUSES]
    for number in range(count):
        fault = kinds[number % len(kinds)]
        slow = fault in SLOW or fault == "slow-link"
        step = draw.randint(1, 3) if slow else draw.randint(2 if fault in ("sleep", "bit-flip") else 1, 12)
        dp, tp = draw.choice([mesh for mesh in MESHES if fault not in OVER_TP or mesh[1] > 1])
        rank, layer, varied = draw.randrange(dp * tp), draw.randrange(LAYERS), draw.random() < VARIED
        yield Case(fault, rank, step, layer, 24 if slow else 14, 0.05, varied, dp=dp, tp=tp)


OVER_TP = frozenset({"skip", "extra", "slow-link"})
"""Which need ranks of tp: a call of one rank alone is none, and of links one of several is found."""
HANGS = frozenset({"stop", "sleep"})
WRONG_CALLS = frozenset({"skip", "skip-grad", "extra", "reorder", "size", "dtype", "group"})


def outcome(case: Case) -> tuple[Finding, ...]:
    """What the report on a job says."""
    return outcome_after(case)[0]


def outcome_after(case: Case) -> tuple[tuple[Finding, ...], float]:
    """The same, and the seconds from the last that any rank did to the end of the job."""
    folder = Path(tempfile.mkdtemp(prefix="tangram-tracing-"))
    settings = TraceSettings(folder / "trace", mesh=case.mesh, hang_seconds=HANG, digest_steps=1)
    with contextlib.suppress(RankError):
        run_ranks(train, case, world=case.ranks, on_event=lambda event: None, device="cpu", trace=settings)
    ended = time.monotonic_ns()
    last = max(int(trace.events["time"].max()) for trace in read(settings.folder))
    if case.fault == "clock-skew":
        other_clock(settings.folder, (case.rank + 1) % case.ranks)
    try:
        return report(folder).findings, (ended - last) / 1e9
    finally:
        shutil.rmtree(folder)


def other_clock(folder: Path, rank: int) -> None:
    """Make a rank one of another machine, whose clocks are seven minutes ahead."""
    path, ahead = folder / file_of(rank, "ring"), int(420e9)
    data = bytearray(path.read_bytes())
    head = [*HEADER.unpack_from(data)]
    HEADER.pack_into(data, 0, *head[:8], b"another", head[9] + ahead, head[10] + 2 * ahead)
    beat, *rest = LIVE.unpack_from(data, LIVE_AT)
    LIVE.pack_into(data, LIVE_AT, beat + ahead, *rest)
    np.frombuffer(data, EVENT_DTYPE, EVENTS, HEADER_BYTES)["time"] += ahead
    np.frombuffer(data, ROW_DTYPE, ROWS, ring_bytes(EVENTS, 0))["begin"] += ahead
    path.write_bytes(data)


def score(seed: int, count: int) -> Score:
    """Of so many cases."""
    found = rank = cause = steps = 0
    late = 0.0
    missed: list[str] = []
    for case in drawn(seed, count):
        findings, seconds = outcome_after(case)
        first = next(iter(findings), None)
        if case.fault in HANGS:
            late = max(late, seconds - HANG)
        if case.fault in WRONG_CALLS and first is not None:
            steps = max(steps, first.step - case.step)
        right = first is not None and first.ranks == case.blamed
        why = SLOW.get(case.fault, "")
        named = first is not None and first.kind in CAUSES[case.fault] and first.cause == why
        found, rank, cause = found + (first is not None), rank + right, cause + (right and named)
        if not right or not named:
            missed.append(f"{case}: {first}")
    return Score(count, found, rank, cause, tuple(missed), late, steps)


def false_alarms(count: int) -> list[str]:
    """Of clean runs, with evaluations and checkpoints, some with rows of several lengths or compiled: what was found
    in those where something was."""
    alarms: list[str] = []
    for number in range(count):
        dp, tp = MESHES[number % len(MESHES)]
        case = Case(steps=14 + number % 3, varied=number % 4 == 3, compiled=number % 10 == 9, dp=dp, tp=tp)
        if found := outcome(case):
            alarms.append(f"{case}: {found}")
    return alarms
