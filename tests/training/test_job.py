"""The ranks read the text that the job was prepared with; the quickstart learns."""

import json
import time
from pathlib import Path

import pytest
import torch

from tangram.cli import main
from tangram.errors import UserError
from tangram.training.data import BYTES, prepare
from tangram.training.run.launch import Rank, run_ranks
from tangram.training.run.rank import RankJob, train_rank
from tangram.training.step.loop import StepCosts
from tests.training.small import WORLD, small_plan, write_text

QUICKSTART = Path(__file__).parents[2] / "examples" / "quickstart" / "job.toml"


def begun(rank: Rank, jobs: tuple[RankJob, ...]) -> list[tuple[str, bool]]:
    """What becomes of each job, and whether torch now refuses an operation that is not repeatable."""
    found: list[tuple[str, bool]] = []
    for job in jobs:
        with pytest.raises(UserError) as told:
            train_rank(rank, job)
        x, refused = torch.zeros(3), False
        try:
            x.put_(torch.tensor([0, 0]), torch.ones(2))  # of two that go to one place either may be the last
        except RuntimeError as error:
            refused = "does not have a deterministic implementation" in str(error)
        found.append((str(told.value), refused))
    return found


def test_a_text_that_changes_is_refused_and_what_is_not_repeatable_where_the_plan_says_so(tmp_path: Path) -> None:
    text = write_text(tmp_path / "text")
    plans = small_plan(text), small_plan(text, run={"steps": 3, "device": "cpu", "deterministic": True})
    prepare(plans[0].data, BYTES, lambda event: None)
    jobs = tuple(RankJob(plan, tmp_path, "of another text", StepCosts()) for plan in plans)
    for rank in run_ranks(begun, jobs, world=WORLD, on_event=print, device="cpu"):
        assert all("reads another text than the others" in said for said, _ in rank)
        assert [refused for _, refused in rank] == [False, True]


@pytest.mark.slow
def test_the_quickstart_learns_within_three_minutes(tmp_path: Path) -> None:
    started = time.monotonic()
    assert main(["train", str(QUICKSTART), "--processes", "2", "--out", str(tmp_path / "out")]) == 0
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert summary["eval_loss"] <= 0.8 * summary["unigram_entropy"]
    assert time.monotonic() - started <= 180
