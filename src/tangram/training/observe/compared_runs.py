"""Runs side by side: what came of them, in which keys their plans differ, and where their losses part."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, cast

from tangram.errors import UserError
from tangram.planner.report import figures
from tangram.schema.files import load
from tangram.schema.job import Job
from tangram.training.observe.events import read_steps
from tangram.training.observe.summary import LAST_STEPS

SHOWN = 10
"""Steps of the table of losses, at most."""
ROUNDING = 1e-5
"""How far apart losses of the same training may be on two layouts, relative to one of them."""
NONE = "-"
Steps = Mapping[int, Mapping[str, float]]


@dataclass(frozen=True)
class Comparison:
    """Tables as text; each row begins with what it is of, and has a value of each run in the order they were given."""

    names: tuple[str, ...]
    results: tuple[tuple[str, ...], ...]
    keys: tuple[tuple[str, ...], ...]
    """Of the plans, those that are not the same in all."""
    losses: tuple[tuple[str, ...], ...]
    """Of some steps that all have: the loss, and beside each but the first how far it is from that, relative to it."""
    note: str
    """Where the losses part."""
    steps: tuple[Steps, ...]
    """All figures of all steps."""


def compare_runs(folders: Sequence[Path]) -> Comparison:
    """Compare runs by the files in their folders; they may still go on. Raises UserError for others."""
    if len(folders) < 2:
        raise UserError("give the folders of two runs or more")
    names, steps = _names(folders), tuple(read_steps(folder) for folder in folders)
    jobs = [load(folder / "plan.toml") for folder in folders]
    plans = [_flat(job.model_dump(mode="json")) for job in jobs]
    rows = [(key, *(plan.get(key, NONE) for plan in plans)) for key in sorted({key for plan in plans for key in plan})]
    shared = [step for step in steps[0] if all("loss" in run.get(step, {}) for run in steps)]
    losses = {step: [run[step]["loss"] for run in steps] for step in shared}
    each = [_results(*one) for one in zip(steps, map(_summary, folders), jobs, strict=True)]
    return Comparison(
        names,
        tuple((key, *(own[key] for own in each)) for key in each[0] if {own[key] for own in each} != {NONE}),
        tuple(row for row in rows if len({*row[1:]}) > 1),
        tuple((f"{step:,}", *_beside(losses[step])) for step in _some(shared)),
        _parting(names, losses),
        steps,
    )


def _results(steps: Steps, summary: Mapping[str, Any], job: Job) -> dict[str, str]:
    """What came of a run: of its steps, and of its summary once it has one."""
    trained = [own for own in steps.values() if "loss" in own]
    held = [own["held_out_loss"] for own in steps.values() if "held_out_loss" in own]
    last = summary.get("eval_loss", held[-1] if held else None)
    best = min([*held, *([last] if last is not None else [])], default=None)

    def written(key: str, words: Callable[[Any], str]) -> str:
        value = summary.get(key)
        return NONE if value is None else words(value)

    return {
        "steps": f"{max(steps):,}" + ("" if summary else ", no summary yet"),
        "tokens": f"{int(sum(own.get('tokens', 0) for own in trained)):,}",
        f"loss of the last {LAST_STEPS} steps": f"{fmean(own['loss'] for own in trained[-LAST_STEPS:]):.4f}"
        if trained
        else NONE,
        "held-out loss": NONE if last is None else f"{last:.4f}",
        "best held-out loss": NONE if best is None else f"{best:.4f}",
        "held-out perplexity": NONE if last is None or not job.by_token else f"{math.exp(min(last, 700)):.5g}",
        "mesh": written("mesh", str),
        "step": written("step_seconds", figures.seconds),
        "tokens/s": written("tokens_per_s", "{:,.0f}".format),
        "MFU": written("mfu", figures.percent),
        "memory of rank 0": written("peak_rss_mb", figures.megabytes),
        "wall time": written("wall_s", figures.seconds),
    }


def _parting(names: Sequence[str], losses: Mapping[int, Sequence[float]]) -> str:
    """`losses`: of each step that all runs have, in order."""
    if not losses:
        return "the runs have no step in common"
    apart = {step: [_apart(one, own[0]) for one in own] for step, own in losses.items()}
    furthest, step = max((max(own), -step) for step, own in apart.items())
    if not furthest:
        return f"losses are the same to the last digit in all {len(losses):,} steps that all have"
    name = names[apart[-step].index(furthest)]
    most = f"most at step {-step:,}, {name}, by {furthest:.1e}"
    first = next((step for step, own in apart.items() if max(own) > ROUNDING), None)
    if first is None:
        return f"losses are within rounding of {names[0]}'s in all {len(losses):,} steps that all have: {most}"
    return f"losses are further than rounding from {names[0]}'s from step {first:,} on: {most}"


def _apart(one: float, other: float) -> float:
    """How far two losses are apart, relative to the second; what is no number is infinitely far from one that is."""
    if one == other or (math.isnan(one) and math.isnan(other)):
        return 0.0
    return abs(one - other) / abs(other) if other and math.isfinite(one - other) else math.inf


def _beside(losses: Sequence[float]) -> list[str]:
    first = losses[0]
    apart = [f" ({(one - first) / abs(first):+.1e})" if first else "" for one in losses]
    return [f"{one:.4f}{apart[at] if at else ''}" for at, one in enumerate(losses)]


def _some(steps: Sequence[int]) -> list[int]:
    """At most `SHOWN` of some steps, evenly, the first and the last among them."""
    if len(steps) <= SHOWN:
        return [*steps]
    return [steps[round(n * (len(steps) - 1) / (SHOWN - 1))] for n in range(SHOWN)]


def _names(folders: Sequence[Path]) -> tuple[str, ...]:
    """The folders' own names where these differ, else as they were given."""
    own = [folder.resolve().name for folder in folders]
    return tuple(own if len({*own}) == len(own) else [str(folder) for folder in folders])


def _flat(table: Mapping[str, Any], before: str = "") -> dict[str, str]:
    """A plan's keys with dots, and their values as text; tables of layouts are one key each."""
    found: dict[str, str] = {}
    for key, value in table.items():
        if isinstance(value, dict) and before != "layouts.":
            found |= _flat(cast("dict[str, Any]", value), f"{before}{key}.")
        elif value is not None:
            found[f"{before}{key}"] = value if isinstance(value, str) else json.dumps(value)
    return found


def _summary(folder: Path) -> Mapping[str, Any]:
    """That of a run that has ended; else nothing."""
    try:
        return cast("dict[str, Any]", json.loads((folder / "summary.json").read_text(encoding="utf-8")))
    except (OSError, ValueError):
        return {}
