"""A rank of a small job that saves beside its training, told by lines on its input what to do; for tests that kill it.

    python -m tests.checkpoint.saving_beside RANK RANKS FOLDER

A request is a JSON list, the name of a function below and its arguments; so is the answer.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tangram.checkpoint.saving.async_saver import AsyncSaver, Settings
from tangram.checkpoint.saving.rank_parts import About
from tangram.checkpoint.state.describe import describe
from tangram.checkpoint.state.entries import LocalPart
from tangram.relayout.exchange.peers import Peers

ROWS, COLUMNS = 8, 5


def whole(step: int) -> dict[str, Tensor]:
    """The state of a step, whole: one tensor that the ranks cut, and two that each of them has."""
    torch.manual_seed(step)
    return {"cut": torch.randn(ROWS, COLUMNS), "one": torch.randn(33), "two": torch.randn(3, 3).bfloat16()}


class Rank:
    """What one rank can be asked for."""

    def __init__(self, rank: int, ranks: int, folder: Path) -> None:
        self._rank, self._ranks = rank, ranks
        self._saver = AsyncSaver(folder / "runs", Peers(dist.group.WORLD), Settings(pause=0.05, limit=30))

    def settings(self, **fields: Any) -> None:
        """Of the saves to come."""
        self._saver.settings = Settings(**{"pause": 0.05, "limit": 30, **fields})

    def begin(self, step: int) -> float:
        """Save the state of a step, and change everything as soon as that is allowed."""
        tensors = whole(step)
        mine = tensors["cut"].chunk(self._ranks)[self._rank].clone()
        parts = {**tensors, "cut": LocalPart(mine, (ROWS, COLUMNS), "out/tp in", f"tp={self._ranks}", self._rank)}
        began = time.monotonic()
        self._saver.save(describe({"model": parts, "progress": {"step": step}}, Peers(dist.group.WORLD)), About(step))
        self._saver.fence()
        blocked = time.monotonic() - began
        for tensor in (*tensors.values(), mine):
            tensor.zero_()
        return blocked

    def wait(self) -> list[Any]:
        """What came of the saves so far."""
        self._saver.wait()
        return self.poll()

    def poll(self) -> list[Any]:
        """The same, without waiting."""
        return [(s.step, str(s.path or ""), s.reason, s.notes) for s in self._saver.poll()]

    def handed_over(self) -> None:
        """Wait until the process that writes has all of the save."""
        while not self._saver.handed_over:
            time.sleep(0.001)

    def pid(self) -> int | None:
        """Of the process that writes."""
        return self._saver.pid

    def stop(self) -> int | None:
        """Let that process hang; its number."""
        assert self._saver.pid is not None
        os.kill(self._saver.pid, signal.SIGSTOP)
        return self._saver.pid

    def close(self) -> list[Any]:
        """End all of it."""
        found = [(s.step, str(s.path or ""), s.reason, s.notes) for s in self._saver.close()]
        dist.destroy_process_group()
        return found


def main(rank: int, ranks: int, folder: Path) -> None:
    """Answer requests until there are no more."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(str(folder / "store"), ranks), rank=rank, world_size=ranks)
    job = Rank(rank, ranks, folder)
    for line in sys.stdin:
        name, arguments = json.loads(line)
        print(json.dumps(getattr(job, name)(**arguments)), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
