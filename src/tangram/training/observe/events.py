"""What happens in a job, as values: ranks emit them, the progress line, the logs and the report take them in.

The steps of a run as lines of JSON, `steps.jsonl` in its folder: what a person plots, and runs are compared by;
and what was counted of experts, `experts.jsonl`.

A run that goes on removes the lines of later steps than its state is of, and appends.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any, TypeVar

from tangram.errors import UserError


@dataclass(frozen=True)
class Note:
    """A milestone worth a line of its own."""

    text: str


class StopRequested(Note):
    """Somebody wants the run to stop after its step."""


@dataclass(frozen=True)
class Doing:
    """What goes on for some seconds now; of interest only while it does."""

    text: str


@dataclass(frozen=True)
class TableEvent:
    """A short table for a person: a title, headers, rows of text."""

    title: str
    headers: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Working:
    """How far a long piece of work that is no training step has come, as tokenising: `done` of `total` in `unit`."""

    what: str
    done: int
    total: int
    unit: str


@dataclass(frozen=True)
class StepDone:
    """One finished training step: its loss is the mean over the counted tokens of the global batch, in nats."""

    step: int
    """From 1; of a run that was resumed it goes on counting."""
    steps: int
    loss: float
    gradient_norm: float
    """Before clipping."""
    lr: float
    tokens: int
    """Counted in this step, over all ranks."""
    seconds: float
    """Since this process group began to train, this step included."""
    first: int = 1
    """The first step of this process group: 1, or the one after the checkpoint that it resumed from."""
    limit: float = math.inf
    """The seconds after which training stops, if that is before the last step."""
    flops: float = 0.0
    """Of the model in this step, forward and backward over all ranks; recomputation is not counted. 0: unknown."""
    peak_flops: float = 0.0
    """What the devices of all ranks can do in a second. 0: unknown."""
    rss_mb: float = 0.0
    """Resident memory of rank 0 now."""
    skipped: int = 0
    """Steps of the whole run that were not applied."""
    scale: float = 1.0
    """What the loss is multiplied by in the next step."""
    router_loss: float = 0.0
    """What the loss of routers adds to what is trained on; `loss` is without it."""
    dropped: float = 0.0
    """The share of tokens' choices that experts had no room for."""
    figures: Mapping[str, float] = field(default_factory=dict[str, float])
    """What the task tells beside the loss, as the rewards of preferences."""


@dataclass(frozen=True)
class StepSkipped:
    """A step that was not applied."""

    step: int
    reason: str
    skipped: int
    """Steps of the whole run that were not applied, this one included."""
    samples: str = ""
    """The file that says what it was trained on; of an overflow that lowers the loss scale there is none."""


@dataclass(frozen=True)
class Evaluated:
    """The held-out loss after `step` steps, in nats per token, or of preferences in nats per pair."""

    step: int
    loss: float
    seconds: float
    """Since training began."""
    figures: Mapping[str, float] = field(default_factory=dict[str, float])
    """What the task tells beside it."""


@dataclass(frozen=True)
class ExpertLoads:
    """How many times each expert of each layer was chosen since the last such event, over all ranks."""

    step: int
    tokens: int
    """That were routed, padding included."""
    layers: Mapping[str, tuple[int, ...]]
    """By the path of the module of experts, for each expert."""

    @property
    def evenness(self) -> dict[str, float]:
        """By layer, the mean over the experts as a part of the most: 1 where all are chosen as often."""
        return {name: fmean(own) / max(own) for name, own in self.layers.items() if any(own)}


@dataclass(frozen=True)
class CheckpointSaved:
    """A checkpoint that is committed: complete on disk under its final name."""

    step: int
    path: str
    blocked_seconds: float
    """How long training stood still for it."""
    seconds: float
    """From the begin of the save to the commit."""
    asynchronous: bool


@dataclass(frozen=True)
class SaveFailed:
    """A checkpoint that could not be written; training goes on and the last good one is untouched."""

    step: int
    reason: str


@dataclass
class Record:
    """Everything that happened in a run, in the order in which it came."""

    steps: list[StepDone] = field(default_factory=list[StepDone])
    skips: list[StepSkipped] = field(default_factory=list[StepSkipped])
    evaluations: list[Evaluated] = field(default_factory=list[Evaluated])
    loads: list[ExpertLoads] = field(default_factory=list[ExpertLoads])
    saves: list[CheckpointSaved] = field(default_factory=list[CheckpointSaved])
    failures: list[SaveFailed] = field(default_factory=list[SaveFailed])

    def __call__(self, event: object) -> None:
        """Keep an event; those that are only for the eye are passed over."""
        for kind, kept in (
            (StepDone, self.steps),
            (StepSkipped, self.skips),
            (Evaluated, self.evaluations),
            (ExpertLoads, self.loads),
            (CheckpointSaved, self.saves),
            (SaveFailed, self.failures),
        ):
            if isinstance(event, kind):
                kept.append(event)  # pyright: ignore[reportArgumentType]  the list of this kind


FILE, EXPERTS = "steps.jsonl", "experts.jsonl"


class StepsFile:
    """Writes the steps, evaluations and counts of experts that it is called with. What cannot be written (a full disk)
    stops no run: it is told once, by an event."""

    def __init__(self, folder: Path, on_event: Callable[[object], None], after: int = 0) -> None:
        """`after`: the step that the run goes on from. What was written of later ones is of no state any more."""
        self._folder, self._on_event, self._told = folder, on_event, False
        for file in (FILE, EXPERTS):
            try:
                _forget_after(folder / file, after)
            except OSError as error:
                on_event(Note(f"{file} keeps steps after step {after}, which are done again ({error.strerror})"))

    def __call__(self, event: object) -> None:
        match event:
            case StepDone():
                self._append(
                    {
                        "step": event.step,
                        "loss": event.loss,
                        "tokens": event.tokens,
                        "lr": event.lr,
                        "gradient_norm": event.gradient_norm,
                        "seconds": event.seconds,
                        **event.figures,
                    }
                )
            case Evaluated():
                figures = {f"held_out_{key}": value for key, value in event.figures.items()}
                self._append({"step": event.step, "held_out_loss": event.loss, **figures})
            case ExpertLoads():
                self._append(vars(event), EXPERTS)
            case _:
                pass

    def _append(self, figures: Mapping[str, Any], file: str = FILE) -> None:
        try:
            append_line(self._folder / file, figures)
        except OSError as error:
            if not self._told:
                self._told = True
                self._on_event(Note(f"{file} cannot be written ({error.strerror}): it lacks steps"))


def append_line(file: Path, row: Mapping[str, Any]) -> None:
    """Write a table as a line at the end of a file. Raises OSError.

    What a disk that was full, or a kill, has left of the line before is removed: in the midst it would be no line.
    """
    with file.open("ab+") as stream:
        end = stream.seek(0, os.SEEK_END)
        if end and (stream.seek(end - 1), stream.read(1))[1] != b"\n":
            stream.seek(0)
            stream.truncate(stream.read().rfind(b"\n") + 1)
        stream.write(json.dumps(row).encode() + b"\n")


def _forget_after(file: Path, step: int) -> None:
    """Remove the lines of later steps, and no others, whatever they are. Raises OSError."""
    if not file.exists():
        return
    lines = file.read_bytes().splitlines(keepends=True)
    kept = [line for line in lines if not _step_of(line) > step]
    if len(kept) < len(lines):
        partial = file.with_name(f".{file.name}.partial")
        partial.write_bytes(b"".join(kept))
        partial.replace(file)


def _step_of(line: bytes) -> float:
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):  # half a line, or somebody's own
        return 0.0


def read_steps(folder: Path) -> dict[int, dict[str, float]]:
    """What is known of each step of a run, in order. Raises UserError for a folder without any."""
    file = folder / FILE
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no UTF-8 text"
        raise UserError(f'"{file}" cannot be read ({why}): give the folder of a run that has trained a step') from None
    found: dict[int, dict[str, float]] = {}
    for step, figures in read_lines(file, lines, _step, "step of a run"):
        found[step] = {**found.get(step, {}), **figures}
    if not found:
        raise UserError(f'"{file}" has no step: the run has trained none yet')
    return dict(sorted(found.items()))


def _step(own: dict[str, Any]) -> tuple[int, dict[str, float]]:
    return int(own.pop("step")), {str(key): float(value) for key, value in own.items()}


T = TypeVar("T")


def read_lines(file: Path, lines: Sequence[str], read: Callable[[dict[str, Any]], T], what: str) -> Iterator[T]:
    """What `read` makes of each line's table; a run that was killed may have left a part of its last line, which is
    passed over. Raises UserError for another that is none of `what`."""
    for number, line in enumerate(lines, 1):
        try:
            yield read(json.loads(line))
        except (ValueError, KeyError, TypeError, AttributeError):
            if number < len(lines):
                raise UserError(f'"{file}": line {number} is no {what}') from None
