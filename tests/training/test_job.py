"""The ranks read the text that the job was prepared with; the quickstart learns."""

import json
import time
from pathlib import Path

import pytest

from tangram.cli import main
from tangram.errors import UserError
from tangram.training.data import BYTES, prepare
from tangram.training.launch import run_ranks
from tangram.training.loop import Costs
from tangram.training.rank import RankJob, train_rank
from tests.training.small import WORLD, small_plan, write_text

QUICKSTART = Path(__file__).parents[2] / "examples" / "quickstart" / "job.toml"


def test_a_text_that_changes_while_the_ranks_start_is_refused(tmp_path: Path) -> None:
    plan = small_plan(write_text(tmp_path / "text"))
    prepare(plan.data, BYTES, lambda event: None)
    told = RankJob(plan, tmp_path, "of another text", Costs())
    with pytest.raises(UserError, match="reads another text than the others"):
        run_ranks(train_rank, told, world=WORLD, on_event=print, device="cpu")


@pytest.mark.slow
def test_the_quickstart_learns_within_three_minutes(tmp_path: Path) -> None:
    started = time.monotonic()
    assert main(["train", str(QUICKSTART), "--processes", "2", "--out", str(tmp_path / "out")]) == 0
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert summary["eval_loss"] <= 0.8 * summary["unigram_entropy"]
    assert time.monotonic() - started <= 180
