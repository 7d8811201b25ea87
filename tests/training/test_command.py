"""`tangram train` as a user runs it: what it leaves behind, going on, other models, ranks that torchrun starts."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tomli_w
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from tangram.cli import main
from tangram.resilience.tiers import memory_of
from tangram.schema.files import load
from tangram.tracing.show.report import report
from tangram.training.observe.events import read_steps
from tangram.training.state.export_hf import byte_tokenizer
from tests.training.causal_models import write_config
from tests.training.small import small_tables, write_text

STRATEGY = ("mesh", "axes", "layouts")


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a job, a plan and their text."""
    folder = tmp_path_factory.mktemp("command")
    (folder / "text").mkdir()
    tables = small_tables(write_text(folder / "text"), run={"steps": 6, "evaluate_every": 2})
    tables["checkpoint"] = {"every_steps": 2}
    (folder / "plan.toml").write_text(tomli_w.dumps(tables))
    (folder / "job.toml").write_text(tomli_w.dumps({key: tables[key] for key in tables if key not in STRATEGY}))
    return folder


def train(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[dict[str, Any], str]:
    """The summary of a run and what was shown."""
    capsys.readouterr()
    code = main(["train", *map(str, arguments), "--json"])
    out, err = capsys.readouterr()
    assert code == 0, err
    return json.loads(out) if out else {}, err


def flip_a_bit(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 16
    file.write_bytes(data)


def test_a_job_is_planned_trained_proved_and_reported(shared: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = shared / "whole"
    summary, shown = train(capsys, shared / "job.toml", "-n", 2, "--out", out, "--profile")
    assert summary == json.loads((out / "summary.json").read_text())
    assert (summary["ranks"], summary["steps"], summary["stopped_early"]) == (2, 6, None)
    assert summary["relayout_relative_difference"] <= 1e-6
    assert summary["export_logits_max_diff"] <= 1e-5
    assert summary["predicted"]["tokens_per_s"] > 0
    assert all(
        summary[key] > 0 for key in ("wall_s", "tokens_per_s", "eval_loss", "checkpoint_blocked_s", "peak_rss_mb")
    )
    assert "Plans for 2 processes" in shown
    assert "one process" in shown
    assert "step 2: checkpoint committed in" in shown
    assert load(out / "plan.toml").data.global_batch == 8
    assert "<svg" in (out / "report.html").read_text() or "Plotly" in (out / "report.html").read_text()
    assert list((out / "tensorboard").glob("events.*"))
    assert {path.name for path in (out / "profile").iterdir()} == {
        f"{what}-rank{rank}.{kind}" for what, kind in (("trace", "json"), ("operators", "txt")) for rank in (0, 1)
    }
    with safe_open(out / "export" / "model.safetensors", "pt") as tensors:
        assert "model.layers.1.mlp.up_proj.weight" in tensors.keys()  # noqa: SIM118  not a mapping


def test_a_run_stops_early_where_the_held_out_loss_falls_no_further(
    shared: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """On two ranks, which stop at the same step; the state is saved, and the page says why."""
    patient = ("--set", "run.evaluate_every=1", "--set", "run.patience=2", "--set", "optimiser.warmup_steps=0")
    plan, out = shared / "plan.toml", shared / "patient"
    still, _ = train(capsys, plan, "--out", out, *patient, "--set", "optimiser.lr=1e-30")
    assert (still["stopped_early"], still["steps"]) == ("patience", 3)  # the first is the best, two more are no better
    assert "as the held-out loss fell no further (run.patience), after step 3" in (out / "report.html").read_text()
    assert max((out / "checkpoint").glob("step-*")).name.endswith("3")
    again, _ = train(capsys, "--resume", "--out", out)  # as a platform does that starts what has ended
    assert again == still
    more, _ = train(capsys, "--resume", "--out", out, "--set", "run.patience=3")
    assert (more["stopped_early"], more["steps"]) == ("patience", 4)
    falls, _ = train(capsys, plan, "--out", shared / "falls", *patient)
    assert (falls["stopped_early"], falls["steps"]) == (None, 6)
    assert (
        main(["train", str(plan), "--out", str(out), "--set", "run.patience=2", "--set", "run.evaluate_every=0"]) == 2
    )
    assert "run.patience: the held-out loss is measured at the end only" in capsys.readouterr().err


def test_a_run_that_is_cut_short_goes_on_as_if_it_had_not_been(
    shared: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan, out, each = shared / "plan.toml", shared / "cut", ("--set", "run.evaluate_every=1")
    whole, _ = train(capsys, plan, "--out", shared / "uncut", *each)
    cut, _ = train(capsys, plan, "--resume", "--out", out, *each, "--set", "run.max_seconds=1e-6")  # begins, too
    assert (cut["stopped_early"], cut["steps"]) == ("time", 1)
    rest, _ = train(capsys, "--resume", "--out", out, "--set", "run.max_seconds=inf")
    assert (rest["resumed_from"], rest["steps"]) == (1, 6)
    assert rest["eval_loss"] == whole["eval_loss"]
    of_whole, of_both = (
        {step: found.get("held_out_loss") for step, found in read_steps(folder).items()}
        for folder in (shared / "uncut", out)
    )
    assert of_both == of_whole, "the one that was due when it was cut, too"
    assert rest["train_loss"] != whole["train_loss"]  # the mean of other steps: those of this run
    assert (out / "plan-1.toml").exists()
    assert main(["train", "--resume", "--out", str(out)]) == 0
    assert "has ended after step 6 of 6: nothing is left to do" in capsys.readouterr().out
    there = sorted((out / "checkpoint").glob("step-*"))
    (out / "summary.json").unlink()  # as where it is killed as it proves what it has trained
    again, _ = train(capsys, "--resume", "--out", out)
    assert (again["resumed_from"], again["eval_loss"]) == (6, whole["eval_loss"])
    assert sorted((out / "checkpoint").glob("step-*")) == there, "the state is there, and not written once more"
    assert main(["train", str(plan), "--resume", "--out", str(out), "--set", "seed=4", "--steps", "9"]) == 2
    assert (
        "was trained with seed 3, and the plan has 4; with run.steps 6, and the plan has 9 (the learning rate of step 7"
        in capsys.readouterr().err
    )
    assert load(out / "plan.toml").seed == 3  # a plan that was refused has replaced nothing
    newest = max((out / "checkpoint").glob("step-*"))
    flip_a_bit(max(newest.glob("*.safetensors"), key=lambda file: file.stat().st_size))
    again, shown = train(capsys, "--resume", "--out", out)
    assert "damaged" in shown
    assert (again["resumed_from"], again["eval_loss"]) == (4, whole["eval_loss"])  # the one before it
    same_shapes = ["--set", "model.change.rms_norm_eps=1e-5", "--set", "run.steps=9"]
    assert main(["train", str(plan), "--resume", "--out", str(out), *same_shapes]) == 2
    assert "rms_norm_eps of the model was 1e-06, is 1e-05" in capsys.readouterr().err
    other = ["--set", "model.change.hidden_size=16", "--set", "run.steps=9"]
    assert main(["train", str(plan), "--resume", "--out", str(out), *other]) == 2
    assert "hidden_size of the model was 32, is 16" in capsys.readouterr().err
    other += ["--allow", "model.change", "--allow", "run.steps"]
    assert main(["train", str(plan), "--resume", "--out", str(out), *other]) == 2
    assert "another model" in capsys.readouterr().err  # what does not fit cannot be allowed


def test_a_model_with_weights_and_a_tokenizer_of_its_own(shared: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, out = shared / "llama", shared / "tuned"
    torch.manual_seed(0)
    sizes: Any = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    original = LlamaForCausalLM(LlamaConfig(vocab_size=300, bos_token_id=256, eos_token_id=256, **sizes))
    original.save_pretrained(model)
    byte_tokenizer().save_pretrained(model)
    frozen = ["--set", 'model.freeze=["*.embed_tokens.weight"]']
    summary, shown = train(capsys, shared / "plan.toml", "--model", model, "--out", out, "--deterministic", *frozen)
    assert f"weights of {model}" in shown
    assert load(out / "plan.toml").run.deterministic
    tuned = AutoModelForCausalLM.from_pretrained(out / "export")
    before, after = original.state_dict(), tuned.state_dict()
    same = {name for name in before if torch.equal(before[name], after[name])}
    assert same == {"model.embed_tokens.weight"}
    assert torch.allclose(before["lm_head.weight"], after["lm_head.weight"], atol=0.1)  # it began from the weights
    assert AutoTokenizer.from_pretrained(out / "export").encode("ab") == [97, 98]
    assert summary["model"] == "llama"


@pytest.mark.slow
def test_a_model_that_mixes_documents_trains_on_one_at_a_time_and_goes_on_so(
    shared: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A convolution, whose state runs on over documents; cut short over two ranks, it goes on over one."""
    config = write_config(shared / "lfm2", "lfm2")
    out, plan = shared / "single", shared / "plan.toml"
    other = ["--model", config, "--set", "data.tokenizer=bytes"]
    whole, shown = train(capsys, plan, *other, "--out", shared / "single-uncut")
    (said,) = re.findall(r"packing    (single: one document to a sample, .*)", shown)
    assert re.fullmatch(
        r"single: .* [\d.]+% of the places hold none; Lfm2ForCausalLM would let a document see .*", said
    )
    assert whole["packing"] == "single"
    assert 0.01 < whole["padding"] < 0.9
    assert whole["export_logits_max_diff"] <= 1e-5
    train(capsys, plan, *other, "--out", out, "--set", "run.max_seconds=1e-6")
    refused = ["train", str(plan), "--resume", "--out", str(out), *map(str, other), "--set", "data.packing=packed"]
    assert main(refused) == 2
    assert 'was trained with data.packing "single", and the plan has "packed": resume' in capsys.readouterr().err
    alone = ["--set", 'mesh="dp=1"']
    rest, shown = train(capsys, plan, "--resume", "--out", out, *other, *alone)
    assert "as in the run that goes on" in shown
    assert (rest["resumed_from"], rest["steps"], rest["packing"]) == (1, 6, "single")
    assert rest["eval_loss"] == pytest.approx(whole["eval_loss"], rel=1e-5)
    assert rest["unigram_entropy"] == whole["unigram_entropy"]


@pytest.mark.slow
def test_documents_share_samples_only_in_a_model_that_keeps_them_apart(
    shared: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    packed, shown = train(capsys, shared / "plan.toml", "--out", shared / "packed", "--steps", 2)
    assert "packing    packed: documents share samples; Qwen3ForCausalLM keeps them apart" in shown
    assert (packed["packing"], packed["padding"] < 0.05) == ("packed", True)
    single = ["--set", "data.packing=single", "--steps", 2]
    alone, shown = train(capsys, shared / "plan.toml", "--out", shared / "alone", *single)
    assert "of the places hold none; as the plan says" in shown
    assert alone["padding"] > 0.05
    config = write_config(shared / "bloom", "bloom")
    mixed = ["--model", str(config), "--set", "data.tokenizer=bytes", "--set", "data.packing=packed"]
    assert main(["train", str(shared / "plan.toml"), "--out", str(shared / "mixed"), *mixed]) == 2
    _, err = capsys.readouterr()
    assert "BloomForCausalLM lets a document see the one that is packed before it" in err
    assert 'windows of its own with data.packing = "single"' in err
    ahead = ["--model", str(write_config(shared / "bert", "bert")), "--set", "data.tokenizer=bytes"]
    assert main(["train", str(shared / "plan.toml"), "--out", str(shared / "ahead"), *ahead]) == 2
    assert "BertLMHeadModel cannot be trained on the next token" in capsys.readouterr().err


@pytest.mark.slow
def test_nothing_held_out(shared: Path, capsys: pytest.CaptureFixture[str]) -> None:
    every = [
        "--set",
        "data.held_out=0",
        "--set",
        "run.evaluate_every=0",
        "--steps",
        "2",
        "--set",
        "precision.compute=bfloat16",
    ]
    summary, shown = train(capsys, shared / "plan.toml", "--out", shared / "all", *every)
    assert (summary["eval_loss"], summary["eval_loss_relayout"], summary["unigram_entropy"]) == (None, None, None)
    assert summary["relayout_logits_max_diff"] <= 0.1
    assert summary["export_logits_max_diff"] <= 1e-5
    assert "held-out" not in shown


@pytest.mark.parametrize("name", ["SIGINT", pytest.param("SIGTERM", marks=pytest.mark.slow)])
def test_a_signal_saves_and_says_how_to_go_on(name: str, shared: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    command = [sys.executable, "-m", "tangram", "train", shared / "plan.toml", "--out", out, "--steps", "100000"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as running:
        assert running.stdout is not None
        shown = ""
        while "step 2: checkpoint committed" not in shown:
            line = running.stdout.readline()
            assert line, shown
            shown += line
        os.killpg(running.pid, signal.Signals[name])  # as a terminal does: everybody gets it
        shown += running.stdout.read()
    assert running.returncode == 0, shown
    last = re.findall(r"stopped after step (\d+), its checkpoint is (\S+); to go on:", shown)
    assert len(last) == 1
    step, checkpoint = int(last[0][0]), Path(last[0][1])
    assert checkpoint == out / "checkpoint" / f"step-{step:08}"
    assert f"tangram train --resume --out {out}" in shown
    assert not (out / "summary.json").exists()
    more = subprocess.run(
        [sys.executable, "-m", "tangram", "train", "--resume", "--out", out, "--set", "run.max_seconds=1e-6", "--json"],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert json.loads(more.stdout)["resumed_from"] == step, more.stderr


@pytest.mark.slow
def test_compiled_blocks(shared: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plain, _ = train(capsys, shared / "plan.toml", "--out", shared / "plain", "--steps", 3)
    quick, _ = train(capsys, shared / "plan.toml", "--out", shared / "quick", "--steps", 3, "--set", "run.compile=true")
    assert quick["eval_loss"] == pytest.approx(plain["eval_loss"], rel=1e-5)


def test_ranks_that_torchrun_starts(shared: Path) -> None:
    out = shared / "torchrun"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    command = [*torchrun, "-m", "tangram", "train", shared / "job.toml", "--out", out, "--json"]
    left = memory_of(out) or out  # by the launcher of another run at this path, who was killed
    (left / "attempt-1").mkdir(parents=True)
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == json.loads((out / "summary.json").read_text())
    assert done.stderr.count("This run") == 1  # rank 0 speaks, and no other
    assert not left.exists(), "nobody takes it for later steps of this run"


def test_a_mistake_is_told_once_by_ranks_that_torchrun_starts(tmp_path: Path) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    command = [*torchrun, "-m", "tangram", "train", tmp_path / "nowhere.toml"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert [line[:19] for line in done.stderr.splitlines()].count("error: there is no ") == 1
    assert "exitcode  : 2" in done.stderr
    assert "error: there is no plan file" in done.stderr.strip().splitlines()[-2]  # the last that torchrun says


def test_a_run_that_diverges_ends_with_one_sentence(shared: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = shared / "diverges"
    assert main(["train", str(shared / "plan.toml"), "--out", str(out), "--set", "optimiser.lr=1e30"]) == 1
    printed, err = capsys.readouterr()
    assert re.search(r"where rank \d was, line by line: .*failure.txt", printed)
    assert err.count("\n") == 1
    assert "of 2 ended the job: AstrayError: step 2: the gradient norm is nan" in err
    assert "its samples are listed in" in err
    (begins,) = re.findall(
        r"; (the gradient of what (model\.layers\.\d) computes is the first that .*, on rank \d); ", err
    )
    (one,) = report(out / "trace").findings  # and no call of the second run of the step is one too many
    assert (one.kind, one.step, one.layer) == ("not finite", 2, begins[1])
    assert one.text.endswith(begins[0])
    assert "Traceback" in (out / "failure.txt").read_text()
    assert "Training ended with an error" in (out / "report.html").read_text()
    assert not (out / "summary.json").exists()
