"""A live line on a terminal, plain lines elsewhere."""

import io
import re
from math import inf

import pytest
from rich.console import Console

from tangram.training.progress import Note, ProgressLine, StepDone


def shown(terminal: bool, width: int = 200, notes: tuple[str, ...] = ()) -> str:
    out = io.StringIO()
    with ProgressLine(Console(file=out, force_terminal=terminal, width=width, height=25)) as line:
        line(Note("model [small]"))
        for step in range(1, 51):
            line(StepDone(step, 50, 2.5, 1.25, tokens=100, seconds=step / 10))
        for note in notes:
            line(Note(note))
        line(object())  # what it does not know it does not show
    return out.getvalue()


def test_plain_lines_are_few() -> None:
    assert shown(terminal=False).splitlines() == [
        "model [small]",
        "step  1/50  loss 2.5000  0:05 left  gradient norm 1.25  1,000 tokens/s",
        "step 50/50  loss 2.5000  0:00 left  gradient norm 1.25  1,000 tokens/s",
    ]


@pytest.mark.parametrize("width", [200, 60, 20])
def test_a_terminal_gets_one_line_that_goes_away(width: int) -> None:
    screen = Screen(width)
    screen.write(shown(terminal=True, width=width, notes=("trained", "held out")))
    assert [line for line in screen.lines if line] == ["model [small]", "trained", "held out"]


def test_a_narrow_terminal_keeps_what_comes_first() -> None:
    assert "step 50/50  loss 2.5000  0:00 left  gradient norm 1.25" in shown(terminal=True, width=60)
    assert "tokens/s" not in shown(terminal=True, width=60)


@pytest.mark.parametrize(
    ("step", "seconds", "limit", "left"),
    [(1, 3.0, inf, "4:57 left"), (50, 100.0, 110.0, "0:10 left"), (1, 3600.0, inf, "99:00:00 left"), (1, 9, 8, "0:00")],
)
def test_the_time_left(step: int, seconds: float, limit: float, left: str) -> None:
    out = io.StringIO()
    ProgressLine(Console(file=out, width=200))(StepDone(step, 100, 2.5, 1.25, 100, seconds, limit))
    assert left in out.getvalue()


class Screen:
    """As much of a terminal as the progress line uses: lines that wrap, a cursor that moves up, lines erased."""

    def __init__(self, width: int) -> None:
        self.width = width
        self.lines = [""]
        self.row = 0

    def write(self, text: str) -> None:
        for part in re.findall(r"\x1b\[\??[0-9;]*[A-Za-z]|\r|\n|[^\x1b\r\n]+", text):
            if part == "\n":
                self._down()
            elif part == "\x1b[2K":
                self.lines[self.row] = ""
            elif part.startswith("\x1b") and part.endswith("A"):
                self.row -= int(part[2:-1])
            elif part != "\r" and not part.startswith("\x1b"):
                self._print(part)

    def _print(self, text: str) -> None:
        for at in range(0, len(text), self.width):
            if at:
                self._down()
            self.lines[self.row] = text[at : at + self.width]

    def _down(self) -> None:
        self.row += 1
        if self.row == len(self.lines):
            self.lines.append("")
