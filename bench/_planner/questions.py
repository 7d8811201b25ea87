"""Public questions as they are typed: `tangram plan explain` with the options of who asked, beside what was measured.

Run as a module. Nothing is learned from these rows. A question is answered well where the command answers, the step
lies in its interval, and the verdict of memory is right (`bench._planner.threads`); a refusal is a wrong answer.
"""

from __future__ import annotations

import contextlib
import csv
import io
import json
import math
import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bench._planner.threads import UNSAFE
from tangram import cli

QUESTIONS = Path(__file__).parents[2] / "data" / "published" / "questions.csv"
GIB = 2.0**30


@dataclass(frozen=True)
class Reply:
    """Of one question."""

    refused: str
    """Why there is no answer; "" where there is."""
    inside: bool = False
    right: bool = False
    off: float = math.nan
    """Memory over what was measured, less 1; nan where none was."""
    words: str = ""

    @property
    def well(self) -> bool:
        """Whether nothing of it is wrong."""
        return not self.refused and self.inside and self.right


def replied(row: Mapping[str, str]) -> Reply:
    """What the command says to a question."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        cli.main(["plan", "explain", *shlex.split(row["command"]), "--json"])
    try:
        answer: dict[str, Any] = json.loads(out.getvalue())
    except ValueError:
        return Reply(err.getvalue().strip()[:300] or "nothing is said")
    if answer["refused"] or not answer["given"]:
        return Reply(str(answer["refused"])[:300])
    return judged(row, answer["given"])


def judged(row: Mapping[str, str], given: Mapping[str, Any]) -> Reply:
    """An answer beside what was measured."""
    step, rate, memory = (float(row[name] or "nan") for name in ("step_s", "tok_s_gpu", "mem_gib"))
    measured = step if step > 0 else given["step"] * given["tokens_per_device"] / rate
    inside = not measured > 0 or given["low"] <= measured <= given["high"]
    left = {"allocated": ("reserve", "context"), "reserved": ("context",)}.get(row["mem_kind"], ())
    needs = given["memory"] - sum(given["held"][name] for name in left)
    right = (given["fits"] < UNSAFE) == (row["oom"] == "1")
    words = (
        f"{given['step']:.2f} s ({given['low']:.2f} to {given['high']:.2f}), measured {measured:.2f}, "
        f"{'inside' if inside else 'OUTSIDE'}; {needs / GIB:.1f} GiB, measured {memory:.1f}, fits {given['fits']:.2f}"
        f"{', ran out' if row['oom'] == '1' else ''}, {'right' if right else 'WRONG'}"
    )
    return Reply("", inside, right, needs / (memory * GIB) - 1, words)


def main(path: Path) -> None:
    """Print a line a question, and what they come to."""
    with path.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    replies = [replied(row) for row in rows]
    for row, reply in zip(rows, replies, strict=True):
        print(f"{row['question']} {row['command']}: {'REFUSED, ' + reply.refused if reply.refused else reply.words}")
    off = np.abs([one.off for one in replies if not math.isnan(one.off)] or [math.nan])
    print(
        f"{sum(one.well for one in replies)} of {len(rows)} questions of {len({row['source'] for row in rows})} places "
        f"answered inside the interval with the right verdict; refused {sum(bool(one.refused) for one in replies)}; "
        f"memory off by {np.median(off):.1%} (median of {np.isfinite(off).sum()}; 90th percentile "
        f"{np.quantile(off, 0.9):.1%})"
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else QUESTIONS)
