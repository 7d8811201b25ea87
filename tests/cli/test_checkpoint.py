"""`tangram checkpoint` as a user meets it: what is printed, exit codes, and one sentence for a mistake."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tangram.checkpoint.saving.rank_parts import About
from tangram.checkpoint.store.manifest import ManifestError
from tangram.cli import main
from tests.checkpoint.making import flip, make, regions

DATA = "model-00001-of-00001.safetensors"


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """Two checkpoints of a small model."""
    for step in (1, 2):
        layers = {f"model.layers.{i}.w": torch.full((4, 6), float(i + step)) for i in range(3)}
        cuts = {"model.layers.0.w": regions((4, 6), "_ _/tp", "tp=2")} if step == 2 else {}
        about = About(step=step, mesh="tp=2")
        make(tmp_path / "runs" / f"step-{step}", layers, cuts, objects={"run.step": step}, about=about)
    return tmp_path / "runs"


def said(capsys: pytest.CaptureFixture[str], *arguments: object, code: int = 0) -> str:
    assert main(["checkpoint", *map(str, arguments)]) == code
    answer = capsys.readouterr()
    if code == 2:
        assert answer.out == ""
        assert answer.err.startswith("error: ")
        assert answer.err.count("\n") == 1
        return answer.err
    assert answer.err == ""
    return answer.out


def document(capsys: pytest.CaptureFixture[str], *arguments: object, code: int = 0) -> Any:
    return json.loads(said(capsys, *arguments, "--json", code=code))


@pytest.mark.parametrize("command", ["inspect", "verify", "prune"])
def test_an_address_is_said_to_be_one(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["checkpoint", command, "s3://bucket/run/step-3"]) == 2
    error = capsys.readouterr().err
    assert '"s3://bucket/run/step-3" is the address of an object store' in error
    assert "convert ADDRESS DIR" in error


def test_inspect_folds_layers(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = said(capsys, "inspect", runs / "step-2")
    assert "model.layers.{0..2}.w  3        float32  4 6" in text
    assert "mesh     tp=2" in text
    assert "run.step  2" in text
    assert "model.layers" in (every := said(capsys, "inspect", runs / "step-2", "--all"))
    assert len(every.splitlines()) == len(text.splitlines()) + 3
    assert "0.w" not in said(capsys, "inspect", runs / "step-2", "--all", "--depth", 1)


def test_inspect_lists_a_folder(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "step-1      1     2" in said(capsys, "inspect", runs)
    assert [one["step"] for one in document(capsys, "inspect", runs)["checkpoints"]] == [1, 2]


def test_inspect_as_json_and_values(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = document(capsys, "inspect", runs / "step-2", "model.layers.0")
    assert found["tensors"]["model.layers.0.w"]["pieces"] == 2
    assert found["objects"] == {"run.step": 2}
    assert list(found["tensors"]) == ["model.layers.0.w"]
    assert "mean      3" in said(capsys, "inspect", runs / "step-2", "--values", "model.layers.1.w")
    assert document(capsys, "inspect", runs / "step-2", "--values", "model.layers.1.w")["largest"] == 3.0


def test_verify_says_sound(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert said(capsys, "verify", runs).count(": sound: step") == 2
    assert said(capsys, "verify", runs, "--newest").count(": sound: step 2") == 1
    found = document(capsys, "verify", runs / "step-1")
    assert (found["sound"], found["offer"], found["checkpoints"][0]["findings"]) == (True, None, [])


def test_verify_names_a_flipped_bit_and_offers_an_older_one(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flip(runs / "step-2" / DATA, 4100)
    text = said(capsys, "verify", runs / "step-2", code=1)
    assert "DAMAGED, 1 finding" in text
    assert "model.layers.0.w" in text
    assert f'the newest older checkpoint that is sound: "{runs / "step-1"}"' in text
    found = document(capsys, "verify", runs, code=1)
    assert found["offer"] == str(runs / "step-1")
    assert found["checkpoints"][1]["findings"][0]["kind"] == "block"
    flip(runs / "step-1" / DATA, 4100)
    assert document(capsys, "verify", runs, code=1)["offer"] is None


def test_diff(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, other = runs / "step-1", runs / "step-2"
    text = said(capsys, "diff", one, other, code=1)
    assert "3 tensors not the same" in text
    assert "24 of 24" in text
    assert "run.step  1  2" in text
    assert said(capsys, "diff", one, one) == "3 tensors the same in both, none differs\n"
    found = document(capsys, "diff", one, other, "model.layers.1", code=1)
    assert found["tensors"][0]["largest"] == 1.0


def test_prune(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "step-1      would be removed" in said(capsys, "prune", runs, "--keep", "last=1", "--dry-run")
    found = document(capsys, "prune", runs, "--keep", "last=1", "--dry-run")
    assert list(found["removed"]) == [str(runs / "step-1")]
    assert "step-1      removed" in said(capsys, "prune", runs, "--keep", "last=1", "--verify")
    assert [path.name for path in runs.iterdir()] == ["step-2"]


def test_names_cannot_move_the_cursor(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ManifestError, match="cannot be printed"):
        make(tmp_path / "refused", {"model.\x1b[2J": torch.ones(1)})
    make(tmp_path / "a", {"model.x": torch.ones(1)}, objects={"o.x": "\x1b[2J"})
    make(tmp_path / "b", {"model.x": torch.zeros(1)})
    assert "\x1b" not in said(capsys, "inspect", tmp_path / "a")
    assert "\x1b" not in said(capsys, "diff", tmp_path / "a", tmp_path / "b", code=1)
    assert "\x1b" not in said(capsys, "inspect", tmp_path / "a", "--values", "\x1b[2J", code=2)
    flip(tmp_path / "b" / DATA, 4096)
    assert "\x1b" not in said(capsys, "verify", tmp_path / "b", code=1)


def test_convert(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = said(capsys, "convert", runs / "step-2", runs / "hf", "--to", "hf")
    assert "3 tensors proved equal to the checkpoint by their digests" in text
    assert "there is no config.json" in text
    found = document(capsys, "convert", runs / "step-2", runs / "half", "--to", "hf", "--dtype", "float16", "--round")
    assert (found["cast"], found["proved_equal"], found["bytes"]) == (3, 0, 144)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "give one of inspect, verify, diff, convert, family and prune"),
        (["inspct", "x"], "No such command 'inspct'"),
        (["inspect", "RUNS/nowhere"], "there is no checkpoint"),
        (["inspect", "RUNS/step-1", "nothing"], "no tensor's name fits 'nothing'"),
        (["inspect", "RUNS/step-1", "--values", "w"], "has no tensor 'w'"),
        (["verify", "RUNS/nowhere"], "there is no checkpoint"),
        (["verify", "RUNS/empty"], "format that is read: it is empty"),
        (["diff", "RUNS", "RUNS/step-1"], "holds several checkpoints, give one of them"),
        (["convert", "RUNS/step-1", "RUNS/hf"], "Missing option '--to'"),
        (["convert", "RUNS/step-1", "RUNS/hf", "--to", "onnx"], "give one of hf, torch_dist, dcp"),
        (["convert", "RUNS/step-1", "RUNS/step-2", "--to", "hf"], "is there already"),
        (["convert", "RUNS/step-1", "RUNS/hf", "--to", "hf", "--memory", "lots"], "'lots' is no size"),
        (["convert", "RUNS/step-1", "RUNS/hf", "--to", "hf", "--memory", "1MB"], "give 44 MiB or more"),
        (["convert", "RUNS/step-1", "/proc/none/hf", "--to", "hf"], 'no directory can be made in "/proc/none"'),
        (["prune", "RUNS"], "say what stays"),
        (["prune", "RUNS", "--keep", "lats=1"], "--keep lats=1"),
        (["prune", "RUNS/step-1", "--keep", "last=1"], "is one checkpoint"),
        (["diff", "RUNS/step-1"], "Missing argument"),
        (["verify", "/" + 300 * "x"], "File name too long"),
        (["diff", "RUNS/step-1", "RUNS/step-1", "x"], "no tensor's name fits 'x'"),
    ],
)
def test_a_mistake_is_answered_with_a_sentence(
    runs: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    (runs / "empty").mkdir()
    assert words in said(capsys, *[a.replace("RUNS", str(runs)) for a in arguments], code=2)


def test_diff_of_damaged_values_is_refused(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flip(runs / "step-2" / DATA, 4100)
    assert "is damaged" in said(capsys, "diff", runs / "step-1", runs / "step-2", code=2)
