"""Looks after the ranks of a run from outside, over their traces alone, and says when they hang and why.

A run hangs when some rank waits in a collective, nobody has recorded anything for the set time, and no rank that does
not wait has a good reason to be busy: a checkpoint, an evaluation, the start, a first step that compiles, or simply
that its process computes. No good reason is to wait for each other, to be stopped, or to sleep. Where a process is
stopped, the others may wait in what is not recorded, as in a save: that is a hang, too.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import threading
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tangram.errors import UserError
from tangram.tracing.blame import deviations, findings, lifeless, noted_by, peers_without
from tangram.tracing.files import stacks
from tangram.tracing.files.format import PATIENT, End, Phase
from tangram.tracing.finding import WAITED_FOR, Finding
from tangram.tracing.reading import VERDICT, Peek, RankTrace, read
from tangram.tracing.settings import TraceSettings
from tangram.tracing.stops import STILL_SECONDS, Outside

LOOK_SECONDS = 0.5
STACK_SECONDS = 1.0
SHARED_SECONDS = 1.0
"""So long a rank's deviation from what it has learned may be one that its peers are just coming to."""
BUSY = 0.05
"""The share of a core from which on a process computes."""


@dataclass(frozen=True)
class Hang:
    """A run that hangs, and why."""

    rank: int
    """Whose fault it is, as far as is known; else the first that waits."""
    sentence: str
    findings: tuple[Finding, ...]


class Watch:
    """Of the ranks of one run."""

    def __init__(self, settings: TraceSettings) -> None:
        self._settings = settings
        self._peek = Peek(settings.folder, settings.run)
        self._noted: dict[int, int] = {}
        """By rank, how many of its deviations have been looked at and need not be again."""
        self._reported: set[tuple[int, int]] = set()
        """Rank and step of those that were told of."""
        self._state: list[tuple[int, ...]] = []
        self._moved = self._looked = time.monotonic_ns()
        self._stood = False
        """Whether since they moved nobody has looked for so long that it is no hang."""
        self._cpu: list[int] = []
        self._hangs: Hang | None = None

    def look(self) -> tuple[list[Finding], Hang | None]:
        """What ranks have noted since the last look, and whether they hang."""
        now, ranks = time.monotonic_ns(), self._peek.look()
        fresh = (
            self._news() if any(live.deviations > self._noted.get(i, 0) for i, (_, live) in enumerate(ranks)) else []
        )
        state = [(last, live.step, live.phase, live.waiting) for last, live in ranks]
        # Who has not looked for so long has stood still itself, and so may all have, as of Ctrl-Z: once they may move.
        stood = 0 < self._settings.hang_seconds < (now - self._looked) / 1e9 and not self._stood
        if state != self._state or not state or stood:
            self._state, self._moved, self._cpu = state, now, [live.cpu for _, live in ranks]
            self._stood = stood
        self._looked, still = now, (now - self._moved) / 1e9
        if not 0 < self._settings.hang_seconds <= still:
            return fresh, None
        return fresh, self._hang(self._read(), now, still)

    def _read(self) -> list[RankTrace]:
        try:
            return [one for one in read(self._settings.folder) if one.run == self._settings.run]
        except UserError:  # one is just making its files, or somebody has taken them away
            return []

    def _news(self) -> list[Finding]:
        traces = self._read()
        by_rank, noted = {trace.rank: trace for trace in traces}, noted_by(traces)
        open_steps = set[tuple[int, int]]()
        for i, trace in enumerate(traces):
            unsettled = {
                (trace.rank, int(one["step"]))
                for one in trace.deviations[self._noted.get(i, 0) :]
                if one.get("learned") and _may_be_shared(trace, one, noted, by_rank)
            }
            open_steps |= unsettled
            if not unsettled:
                self._noted[i] = max(len(trace.deviations), trace.live.deviations)
        fresh: list[Finding] = []
        for found in deviations(traces):
            of = {(rank, found.step) for rank in found.ranks}
            if not of & open_steps and not of <= self._reported:
                fresh.append(found)
                self._reported |= of
        return fresh

    def _hang(self, traces: Sequence[RankTrace], now: int, still: float) -> Hang | None:
        if not traces or len(traces) < traces[0].world:
            return None
        outside = outside_of(traces, now)
        excused = (
            self._excused(trace, cpu, traces, outside, still) for trace, cpu in zip(traces, self._cpu, strict=False)
        )
        if not outside.stopped and (not any(trace.waiting for trace in traces) or any(excused)):
            return None
        here = os.uname().nodename
        # Who has ended its trace knows the signal no more, and would be ended by it, as would who has the number of one
        # that is gone.
        deaf = outside.stopped | outside.gone | {one.rank for one in traces if one.live.end is not End.RUNNING}
        pids = {one.rank: one.pid for one in traces if one.host == here and one.rank not in deaf}
        seen = stacks.request(self._settings.folder, pids, STACK_SECONDS)
        patience = 0.9e9 * min(self._settings.hang_seconds, STILL_SECONDS)
        found = tuple(findings(traces, replace(outside, stacks=seen, still_ns=patience)))
        blamed = [one for one in found if one.kind in WAITED_FOR]
        rank = blamed[0].ranks[0] if blamed else next((trace.rank for trace in traces if trace.waiting), 0)
        why = (
            "; ".join(one.text for one in blamed)
            or f"rank {rank} waits in {traces[rank].waiting}, which all have joined"
        )
        self._hangs = Hang(rank, f"no rank has moved for {still:.0f} s: {why}", found)
        return self._hangs

    def _excused(self, trace: RankTrace, cpu: int, traces: Sequence[RankTrace], outside: Outside, still: float) -> bool:
        """Whether a rank that the others may wait for has a good reason."""
        if trace.waiting is not None or trace.live.end is not End.RUNNING:
            return False
        # The kernel's count: within one call that leaves its heart no turn, as one that reads much JSON, it goes on.
        spent = max(trace.live.cpu, outside.cpu.get(trace.rank, 0))
        if trace.rank in lifeless(traces, outside):
            alive = trace.rank not in outside.stopped | outside.gone
            return alive and spent - trace.live.cpu > BUSY * ((outside.now or 0) - trace.live.beat) > 0
        if trace.live.phase in PATIENT or (trace.live.step <= 1 and trace.live.phase is not Phase.DATA):
            return True
        return (spent - cpu) / 1e9 > BUSY * still

    def end(self, sentence: str, dead: int | None = None) -> Sequence[Finding]:
        """Leave a word for who reads the trace: how the run ended, badly. Before its processes are ended. All findings.

        `dead`: the rank whose process ended without a word. Of a run that has not come to its first step nothing is
        left.
        """
        traces = self._read()
        if not any(trace.live.step for trace in traces) and self._hangs is None:
            shutil.rmtree(self._settings.folder, ignore_errors=True)
            return ()
        gone = frozenset[int]() if dead is None else frozenset({dead})
        found = self._hangs.findings if self._hangs else findings(traces, Outside(gone=gone))
        words = {"sentence": sentence, "findings": [one.as_json() for one in found]}
        path = self._settings.folder / VERDICT
        with suppress(OSError):
            path.with_suffix(".part").write_text(json.dumps(words, indent=1), encoding="utf-8")
            path.with_suffix(".part").replace(path)
        return found

    def explained(self, rank: int, world: int, error: str, dead: int | None = None) -> str:
        """The error that a rank ended the job with, and whose fault it was: all stop at a loss that is not finite on
        one of them. Leaves the word of `end`."""
        found = self.end(f"rank {rank} of {world} ended the job: {error}", dead)
        odd = (one for one in found if one.kind == "not finite" and len(one.ranks) < world)
        return "; ".join((error, *(one.text for one in odd if f" step {one.step}: " in error)))


WATCHERS = 2
"""Machines that watch where nobody else does, and ranks of each: one may be what stands still."""
CLAIM = "hang.claim"


def _may_be_shared(
    trace: RankTrace,
    one: Mapping[str, Any],
    noted: Mapping[tuple[int, str], set[int]],
    by_rank: Mapping[int, RankTrace],
) -> bool:
    """Whether a peer that has not noted a deviation may still be on its way to it.

    It is not where it has passed the step, or waits elsewhere while this rank waits for it.
    """
    missing = [by_rank[rank] for rank in peers_without(trace, one, noted) if rank in by_rank]
    if any(peer.live.step > one["step"] or peer.live.end is not End.RUNNING for peer in missing):
        return False
    fresh = trace.live.beat - one["time"] < SHARED_SECONDS * 1e9  # by the rank's own clock, wherever it is
    return any(fresh or peer.waiting is None for peer in missing)


@contextlib.contextmanager
def watched(
    settings: TraceSettings | None, place: tuple[int, int], world: int, end: Callable[[Hang], None]
) -> Generator[None]:
    """Look after all ranks from a thread of this one, where nobody outside of them does, as under torchrun.

    `place`: which machine this is, and which of its ranks. Of those that see a hang the first calls `end`, which is to
    end its process. A run on several machines is watched where all of its traces are in one folder, by a few alone:
    thousands that read what thousands write would keep its file system busy.
    """
    if settings is None or not settings.hang_seconds or max(place) >= WATCHERS:
        yield
        return
    over = threading.Event()
    pause = max(LOOK_SECONDS, settings.hang_seconds / 10, world / 100)

    def look_after() -> None:
        watch = Watch(settings)
        while not over.wait(pause):
            with suppress(OSError):  # somebody has taken the files away
                _, hang = watch.look()
                if hang is not None and not over.is_set() and _claimed(settings.folder):
                    watch.end(f"rank {hang.rank} of {world} ended the job: {hang.sentence}")
                    end(hang)

    threading.Thread(target=look_after, daemon=True, name="tangram-watch").start()
    try:
        yield
    finally:
        over.set()


def _claimed(folder: Path) -> bool:
    """Whether this process is the first that sees a hang."""
    try:
        os.close(os.open(folder / CLAIM, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644))
    except FileExistsError:
        return False
    return True


def outside_of(traces: Sequence[RankTrace], now: int) -> Outside:
    """What this machine knows of the processes of ranks that it runs; of those of others their hearts tell."""
    here = os.uname().nodename
    seen = {trace.rank: process_state(trace) for trace in traces if trace.host == here}
    states = {rank: state for rank, (state, _) in seen.items()}
    running = {trace.rank for trace in traces if trace.live.end is End.RUNNING}
    stopped = frozenset(rank for rank, state in states.items() if state == "T")
    gone = frozenset(rank for rank, state in states.items() if state in ("", "Z", "X") and rank in running)
    alive = any(state not in ("", "Z", "X") for state in states.values())
    # Of a run that is over, who has not said how it ended, where others have, ended without a word.
    known = alive or len(running) < len(traces)
    cpu = {rank: spent for rank, (_, spent) in seen.items()}
    return Outside(now if alive else None, gone if known else frozenset(), stopped, cpu=cpu)


def process_state(trace: RankTrace) -> tuple[str, int]:
    """The letter of the kernel for the state of a rank's process, "" where it is gone, or another has its number; and
    its CPU time, ns."""
    try:
        fields = Path(f"/proc/{trace.pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    except OSError:
        return "", 0
    ticks = os.sysconf("SC_CLK_TCK")
    begun = int(fields[19]) / ticks  # seconds since the machine was started, as the monotonic clock has it, about
    cpu = (int(fields[11]) + int(fields[12])) * 1_000_000_000 // ticks
    return (fields[0], cpu) if begun <= trace.begun / 1e9 + STILL_SECONDS else ("", 0)
