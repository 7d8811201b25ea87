"""torchrun's own restart of `tangram train --resume`, one of whose workers is killed."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

from tangram.schema.files import dumps
from tangram.schema.plan import Plan

LIMIT = 120.0
STEP = re.compile(r"^step +(\d+)/")
SAVED = re.compile(r"^step (\d+): checkpoint committed")


def seconds(plan: Plan, folder: Path) -> float | None:
    """From the kill of a worker, after the first checkpoint, to the first step after; None where the job died."""
    folder.mkdir()
    (folder / "plan.toml").write_text(dumps(plan))
    elastic = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        str(plan.ranks),
        "--max-restarts",
        "3",
    ]
    train = ["-m", "tangram", "train", str(folder / "plan.toml"), "--out", str(folder / "run"), "--resume"]
    log = folder / "log"
    with log.open("w") as out:
        agent = subprocess.Popen([*elastic, *train], stdout=out, stderr=subprocess.STDOUT, process_group=0)
    try:
        if not _until(agent, lambda: any(map(SAVED.match, _lines(log)))):
            return None
        before = len(_lines(log))
        workers = [int(pid) for pid in Path(f"/proc/{agent.pid}/task/{agent.pid}/children").read_text().split()]
        begun = time.monotonic()
        os.kill(workers[-1], signal.SIGKILL)
        if not _until(agent, lambda: any(map(STEP.match, _after_restart(_lines(log)[before:])))):
            return None
        return time.monotonic() - begun
    finally:
        agent.terminate()  # it ends its workers, which have sessions of their own
        try:
            agent.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(agent.pid, signal.SIGKILL)


def _after_restart(lines: list[str]) -> list[str]:
    at = next((i for i, line in enumerate(lines) if line.startswith("This run")), len(lines))
    return lines[at:]


def _lines(log: Path) -> list[str]:
    return log.read_text(errors="replace").splitlines()


def _until(agent: subprocess.Popen[bytes], done: object) -> bool:
    assert callable(done)
    until = time.monotonic() + LIMIT
    while time.monotonic() < until and agent.poll() is None:
        if done():
            return True
        time.sleep(0.05)
    return False
