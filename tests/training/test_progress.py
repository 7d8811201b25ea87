"""A live line on a terminal, plain lines elsewhere."""

import io
import re
from dataclasses import replace
from math import inf

import pytest
from rich.console import Console

from tangram.planner.report import figures
from tangram.training.observe.events import CheckpointSaved, Evaluated, Note, SaveFailed, StepDone, TableEvent, Working
from tangram.training.observe.progress import ProgressLine


def shown(terminal: bool, width: int = 200, notes: tuple[str, ...] = ()) -> str:
    out = io.StringIO()
    with ProgressLine(Console(file=out, force_terminal=terminal, width=width, height=25)) as line:
        line(Note("model [small]"))
        for step in range(1, 51):
            line(StepDone(step, 50, 2.5, 1.25, 1e-3, tokens=100, seconds=step / 10))
        for note in notes:
            line(Note(note))
        line(object())  # what it does not know it does not show
    return out.getvalue()


def test_plain_lines_are_few() -> None:
    assert shown(terminal=False).splitlines() == [
        "model [small]",
        "step  1/50  loss 2.5000  0:05 left  1,000 tokens/s  gradient norm 1.25",
        "step 50/50  loss 2.5000  0:00 left  1,000 tokens/s  gradient norm 1.25",
    ]


@pytest.mark.parametrize("width", [200, 60, 20])
def test_a_terminal_gets_one_line_that_goes_away(width: int) -> None:
    screen = Screen(width)
    screen.write(shown(terminal=True, width=width, notes=("trained", "held out")))
    assert [line for line in screen.lines if line] == ["model [small]", "trained", "held out"]


def test_a_narrow_terminal_keeps_what_comes_first() -> None:
    assert "step 50/50  loss 2.5000  0:00 left  1,000 tokens/s" in shown(terminal=True, width=60)
    assert "gradient norm" not in shown(terminal=True, width=60)


@pytest.mark.parametrize(
    ("step", "seconds", "limit", "left"),
    [(1, 3.0, inf, "4:57 left"), (50, 100.0, 110.0, "0:10 left"), (1, 3600.0, inf, "99:00:00 left"), (1, 9, 8, "0:00")],
)
def test_the_time_left(step: int, seconds: float, limit: float, left: str) -> None:
    out = io.StringIO()
    ProgressLine(Console(file=out, width=200))(StepDone(step, 100, 2.5, 1.25, 1e-3, 100, seconds, limit=limit))
    assert left in out.getvalue()


def plainly(*events: object) -> list[str]:
    out = io.StringIO()
    line = ProgressLine(Console(file=out, width=200))
    for event in events:
        line(event)
    return out.getvalue().splitlines()


def test_the_time_left_of_a_resumed_run_counts_its_own_steps() -> None:
    (line,) = plainly(StepDone(51, 100, 2.5, 1.25, 1e-3, 100, seconds=2.0, first=51))
    assert "1:38 left" in line


def test_rates_are_those_of_the_last_steps() -> None:
    slow = [StepDone(n, 40, 2.5, 1.0, 1e-3, 100, seconds=10.0 * n, flops=2e9, peak_flops=8e9) for n in range(1, 20)]
    quick = [replace(slow[0], step=20 + n, seconds=190 + n / 10) for n in range(21)]
    *_, line = plainly(*slow, *quick)
    assert "1,000 tokens/s  20 GFLOP/s  MFU 250%" in line


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (4.2e7, "0.042 GFLOP/s"),
        (4.09e10, "40.9 GFLOP/s"),
        (3.4e11, "340 GFLOP/s"),
        (9.999e11, "1 TFLOP/s"),
        (1.25e17, "125 PFLOP/s"),
    ],
)
def test_flops_have_the_unit_of_their_size(value: float, said: str) -> None:
    assert figures.flops(value) == said


def test_what_else_happens_has_a_line_of_its_own() -> None:
    assert plainly(
        Evaluated(10, 2.25, 1.0),
        CheckpointSaved(10, "run/step-10", blocked_seconds=0.0125, seconds=0.5, asynchronous=True),
        CheckpointSaved(20, "run/step-20", blocked_seconds=0.25, seconds=0.25, asynchronous=False),
        SaveFailed(20, "the disk is full"),
        TableEvent("Plan", ("what", "value"), (("mesh", "dp=2"),)),
        Working("tokenising", 3, 4, "files"),
        Working("tokenising", 4, 4, "files"),
    ) == [
        "step 10: held-out loss 2.2500",
        "step 10: checkpoint committed in 0.50 s; training stood still for 0.013 s of it",
        "step 20: checkpoint committed in 0.25 s",
        "step 20: NO checkpoint was written: the disk is full; training goes on",
        "Plan",
        "what  value",
        "mesh  dp=2",
        "",
        "tokenising  75%  3 of 4 files",
        "tokenising 100%  4 of 4 files",
    ]


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
