"""Right runs that were taken for wrong, and one that could not be ended: what reviews have found."""

import json
import shutil
from pathlib import Path

import pytest

from tangram.cli import main
from tangram.training.run.end_proofs import SAME_LOSS, loss_difference
from tests.training.small import plan_file, write_text


def test_a_small_loss_may_differ_by_as_much_as_rounding_does() -> None:
    """Of a text that says itself the loss is near zero, but rounding is of logits, which are not."""
    limit = SAME_LOSS["float32"]
    assert loss_difference(0.0015363150741904974, 0.0015363225247710943) <= limit  # as tensor-parallel ranks measured
    assert loss_difference(0.001536, 0.001546) > limit
    assert loss_difference(4.75228, 4.75267) > limit
    assert loss_difference(0.0, 0.0) == 0


def test_a_run_that_ended_in_its_proofs_is_finished_by_resume(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As one that a signal has stopped after the last step; only a run with a summary of it has nothing left to do, and
    says so with 0: whatever starts it again, as a platform, would do so for ever."""
    (tmp_path / "text").mkdir()
    plan = plan_file(tmp_path / "plan.toml", write_text(tmp_path / "text"), run={"steps": 2})
    out = tmp_path / "out"
    assert main(["train", str(plan), "--out", str(out)]) == 0
    summary = (out / "summary.json").read_text()
    capsys.readouterr()
    for command in ("train", "launch"):
        assert main([command, str(plan), "--resume", "--out", str(out), "--json"]) == 0
        shown = capsys.readouterr()
        assert json.loads(shown.out) == json.loads(summary)
        assert shown.err.splitlines()[-1].endswith(
            "has ended after step 2 of 2: nothing is left to do (for more, --set run.steps=N)"
        )
    assert (out / "summary.json").read_text() == summary
    assert main(["train", str(plan), "--resume", "--out", str(out), "--set", "seed=4"]) == 2
    assert (
        main(["train", str(plan), "--resume", "--out", str(out), "--steps", "1", "--set", "optimiser.warmup_steps=0"])
        == 2
    )
    assert "is of step 2, and run.steps is 1: raise it" in capsys.readouterr().err
    (tmp_path / "before.json").write_text(summary)
    (out / "summary.json").write_text(summary.replace("step-00000002", "step-00000001"))  # of a run of fewer steps
    shutil.rmtree(out / "export")
    assert main(["train", "--resume", "--out", str(out)]) == 0
    before, after = (json.loads(path.read_text()) for path in (tmp_path / "before.json", out / "summary.json"))
    assert (after["steps"], after["eval_loss"]) == (2, before["eval_loss"])
    assert (out / "export" / "model.safetensors").is_file()
