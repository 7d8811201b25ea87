"""The queue: runs without a result are trained, one after the other, by as many processes as are started."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from bench._convergence import running
from bench._convergence.settings import Run
from tangram.errors import UserError
from tangram.training.run.run_folder import alone

Train = Callable[[Run, Path], dict[str, Any]]


def work(runs: Sequence[Run], folder: Path, until: float, train: Train = running.train) -> int:
    """Train what has no result, as long as the longest run so far would end in time; how many were trained.

    `until`: by the monotonic clock. A run that another process is training is passed over.
    """
    longest, done = 0.0, 0
    for run in runs:
        if running.result_of(run, folder) is not None:
            continue
        if done and time.monotonic() + longest > until:
            break
        with contextlib.ExitStack() as held:
            own = folder / run.name
            own.mkdir(parents=True, exist_ok=True)
            try:
                held.enter_context(alone(own))
            except UserError:
                continue
            if running.result_of(run, folder) is not None:  # another process has just ended it
                continue
            begun = time.monotonic()
            try:
                found = train(run, folder)
            except running.StoppedError:
                print(f"{run.name}: stopped; it begins anew next time", file=sys.stderr)
                break
            longest, done = max(longest, time.monotonic() - begun), done + 1
            print(f"{run.name}: held-out loss {found['held_out']}, {time.monotonic() - begun:.0f} s", file=sys.stderr)
    return done
