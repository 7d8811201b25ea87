"""`tangram plan ... --export` and `--explain FILE` as a person uses them."""

import json
from pathlib import Path

import pytest

from tangram.cli import main
from tests.planner.commands import refused

HERE = Path(__file__).parent
SAID = ("llama-3-8b", "--cluster", "h100-8x8", "--tokens-per-batch", "1M", "--gpus", "16")


def test_an_export_is_explained_as_it_was_planned(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "args.sh"
    assert main(["plan", *SAID, "--to", "megatron-lm", "--out", str(out), "--pick", "2", "--json"]) == 0
    planned = json.loads(capsys.readouterr().out)
    assert planned["ask"]["framework"] == "megatron-core"  # whose figures are its own
    assert main(["plan", *SAID[:3], "--explain", str(out), "--gpus", "16", "--json"]) == 0
    explained = json.loads(capsys.readouterr().out)
    assert explained["given"] == planned["choices"][1]
    assert explained["read"]["numbers"]["batch"] == 2**20 // 8192
    assert main(["plan", *SAID[:3], "--explain", str(out), "--gpus", "16"]) == 0
    said = capsys.readouterr().out
    assert f"Read from {out}" in said
    assert "not looked at" in said


def test_a_strategy_of_one_project_for_another(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = tmp_path / "job.toml"
    job.write_text(
        "[training]\nseq_len = 4096\nlocal_batch_size = 2\n[parallelism]\ntensor_parallel_degree = 2\n"
        "[activation_checkpoint]\nmode = 'full'\n"
    )
    said = ("llama-3-8b", "--cluster", "h100-8x8", "--explain", str(job), "--gpus", "8")
    assert main(["plan", *said, "--to", "megatron-lm"]) == 0
    out, err = capsys.readouterr()
    assert out.startswith("# llama-3-8b on 8 devices of h100-8x8")
    for line in ("--data-parallel-sharding-strategy optim_grads_params", "--seq-length 4096", "--micro-batch-size 2",
                 "--recompute-method uniform", "--global-batch-size 8"):  # fmt: skip
        assert line in out
    assert err == ""
    assert main(["plan", *said, "--seq", "2048", "--tokens-per-batch", "64K", "--json"]) == 0
    typed = json.loads(capsys.readouterr().out)["given"]["at"]
    assert (typed["sequence"], typed["batch"]) == (2048, 32)  # what is typed counts more than the file


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ("--to", "megatron"),
            "there is no export 'megatron' (did you mean 'megatron-lm'?): there are megatron-lm",
        ),
        (("--to", "torchtitan", "--out", "nowhere/x.toml"), "cannot be written to nowhere/x.toml: give a file in a"),
        (("--to", "torchtitan", "--pick", "0"), "--pick 0: the rows of the ranking are 1 to 8"),
        (("--explain", ""), "no strategy is given: write its mesh"),
        (("--explain", "nowhere.toml"), 'there is no file "nowhere.toml", and it is no mesh either'),
        (("--explain", "pp=2 dp=8", "--to", "megatron-lm", "--zero", "3"), "whose pages name no pipelines"),
    ],
)
def test_mistakes_are_one_sentence(arguments: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert said in refused(capsys, *SAID, *arguments)


def test_an_export_needs_a_cluster(capsys: pytest.CaptureFixture[str]) -> None:
    assert "give one with --cluster" in refused(capsys, "job.toml", "--to", "torchtitan")


def test_for_tangram_it_is_the_plan_of_a_job(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = str(Path(__file__).parents[3] / "examples/quickstart/job.toml")
    for name, how in (("a.toml", ("--to", "tangram")), ("b.toml", ("--runs",))):
        assert main(["plan", job, "--cluster", "cpu-2", *how, "--out", str(tmp_path / name)]) == 0
        assert f"tangram train {tmp_path / name}" in capsys.readouterr().out
    assert (tmp_path / "a.toml").read_text() == (tmp_path / "b.toml").read_text()
    assert "give a job's .toml, and --out" in refused(capsys, "llama-3-8b", "--cluster", "h100-8x8", "--to", "tangram")
    assert "give a job's .toml, and --out" in refused(capsys, job, "--cluster", "cpu-2", "--to", "tangram")
