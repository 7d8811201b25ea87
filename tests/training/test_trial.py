"""Plans are really run for a few steps: what is measured, what is caught, and one command from a job to a model."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from tangram.cli import main
from tangram.hardware.host.workers import Job, run
from tangram.planner.cost.history import read
from tangram.schema.files import dumps, load
from tangram.schema.plan import Plan
from tangram.training.observe.summary import Summary
from tangram.training.trials.auto import measured, shortened
from tests.training.small import small_plan, small_tables, write_text

STRATEGY = ("mesh", "axes", "layouts")


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trial") / "text"
    folder.mkdir()
    return write_text(folder)


@pytest.fixture
def job(text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A job, and a history of its own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("TANGRAM_HISTORY", str(tmp_path / "h.sqlite"))
    tables = small_tables(text, run={"steps": 10})
    path = tmp_path / "job.toml"
    path.write_text(tomli_w.dumps({key: tables[key] for key in tables if key not in STRATEGY}))
    return path


def test_only_training_is_left_of_a_plan(text: Path) -> None:
    plan = small_plan(text, run={"steps": 3, "evaluate_every": 1, "count_experts": 2})
    short = shortened(plan, 5)
    assert (short.run.steps, short.run.evaluate_every, short.run.count_experts) == (5, 0, 0)
    assert (short.checkpoint.every_steps, short.mesh, short.layouts) == (0, plan.mesh, plan.layouts)
    warm = small_plan(text, run={"steps": 90}, optimiser={"warmup_steps": 50, "schedule": "wsd", "decay_steps": 9})
    assert shortened(warm, 2).run.steps == 2


def test_what_does_not_end_is_ended(text: Path) -> None:
    found = measured(small_plan(text), limit=0.5)
    assert found.outcome == "not done"
    assert "not done within 0.5 s" in found.why


@pytest.mark.slow
def test_memory_that_runs_out_is_an_outcome(text: Path) -> None:
    plan = small_plan(text, data={"global_batch": 4096, "micro_batch": 2048, "sequence": 128})
    wanted: Any = {"plan": dumps(shortened(plan, 2)), "most": 1_500_000_000}
    found: Any = run([Job("tests.training.limited:with_little_memory", wanted)], 120)[0]
    assert found.ok, found.log
    assert found.value["outcome"] == "out of memory"
    assert "out of memory in" in found.value["why"]


def test_what_goes_wrong_is_said(text: Path) -> None:
    found = measured(small_plan(text, data={"sources": [{"path": str(text / "nowhere")}]}))
    assert found.outcome == "failed"
    assert "nowhere" in found.why


def test_the_best_plans_are_measured_and_remembered(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, file = job.parent / "plan.toml", job.parent / "h.sqlite"
    assert main(["plan", str(job), "-n", "2", "--measure", "1", "--out", str(out), "--json"]) == 0
    told: Any = json.loads(capsys.readouterr().out)
    assert [one["outcome"] for one in told["trials"]] == ["measured"]
    assert told["trials"][0]["seconds"] > 0
    assert told["trials"][0]["used"] > 1e8
    entry = read(file).entries[0]
    assert (entry.kind, entry.name, entry.outcome) == ("trial", "job", "measured")
    assert entry.seconds == told["trials"][0]["seconds"]
    known = [one for one in told["plans"] if one["likely"]["measured"]]
    assert len(known) == 1
    assert known[0]["likely"]["step"] == entry.seconds
    plan = load(out)
    assert isinstance(plan, Plan)
    assert plan.ranks == 2

    assert main(["plan", str(job), "-n", "2"]) == 0  # what was learned is there the next time
    said = capsys.readouterr().out
    assert "ms, measured" in said
    assert "corrected by 1 measured here" in said
    assert main(["plan", "--history"]) == 0
    assert "trial" in capsys.readouterr().out


def test_from_a_job_to_a_model_in_one_command(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = job.parent / "run"
    assert main(["train", str(job), "-n", "2", "--auto", "--trials", "1", "--out", str(out), "--json"]) == 0
    summary = json.loads((out / "summary.json").read_text())
    assert summary["steps"] == 10
    said = capsys.readouterr().err
    assert "trial " in said
    assert "ms a step" in said
    entries = read(job.parent / "h.sqlite").entries
    assert [one.kind for one in entries] == ["trial", "training"]
    assert entries[1].seconds == summary["step_seconds"] * (1 - summary["slow_ranks_share"])
    assert entries[1].outcome == "measured"


def test_what_slow_ranks_cost_is_not_learned() -> None:
    some = Summary(model="m", parameters=1, ranks=8, mesh="dp=8", steps=9, tokens=1, wall_s=1.0, step_seconds=0.4)
    assert some.step_without_slow_ranks == 0.4
    assert replace(some, slow_ranks_share=0.25).step_without_slow_ranks == pytest.approx(0.3)


def test_a_history_that_cannot_be_read_stops_nobody(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (job.parent / "h.sqlite").write_text("no database, but long enough for a header to be read of it" * 40)
    assert main(["plan", str(job), "-n", "2"]) == 0
    assert "planned without what was measured before" in capsys.readouterr().out
    assert main(["plan", "--history"]) == 2
    assert "cannot be used" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["--resume"], []])
def test_what_auto_cannot_do_is_said(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str]
) -> None:
    plan = tmp_path / "plan.toml"
    plan.write_text(dumps(small_plan(text)))
    assert main(["train", str(plan), "--auto", "--out", str(tmp_path / "out"), *words]) == 2
    assert "error: " in capsys.readouterr().err


def test_trials_are_counted_from_one(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(job), "--measure", "-1"]) == 2
    assert main(["plan", str(job), "--measure", "1", "--limit", "0"]) == 2
    assert "give some trials" in capsys.readouterr().err
