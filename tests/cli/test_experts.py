"""`tangram experts`: from a run's counts to a placement."""

import json
from pathlib import Path

import pytest

from tangram.cli import main
from tangram.training.objective.expert_loads import read, together
from tangram.training.observe.events import EXPERTS, ExpertLoads, StepsFile

COUNTS = (ExpertLoads(10, 40, {"mlp.experts": (60, 10, 5, 5)}), ExpertLoads(20, 40, {"mlp.experts": (40, 20, 15, 5)}))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    steps = StepsFile(tmp_path, lambda event: None)
    for one in COUNTS:
        steps(one)
    return tmp_path


def test_counts_come_back_and_add_up(run: Path) -> None:
    assert read(run) == read(run / EXPERTS) == [*COUNTS]
    assert together(COUNTS) == {"mlp.experts": (100, 30, 20, 10)}
    assert COUNTS[0].evenness == {"mlp.experts": 20 / 60}


def test_a_last_line_that_was_cut_off_is_left_out(run: Path) -> None:
    text = (run / EXPERTS).read_text()
    (run / EXPERTS).write_text(text + text[:20])
    assert read(run) == [*COUNTS]


def test_balance_before_and_after(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["experts", str(run), "--ranks", "2", "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)["layers"].values()
    assert found["tokens"] == [100, 30, 20, 10]
    assert found["balance"] == pytest.approx(80 / 130)
    assert found["placed"] == pytest.approx(80 / 110)
    assert found["placement"] == [[0, 3], [1, 2]]
    assert main(["experts", str(run), "--ranks", "2", "--slots", "6", "--last", "1"]) == 0
    out = capsys.readouterr().out
    assert "0.667" in out
    assert "0.960" in out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--ranks", "3"], "must divide evenly among 3 ranks"),
        (["--ranks", "2", "--slots", "2"], "2 slots hold no 4 experts"),
        (["--ranks", "0"], "--nodes and --groups 1 or more"),
    ],
)
def test_mistakes_are_told(run: Path, arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["experts", str(run), *arguments]) == 2
    assert said in capsys.readouterr().err


def test_a_run_that_has_not_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["experts", str(tmp_path), "--ranks", "2"]) == 2
    assert "run.count_experts" in capsys.readouterr().err
    (tmp_path / EXPERTS).write_text("{}\n{}\n")
    assert main(["experts", str(tmp_path), "--ranks", "2"]) == 2
    assert "line 1 is no count" in capsys.readouterr().err
    (tmp_path / EXPERTS).write_bytes(b"\xff")
    assert main(["experts", str(tmp_path), "--ranks", "2"]) == 2
    assert "is not UTF-8 text" in capsys.readouterr().err
