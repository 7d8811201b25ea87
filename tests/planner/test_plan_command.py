"""`tangram plan` as a person uses it: the table, the file it writes, and what it says of mistakes."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tangram.cli import main
from tangram.planner.local.show import rows
from tangram.schema.files import load
from tangram.schema.plan import Plan
from tests.planner.commands import refused
from tests.planner.small import JOB, PLAN

TINY = (
    "change = { hidden_size = 32, intermediate_size = 32, num_hidden_layers = 1, head_dim = 8, num_attention_heads = 4,"
    " vocab_size = 258 }"
)


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small job, in a folder of its own with a cache of its own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = tmp_path / "job.toml"
    path.write_text(JOB.replace('preset = "qwen3-1m"', f'preset = "qwen3-1m"\n{TINY}'))
    return path


def test_the_table_and_the_file_that_is_written(job: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "plan.toml"
    assert main(["plan", str(job), "--processes", "2", "--out", str(out), "--pick", "2"]) == 0
    said = capsys.readouterr().out
    numbered = {row.split()[0]: row for row in said.splitlines() if re.match(r"\d+ |- ", row)}
    assert {"1", "2", "-"} <= set(numbered)
    assert "one process" in numbered["-"]
    assert f"wrote {out}" in said
    plan = load(out)
    assert isinstance(plan, Plan)
    assert plan.ranks == 2
    assert plan.data.sources[1].path == str(tmp_path / "text")
    assert (tmp_path / "cache" / "tangram" / "rates.json").is_file()

    assert main(["plan", str(job), "-n", "2", "--json", "--set", "data.global_batch=2"]) == 0
    told: Any = json.loads(capsys.readouterr().out)
    assert told["processes"] == 2
    assert {"FSDP", "DDP", "TP"} == {one["name"] for one in told["plans"]}
    assert told["one_process"]["name"] == "one process"
    assert {one["micro_batch"] for one in told["plans"] if one["name"] == "FSDP"} == {1}


def test_none_fits(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    changes = ["data.global_batch=1", "model.change.num_attention_heads=3", "model.change.num_key_value_heads=1"]
    words = [word for change in changes for word in ("--set", change)]
    assert main(["plan", str(job), "-n", "2", *words]) == 1
    said = capsys.readouterr().out
    assert said.count("1 samples cannot be cut over the 2 ranks of the data axes") == 2
    assert "the 3 attention heads (num_attention_heads) do not divide by tp=2" in said


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--processes", "0"], "--processes 0: plans are made for 1 to 64"),
        (["--processes", "65"], "--processes 65: plans are made for 1 to 64"),
        (["--processes", "many"], "Invalid value for '--processes'"),
        (["--set", "run.stepz=3"], 'unknown key "run.stepz"; did you mean "steps"?'),
        (["--set", "run.steps"], "write a key and a value"),
        (["--set", "model.change.hiden_size=3"], 'has no field "hiden_size" to change; did you mean "hidden_size"?'),
        (["--set", "version=2"], "version = 2: input should be 3"),
        (["--set", "data.tokenizer=nowhere"], "does not exist: give a Hugging Face directory"),
        (["--set", "data.sequence=4000"], "but the model has 1024 positions"),
        (["--set", "model.change.vocab_size=100"], "vocabulary of 100"),
        (["--out", "/proc/none/plan.toml"], "cannot be written"),
        (["--out", "plan.toml", "--pick", "99"], "--pick 99: there are"),
        (
            [
                "-n",
                "2",
                "--out",
                "plan.toml",
                "--stages",
                "4",
                "--schedule",
                "ZBVZeroBubble",
                "--set",
                "model.change.tie_word_embeddings=true",
                "--set",
                "model.change.num_hidden_layers=4",
            ],
            "0 plans that fit this machine: pipeline.schedule: ZBVZeroBubble puts model.embed_tokens and the head",
        ),
        (["--out", "plan.toml", "--pick", "0"], "--pick 0: rows count from 1"),
        (["--out", "."], "cannot be written"),
    ],
)
def test_mistakes(
    arguments: list[str], message: str, job: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(job.parent)
    assert message in refused(capsys, str(job), *arguments)
    assert not (job.parent / "plan.toml").exists()


def test_mistakes_in_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "job.toml"
    path.write_text(JOB.replace("version = 3", "version = 4"))
    assert f"{path}, line 1: version = 4: this Tangram reads plans of version 3" in refused(capsys, str(path))
    path.write_text(JOB.replace("lr = 2e-3", "lr = -1"))
    assert f"{path}, line 20: optimiser.lr = -1" in refused(capsys, str(path))
    assert "there is no plan file" in refused(capsys, str(tmp_path / "none.toml"))
    path.write_text(PLAN)
    assert "is a plan already" in refused(capsys, str(path))


def test_show(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "plan.toml"
    path.write_text(PLAN)
    assert main(["plan", "--show", str(path)]) == 0
    said = capsys.readouterr().out
    for words in ("2 ranks, tensor: cuts what modules compute", "data: cuts the batch and the parameters (FSDP)"):
        assert words in said
    assert main(["plan", "--show", str(path), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["step"] == "8 samples of 16 tokens = 128 tokens"
    assert told["of which"] == "4 samples a DP rank of 2, as 2 micro-batches of 2"
    assert told["parameters *.q_proj.weight"] == "(heads/tp head_dim)/dp h"
    path.write_text(JOB)
    assert main(["plan", "--show", str(path)]) == 0
    assert "this is a job" in capsys.readouterr().out


def test_what_is_shown_of_the_rest(tmp_path: Path) -> None:
    path = tmp_path / "plan.toml"
    path.write_text(PLAN)
    changes = {
        "mesh": "dp=2 tp=2 hp=1",
        "axes.data": '["dp", "hp"]',
        "data.global_batch": "7",
        "optimiser.schedule": "wsd",
        "optimiser.decay_steps": "30",
        "checkpoint.every_steps": "50",
        "run.recompute": '["model.layers.*"]',
        "run.max_seconds": "60",
        "precision.compute": "bfloat16",
        "model.freeze": '["*.embed*"]',
        "model.change.hidden_size": "64",
    }
    said = dict(rows(load(path, changes)))
    assert said["axis hp"] == "1 ranks, data: cuts the batch, parameters are copies"
    assert said["of which"] == "up to 4 of 2, as 2 micro-batches of 2; 1 places of the last stay empty"
    assert said["learning rate"] == "20 steps up to 0.002, constant, then 30 steps down to 0.0002"
    assert said["checkpoints"] == "every 50 steps and at the end, while training goes on; the newest 2 are kept"
    assert said["recomputed"] == "model.layers.*"
    assert said["computed in"] == "bfloat16"
    assert said["length"] == "300 steps, or 60 s if that is sooner; 33,600 tokens"
    assert said["model"] == 'the preset "qwen3-1m", with hidden_size = 64'
    assert said["not trained"] == "*.embed*"


def test_show_and_mistakes_load_no_torch(tmp_path: Path) -> None:
    path = tmp_path / "plan.toml"
    path.write_text(PLAN)
    command = [sys.executable, "-X", "importtime", "-m", "tangram", "plan", "--show", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert not re.search(r"\| +(torch|transformers)$", done.stderr, re.MULTILINE)
