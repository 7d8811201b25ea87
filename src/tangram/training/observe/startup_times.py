"""Where the time goes from the command to the first step (`tangram train --profile-startup`).

A job tells what it is doing (`events.Doing`); what lies between one such word and the next is one row. So nothing is
measured that a run does not do anyway, and whoever adds a slow part gives it a word. Trade-off: of several ranks only
what rank 0 tells is seen, which waits for the others where they meet.
"""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from tangram.training.observe.events import Doing, StepDone, StepSkipped, TableEvent

BEFORE = "starting Python, importing"


def age() -> float:
    """Seconds since this process was started; where the system does not tell (it is not Linux), 0."""
    try:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        up = float(Path("/proc/uptime").read_text().split()[0])
    except OSError:
        return 0.0
    return max(0.0, up - int(fields[19]) / os.sysconf("SC_CLK_TCK"))  # field 22, and the first two are cut off


@dataclass
class Startup:
    """Passes events on, and after the first step a table of what came before it."""

    tell: Callable[[object], None]
    now: Callable[[], float] = time.monotonic
    begun: float = field(default_factory=lambda: time.monotonic() - age())
    """When the command was given, by the clock `now`."""
    moments: list[tuple[float, str]] = field(default_factory=list[tuple[float, str]])
    done: bool = False

    def __call__(self, event: object) -> None:
        """Take an event in, and pass it on."""
        self.tell(event)
        if self.done:
            return
        if isinstance(event, Doing):
            self.moments.append((self.now(), event.text))
        elif isinstance(event, StepDone | StepSkipped):
            self.done = True
            self.tell(self.table(self.now()))

    def table(self, end: float) -> TableEvent:
        """What was done for how many seconds, until `end`."""
        begins = [(self.begun, BEFORE), *self.moments]
        ends = [at for at, _ in self.moments] + [end]
        total = max(end - self.begun, 1e-9)
        rows = [(what, to - at) for (at, what), to in zip(begins, ends, strict=True)]
        return TableEvent(
            f"From the command to the first step: {total:.1f} s",
            ("what", "seconds", "share"),
            tuple((what, f"{seconds:.2f}", f"{seconds / total:.0%}") for what, seconds in rows),
        )
