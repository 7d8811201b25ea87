"""Directories that cannot be used are told by one sentence that says what to do, whatever command asks."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tangram.cli import main
from tangram.errors import UserError
from tangram.models.building.build import read_source
from tangram.models.building.directory import hub_hint, is_pointer, other_weights, refuse_pointers

CONFIG = json.dumps({"model_type": "qwen3", "hidden_size": 32, "num_hidden_layers": 1})
POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"


def folder(path: Path, **files: str) -> Path:
    path.mkdir()
    for name, text in {"config.json": CONFIG, **{key.replace("__", "."): text for key, text in files.items()}}.items():
        (path / name).write_text(text)
    return path


def asked(model: str, *, job: Path) -> list[list[str]]:
    """Every command that takes the directory of a model, with its weights or its configuration."""
    out, of_path = str(job.parent / "out"), job.with_name("of-path.toml")
    of_path.write_text(JOB.replace('preset = "qwen3-1m"', f"path = {json.dumps(model)}"))
    return [
        ["train", str(job), "--model", model, "--out", out],
        ["plan", str(of_path)],
        ["checkpoint", "convert", model, out, "--to", "dcp"],
    ]


JOB = """version = 3
[model]
preset = "qwen3-1m"
[data]
sources = [{path = "stdlib"}]
tokenizer = "bytes"
sequence = 16
global_batch = 8
[optimiser]
lr = 1e-3
[run]
steps = 1
device = "cpu"
"""


@pytest.fixture
def job(tmp_path: Path) -> Path:
    file = tmp_path / "job.toml"
    file.write_text(JOB)
    return file


CASES: dict[str, tuple[Callable[[Path], str], str]] = {
    "pointer": (lambda tmp: str(folder(tmp / "a", model__safetensors=POINTER)), "git lfs pull"),
    "gguf": (lambda tmp: str(folder(tmp / "a", x__gguf="GGUF")), "x.gguf, which is not read: get the repository with"),
    "keras": (lambda tmp: str(folder(tmp / "a", tf_model__h5="HDF")), "tf_model.h5, which is not read"),
    "hub": (lambda tmp: "Qwen/Qwen3-0.6B", "`hf download Qwen/Qwen3-0.6B --local-dir Qwen3-0.6B`"),
}


@pytest.mark.parametrize("case", CASES)
def test_every_command_says_what_to_do(case: str, job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make, said = CASES[case]
    model = make(job.parent)
    for command in asked(model, job=job):
        assert main(command) == 2, command
        error = capsys.readouterr().err
        assert said in error, command
        assert error.count("\n") == 1
    assert not (job.parent / "out").exists()


@pytest.mark.parametrize("command", [["shard", "{}", "--mesh", "tp=2"], ["plan", "{}", "--cluster", "h100-8x8"]])
def test_planning_needs_a_configuration_only(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([one.format("Qwen/Qwen9-0.6B") for one in command]) == 2
    assert "`hf download Qwen/Qwen9-0.6B" in capsys.readouterr().err


def test_a_configuration_is_read_beside_weights_that_are_not(tmp_path: Path) -> None:
    path = folder(tmp_path / "a", x__gguf="GGUF", model__bin=POINTER)
    assert read_source(None, str(path), {}, weights=False).weights is None
    with pytest.raises(UserError, match=r"model\.bin.*git lfs pull"):
        read_source(None, str(path), {})


def test_which_names_are_of_the_hub() -> None:
    assert all(hub_hint(name) for name in ("Qwen/Qwen3-0.6B", "meta-llama/Llama-3.1-8B", "/nowhere/org/model"))
    assert not any(map(hub_hint, ("qwen3", "a/b/c", "runs/job.toml", "./x/y", "~/x", "org/model.safetensors")))
    assert not hub_hint("/tmp/a-model-that-is-not-there")  # the folder around it is there


def test_which_weights_there_are(tmp_path: Path) -> None:
    assert other_weights(folder(tmp_path / "none")) == ""
    assert other_weights(folder(tmp_path / "both", a__safetensors="", b__gguf="")) == ""
    assert "a pickle: convert them" in other_weights(folder(tmp_path / "pickle", pytorch_model__bin=""))
    assert other_weights(folder(tmp_path / "arguments", training_args__bin="")) == ""
    steps = folder(tmp_path / "steps")
    folder(steps / "checkpoint-5", model__safetensors="")
    assert other_weights(steps) == "are in its sub-folder checkpoint-5: give that"
    with pytest.raises(UserError, match=r"sub-folder checkpoint-5: give that, or give its config\.json to begin"):
        read_source(None, str(steps), {})


def test_a_pointer_is_told_from_small_files(tmp_path: Path) -> None:
    path = folder(tmp_path / "a", a__json="{}", b__json=POINTER, c__png=POINTER)
    assert [is_pointer(path / name) for name in ("a.json", "b.json", "c.png", "none")] == [False, True, True, False]
    with pytest.raises(UserError, match=r"b\.json\" is a pointer"):
        refuse_pointers(path)
    (path / "b.json").unlink()
    refuse_pointers(path)  # a picture is nobody's weights
