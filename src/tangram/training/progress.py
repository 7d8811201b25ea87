"""What a person sees while a job runs: one live line on a terminal, a plain line now and then elsewhere.

Everything goes to one rich console (stderr when the result is JSON on stdout); ranks never print, they emit events.
"""

import math
import time
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.live import Live
from rich.text import Text

PLAIN_SECONDS = 5.0  # between two plain lines, so that a log file stays readable


@dataclass(frozen=True)
class StepDone:
    """One finished training step: its loss is the mean over the counted tokens of the global batch, in nats."""

    step: int
    steps: int
    loss: float
    gradient_norm: float
    tokens: int
    seconds: float
    limit: float = math.inf
    """The seconds after which training stops, if that is before the last step."""


@dataclass(frozen=True)
class Note:
    """A milestone worth a line of its own."""

    text: str


class ProgressLine:
    """Shows events; use it as a context manager so that the terminal is left as it was."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live = Live(console=console, transient=True, refresh_per_second=4) if console.is_terminal else None
        self._started = time.monotonic()
        self._shown = float("-inf")
        self._tokens = 0

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
        if isinstance(event, Note):
            if self._live:
                self._live.update(Text())  # the steps are behind us; what they ended at is no news
            self._console.print(event.text, highlight=False, soft_wrap=True, markup=False)
        elif isinstance(event, StepDone):
            self._step(event)

    def _step(self, event: StepDone) -> None:
        self._tokens += event.tokens
        rate = self._tokens / max(event.seconds, 1e-9)
        line = (
            f"step {event.step:>{len(str(event.steps))}}/{event.steps}  loss {event.loss:.4f}  "
            f"{_left(event)}  gradient norm {event.gradient_norm:.2f}  {rate:,.0f} tokens/s"
        )
        if self._live:
            # One line whatever the width, so that it does not jump; what matters most comes first.
            self._live.update(Text(line, no_wrap=True, overflow="ellipsis"))
            return
        now = time.monotonic()
        if event.step in (1, event.steps) or now - self._shown >= PLAIN_SECONDS:
            self._shown = now
            self._console.print(line, highlight=False, soft_wrap=True, markup=False)


def _left(event: StepDone) -> str:
    """The time until the last step at the pace so far, or until the time limit where that comes first."""
    pace = event.seconds / event.step
    left = max(0.0, min(pace * (event.steps - event.step), event.limit - event.seconds))
    minutes, seconds = divmod(round(left), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02} left" if hours else f"{minutes}:{seconds:02} left"
