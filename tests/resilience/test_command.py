"""`tangram launch` as a person types it: killed as a whole it goes on from memory; what it cannot do it says."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tangram.cli import main
from tangram.resilience.tiers import memory_of
from tangram.training import start
from tangram.training.run.job import Stopped
from tests.resilience.runs import free_port
from tests.training.small import plan_file, write_text


def test_several_to_a_node_are_refused(tmp_path: Path) -> None:
    (tmp_path / "text").mkdir()
    plan = plan_file(tmp_path / "plan.toml", write_text(tmp_path / "text"))
    environment = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
    environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": f"{free_port()}"}
    command = [sys.executable, "-m", "tangram", "launch", str(plan), "--out", str(tmp_path / "run")]
    done = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, check=False)
    assert done.returncode == 2, done.stdout + done.stderr
    assert "start one on each (--nproc-per-node 1)" in " ".join(done.stderr.split())


def test_without_a_job_it_says_what_to_give(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["launch"]) == 2
    assert "give a plan or a job" in capsys.readouterr().err


def test_who_stops_it_is_told_to_go_on_with_a_launcher(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "text").mkdir()
    plan, out = plan_file(tmp_path / "plan.toml", write_text(tmp_path / "text")), tmp_path / "run"
    monkeypatch.setattr(start, "train_job", lambda *job: Stopped(2, None))
    assert main(["launch", str(plan), "--out", str(out)]) == 0
    assert f"tangram launch --resume --out {out}" in "".join(capsys.readouterr().out.split("\n"))


@pytest.mark.slow
def test_a_launcher_that_is_killed_goes_on_from_memory(tmp_path: Path) -> None:
    (tmp_path / "text").mkdir()
    run = {"steps": 120}
    plan = plan_file(tmp_path / "plan.toml", write_text(tmp_path / "text"), run=run, checkpoint={"every_steps": 0})
    out, log = tmp_path / "run", tmp_path / "log"
    command = [sys.executable, "-m", "tangram", "launch", str(plan), "--out", str(out)]
    memory = memory_of(out)
    assert memory is not None
    with log.open("w") as stream:
        program = subprocess.Popen(command, stdout=stream, stderr=subprocess.STDOUT, process_group=0)
    until = time.monotonic() + 120
    while not list(memory.glob("attempt-1/step-*")) and time.monotonic() < until and program.poll() is None:
        time.sleep(0.02)
    os.killpg(program.pid, signal.SIGKILL)
    program.wait()
    assert list(memory.glob("attempt-1/step-*")), log.read_text()
    assert not list((out / "checkpoint").glob("step-*"))
    again = subprocess.run([*command, "--resume"], capture_output=True, text=True, check=False)
    assert again.returncode == 0, again.stderr + again.stdout
    assert "resumed from" in again.stdout
    assert "step   1/120" not in again.stdout, "it did not begin anew"
    assert (out / "summary.json").is_file()
    assert not memory.exists()
