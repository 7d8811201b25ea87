"""`tangram launch` on several nodes: launchers over one store on this machine, each with a memory of its own."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

from tangram.errors import UserError
from tangram.schema.files import dumps
from tangram.schema.plan import Plan
from tangram.tracing.reading import read

NODES = 2
LIMIT = 300.0
RECOVERED = re.compile(r"recovered in ([\d.]+) s from memory, (\d+) steps? done again")

Launchers = Sequence["subprocess.Popen[str]"]


@contextmanager
def memories() -> Generator[list[Path]]:
    """A folder in memory for each node."""
    with tempfile.TemporaryDirectory(prefix="tangram-nodes-", dir="/dev/shm") as folder:
        found = [Path(folder, f"{node}") for node in range(NODES)]
        for one in found:
            one.mkdir()
        yield found


def started(plan: Path, out: Path, memory: Sequence[Path], *more: str) -> list[subprocess.Popen[str]]:
    """A launcher for each node, as torchrun or Slurm starts them."""
    with closing(socket.socket()) as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": f"{port}", "WORLD_SIZE": f"{NODES}"}
    common |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    command = [sys.executable, "-m", "tangram", "launch", str(plan), "--out", str(out), "--snapshot-every", "1", *more]
    return [
        subprocess.Popen(
            [*command, "--memory", str(memory[node])],
            env=os.environ | common | {"RANK": f"{node}", "GROUP_RANK": f"{node}"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for node in range(NODES)
    ]


def losses(out: Path) -> dict[int, float]:
    """By step, of those that are done."""
    file = out / "steps.jsonl"
    rows = [json.loads(row) for row in file.read_text().splitlines()] if file.exists() else []
    return {row["step"]: row["loss"] for row in rows if "loss" in row}


def until_step(out: Path, step: int, launchers: Launchers) -> None:
    """Wait until a step is done, or a launcher has ended."""
    until = time.monotonic() + LIMIT
    while max(losses(out), default=0) < step and all(one.poll() is None for one in launchers):
        if time.monotonic() > until:
            raise TimeoutError(f"step {step} has not come in {LIMIT:g} s")
        time.sleep(0.05)


def pids(out: Path) -> dict[int, int]:
    """The processes of ranks, as the newest trace has them."""
    try:
        return {trace.rank: trace.pid for trace in read(out / "trace")}
    except UserError:
        return {}


def ended(launchers: Launchers) -> list[str]:
    """What they have said."""
    return [one.communicate(timeout=LIMIT)[0] for one in launchers]


@dataclass(frozen=True)
class Outcome:
    """Of a run with losses of ranks and nodes."""

    seconds: float
    """Of a lost rank to the next new step; of a lost node until the other launcher has ended."""
    again: int
    """Steps that were done before, and again."""
    losses: dict[int, float]
    good: bool


def rank_lost(plan: Plan, folder: Path, step: int) -> Outcome:
    """A rank of the last node is killed after a step."""
    folder.mkdir()
    (folder / "plan.toml").write_text(dumps(plan))
    with memories() as memory:
        launchers = started(folder / "plan.toml", folder / "run", memory)
        until_step(folder / "run", step, launchers)
        os.kill(pids(folder / "run")[plan.ranks - 1], signal.SIGKILL)
        said = " ".join(ended(launchers)[0].split())
    found = RECOVERED.search(said)
    good = found is not None and all(one.returncode == 0 for one in launchers)
    seconds, again = (float(found[1]), int(found[2])) if found else (float("nan"), 0)
    return Outcome(seconds, again, losses(folder / "run"), good)


def node_lost(plan: Plan, folder: Path, step: int) -> Outcome:
    """The last node is lost after a step with its memory; all launchers are started again."""
    folder.mkdir()
    (folder / "plan.toml").write_text(dumps(plan))
    with memories() as memory:
        launchers = started(folder / "plan.toml", folder / "run", memory)
        until_step(folder / "run", step, launchers)
        begun = time.monotonic()
        launchers[-1].kill()
        ended(launchers)
        seconds = time.monotonic() - begun
        before = max(losses(folder / "run"))
        shutil.rmtree(memory[-1])
        memory[-1].mkdir()
        launchers = started(folder / "plan.toml", folder / "run", memory, "--resume")
        said = " ".join(ended(launchers)[0].split())
    found = re.search(r"checkpoint/step-0*(\d+)", said)
    good = found is not None and all(one.returncode == 0 for one in launchers)
    return Outcome(seconds, before - int(found[1]) if found else before, losses(folder / "run"), good)
