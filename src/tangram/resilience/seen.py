"""What is told of a run whose ranks are started again: each step once, with the clock of the whole run."""

import contextlib
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tangram.planner.cost.goodput import FILE
from tangram.resilience.policy import Failure
from tangram.schema.plan import Plan
from tangram.training.observe.events import Evaluated, ExpertLoads, Note, StepDone, StepSkipped, append_line

MEMORY = "memory"
ROUNDED = 1e-4
"""By how much a step's loss may differ at another layout, relative to it."""


@dataclass(frozen=True)
class Recovered:
    """After a failure: the first step that was not done before."""

    step: int
    lost_steps: int
    """That had been done and were done again."""
    seconds: float
    """From when the failure was seen."""
    memory: bool
    """Whether the state came from memory."""


class Seen:
    """What was told of the run; tells it on, once."""

    def __init__(self, plan: Plan, on_event: Callable[[object], None]) -> None:
        self._plan, self._tell = plan, on_event
        self.steps: dict[int, StepDone] = {}
        self.reached = 0
        """The furthest step."""
        self.promoted = 0
        self.blocked = 0.0
        self.failed_at = 0.0
        self.relaid = False
        """Whether ranks lie otherwise than at first, so that losses are the same but for rounding."""
        self._before: set[tuple[type, int]] = set()
        self._began: float | None = None
        self._again = 0
        self._from = ""

    def begin(self, where: str) -> None:
        """Of an attempt, which goes on from there."""
        self._again, self._from = 0, where

    def spent(self) -> float:
        """Seconds since the first step began."""
        return 0.0 if self._began is None else time.monotonic() - self._began

    def __call__(self, event: object) -> None:
        """Tell an event on, unless it is of a step that was told of."""
        if not isinstance(event, StepDone | StepSkipped | Evaluated | ExpertLoads):
            self._tell(event)
            return
        key = (type(event), event.step)
        if key in self._before:
            self._compare(event)
            return
        self._before.add(key)
        if isinstance(event, StepDone):
            now = time.monotonic()
            self._began = now - event.seconds if self._began is None else self._began
            first = min(self.steps, default=event.first)
            event = self.steps[event.step] = replace(event, seconds=now - self._began, first=first)
        if isinstance(event, StepDone | StepSkipped) and event.step > self.reached:
            self.reached = event.step
            self._recovered(event.step)
        self._tell(event)

    def _recovered(self, step: int) -> None:
        if not self.failed_at:
            return
        event = Recovered(step, self._again, time.monotonic() - self.failed_at, self._from == MEMORY)
        self.failed_at = 0.0
        again = f"{event.lost_steps} step{'s' * (event.lost_steps != 1)} done again"
        self._tell(Note(f"recovered in {event.seconds:.1f} s from {self._from}, {again}"))
        self._tell(event)

    def _compare(self, event: StepDone | StepSkipped | Evaluated | ExpertLoads) -> None:
        """A step that is done again has to come out as before."""
        if isinstance(event, StepDone | StepSkipped):
            self._again += 1
        if isinstance(event, StepDone) and (before := self.steps.get(event.step)) and before.loss != event.loss:
            if self.relaid and math.isclose(before.loss, event.loss, rel_tol=ROUNDED):
                return
            self._tell(
                Note(
                    f"step {event.step} was done again and has another loss, {event.loss!r} and not {before.loss!r}: "
                    "its ranks compute otherwise than before (run.deterministic refuses what is not repeatable)"
                )
            )


class FailureLog:
    """What a run sees of failures, line by line in its folder, for `tangram plan --failures`.

    Of one launcher; None for a folder: of one that does not lead, which writes nothing.
    """

    def __init__(self, folder: Path | None, devices: int) -> None:
        self._file = None if folder is None else folder / FILE
        self._devices, self._begun = devices, time.monotonic()
        self._add({"what": "start", "devices": devices})

    def failed(self, failure: Failure, details: str = "") -> None:
        words = {"words": failure.words, "details": details}
        self._add({"what": "failure", "cause": failure.cause.value, "step": failure.step} | words)

    def recovered(self, event: Recovered) -> None:
        where = "memory" if event.memory else "disk"
        self._add({"what": "recovered", "seconds": round(event.seconds, 2), "from": where, "again": event.lost_steps})

    def ended(self) -> None:
        self._add({"what": "end"})

    def _add(self, row: dict[str, Any]) -> None:
        if self._file is None:
            return
        row["device_hours"] = round((time.monotonic() - self._begun) * self._devices / 3600, 6)
        with contextlib.suppress(OSError):  # a disk that is full, say
            append_line(self._file, row)
