"""Public reports about going on with a run: learning rates, batches, horizons, folders, temporary files.

Others of this subject have their test elsewhere: accelerate#2016, torchtitan#1357 (another number of ranks) and
ms-swift#10050, verl#7401, pytorch-lightning#21938 (the order of samples, within an epoch and at its end) in
tests/training/oracle/test_resume.py, pytorch#1223 (zombies) in
tests/training/test_launch.py, submitit#1701 (SIGHUP) in tests/training/test_stop.py.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import tomli_w

from tangram.cli import main
from tangram.schema.files import load
from tangram.training.observe.events import StepDone
from tangram.training.start import TrainRequest, train_request
from tangram.training.state.checkpointer import describe, newest
from tangram.training.step.optimiser_step import lr_at
from tests.training.small import small_tables, write_text


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one rank that has done 1 of 6 steps."""
    folder = tmp_path_factory.mktemp("public")
    one = {"mesh": "dp=1", "layouts": {"parameters": {"*": "..."}}}
    plan, out = folder / "plan.toml", folder / "run"
    plan.write_text(tomli_w.dumps(small_tables(write_text(folder / "text"), run={"steps": 6}, **one)))
    asked = TrainRequest(load(plan, {"run.max_seconds": "1e-9"}), "public", None, out, None, False)
    train_request(asked, lambda event: None, None)
    return out


def resumed(out: Path, changes: dict[str, str], *allow: str) -> list[StepDone]:
    """The steps that a resume does."""
    events: list[object] = []
    asked = TrainRequest(load(out / "plan.toml", changes), "public", None, out, out, False, 0, allow)
    train_request(asked, events.append, None)
    return [event for event in events if isinstance(event, StepDone)]


def refused(out: Path, capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["train", "--resume", "--out", str(out), *words]) == 2
    return capsys.readouterr().err


@pytest.fixture(scope="module")
def steps(out: Path) -> list[StepDone]:
    """Those that the run does when it goes on, after its first."""
    return resumed(out, {"run.max_seconds": "inf"})


def test_a_resume_does_not_begin_the_schedule_anew(out: Path, steps: list[StepDone]) -> None:
    """tensorflow#49208: the schedule forgets where the run was, and warms up once more."""
    assert [step.step for step in steps] == [2, 3, 4, 5, 6]
    assert steps[0].lr == lr_at(1, 6, load(out / "plan.toml").optimiser)


def test_a_resume_advances_the_schedule_once_a_step(out: Path, steps: list[StepDone]) -> None:
    """slime#1547: a schedule that was restored and then advanced by the steps done is ahead of the run."""
    assert [step.lr for step in steps] == [lr_at(at, 6, load(out / "plan.toml").optimiser) for at in range(1, 6)]


def test_the_horizon_is_the_runs_and_not_what_is_left_of_it(out: Path, steps: list[StepDone]) -> None:
    """prime-rl#3268: a schedule sized anew on resume decays over another number of steps."""
    optimiser = load(out / "plan.toml").optimiser
    assert steps[-1].lr == pytest.approx(optimiser.lr * optimiser.final_lr)


def test_more_steps_do_not_change_the_rate_unasked(
    out: Path, steps: list[StepDone], capsys: pytest.CaptureFixture[str]
) -> None:
    """insightface#2143: epochs are raised on resume, and the schedule takes them for the whole of the run."""
    said = refused(out, capsys, "--set", "run.steps=12", "--set", "run.max_seconds=inf")
    assert "was trained with run.steps 6, and the plan has 12 (the learning rate of step 7 becomes" in said
    assert "--set optimiser.schedule=constant --set optimiser.lr=0.001 keeps): resume with the same" in said
    assert "--allow run.steps" in said


def test_another_batch_goes_on_at_the_sample_where_the_run_was(
    out: Path, steps: list[StepDone], capsys: pytest.CaptureFixture[str]
) -> None:
    """OLMo#182: a position that is counted in steps is another place in the text when the batch is another."""
    steady = {"optimiser.schedule": "constant", "optimiser.lr": "0.001", "run.steps": "8", "data.global_batch": "4"}
    words = [word for key, value in steady.items() for word in ("--set", f"{key}={value}")]
    assert "data.global_batch 8, and the plan has 4: resume" in refused(out, capsys, *words)
    more = resumed(out, {**steady, "run.max_seconds": "inf"}, "data")
    assert [step.lr for step in more] == pytest.approx([0.001, 0.001])
    path = newest(out / "checkpoint")
    assert path is not None
    assert describe(path).progress.samples == 6 * 8 + 2 * 4


@pytest.mark.parametrize("length", [60, 75, 76, 80, 200])
def test_a_long_folder_for_temporary_files(length: int, tmp_path: Path) -> None:
    """RiboDetector#57, cpython#140734: under a long TMPDIR the address of a socket is too long, by one byte also."""
    folder = f"/tmp/{'x' * (length - 5)}"
    code = (
        "from multiprocessing.connection import Listener\n"
        "from tangram.training.run.fork_server import context_of_ranks\n"
        "context_of_ranks()\n"
        "print(len(Listener(family='AF_UNIX').address))"
    )
    Path(folder).mkdir(exist_ok=True)
    try:
        run = subprocess.run(
            [sys.executable, "-c", code], env=os.environ | {"TMPDIR": folder}, capture_output=True, text=True
        )
        assert run.returncode == 0, run.stderr
        assert int(run.stdout) <= 103
    finally:
        Path(folder).rmdir()
