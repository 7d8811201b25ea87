"""The whole command: train, checkpoint, reload, export."""

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

from tangram.cli import main
from tangram.errors import UserError
from tangram.training.job import RankJob, train_rank
from tangram.training.launch import run_ranks
from tests.training.small import WORLD, plan_file, small_plan

QUICKSTART = Path(__file__).parents[2] / "examples" / "quickstart" / "plan.toml"


def tangram_train(*arguments: object) -> tuple[dict[str, Any], str]:
    command = [sys.executable, "-m", "tangram", "train", *map(str, arguments), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), done.stderr


def test_the_whole_job(text: Path, tmp_path: Path) -> None:
    plan = plan_file(tmp_path / "plan.toml", text)
    report, shown = tangram_train(plan, "--out", tmp_path / "out", "--steps", 5)
    assert (report["ranks"], report["steps"]) == (2, 5)
    assert report["final_loss"] < report["first_loss"]
    assert report["relative_difference"] <= 1e-6
    assert report["logits_difference"] <= 1e-5
    assert "step 5/5" in shown
    assert json.loads((tmp_path / "out" / "summary.json").read_text()) == report
    assert (tmp_path / "out" / "plan.toml").read_bytes() == plan.read_bytes()
    with safe_open(tmp_path / "out" / "export" / "model.safetensors", "pt") as tensors:
        assert "model.layers.1.mlp.up_proj.weight" in tensors.keys()  # noqa: SIM118  not a mapping


def test_a_run_that_diverges_ends_with_one_sentence(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = plan_file(tmp_path / "plan.toml", text, optimiser={"lr": 1e30}, run={"steps": 20})
    assert main(["train", str(plan), "--out", str(tmp_path / "out")]) == 1
    _, err = capsys.readouterr()
    assert err.count("\n") == 1
    assert "of 2 ended the job: FloatingPointError: the gradient norm of step 2 is nan" in err
    assert "Traceback" in (tmp_path / "out" / "failure.txt").read_text()


def test_a_text_that_changes_while_the_ranks_start_is_refused(text: Path, tmp_path: Path) -> None:
    told = RankJob(small_plan(text), tmp_path, ("of", "another text"))
    with pytest.raises(UserError, match=r"data\.root have changed since the job began"):
        run_ranks(train_rank, told, world=WORLD, on_event=print, device="cpu")


@pytest.mark.slow
def test_the_quickstart_learns_within_two_minutes(tmp_path: Path) -> None:
    started = time.monotonic()
    report, _ = tangram_train(QUICKSTART, "--out", tmp_path / "out")
    assert report["held_out_loss"] <= 0.8 * report["unigram_entropy"]
    assert 1e6 <= report["parameters"] <= 2e6
    assert time.monotonic() - started <= 120
