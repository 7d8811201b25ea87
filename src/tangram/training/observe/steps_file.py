"""The steps of a run as lines of JSON, `steps.jsonl` in its folder: what a person plots, and runs are compared by;
and what was counted of experts, `experts.jsonl`.

A run that goes on appends; of a step that was done twice the last line holds.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from tangram.errors import UserError
from tangram.training.observe.events import Evaluated, ExpertLoads, Note, StepDone

FILE, EXPERTS = "steps.jsonl", "experts.jsonl"


class StepsFile:
    """Writes the steps, evaluations and counts of experts that it is called with. What cannot be written (a full disk)
    stops no run: it is told once, by an event."""

    def __init__(self, folder: Path, on_event: Callable[[object], None]) -> None:
        self._folder, self._on_event, self._told = folder, on_event, False

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
