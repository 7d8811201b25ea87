"""What a run came to: the figures that follow from its events, and the document they stand in."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from tangram.errors import UserError
from tangram.planner.report import figures
from tangram.training.observe import summary as throughput
from tangram.training.observe.events import CheckpointSaved, Evaluated, Record, SaveFailed, StepDone
from tangram.training.observe.summary import Summary, summarise, train_loss
from tests.training.made_up import plan_of, record_of, summary_of

# What programs that read the document rely on.
KEYS = """
    wall_s steps tokens_per_s train_loss eval_loss unigram_entropy eval_loss_relayout export_logits_max_diff
    checkpoint_blocked_s peak_rss_mb predicted model parameters ranks mesh tokens checkpoint export report tensorboard
    relayout_relative_difference relayout_logits_max_diff mfu tflops resumed_from stopped_early
"""


def steps_at(*seconds: float, tokens: int = 100, first: int = 1) -> Record:
    """Steps that end at these times."""
    record = Record()
    for number, end in enumerate(seconds, start=first):
        record(StepDone(number, 99, 2.0, 1.0, 1e-3, tokens, end, first=first, flops=6e9, peak_flops=2e11))
    return record


def test_a_step_takes_the_time_since_the_one_before() -> None:
    assert throughput.durations(steps_at(3.0, 4.0, 6.0)) == [3.0, 1.0, 2.0]


def test_the_first_step_after_a_resume_is_timed_too() -> None:
    assert throughput.durations(steps_at(3.0, 4.0, first=501)) == [3.0, 1.0]


def test_what_was_not_seen_is_not_timed() -> None:
    record = steps_at(3.0, 4.0, 6.0, 7.0)
    late = Record(steps=record.steps[1:2] + record.steps[3:])
    assert throughput.durations(late) == [None, None]
    assert throughput.step_seconds(late) is None
    assert throughput.durations(Record()) == []


def test_evaluations_and_saves_are_no_part_of_a_step() -> None:
    record = steps_at(1.0, 12.0, 18.0)
    record(CheckpointSaved(1, "a", 0.5, 3.0, True))  # before the evaluation, whose time has it in it
    record(Evaluated(1, 2.0, 11.25))
    record(CheckpointSaved(2, "b", 4.0, 5.0, False))
    assert throughput.durations(record) == [1.0, 0.75, 2.0]


def test_a_save_that_blocked_later_than_its_step_takes_nothing_off() -> None:
    record = steps_at(1.0, 2.0)
    record(CheckpointSaved(1, "a", 5.0, 6.0, True))
    assert throughput.durations(record) == [1.0, 1.0]


def test_the_first_few_steps_do_not_count() -> None:
    slow = steps_at(50.0, 90.0, 120.0, 121.0, 122.0, 124.0)
    assert throughput.step_seconds(slow) == 1.0
    assert throughput.tokens_per_s(slow) == 100.0
    assert throughput.step_seconds(steps_at(50.0, 51.0, 52.0)) == 1.0  # too few to leave any out: their median
    assert throughput.step_seconds(steps_at(50.0)) == 50.0


def test_flops_are_unknown_when_nobody_said_them() -> None:
    record = steps_at(0.5, 1.0, 1.5)
    assert throughput.tflops(record) == pytest.approx(0.012)
    assert throughput.mfu(record) == pytest.approx(0.06)
    nameless = Record(steps=[replace(step, peak_flops=0.0) for step in record.steps])
    assert throughput.tflops(nameless) == pytest.approx(0.012)
    assert throughput.mfu(nameless) is None
    assert throughput.tflops(Record(steps=[replace(step, flops=0.0) for step in record.steps])) is None


def test_the_training_loss_is_the_mean_of_the_last_ten_steps() -> None:
    record = steps_at(*range(1, 13))
    record.steps = [replace(step, loss=float(step.step)) for step in record.steps]
    assert train_loss(record) == 7.5
    assert train_loss(Record(steps=record.steps[:1])) == 1.0
    assert train_loss(Record()) is None


def test_a_run_is_summed_up() -> None:
    record = record_of(300, evaluate_every=100, save_every=100)
    record(SaveFailed(250, "no room"))
    summary = summarise(
        plan=plan_of(300), record=record, stopped="time", model="m", parameters=5, wall_s=70.0, eval_loss=2.0
    )
    assert (summary.ranks, summary.mesh, summary.steps, summary.tokens) == (2, "dp=2", 300, 300_000)
    assert summary.tokens_per_s == pytest.approx(10_000, rel=0.05)
    assert summary.checkpoint_blocked_s == pytest.approx(0.15)
    assert summary.peak_rss_mb == max(step.rss_mb for step in record.steps)
    assert (summary.stopped_early, summary.resumed_from, summary.eval_loss) == ("time", None, 2.0)
    assert summary.eval_loss_relayout is None
    assert summary.predicted is None


def test_what_the_caller_knows_better_counts() -> None:
    assert summary_of(plan_of(3), record_of(3), peak_rss_mb=1234.5).peak_rss_mb == 1234.5


def test_a_run_without_a_step_has_no_figures() -> None:
    summary = summarise(
        plan=plan_of(300), record=Record(), stopped="signal", model="m", parameters=5, wall_s=1.0, resumed_from=40
    )
    assert (summary.steps, summary.tokens) == (40, 0)
    assert summary.tokens_per_s is summary.step_seconds is summary.train_loss is summary.mfu is None
    assert summary.peak_rss_mb is None


def test_the_document_reads_back(tmp_path: Path) -> None:
    summary = summary_of(plan_of(300), record_of(300))
    path = tmp_path / "summary.json"
    summary.write(path)
    document = json.loads(path.read_text())
    assert set(KEYS.split()) <= set(document)
    assert Summary(**document) == summary
    assert [file.name for file in tmp_path.iterdir()] == ["summary.json"]


def test_what_is_no_number_is_null(tmp_path: Path) -> None:
    plan = plan_of(1)
    unknown = {"step_seconds": math.nan, "memory_mb": [1.0, math.inf], "tokens_per_s": None, "fits": True}
    summary = summary_of(plan, record_of(1), eval_loss=math.nan, predicted=unknown)
    summary.write(tmp_path / "summary.json")

    def refuse(word: str) -> float:
        raise AssertionError(f"{word} is no JSON")

    document = json.loads((tmp_path / "summary.json").read_text(), parse_constant=refuse)
    assert document["eval_loss"] is None
    assert document["predicted"] == {
        "step_seconds": None,
        "memory_mb": [1.0, None],
        "tokens_per_s": None,
        "fits": True,
    }


def test_a_path_that_is_no_text_reads_back(tmp_path: Path) -> None:
    summary = summary_of(plan_of(1), record_of(1), export="runs/\udcff/größe")
    summary.write(tmp_path / "summary.json")
    assert json.loads((tmp_path / "summary.json").read_text())["export"] == "runs/\udcff/größe"


def test_a_document_that_cannot_be_written_leaves_the_old_one(tmp_path: Path) -> None:
    path = tmp_path / "summary.json"
    summary = summary_of(plan_of(1), record_of(1))
    path.write_text("old")
    with pytest.raises(TypeError):
        replace(summary, predicted={"plan": object()}).write(path)
    assert path.read_text() == "old"
    with pytest.raises(UserError, match=r"the summary cannot be written to .*: No such file"):
        summary.write(tmp_path / "nowhere" / "summary.json")
    (tmp_path / "taken").mkdir()
    with pytest.raises(UserError, match="the summary cannot be written to"):
        summary.write(tmp_path / "taken")
    assert sorted(file.name for file in tmp_path.iterdir()) == ["summary.json", "taken"]


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (0.0, "0 s"),
        (0.0004, "0.4 ms"),
        (0.088, "88 ms"),
        (0.9994, "999 ms"),
        (0.9999, "1 s"),
        (12.34, "12.3 s"),
        (59.96, "1 min"),
        (75.2, "1 min 15 s"),
        (3599.4, "59 min 59 s"),
        (3599.6, "1 h"),
        (7500.0, "2 h 5 min"),
        (360_000.0, "100 h"),
    ],
)
def test_durations_in_words(value: float, words: str) -> None:
    assert figures.seconds(value) == words


@pytest.mark.parametrize(
    ("value", "words"),
    [(0.5, "0.5 MB"), (812.3, "812 MB"), (999.6, "1 GB"), (2048.0, "2.05 GB"), (80_000.0, "80 GB"), (2e6, "2 TB")],
)
def test_sizes_in_words(value: float, words: str) -> None:
    assert figures.megabytes(value) == words


@pytest.mark.parametrize(
    ("value", "words"),
    [(0, "0"), (7, "7"), (950, "950"), (999.9, "1 K"), (1_837_248, "1.84 M"), (70.6e9, "70.6 B"), (15e12, "15 T")],
)
def test_counts_in_words(value: float, words: str) -> None:
    assert figures.count(value) == words


@pytest.mark.parametrize(
    ("value", "words"),
    [(0.25, "0.25 t/s"), (12.34, "12.3 t/s"), (12_345.6, "12,346 t/s"), (999_999.7, "1 M t/s"), (2.5e6, "2.5 M t/s")],
)
def test_rates_in_words(value: float, words: str) -> None:
    assert figures.rate(value, "t/s") == words


@pytest.mark.parametrize(("value", "words"), [(0, "0%"), (0.0083, "0.8%"), (0.099, "9.9%"), (0.43, "43%"), (1, "100%")])
def test_shares_in_words(value: float, words: str) -> None:
    assert figures.percent(value) == words
