"""`tangram launch` on two nodes, as torchrun or Slurm starts it there: two launchers over one store, each with a memory
of its own. A rank is lost, then a node with all that lay in its memory; the losses are those of a run left alone."""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bench._faults.nodes import ended, losses, memories, pids, started, until_step
from tangram.training.run import environment
from tests.training.small import plan_file, write_text

RANKS = 4
MESH = {"mesh": "dp=2 fsdp=2", "axes": {"data": ["dp", "fsdp"]}, "layouts": {"parameters": {"*": "_/fsdp ..."}}}


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("several")
    (folder / "text").mkdir()
    run: dict[str, Any] = {"steps": 60, "evaluate_every": 0, "max_seconds": 600}
    text = write_text(folder / "text")
    return plan_file(folder / "plan.toml", text, run=run, checkpoint={"every_steps": 0}, **MESH)


@pytest.fixture
def memory() -> Iterator[list[Path]]:
    with memories() as found:
        yield found


@pytest.fixture(scope="module")
def undisturbed(plan: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    out = tmp_path_factory.mktemp("alone") / "run"
    command = [sys.executable, "-m", "tangram", "train", str(plan), "--out", str(out)]
    subprocess.run(command, check=True, capture_output=True)
    return losses(out)


TORCH = re.compile(r"\[[IWE]\d{4} |\[.*\bgloo/|Exception raised from|frame #|<omitting python frames>")
"""Lines of torch's own log, as where a connection to a rank that was killed fails or a busy machine answers late."""


def own_lines(output: str) -> list[str]:
    """What a launcher has said itself: all it tells is the first one's to tell, and torch's log is no word of it."""
    return [line for line in output.splitlines() if line.strip() and not TORCH.match(line)]


def test_torchs_log_is_no_word_of_a_launcher() -> None:
    log = (
        "[W1129 21:28:29.6 TCPStore.cpp:125] [c10d] recvValue failed\nException raised from recvBytes\nframe #0: x\n\n"
    )
    assert not own_lines(log)
    assert own_lines(log + "error: it ends\nTraceback (most recent call last):") == [
        "error: it ends",
        "Traceback (most recent call last):",
    ]


def test_a_rank_of_another_node_is_lost(
    plan: Path, undisturbed: dict[int, float], memory: list[Path], tmp_path: Path
) -> None:
    launchers = started(plan, tmp_path / "run", memory)
    until_step(tmp_path / "run", 5, launchers)
    os.kill(pids(tmp_path / "run")[RANKS - 1], signal.SIGKILL)
    first, second = ended(launchers)
    assert [one.returncode for one in launchers] == [0, 0], first + second
    assert "rank 3 of 4 ended the job: killed by signal 9" in " ".join(first.split()), first
    assert "from memory" in first
    assert not own_lines(second), f"one tells: {second}"
    assert losses(tmp_path / "run") == undisturbed
    assert not [path for one in memory for path in one.iterdir()]


@pytest.mark.slow
def test_a_node_is_lost_with_its_memory(
    plan: Path, undisturbed: dict[int, float], memory: list[Path], tmp_path: Path
) -> None:
    launchers = started(plan, tmp_path / "run", memory)
    until_step(tmp_path / "run", 12, launchers)
    launchers[1].kill()
    launchers[1].wait()
    time.sleep(1)  # its ranks end with it
    shutil.rmtree(memory[1])
    memory[1].mkdir()
    (first, _) = ended(launchers)
    assert launchers[0].returncode == 1
    assert "nothing was heard of its launcher" in first
    assert not (tmp_path / "run" / "checkpoint").exists()
    again = started(plan, tmp_path / "run", memory, "--resume")
    (first, _) = ended(again)
    assert [one.returncode for one in again] == [0, 0], first
    assert "resumed from" in first
    assert losses(tmp_path / "run") == undisturbed


@pytest.mark.parametrize(
    ("count", "mistake", "spared"), [("0", True, True), ("3", True, False), ("3", False, True), ("1000", False, False)]
)
def test_restarts_are_not_used_for_what_would_come_again(
    monkeypatch: pytest.MonkeyPatch, count: str, mistake: bool, spared: bool
) -> None:
    """Of a mistake a first start has seen all that a later one would; what ended the policy is the same for each."""
    ended: list[int] = []

    def kill(pid: int, number: int) -> None:
        ended.append(pid)

    monkeypatch.setattr(os, "kill", kill)
    monkeypatch.setattr(os, "_exit", ended.append)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", count)
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "1000")
    environment.end_process(environment.final(1, mistake=mistake))
    assert ended == [os.getppid()] * spared + [1]


@pytest.mark.slow
def test_a_mistake_ends_torchrun_that_has_a_thousand_restarts_left(tmp_path: Path) -> None:
    plan = tmp_path / "plan.toml"
    plan.write_text("version = 3\n[optimiser]\nlrr = 1\n")
    torchrun = ["torch.distributed.run", "--standalone", "--nproc-per-node", "1", "--max-restarts", "1000"]
    command = [sys.executable, "-m", *torchrun, "-m", "tangram", "launch", str(plan), "--resume"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode
    assert done.stderr.count('unknown key "optimiser.lrr"') == 1, done.stderr
