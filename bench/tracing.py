"""Tracing: what it costs a step, an event and a disk, and which of many planted faults it names.

    cost     a training step with and without, in interleaved pairs; an event; bytes
    faults   4 ranks, one of which skips a call, makes one too many, in another order, of another size or type, is
             stopped, killed, put to sleep, slow, or has a loss that is not finite: the rank and the cause of the first
             finding, by a seed (`--repeats N`: N cases of each kind); and clean runs in which nothing may be found

Peers have no figure here: torch's flight recorder keeps no groups and no ends of calls under gloo, and its analyser
does not read what it wrote.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

from bench._tracing import cost, faults
from tangram.hardware.measure import Row

SEED = 31


def rows(quick: bool, only: tuple[str, ...] = (), repeats: int = 0) -> Iterable[Row]:
    """The figures; `only`: of these groups."""
    with tempfile.TemporaryDirectory(prefix="tangram-bench-tracing-") as folder:
        if not only or "cost" in only:
            yield from cost.rows(quick, Path(folder))
    if not only or "faults" in only:
        cases = (repeats or (1 if quick else 3)) * len(faults.CAUSES)
        found = faults.score(SEED, cases)
        for line in found.missed:
            print(line, file=sys.stderr)
        yield Row(f"of {cases} faults: found", "%", 100 * found.found / cases, target=99.0, better="higher")
        yield Row("put down to the right rank", "%", 100 * found.rank / cases, target=97.0, better="higher")
        yield Row("and to the right cause", "%", 100 * found.cause / cases, target=95.0, better="higher")
        clean = 2 if quick else 10
        yield Row(f"of {clean} clean runs: a false alarm", "runs", faults.false_alarms(clean), target=0.0)
