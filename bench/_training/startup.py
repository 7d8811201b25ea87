"""The quickstart as a command, until its first step is done."""

from __future__ import annotations

import re
import statistics
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

from tangram.hardware.measuring.measure import Row

QUICKSTART = Path(__file__).parents[2] / "examples" / "quickstart" / "job.toml"
CHANGES = ("run.steps=2", "optimiser.warmup_steps=1", "data.held_out_samples=8")
TOTAL = re.compile(r"From the command to the first step: ([0-9.]+) s")


def rows(quick: bool, folder: Path) -> Iterable[Row]:
    """The figure; tokens and rates are known after the first time, which is not counted."""
    turns = 1 if quick else 5
    found = [seconds(folder / f"run-{turn}", folder / "tokens") for turn in range(1 + turns)]
    yield Row("the quickstart on two processes, command to first step", "s", statistics.median(found[1:]), target=15.0)


def seconds(out: Path, cache: Path) -> float:
    """Of one start, as `--profile-startup` says."""
    words = [f for change in (*CHANGES, f'data.cache="{cache}"') for f in ("--set", change)]
    command = [sys.executable, "-m", "tangram", "train", str(QUICKSTART), "--processes", "2", "--out", str(out), *words]
    done = subprocess.run([*command, "--profile-startup"], capture_output=True, text=True, check=True)
    total = TOTAL.search(done.stdout)
    if total is None:
        raise RuntimeError(f"no total was printed: {done.stdout[-500:]}")
    return float(total[1])
