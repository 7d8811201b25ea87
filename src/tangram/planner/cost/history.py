"""What was predicted and what was measured: one SQLite file, to which every training and every trial adds a row.

    $TANGRAM_HISTORY, else $XDG_DATA_HOME/tangram/history.sqlite, else ~/.local/share/tangram/history.sqlite

An empty TANGRAM_HISTORY keeps none. Rows are only added, each in a transaction of its own, so that trainings side by
side may do so, and one that dies leaves a whole file. A row that cannot be read (somebody edited it, another version
wrote it) is left out and counted.

The trade-off: one file of a user on a machine, not a service. Where home folders are shared over NFS without locks,
give each machine its own; a row says whose it is.

What it says about plans is how long their steps are likely to take, and which have no hope. The seconds that
`planner.local.estimate` gives by their parts are corrected by `planner.cost.calibration`: effects of a device, of a
place (a machine with its software and so many ranks) and of each part, regularised towards the estimate, robust against
single bad rows, with an interval. Where the very plan was measured here, the median of that counts.

A plan that ran out of memory says something of another one only if that one lies the same way and needs no less of
anything: each part of its prediction is at least as large, and the rank has no more room. That holds for any model
whose parts are off by factors of their own.
"""

from __future__ import annotations

import json
import math
import os
import sqlite3
from collections.abc import Generator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, fields
from hashlib import sha256
from pathlib import Path
from statistics import median
from typing import Any, cast

from tangram.errors import UserError
from tangram.planner.cost.calibration import SURE, Learned, Run, learn
from tangram.schema.plan import Plan

VERSION = 1
PATIENCE = 10.0
"""Seconds that are waited for another process's row."""
OUTCOMES = ("measured", "out of memory", "not done", "failed")

OF_THE_PLAN = (
    "task",
    "lora",
    "preference",
    "distill",
    "model",
    "precision",
    "mesh",
    "axes",
    "layouts",
    "pipeline",
    "context",
)
OF_DATA = ("sequence", "global_batch", "micro_batch", "packing")
NOT_OF_RUN = {
    "steps", "max_seconds", "evaluate_every", "patience", "on_nonfinite", "skips_in_a_row", "diverged", "trace",
    "hang_seconds", "boards",
}  # fmt: skip
"""Of [run], what says nothing about how long a step takes or what it needs."""


@dataclass(frozen=True)
class Entry:
    """One training or trial."""

    at: float
    """When it ended, in seconds since 1970."""
    kind: str
    """"training" or "trial"."""
    name: str
    """Of the job."""
    plan: str
    """As its file is."""
    key: str
    """Of what decides time and memory (`key_of`)."""
    family: str
    """Of what of it no number says (`family_of`)."""
    device: str
    place: str
    """The machine, its software and on how many ranks."""
    precision: str
    model: int
    """The version of the estimate that predicted."""
    parts: Mapping[str, float]
    """Predicted seconds of a step, by what they are spent on, as the estimate says without any history."""
    expected: float
    """Predicted seconds of a step, with what the history said then."""
    low: float
    high: float
    """90 % were expected between these."""
    held: Mapping[str, float]
    """Predicted bytes of the rank that needs most, by what they are of."""
    room: float
    """Bytes that a rank could use."""
    outcome: str
    """One of `OUTCOMES`."""
    seconds: float | None = None
    """Measured, of a step: the median."""
    used: float | None = None
    """Measured bytes of the rank that took most."""
    why: str = ""
    """In a sentence, where nothing was measured."""

    @property
    def memory(self) -> float:
        """Predicted bytes of the rank that needs most."""
        return sum(self.held.values())

    @property
    def measured(self) -> bool:
        """Whether there are seconds."""
        return self.outcome == "measured" and self.seconds is not None


@dataclass(frozen=True)
class History:
    """All rows of a file, the oldest first."""

    entries: tuple[Entry, ...] = ()
    left_out: int = 0
    """Rows that could not be read."""


def path() -> Path | None:
    """The file; None where none is kept."""
    said = os.environ.get("TANGRAM_HISTORY")
    if said is not None:
        return Path(said).expanduser() if said.strip() else None
    return Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share") / "tangram" / "history.sqlite"


def key_of(plan: Plan, tokens: int = 0) -> str:
    """The same for two plans whose steps take the same time and memory: what else they train on, and how long.

    `tokens`: of a step, where fewer than its rows could have are known.
    """
    whole = plan.model_dump(mode="json")
    said = _of_the_plan(whole)
    lengths = ("sources", "tokenizer") if plan.data.packing == "single" else ()  # of rows follow from what is read
    said["data"] = {name: whole["data"][name] for name in (*OF_DATA, *lengths)} | ({"tokens": tokens} if tokens else {})
    said["run"] = {name: value for name, value in whole["run"].items() if name not in NOT_OF_RUN}
    return _digest(said)


def family_of(plan: Plan) -> str:
    """The same for two plans of one model in one layout, whatever their batches and what they recompute."""
    whole = plan.model_dump(mode="json")
    return _digest(_of_the_plan(whole))


def _of_the_plan(whole: Mapping[str, Any]) -> dict[str, Any]:
    """Of a plan's tables what says which model is trained, how it lies, and which states it has."""
    optimiser = whole["optimiser"]
    other = {} if optimiser["name"] == "adamw" else {"optimiser": [optimiser["name"], optimiser["momentum"]]}
    said = {"rounding": "nearest", "in_backward": False}  # as it was before there were others
    other |= {key: optimiser[key] for key, usual in said.items() if optimiser[key] != usual}
    return {"moments": optimiser["moments"], **other, **{name: whole[name] for name in OF_THE_PLAN}}


def _digest(said: Mapping[str, Any]) -> str:
    return sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()[:16]


def add(entry: Entry, file: Path) -> None:
    """One more row. Raises UserError where the file cannot be written."""
    with _opened(file) as database:
        values = [_stored(getattr(entry, one.name)) for one in fields(Entry)]
        marks = ", ".join("?" * len(values))
        with database:
            database.execute(f"INSERT INTO runs ({_columns()}) VALUES ({marks})", values)


def read(file: Path) -> History:
    """All rows; none where there is no file yet. Raises UserError for a file that is no history."""
    if not file.exists():
        return History()
    with _opened(file) as database:
        rows = database.execute(f"SELECT {_columns()} FROM runs ORDER BY at, rowid").fetchall()
    found = [_entry(row) for row in rows]
    kept = tuple(one for one in found if one is not None)
    return History(kept, len(found) - len(kept))


@contextmanager
def _opened(file: Path) -> Generator[sqlite3.Connection]:
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with closing(sqlite3.connect(file, timeout=PATIENCE)) as database:
            version = int(database.execute("PRAGMA user_version").fetchone()[0])
            if version > VERSION:
                raise UserError(f"the history {file} is of a newer version ({version}): set TANGRAM_HISTORY to another")
            with database:  # two that begin together both find version 0
                database.execute(f"CREATE TABLE IF NOT EXISTS runs ({_columns()})")
                database.execute(f"PRAGMA user_version = {VERSION}")
            yield database
    except sqlite3.Error as error:
        raise UserError(f"the history {file} cannot be used ({error}): set TANGRAM_HISTORY to another file") from None
    except OSError as error:
        raise UserError(f"the history {file} cannot be used: {error.strerror}: set TANGRAM_HISTORY") from None


def _columns() -> str:
    return ", ".join(f'"{one.name}"' for one in fields(Entry))


def _stored(value: Any) -> Any:
    return json.dumps(dict(cast("Mapping[str, float]", value))) if isinstance(value, Mapping) else value


NUMBERS = ("at", "expected", "low", "high", "room")
TEXTS = ("kind", "name", "plan", "key", "family", "device", "place", "precision", "why")


def _entry(row: tuple[Any, ...]) -> Entry | None:
    """Of a row that makes sense."""
    said: dict[str, Any] = dict(zip((one.name for one in fields(Entry)), row, strict=True))
    try:
        said |= {name: float(said[name]) for name in NUMBERS}
        said |= {name: float(said[name]) for name in ("seconds", "used") if said[name] is not None}
        said |= {name: _numbers(said[name]) for name in ("parts", "held")}
        said["model"] = int(said["model"])
        found = Entry(**said)
    except (TypeError, ValueError, AttributeError):
        return None
    known = [getattr(found, name) for name in (*NUMBERS, "seconds", "used")]
    sizes = [*found.parts.values(), *found.held.values()]
    sound = (
        all(isinstance(getattr(found, name), str) for name in TEXTS)
        and all(map(math.isfinite, (*sizes, *(one for one in known if one is not None))))
        and min(sizes, default=0) >= 0
        and sum(found.parts.values()) > 0
        and found.outcome in OUTCOMES
        and (found.outcome != "measured" or (found.seconds or 0) > 0)
    )
    return found if sound else None


def _numbers(text: str) -> dict[str, float]:
    return {str(name): float(part) for name, part in cast("dict[str, Any]", json.loads(text)).items()}


NOISE = 0.08
"""Standard deviation of the logarithm of one run's median step, run again on the same machine."""
MOST = 500
"""Runs that are learned from, the newest."""
FRAMEWORK = "tangram"


@dataclass(frozen=True)
class Here:
    """Where it would run, as entries of the history have it."""

    device: str
    place: str
    room: float
    """Bytes that a rank can use."""
    model: int
    """The version of the estimate."""


@dataclass(frozen=True)
class PredictedPlan:
    """Of a plan, as entries of the history have it."""

    key: str
    family: str
    precision: str
    parts: Mapping[str, float]
    held: Mapping[str, float]


@dataclass(frozen=True)
class Likely:
    """Seconds of a step."""

    step: float
    low: float
    high: float
    """90 % lie between these."""
    measured: int = 0
    """How often this very plan was measured here."""

    @property
    def least(self) -> float:
        """What it can hardly be below: three standard deviations, one of a thousand."""
        return self.step * (self.low / self.step) ** (3 / SURE)


def learned_of(entries: Sequence[Entry], here: Here) -> Learned:
    """What measured runs of any place teach; those that another version of the estimate predicted do not."""
    runs = [_run(one.parts, one.device, one.precision, one.place, one.seconds or 0.0) for one in _sound(entries, here)]
    return learn([], NOISE).after(runs[-MOST:])


def likely(entries: Sequence[Entry], here: Here, asked: Sequence[PredictedPlan]) -> list[Likely]:
    """How long each plan's step takes, with all that is known."""
    if not asked:
        return []
    learned = learned_of(entries, here)
    steps, spreads = learned.correct([_run(one.parts, here.device, one.precision, here.place) for one in asked])
    known: dict[str, list[float]] = {}
    for one in entries:
        if one.measured and one.seconds and one.place == here.place:
            known.setdefault(one.key, []).append(one.seconds)
    return [
        _likely(float(step), float(spread), known.get(one.key, []))
        for one, step, spread in zip(asked, steps, spreads, strict=True)
    ]


def hopeless(entries: Sequence[Entry], here: Here, asked: PredictedPlan) -> str:
    """Why a plan would run out of memory, as another did that needs no more; "" where nobody knows."""
    for one in reversed(entries):
        if one.outcome == "out of memory" and _no_less(asked, one) and here.room <= one.room and _alike(one, here):
            same = "it" if one.key == asked.key else "a plan that needs no more of anything"
            return f"{same} ran out of memory here before"
    return ""


def _alike(one: Entry, here: Here) -> bool:
    return one.place == here.place and one.model == here.model


def _no_less(asked: PredictedPlan, one: Entry) -> bool:
    """Whether a plan needs at least as much of everything as one that was tried."""
    if one.key == asked.key:
        return True
    same = one.family == asked.family and set(asked.held) == set(one.held)
    return same and all(asked.held[name] >= part for name, part in one.held.items())


def _sound(entries: Sequence[Entry], here: Here) -> list[Entry]:
    return [one for one in entries if one.measured and one.model == here.model]


def _run(parts: Mapping[str, float], device: str, precision: str, place: str, seconds: float = float("nan")) -> Run:
    return Run(parts, device, FRAMEWORK, precision, place, seconds)


def _likely(step: float, spread: float, measured: Sequence[float]) -> Likely:
    """What was measured counts before what is learned from other plans."""
    if measured:
        step, spread = median(measured), NOISE * math.sqrt(1 + 1 / len(measured))
    return Likely(step, step * math.exp(-SURE * spread), step * math.exp(SURE * spread), len(measured))
