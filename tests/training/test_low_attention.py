"""`run.attention` of low precision as a user runs it: the kernels under Triton's interpreter, and their emulation."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from tangram.cli import main
from tests.training.small import small_tables, write_text

STRATEGY = ("mesh", "axes", "layouts")


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("low")
    (folder / "text").mkdir()
    tables = small_tables(write_text(folder / "text"), run={"steps": 2, "attention": "fp8-fwd"})
    tables["data"] |= {"global_batch": 2, "held_out_samples": 2}
    (folder / "job.toml").write_text(tomli_w.dumps({key: tables[key] for key in tables if key not in STRATEGY}))
    return folder / "job.toml"


@pytest.mark.slow  # of `make kernels`, always
def test_the_kernels_train_as_their_emulation(job: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A process of its own: the interpreter has to be asked for before Triton is loaded."""
    pytest.importorskip("triton")
    losses: list[float] = []
    for interpret in ("0", "1"):
        program = (
            f"import os, sys; os.environ['TRITON_INTERPRET'] = '{interpret}'; from tangram.cli import main; "
            f"sys.exit(main(['train', {str(job)!r}, '-n', '1', '--json', '--out', {str(job.parent / interpret)!r}]))"
        )
        ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300, check=False)
        assert ran.returncode == 0, ran.stderr
        assert "logits differ by 0.0e+00" in ran.stderr  # of the export, which transformers loads without casts
        losses.append(json.loads(ran.stdout)["eval_loss"])
    assert losses[0] != losses[1]  # sums in another order
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)


def train(job: Path, out: Path, capsys: pytest.CaptureFixture[str], *more: str) -> tuple[dict[str, Any], str]:
    capsys.readouterr()
    code = main(["train", str(job), "-n", "1", "--json", "--out", str(out), *more])
    found, err = capsys.readouterr()
    return (json.loads(found) if code == 0 else {}), err


def test_each_mode_changes_the_run(job: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found: dict[str, float] = {}
    for mode in ("sdpa", "nvfp4-emulated"):
        summary, err = train(job, tmp_path / mode, capsys, "--set", f'run.attention="{mode}"')
        assert summary, err
        found[mode] = summary["eval_loss"]
    assert len({*found.values()}) == len(found)
    assert all(loss == pytest.approx(found["sdpa"], rel=2e-2) for loss in found.values())


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (['run.attention="fp4"'], "did you mean"),
        (['run.attention="fp8"', 'precision.compute="float16"'], "computes in bfloat16, of which float16 is no part"),
    ],
)
def test_what_cannot_be_is_refused(
    settings: list[str], said: str, job: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    summary, err = train(job, tmp_path / "out", capsys, *(x for one in settings for x in ("--set", one)))
    assert not summary
    assert said in err
    assert "Traceback" not in err


def test_a_ring_is_refused(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tables = small_tables(job.parent / "text", run={"attention": "fp8"})
    tables |= {
        "mesh": "cp=2",
        "axes": {"context": ["cp"]},
        "layouts": {"parameters": {"*": "..."}, "marks": {"model.layers.*": "b s/cp h"}},
        "context": {"keys": "ring"},
    }
    plan = job.with_name("plan.toml")
    plan.write_text(tomli_w.dumps(tables))
    assert main(["plan", str(plan), "--show"]) != 0
    assert 'set run.attention = "tokens"' in capsys.readouterr().err
