"""Tracing: what it costs a step, an event and a disk, and which of many planted faults it names.

    cost     a training step with and without, in interleaved pairs; an event; bytes
    faults   2 to 8 ranks, one of which skips a call, makes one too many, in another order, of another size or type or
             over another group, is stopped, killed, put to sleep, slow, behind a slow link, of another clock, or has
             a bit of its weights flipped or a loss that is not finite: the rank and the cause of the first finding,
             by a seed (`--repeats N`: N cases of each kind, pairs of steps, or seeds); and clean runs, in which nothing
             may be found
    ranks    16,384 ranks that never ran, from the planner's time model, with a planted fault: what a report takes

Peers have no figure here: torch's flight recorder keeps no groups and no ends of calls under gloo, and its analyser
does not read what it wrote.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

from bench._tracing import cost, faults
from bench._tracing.synthetic import Cluster, drawn, names, step_without, write
from tangram.hardware.host.machine import peak_resident_mb
from tangram.hardware.measuring.measure import Row
from tangram.tracing.show.report import report

SEED = 20261128


def rows(quick: bool, only: tuple[str, ...] = (), repeats: int = 0) -> Iterable[Row]:
    """The figures; `only`: of these groups."""
    with tempfile.TemporaryDirectory(prefix="tangram-bench-tracing-") as folder:
        if not only or "cost" in only:
            yield from cost.rows(quick, Path(folder), repeats)
    if not only or "faults" in only:
        cases = (repeats or (1 if quick else 9)) * len(faults.CAUSES)
        found = faults.score(SEED, cases)
        for line in found.missed:
            print(line, file=sys.stderr)
        yield Row(f"of {cases} faults: found", "%", 100 * found.found / cases, target=99.0, better="higher")
        yield Row("put down to the right rank", "%", 100 * found.rank / cases, target=97.0, better="higher")
        yield Row("and to the right cause", "%", 100 * found.cause / cases, target=95.0, better="higher")
        yield Row("a hang is named and the run ended, after the set time by at most", "s", found.late, target=1.0)
        yield Row("a wrong call is named, after its step by at most", "steps", found.steps, target=1.0)
        clean = 10 if quick else 200
        alarms = faults.false_alarms(clean)
        for line in alarms:
            print(line, file=sys.stderr)
        yield Row(f"of {clean} clean runs: a false alarm", "runs", len(alarms), target=0.0)
    if not only or "ranks" in only:
        yield from _synthetic(Cluster(4, 64, 4) if quick else Cluster(8, 256, 8), repeats or 3)


def _synthetic(cluster: Cluster, seeds: int) -> Iterable[Row]:
    """Reports on traces of ranks that never ran."""
    taken: list[float] = []
    off: list[float] = []
    right = 0
    for seed in range(seeds):
        with tempfile.TemporaryDirectory(prefix="tangram-bench-tracing-") as folder:
            planted = drawn(cluster, seed)
            write(Path(folder) / "trace", cluster, planted, seed)
            begun = time.process_time()
            found = report(Path(folder)).findings
            taken.append(time.process_time() - begun)
        named = bool(found) and names(found[0], planted)
        right += named
        if named and found[0].without_ms:
            off.append(abs(found[0].without_ms / 1e3 / step_without(cluster, planted, seed) - 1))
    what = f"a report on {cluster.ranks:,} ranks"
    yield Row(what, "CPU s", max(taken), target=60.0)
    yield Row(f"{what}: memory of the process", "GB", peak_resident_mb() / 1e3, target=2.0)
    if off:
        yield Row(f"{what}: a step without who is slow, as played again, off by at most", "%", 100 * max(off))
    yield Row(
        f"{what}: the right rank and axis, of {seeds} faults", "%", 100 * right / seeds, target=98.0, better="higher"
    )
