"""A wrong plan ends the real command line with exit code 2 and one sentence, before anything is loaded or made."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tangram.cli import main
from tangram.errors import UserError
from tangram.training.plan import load_plan
from tests.training.small import small_plan

QUICKSTART = Path(__file__).parents[2] / "examples" / "quickstart" / "plan.toml"


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one sentence on stderr."""
    assert main(["train", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    return err


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("preset =", "presett ="), 'line {line}: unknown key "model.presett"; did you mean "preset"? (and 1 more)'),
        (("[optimiser]", "[optimizer]"), 'unknown key "optimizer"; did you mean "optimiser"? (and 1 more)'),
        (("lr = 2e-3", "zzz = 1\nlr = 2e-3"), 'unknown key "optimiser.zzz"; known are lr, warmup_steps,'),
        (("steps = 300", ""), ': the key "run.steps" is missing'),
        (("version = 1", "version = 2"), "line {line}: version = 2: input should be 1"),
        (("steps = 300", 'steps = "many"'), "line {line}: run.steps = 'many': input should be a valid integer"),
        (("lr = 2e-3", "lr = -1"), "line {line}: optimiser.lr = -1: input should be greater than 0"),
        (('mesh = "dp=2"', 'mesh = "dp=2 tp=2"'), "line {line}: mesh: this version trains over the one mesh axis dp"),
        (('mesh = "dp=2"', 'mesh = "dp 2"'), "line {line}: mesh: "),
        (('"_/dp ..."', '"_/dp/ ..."'), "line {line}: layouts.*: "),
        (("global_batch = 8", "global_batch = 6"), "is not a multiple of data.micro_batch x ranks = 4 x 2 = 8"),
        (("seed = 1", "seed = -1"), "line {line}: seed = -1: input should be greater than or equal to 0"),
        (("lr = 2e-3", "lr = inf"), "line {line}: optimiser.lr = inf: input should be a finite number"),
        (("weight_decay = 0.1", "weight_decay = inf"), "weight_decay = inf: input should be a finite number"),
        (("steps = 300", "steps = "), "this is not TOML: "),
    ],
)
def test_a_wrong_plan(
    change: tuple[str, str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = QUICKSTART.read_text()
    assert change[0] in text
    path = tmp_path / "plan.toml"
    path.write_text(text.replace(*change, 1))
    out = tmp_path / "out"
    line = text[: text.index(change[0])].count("\n") + 1
    assert message.replace("{line}", str(line)) in run(capsys, str(path), "--out", str(out))
    assert not out.exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("qwen3-2m", "qwen3-3m"), 'there is no model preset "qwen3-3m"'),
        (('"*" = "_/dp ..."', '"*.bias" = "_/dp ..."'), "no rule in [layouts] matches the parameter"),
        (('"*" = "_/dp ..."', '"*" = "..."'), "is not one that this version can train"),
        (('"*" = "_/dp ..."', '"*" = "_/tp ..."'), "no axis 'tp' in mesh dp=2"),
        (('"qwen3-2m"', '"qwen3-2m"\nchange = { vocab_size = 100 }'), "but the tokens need 257"),
        (("sequence = 128", "sequence = 2000"), "but the model has 1024 positions"),
        (('root = "stdlib"', 'root = "nowhere"'), 'nowhere" in data.root does not exist'),
    ],
)
def test_a_plan_that_cannot_be_run(
    change: tuple[str, str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = QUICKSTART.read_text()
    assert change[0] in text
    path = tmp_path / "plan.toml"
    path.write_text(text.replace(*change, 1))
    out = tmp_path / "out"
    assert message in run(capsys, str(path), "--out", str(out))
    assert message in run(capsys, str(path), "--out", str(out))  # the folder is still free


def test_a_wrong_number_of_processes(capsys: pytest.CaptureFixture[str]) -> None:
    message = run(capsys, str(QUICKSTART), "--processes", "3")
    assert "--processes 3 does not agree with" in message
    assert "has 2 rank(s)" in message


def test_no_steps(capsys: pytest.CaptureFixture[str]) -> None:
    assert "run.steps = 0: input should be greater than 0" in run(capsys, str(QUICKSTART), "--steps", "0")


def test_a_missing_plan_a_folder_and_no_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "there is no plan file" in run(capsys, str(tmp_path / "plan.toml"))
    assert "cannot be read" in run(capsys, str(tmp_path))
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    assert "it is not UTF-8 text" in run(capsys, str(tmp_path / "binary"))


def test_an_output_folder_that_is_in_use_or_cannot_be_made(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "file").touch()
    assert "holds files already" in run(capsys, str(QUICKSTART), "--out", str(tmp_path / "used"))
    below = tmp_path / "used" / "file" / "out"
    assert "cannot be made" in run(capsys, str(QUICKSTART), "--out", str(below))


def test_an_unwritable_output_folder_in_a_process_of_its_own(tmp_path: Path) -> None:
    # /proc refuses new folders to everybody, root too; elsewhere a path below a file does.
    parent = Path("/proc") if Path("/proc/self").exists() else Path(__file__)
    command = [
        sys.executable,
        "-X",
        "importtime",
        "-m",
        "tangram",
        "train",
        str(QUICKSTART),
        "--out",
        str(parent / "x"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stdout == ""
    said = [line for line in done.stderr.splitlines() if not line.startswith("import time:")]
    assert len(said) == 1
    assert "cannot be made" in said[0]
    assert not re.search(r"\| +(torch|transformers)$", done.stderr, re.MULTILINE)  # a mistake shows at once


def test_the_first_layout_rule_that_matches_decides(text: Path) -> None:
    plan = small_plan(text)
    rules = {"*.norm.weight": "a/dp", "model.*": "b/dp ..."}
    plan = plan.model_copy(update={"layouts": rules})
    assert plan.layout_of("model.norm.weight") == "a/dp"
    assert plan.layout_of("model.embed.weight") == "b/dp ..."
    with pytest.raises(UserError, match=r"no rule in \[layouts\] matches the parameter \"lm_head\.weight\""):
        plan.layout_of("lm_head.weight")


def test_a_folder_of_text_is_found_from_the_plan_file(tmp_path: Path) -> None:
    path = tmp_path / "plan.toml"
    path.write_text(QUICKSTART.read_text().replace('"stdlib"', '"my/text"'))
    assert load_plan(path).data.root == str(tmp_path / "my" / "text")
    assert load_plan(path, steps=7).run.steps == 7
