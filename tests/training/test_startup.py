"""What a run says of the time until its first step: every second has a name, and it is said once."""

import subprocess
import sys
import time

import pytest

from tangram.training.observe.events import Doing, Note, StepDone, StepSkipped, TableEvent
from tangram.training.observe.progress import BEFORE, Startup, age

STEP = StepDone(step=1, steps=2, loss=1.0, gradient_norm=1.0, lr=1.0, tokens=1, seconds=1.0)


@pytest.mark.parametrize("end", [STEP, StepSkipped(1, "the loss is nan", 1)])
def test_every_second_has_a_name(end: object) -> None:
    clock, heard = iter([12.0, 15.0, 21.0]), list[object]()
    startup = Startup(heard.append, now=lambda: next(clock), begun=10.0)
    events = (Doing("reading"), Note("a line"), Doing("the first step"), end, Doing("afterwards"), end)
    for event in events:
        startup(event)
    (table,) = [event for event in heard if isinstance(event, TableEvent)]
    assert table.title == "From the command to the first step: 11.0 s"
    assert table.rows == ((BEFORE, "2.00", "18%"), ("reading", "3.00", "27%"), ("the first step", "6.00", "55%"))
    assert [event for event in heard if event is not table] == [*events]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the system does not tell")
def test_the_age_of_a_process_begins_with_its_start() -> None:
    program = "import time; time.sleep(0.5); from tangram.training.observe.progress import age; print(age())"
    begun = time.monotonic()
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert 0.5 <= float(done.stdout) <= time.monotonic() - begun + 0.02  # the clock of ticks has a grain
    assert age() > 0
