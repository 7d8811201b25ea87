"""The TensorBoard log, read back with TensorBoard's own reader."""

import importlib.util
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tangram.errors import UserError
from tangram.schema.files import dumps
from tangram.training.observe.events import CheckpointSaved, Evaluated, Note, StepDone
from tangram.training.observe.optional_libraries import need_report
from tangram.training.observe.tensorboard import TensorBoard
from tests.training.made_up import plan_of


def write(folder: Path, *events: object) -> None:
    board = TensorBoard(folder, plan_of(3))
    try:
        for event in events:
            board(event)
    finally:
        board.close()


def read(folder: Path) -> EventAccumulator:
    events = EventAccumulator(str(folder))
    events.Reload()
    return events


def curve(events: EventAccumulator, name: str) -> list[tuple[int, float]]:
    return [(point.step, pytest.approx(point.value, rel=1e-6)) for point in events.Scalars(name)]


def step(number: int, seconds: float, first: int = 1, rss_mb: float = 0.0) -> StepDone:
    return StepDone(number, 9, 5.0 - number / 10, 1.5, 1e-3, 100, seconds, first=first, rss_mb=rss_mb)


def test_every_figure_is_written(tmp_path: Path) -> None:
    write(
        tmp_path,
        Note("hello"),
        step(1, 4.0, rss_mb=300.0),
        step(2, 6.0, rss_mb=310.0),
        Evaluated(2, 4.75, 16.0),
        step(3, 16.5, rss_mb=320.0),
        CheckpointSaved(2, "somewhere", 0.25, 2.0, True),
    )
    events = read(tmp_path)
    assert curve(events, "train/loss") == [(1, 4.9), (2, 4.8), (3, 4.7)]
    assert curve(events, "train/gradient_norm") == [(1, 1.5), (2, 1.5), (3, 1.5)]
    assert curve(events, "train/lr") == [(1, 1e-3), (2, 1e-3), (3, 1e-3)]
    assert curve(events, "train/tokens_per_s") == [(1, 25.0), (2, 50.0), (3, 200.0)]  # without the evaluation
    assert curve(events, "memory/rss_mb") == [(1, 300.0), (2, 310.0), (3, 320.0)]
    assert curve(events, "eval/loss") == [(2, 4.75)]
    assert curve(events, "checkpoint/blocked_s") == [(2, 0.25)]
    assert set(events.Tags()["scalars"]) == {
        "train/loss",
        "train/gradient_norm",
        "train/lr",
        "train/tokens_per_s",
        "memory/rss_mb",
        "eval/loss",
        "checkpoint/blocked_s",
    }


def test_the_plan_stands_beside_as_text(tmp_path: Path) -> None:
    write(tmp_path, step(1, 1.0))
    (text,) = read(tmp_path).Tensors("plan/text_summary")
    shown = text.tensor_proto.string_val[0].decode()
    assert [line.removeprefix("    ") for line in shown.splitlines()] == dumps(plan_of(3)).splitlines()


def test_memory_that_nobody_measured_has_no_curve(tmp_path: Path) -> None:
    write(tmp_path, step(1, 1.0))
    assert "memory/rss_mb" not in read(tmp_path).Tags()["scalars"]


def test_a_resumed_run_takes_the_place_of_what_came_after_its_checkpoint(tmp_path: Path) -> None:
    write(tmp_path, *(step(number, float(number)) for number in range(1, 6)))
    write(tmp_path, *(step(number, float(number - 3), first=4) for number in (4, 5, 6)))
    assert [point.step for point in read(tmp_path).Scalars("train/loss")] == [1, 2, 3, 4, 5, 6]


def test_nothing_is_written_for_a_run_without_events(tmp_path: Path) -> None:
    board = TensorBoard(tmp_path / "board")
    board.close()
    board.close()
    assert list((tmp_path / "board").iterdir()) == []


def test_a_missing_extra_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = importlib.util.find_spec
    monkeypatch.setattr(
        "tangram.training.observe.optional_libraries.find_spec", lambda name: None if name == "plotly" else whole(name)
    )
    with pytest.raises(UserError) as refused:
        TensorBoard(tmp_path / "board")
    assert str(refused.value) == (
        'a run\'s report and boards need plotly: install with pip install "tangram-train[report]"'
    )
    assert not (tmp_path / "board").exists()
    need_report(("tensorboard",))
