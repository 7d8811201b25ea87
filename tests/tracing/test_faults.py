"""Real ranks, one of which errs: it is named, with what it did, and within which time; clean runs are left in peace."""

import re
import time
from pathlib import Path

import numpy as np
import pytest

from bench._tracing import jobs
from bench._tracing.jobs import BUSY, EVALUATES, LAYERS, PAUSE, SAVES, SLOW, Case, train
from tangram.errors import UserError
from tangram.tracing.files.format import CHECKED, End, Kind
from tangram.tracing.finding import Finding
from tangram.tracing.reading import read
from tangram.tracing.settings import TraceSettings
from tangram.tracing.show.report import TraceReport, report
from tangram.tracing.stops import STILL_SECONDS
from tangram.training.observe.events import Note
from tangram.training.run.launch import RankError, run_ranks

HANG = 2.0  # seconds


def job(folder: Path, case: Case, hang: float = HANG) -> tuple[TraceReport, str, list[str], float]:
    """The report on a job with a fault, the error that it ended with, the notes while it ran, and how long it took."""
    notes: list[str] = []
    settings = TraceSettings(folder, mesh=Case().mesh, hang_seconds=hang)
    error, begun = "", time.monotonic()
    try:
        run_ranks(
            train,
            case,
            world=4,
            on_event=lambda event: notes.append(event.text) if isinstance(event, Note) else None,
            device="cpu",
            trace=settings,
        )
    except RankError as failure:
        error = str(failure)
    return report(folder), error, notes, time.monotonic() - begun


def first(found: TraceReport) -> Finding:
    assert found.findings, found
    return found.findings[0]


def test_a_clean_run_is_read_back_and_nothing_is_found(tmp_path: Path) -> None:
    found, error, notes, _ = job(tmp_path, Case())
    assert (found.findings, found.notes, notes, error) == ((), (), [], "")
    assert found.state == "ended well, after step 14"
    for trace in read(tmp_path):
        assert trace.live.end is End.FINISHED
        assert trace.rows["step"].tolist() == [*range(1, 15)]
        assert trace.rows["calls"].tolist() == [
            2 * LAYERS + 1 + 2 * (s == EVALUATES) + (s == SAVES) for s in range(1, 15)
        ]
        enters = trace.events[trace.events["kind"] == Kind.ENTER]
        exits = trace.events[trace.events["kind"] == Kind.EXIT]
        assert enters["number"].tolist() == exits["site"].tolist()
        words = [str(trace.in_words(one)) for one in enters[enters["step"] == 9]]
        assert words[1] == f"all-reduce over tp in 1 (_tracing/jobs.py:{_line('dist.all_reduce(x, group=self.group)')})"
        assert words[3] == f"all-reduce over dp (_tracing/jobs.py:{_line('dist.all_reduce(grad, group=group)')})"
        assert words[6].startswith("all-reduce over dp tp")
        times = trace.rows["own_us"][:, [*CHECKED]].sum(1) + trace.rows["wait_us"].sum(1)
        assert (times <= trace.rows["nanoseconds"] / 1e3 + 1).all()


def _line(text: str) -> int:
    lines = Path(jobs.__file__).read_text().splitlines()
    return next(i for i, line in enumerate(lines, 1) if text in line)


def test_a_rank_whose_interpreter_is_stuck_is_not_said_to_be_stopped(tmp_path: Path) -> None:
    found, error, _, _ = job(tmp_path, Case("stuck", rank=2, step=9, layer=1), STILL_SECONDS + 1)
    why = f"its interpreter is stuck at _tracing/jobs.py:{_line('sum(itertools')} in forward; it was in forward of step"
    assert f" s: rank 2 stands still: {why}" in error, error
    assert (first(found).kind, first(found).ranks) == ("stopped", (2,))


def test_a_stopped_rank_is_named_by_report_while_it_hangs_and_after(tmp_path: Path) -> None:
    found, error, _, seconds = job(tmp_path, Case("stop", rank=2, step=9, layer=1))
    why = "rank 2 stands still: its process is stopped;"
    assert error.startswith(f"rank 2 of 4 ended the job: no rank has moved for 2 s: {why}"), error
    assert "forward of step 9" in error
    one = first(found)
    assert (one.kind, one.ranks, one.step) == ("stopped", (2,), 9)
    assert any(line.startswith("rank 3 waits in all-reduce over tp in 1") for line in one.details), one.details
    assert found.state.startswith("ended badly: rank 2 of 4")
    assert re.search(r"; the step has taken [2-9],\d+ ms so far, and without that takes about \d+$", one.text), one.text
    assert one.step_ms > 1e3 * HANG * 0.9 > 1e3 > one.without_ms, "a step of these takes some ms"
    assert seconds < HANG + 25  # of which the start of four processes on a busy machine is the most


@pytest.mark.parametrize(
    ("fault", "least", "where"), [("pause", 0, "forward"), pytest.param("pause-wait", BUSY, "a wait for others")]
)
def test_a_rank_that_stood_still_and_went_on_is_named_with_the_step_as_it_would_have_been(
    fault: str, least: float, where: str, tmp_path: Path
) -> None:
    run_ranks(
        train,
        Case(fault, rank=2, step=9, layer=1, steps=20),
        world=4,
        on_event=lambda event: None,
        device="cpu",
        trace=TraceSettings(tmp_path, mesh=Case().mesh),
    )
    found = report(tmp_path)
    one = first(found)
    assert (one.kind, one.ranks, one.step) == ("stood still", (2,), 9)
    assert re.match(rf"rank 2 stood still for [12]\.\d s in {where} of step 9: ", one.text), one.text
    # Beside the other steps, and what others did in that step whether it was stopped or not.
    usual = float(np.median([trace.rows["nanoseconds"][1:] for trace in read(tmp_path)])) / 1e6
    assert one.step_ms > 1e3 * PAUSE
    assert 1e3 * least <= one.without_ms < 1e3 * least + usual + 400
    assert f"about {one.without_ms:,.0f} ms instead of {one.step_ms:,.0f}" in one.text
    assert found.slow_share < 0.9, "what it cost is not that of a slow rank"


@pytest.mark.parametrize(
    ("case", "kind", "axes", "words"),
    [
        (Case("skip", rank=2, step=9, layer=1), "skipped", "tp", "rank 2 skipped all-reduce over tp in 1 (_tracing/"),
        (Case("skip-grad", rank=1, step=9, layer=2), "skipped", "dp", "rank 1 skipped all-reduce over dp"),
        (Case("extra", rank=3, step=8, layer=0), "extra", "tp", "which is not due"),
        pytest.param(
            Case("reorder", rank=0, step=9), "skipped", "dp", "rank 0 skipped all-reduce", marks=pytest.mark.slow
        ),
    ],
    ids=lambda value: value.fault if isinstance(value, Case) else None,
)
def test_a_call_that_is_not_due_is_named_in_its_step_and_the_hang_is_put_down_to_it(
    case: Case, kind: str, axes: str, words: str, tmp_path: Path
) -> None:
    found, error, notes, _ = job(tmp_path, case)
    one = first(found)
    assert (one.kind, one.ranks, one.step, one.axes) == (kind, (case.rank,), case.step, axes)
    assert words in one.text
    assert one.line.startswith("_tracing/jobs.py:")
    assert notes, "it was told of while it ran"
    assert notes[0] == one.text
    assert f"rank {case.rank} of 4 ended the job" in error, error
    others = [other for other in found.findings if other.kind != "slow"]  # on a busy machine one may be
    assert others == [one], "those who wait for it are not blamed"


@pytest.mark.parametrize("fault", ["size", pytest.param("dtype", marks=pytest.mark.slow)])
def test_a_mis_sized_call_is_named_though_others_die_of_it(fault: str, tmp_path: Path) -> None:
    found, error, _, _ = job(tmp_path, Case(fault, rank=2, step=9, layer=2))
    kinds = {one.kind: one for one in found.findings}
    assert kinds["mis-sized"].ranks == (2,)
    assert kinds["mis-sized"].step == 9
    assert first(found).kind == "mis-sized"
    assert ("5,120 bytes of float32 instead of 4,096" in kinds["mis-sized"].text) == (fault == "size"), error


@pytest.mark.parametrize("step", [2, pytest.param(9, marks=pytest.mark.slow)])
def test_of_ranks_with_one_loss_the_one_is_named_whose_numbers_were_not_finite_first(step: int, tmp_path: Path) -> None:
    found, error, _, _ = job(tmp_path, Case("nan", rank=2, step=step, layer=1))
    one = first(found)
    assert not error
    assert (one.kind, one.ranks, one.step, one.axes, one.layer) == ("not finite", (2,), step, "tp", "1")
    line = _line("dist.all_reduce(x, group=self.group)")
    assert f"rank 2 gave what is not finite to all-reduce over tp in 1 (_tracing/jobs.py:{line})" in one.text
    assert one.text.endswith("the loss is not finite on ranks 2, 3")


@pytest.mark.parametrize("fault", ["skip", pytest.param("skip-grad", marks=pytest.mark.slow)])
def test_a_call_is_skipped_in_a_step_of_rows_longer_than_any_before(fault: str, tmp_path: Path) -> None:
    found, error, _, _ = job(tmp_path, Case(fault, rank=3, step=9, layer=1, varied=True))
    one = first(found)
    assert (one.kind, one.ranks, one.step, one.axes) == ("skipped", (3,), 9, "tp" if fault == "skip" else "dp")
    assert "rank 3 of 4 ended the job" in error, error


def test_a_killed_rank_is_named_and_its_last_steps_are_there(tmp_path: Path) -> None:
    found, error, _, _ = job(tmp_path, Case("kill", rank=1, step=9, layer=2))
    assert error.startswith("rank 1 of 4 ended the job: killed by signal 9")
    one = first(found)
    assert (one.kind, one.ranks, one.step) == ("died", (1,), 9)
    trace = read(tmp_path)[1]
    assert trace.live.end is End.RUNNING
    assert trace.rows["step"].tolist() == [*range(1, 9)]
    assert trace.in_words(trace.events[trace.events["kind"] == Kind.ENTER][-1]).site.layer == "1"


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (
            "slow",
            "in forward, for it they wait over .*; it computes for [0-9.]+ ms of them(. Without it .*)?$",
        ),
        ("starved", "in forward, .*; it computes for [0-9.]+ ms of them and else was starved of CPU"),
        pytest.param(
            "slow-data", "in data, .* and else waited for its data(. Without it .*)?$", marks=pytest.mark.slow
        ),
        pytest.param("slow-disk", "in forward, .* and else waited for something outside", marks=pytest.mark.slow),
    ],
)
def test_a_slow_rank_is_named_with_what_it_is_slow_in_and_why(fault: str, words: str, tmp_path: Path) -> None:
    found, error, _, _ = job(tmp_path, Case(fault, rank=1, step=1, steps=16, seconds=0.06))
    assert not error
    one = first(found)
    assert (one.kind, one.ranks, one.cause) == ("slow", (1,), SLOW[fault])
    assert re.search("most of it " + words, one.text), one.text
    assert {*one.axes.split(" and ")} == {"tp", "dp"}, "its peer of tp waits in the forward, that of dp in the backward"


@pytest.mark.slow
@pytest.mark.parametrize("step", [2, 9])
def test_a_rank_that_sleeps_is_named_by_its_stack(step: int, tmp_path: Path) -> None:
    found, error, _, _ = job(tmp_path, Case("sleep", rank=3, step=step, layer=1))
    one = first(found)
    assert (one.kind, one.ranks) == ("absent", (3,))
    assert "at _tracing/jobs.py" in error


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["skip", "skip-grad", "extra"])
def test_a_fault_of_the_first_step_is_found_by_comparing_ranks(fault: str, tmp_path: Path) -> None:
    found, error, _, _ = job(tmp_path, Case(fault, rank=2, step=1, layer=1))
    one = first(found)
    assert (one.kind, one.ranks, one.step) == ("unlike", (2,), 1)
    assert "rank 2 of 4 ended the job" in error


def test_a_disk_without_room_stops_the_trace_and_not_the_run(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")  # a folder that cannot be made, as one of a disk that is full
    notes: list[object] = []
    settings = TraceSettings(blocked / "trace", mesh=Case().mesh)
    done = run_ranks(train, Case(steps=3), world=4, on_event=notes.append, device="cpu", trace=settings)
    assert done == [3] * 4
    assert len(notes) == 4
    assert 'not traced: "' in str(notes[0])
    with pytest.raises(UserError, match="there is no folder"):
        report(blocked / "trace")
