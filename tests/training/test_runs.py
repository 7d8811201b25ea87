"""`tangram runs compare`: runs side by side, by the files that they leave."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tangram.cli import main
from tangram.errors import UserError
from tangram.schema.files import dumps
from tangram.training.observe.compared_runs import compare_runs
from tangram.training.observe.events import FILE, Evaluated, Note, StepDone, StepsFile, read_steps
from tests.training.small import small_plan, write_text


def written(folder: Path, losses: Sequence[float], first: int = 1, **changes: Any) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "plan.toml").write_text(dumps(small_plan(write_text(folder.parent / "text"), **changes)))
    write = StepsFile(folder, print, after=first - 1)
    for step, loss in enumerate(losses, first):
        write(StepDone(step, 9, loss, 1.0, 1e-3, 100, 0.5 * step))
    write(Evaluated(first + len(losses) - 1, losses[-1] + 0.5, 3.0))
    return folder


def test_a_step_that_is_done_again_counts_once_and_half_a_line_not_at_all(tmp_path: Path) -> None:
    run = written(tmp_path / "run", [3.0, 2.0, 1.5])
    written(run, [1.75, 1.25], first=3)  # it went on from the checkpoint of step 2
    with (run / FILE).open("a") as stream:
        stream.write('{"step": 5, "lo')
    steps = read_steps(run)
    assert [steps[step]["loss"] for step in steps] == [3.0, 2.0, 1.75, 1.25]
    assert steps[4]["held_out_loss"] == 1.75
    with (run / FILE).open("a") as stream:
        stream.write("\n[]\n")
    with pytest.raises(UserError, match="line 6 is no step of a run"):
        read_steps(run)


def test_what_was_done_after_the_checkpoint_that_is_gone_on_from_is_no_step_of_the_run(tmp_path: Path) -> None:
    """The run was cut off after step 4 and goes on from step 2, to step 3 by now: step 4 is of no state any more."""
    run = written(tmp_path / "run", [3.0, 2.0, 1.5, 1.0])
    with (run / FILE).open("a") as stream:
        stream.write('{"step": 5, "lo')
    StepsFile(run, print, after=2)(StepDone(3, 9, 1.75, 1.0, 1e-3, 100, 0.5))
    rows = [json.loads(line) for line in (run / FILE).read_text().splitlines()]
    assert [(row["step"], row["loss"]) for row in rows] == [(1, 3.0), (2, 2.0), (3, 1.75)]
    StepsFile(run, print)
    assert not (run / FILE).read_text(), "it begins anew, as where there was no checkpoint"


def test_what_differs_is_what_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a = written(tmp_path / "a", [3.0, 2.0, 1.0])
    b = written(tmp_path / "b", [3.0, 2.0 * (1 + 2e-6), 1.5, 1.0], seed=7)
    found = compare_runs([a, b])
    assert found.keys == (("seed", "3", "7"),)
    assert [row[0] for row in found.losses] == ["1", "2", "3"]
    assert found.losses[2][1:] == ("1.0000", "1.5000 (+5.0e-01)")
    assert found.note == "losses are further than rounding from a's from step 3 on: most at step 3, b, by 5.0e-01"
    table = {row[0]: row[1:] for row in found.results}
    assert table["tokens"] == ("300", "400")
    assert table["held-out perplexity"] == (f"{math.exp(1.5):.5g}", f"{math.exp(1.5):.5g}")
    assert table["steps"] == ("3, no summary yet", "4, no summary yet")
    (b / "summary.json").write_text(json.dumps({"eval_loss": 1.25, "tokens_per_s": 1234.5, "mfu": None}))
    table = {row[0]: row[1:] for row in compare_runs([a, b]).results}
    assert table["tokens/s"] == ("-", "1,234")
    assert table["best held-out loss"] == ("1.5000", "1.2500")
    assert main(["runs", "compare", str(a), str(b), "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["steps"]["b"]["4"]["loss"] == 1.0
    assert printed["runs"]["a"]["keys"]["seed"] == "3"
    assert main(["runs", "compare", str(a), str(b)]) == 0
    assert "Keys that differ" in capsys.readouterr().out


def test_the_same_losses_and_a_loss_that_is_no_number(tmp_path: Path) -> None:
    a, b = written(tmp_path / "a", [3.0, 2.0]), written(tmp_path / "b", [3.0, 2.0])
    assert compare_runs([a, b]).note == "losses are the same to the last digit in all 2 steps that all have"
    c = written(tmp_path / "c", [3.0, math.nan])
    assert "from step 2 on: most at step 2, c, by inf" in compare_runs([a, b, c]).note
    d = written(tmp_path / "d", [1.0], first=5)
    assert compare_runs([a, d]).note == "the runs have no step in common"


def test_what_is_no_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = written(tmp_path / "run", [1.0])
    assert main(["runs", "compare", str(run)]) == 2
    assert "two runs or more" in capsys.readouterr().err
    assert main(["runs", "compare", str(run), str(tmp_path)]) == 2
    assert "give the folder of a run that has trained a step" in capsys.readouterr().err


def test_half_a_line_in_the_midst_is_gone_with_the_next(tmp_path: Path) -> None:
    """A disk that was full, or a kill, left it, and the next line was written behind it: no step could be read."""
    run = written(tmp_path / "run", [3.0, 2.0])
    with (run / FILE).open("a") as stream:
        stream.write('{"step": 3, "lo')
    written(run, [1.75, 1.25], first=3)
    assert [one["loss"] for one in read_steps(run).values()] == [3.0, 2.0, 1.75, 1.25]


def test_a_disk_that_is_full_stops_no_run(tmp_path: Path) -> None:
    told: list[object] = []
    write = StepsFile(tmp_path / "gone", told.append)
    for step in (1, 2):
        write(StepDone(step, 9, 1.0, 1.0, 1e-3, 100, 0.5))
    (note,) = told  # once
    assert isinstance(note, Note)
    assert "steps.jsonl cannot be written (No such file or directory)" in note.text
