"""A program whose ranks step until somebody asks them to stop, all at the same step; the test sends the signals."""

import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from tangram.cli.errors import reported
from tangram.training.observe.events import Note
from tangram.training.run.launch import Rank, run_ranks
from tangram.training.run.signals import POLITE


def step_until_asked(rank: Rank, payload: None) -> tuple[str, int]:
    """The signal that this rank knows of and the step it stopped at."""
    for step in range(1_000_000):
        wish = torch.tensor(float(rank.stop.requested()))
        dist.all_reduce(wish)
        if step == 0:
            rank.emit(f"rank {rank.index} is {os.getpid()}")
        if wish > 0:
            return rank.stop.signal, step
    raise AssertionError("nobody asked")


def show(event: object) -> None:
    """One line for each event."""
    print(event.text if isinstance(event, Note) else event, flush=True)


def main() -> None:
    """Run the ranks and say how they ended."""
    before = [signal.getsignal(number) for number in POLITE]
    ended = run_ranks(step_until_asked, None, world=2, on_event=show, device="cpu")
    names = {name for name, _ in ended} - {""}
    said = f"{' '.join(names) or None} at step {' '.join(str(step) for _, step in ended)}"
    print(said)
    print("the handlers are as before:", before == [signal.getsignal(number) for number in POLITE])
    for file in sys.argv[1:]:
        Path(file).write_text(said)


if __name__ == "__main__":
    sys.exit(reported(main))
