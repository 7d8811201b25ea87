"""What a person sees while a job runs: one live line on a terminal, a plain line now and then elsewhere.

Everything goes to one rich console (stderr when the result is JSON on stdout); ranks never print, they emit events.
"""

import os
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

from rich.console import Console, RenderableType
from rich.live import Live
from rich.text import Text

from tangram.planner.report import figures
from tangram.text import plain
from tangram.training.observe.events import (
    CheckpointSaved,
    Doing,
    Evaluated,
    ExpertLoads,
    Note,
    SaveFailed,
    StepDone,
    StepSkipped,
    TableEvent,
    Working,
)
from tangram.training.observe.text_tables import drawn

PLAIN_SECONDS = 5.0  # between two plain lines, so that a log file stays readable
WATCHED = ("rewards/margins", "rewards/accuracies", "divergence")  # what the line tells beside the loss
RECENT = 20  # steps that the shown rate is taken over


class ProgressLine:
    """Shows events; use it as a context manager so that the terminal is left as it was."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live = Live(console=console, transient=True, refresh_per_second=4) if console.is_terminal else None
        self._shown = float("-inf")
        self._recent: deque[StepDone] = deque(maxlen=RECENT + 1)

    def __enter__(self) -> Self:
        if self._live:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live:
            self._live.stop()

    def __call__(self, event: object) -> None:
        """Show one event; of steps on a plain console only the first, the last and one every few seconds."""
        match event:
            case Note():
                self._print(event.text)
            case Doing():
                if self._live:
                    self._live.update(Text(f"{event.text} ...", no_wrap=True, overflow="ellipsis"))
            case TableEvent():
                self._table(event)
            case Working():
                share = event.done / event.total if event.total else 1.0
                line = f"{event.what} {share:4.0%}  {event.done:,} of {event.total:,} {event.unit}"
                self._line(line, event.done >= event.total)
            case StepDone():
                self._step(event)
            case Evaluated():
                self._print(f"step {event.step}: held-out loss {event.loss:.4f}")
            case ExpertLoads() if event.evenness:
                name, least = min(event.evenness.items(), key=lambda one: one[1])
                self._print(f"step {event.step}: experts are chosen {least:.2f} evenly (mean over most) in {name}")
            case StepSkipped():
                where = f"; its samples are in {event.samples}" if event.samples else ""
                self._print(f"step {event.step}: NOT applied: {event.reason}{where}")
            case CheckpointSaved():
                still = f"; training stood still for {event.blocked_seconds:.3f} s of it" if event.asynchronous else ""
                self._print(f"step {event.step}: checkpoint committed in {event.seconds:.2f} s{still}")
            case SaveFailed():
                self._print(f"step {event.step}: NO checkpoint was written: {event.reason}; training goes on")
            case _:
                pass  # for the record only

    def _print(self, text: RenderableType) -> None:
        if self._live:
            self._live.update(Text())  # what was shown is behind us
        self._console.print(text, highlight=False, soft_wrap=isinstance(text, str), markup=False)

    def _table(self, event: TableEvent) -> None:
        if self._console.is_terminal:
            self._print(drawn(event.title, event.headers, event.rows))
        else:
            self._print("\n".join(plain(event.title, event.headers, event.rows)) + "\n")

    def _line(self, line: str, important: bool) -> None:
        if self._live:
            # One line whatever the width, so that it does not jump; what matters most comes first.
            self._live.update(Text(line, no_wrap=True, overflow="ellipsis"))
            return
        now = time.monotonic()
        if important or now - self._shown >= PLAIN_SECONDS:
            self._shown = now
            self._console.print(line, highlight=False, soft_wrap=True, markup=False)

    def _step(self, event: StepDone) -> None:
        self._recent.append(event)
        line = (
            f"step {event.step:>{len(str(event.steps))}}/{event.steps}  loss {event.loss:.4f}  {time_left(event)}  "
            f"{self._rates()}  gradient norm {event.gradient_norm:.2f}"
        )
        line += "".join(f"  {key.rpartition('/')[2]} {x:.3g}" for key, x in event.figures.items() if key in WATCHED)
        if event.dropped:
            line += f"  {event.dropped:.1%} dropped"
        if event.skipped:
            line += f"  {event.skipped} skipped"
        self._line(line, event.step in (event.first, event.steps))

    def _rates(self) -> str:
        """Tokens a second, and where they are known the model's FLOP/s and their share of what the devices can do."""
        last = self._recent[-1]
        before = self._recent[0].seconds if len(self._recent) > 1 else 0.0
        steps = list(self._recent)[1:] if len(self._recent) > 1 else [last]
        seconds = max(last.seconds - before, 1e-9)
        words = [f"{sum(step.tokens for step in steps) / seconds:,.0f} tokens/s"]
        flops = sum(step.flops for step in steps) / seconds
        if flops:
            words.append(figures.flops(flops))
            if last.peak_flops:
                words.append(f"MFU {flops / last.peak_flops:.0%}")
        return "  ".join(words)


def time_left(event: StepDone) -> str:
    """The time until the last step at the pace so far, or until the time limit where that comes first."""
    pace = event.seconds / (event.step - event.first + 1)
    left = max(0.0, min(pace * (event.steps - event.step), event.limit - event.seconds))
    minutes, seconds = divmod(round(left), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02} left" if hours else f"{minutes}:{seconds:02} left"


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
    """Passes events on, and after the first step a table of what came before it (`--profile-startup`).

    What lies between one `Doing` and the next is one row. So nothing is measured that a run does not do anyway, and
    whoever adds a slow part gives it a word. Trade-off: of several ranks only what rank 0 tells is seen.
    """

    tell: Callable[[object], None]
    now: Callable[[], float] = time.monotonic
    begun: float = field(default_factory=lambda: time.monotonic() - age())
    """When the command was given, by the clock `now`."""
    moments: list[tuple[float, str]] = field(default_factory=list[tuple[float, str]])
    done: bool = False

    def __call__(self, event: object) -> None:
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
