"""A live line on a terminal, plain lines elsewhere."""

import io

from rich.console import Console

from tangram.training.progress import Note, ProgressLine, StepDone


def shown(terminal: bool) -> str:
    out = io.StringIO()
    with ProgressLine(Console(file=out, force_terminal=terminal, width=200)) as line:
        line(Note("model [small]"))
        for step in range(1, 51):
            line(StepDone(step, 50, 2.5, 1.25, tokens=100, seconds=step / 10))
        line(object())  # what it does not know it does not show
    return out.getvalue()


def test_plain_lines_are_few() -> None:
    assert shown(terminal=False).splitlines() == [
        "model [small]",
        "step  1/50  loss 2.5000  gradient norm 1.25  1,000 tokens/s  0 s",
        "step 50/50  loss 2.5000  gradient norm 1.25  1,000 tokens/s  5 s",
    ]


def test_a_terminal_gets_one_line_that_goes_away() -> None:
    out = shown(terminal=True)
    assert "model [small]\n" in out
    assert "step 50/50" in out
    assert out.endswith("\x1b[?25h\r\x1b[1A\x1b[2K") or "\x1b[2K" in out  # the line is erased
