"""Ranks that are killed while they train: the run goes on from memory, and comes out as if nobody had disturbed it."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from tangram.checkpoint.store.commits import committed, read_marker
from tangram.checkpoint.tiers.promote import pin, promote
from tangram.errors import UserError
from tangram.planner.cost.goodput import seen_failures
from tangram.resilience import carrier, fewer, supervise, tiers
from tangram.resilience.policy import Limits
from tangram.resilience.rescue import rescue
from tangram.resilience.supervise import Settings, supervised
from tangram.resilience.tiers import memory_of
from tangram.tracing.settings import TraceSettings, fresh_folder
from tangram.training.observe.events import CheckpointSaved, Evaluated, Note, StepDone
from tangram.training.run import launch
from tangram.training.run.launch import RankError
from tests.resilience.runs import Run, job_of, run, text_in
from tests.resilience.test_tiers import flip

STEPS = 60  # of some ten milliseconds: snapshots have to keep up
TABLES = {"run": {"steps": STEPS, "evaluate_every": 40}, "checkpoint": {"every_steps": 20, "keep": 5}}


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return text_in(tmp_path_factory.mktemp("resilience"))


@pytest.fixture(scope="module")
def undisturbed(text: Path) -> Run:
    seen = Run()
    run(job_of(text.parent / "undisturbed", text, **TABLES), seen)
    assert seen.starts == 1
    assert [step.step for step in seen.steps] == [*range(1, STEPS + 1)]
    return seen


def test_killed_twice_it_comes_out_the_same(text: Path, undisturbed: Run) -> None:
    folder = text.parent / "killed"
    seen = Run(at={3: 1, 30: 0})
    job = job_of(folder, text, **TABLES)
    report = run(job, seen)
    assert seen.starts == 3
    assert seen.losses == undisturbed.losses, "bit for bit, each step once"
    assert [*report.trained.losses] == undisturbed.losses
    assert (report.first, report.step, report.trained.tokens) == (0, STEPS, sum(one.tokens for one in seen.steps))
    assert len(seen.recovered) == 2
    assert all(one.memory and one.lost_steps < one.step - 1 for one in seen.recovered), seen.recovered
    assert [one.seconds for one in seen.steps] == sorted(one.seconds for one in seen.steps)
    steps = [marker.step for _, marker in committed(folder / "checkpoint")]
    assert steps[-1] == STEPS
    assert [event.step for event in seen.saved] == steps
    assert len(steps) >= 3, "as often as the plan says, or at the next snapshot"
    memory = memory_of(folder)
    assert memory is not None
    assert not memory.exists()
    assert any("killed by signal 9" in note and "going on from /dev/shm" in note for note in seen.notes), seen.notes
    found = seen_failures([folder])
    assert (found.failures, len(found.restarts)) == (2, 2)
    assert 0 < sum(found.restarts) < found.device_hours * 3600 / job.plan.ranks + 0.1


@pytest.mark.parametrize("copied", [False, True])
def test_a_rotten_snapshot_is_left_for_its_copy_or_an_older_one(text: Path, undisturbed: Run, *, copied: bool) -> None:
    folder, behind = text.parent / f"rotten-{copied}", list[int]()

    def rot(note: str) -> None:
        if note.startswith("after step"):
            snapshot = Path(note.rpartition("going on from ")[2])
            behind.append(int(note.split()[2].strip(":")) - read_marker(snapshot).step)
            if copied:
                promote(snapshot, folder / "checkpoint")
            flip(snapshot)

    seen = Run(at={6: 1}, on_note=rot)
    run(job_of(folder, text, **TABLES), seen)
    assert seen.losses == undisturbed.losses
    assert any("cannot go on from" in note and "damaged" in note for note in seen.notes), seen.notes
    (lost,) = (one.lost_steps for one in seen.recovered)
    assert (lost == behind[0]) is copied, "no more is done again than with the snapshot"


FAILS_ONCE = """
import pathlib, torch
from torch.nn.modules.module import register_module_forward_pre_hook

def batch_of(module, args):
    flag = pathlib.Path(__file__).with_suffix(".flag")
    ranks = torch.distributed.is_initialized() and torch.distributed.get_rank()
    if ranks and module.training and type(module).__name__.endswith("ForCausalLM") and not flag.exists():
        flag.touch()
        raise KeyError("shard 17")

register_module_forward_pre_hook(batch_of)
"""


def test_the_stack_of_an_error_that_did_not_come_again_is_kept(text: Path) -> None:
    folder, seen = text.parent / "once", Run()
    (text.parent / "code.py").write_text(FAILS_ONCE)
    run(job_of(folder, text, model={"code": str(text.parent / "code.py")}, run={"steps": 3}), seen)
    assert [step.step for step in seen.steps] == [1, 2, 3]
    rows = [json.loads(line) for line in (folder / "failures.jsonl").read_text().splitlines()]
    (failure,) = (row for row in rows if row["what"] == "failure")
    assert failure["words"] == "rank 1 of 2 ended the job: KeyError: 'shard 17'"
    assert "code.py" in failure["details"]
    assert "in batch_of" in failure["details"]


def test_without_snapshots_it_goes_on_from_the_disk(
    text: Path, undisturbed: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Killing(Run):
        def __call__(self, event: object) -> None:
            super().__call__(event)
            if isinstance(event, CheckpointSaved) and self.starts == 1:
                os.kill(self.pids[1], signal.SIGKILL)

    seen, kills = Killing(), itertools.count()
    monkeypatch.setattr(launch, "memory_kills", lambda: next(kills))
    run(job_of(text.parent / "disk", text, **TABLES), seen, Settings(snapshot_every=0))
    found = seen_failures([text.parent / "disk"])
    assert (found.failures, len(found.restarts)) == (0, 1), "memory ran out: no device has failed"
    assert seen.losses == undisturbed.losses
    assert [one.memory for one in seen.recovered] == [False]
    assert seen.recovered[0].lost_steps < seen.recovered[0].step - 1


def test_killed_before_its_first_step_it_begins_again_and_says_so(text: Path, undisturbed: Run) -> None:
    seen, killed = Run(), list[int]()

    def started(pids: Sequence[int]) -> None:
        seen.started(pids)
        if not killed:
            killed.append(pids[1])
            os.kill(pids[1], signal.SIGKILL)

    supervised(job_of(text.parent / "early", text, **TABLES), seen, Settings(snapshot_every=1), started)
    assert seen.losses == undisturbed.losses
    assert any(note.endswith("from the beginning, 0 steps done again") for note in seen.notes), seen.notes
    assert not seen.recovered[0].memory


def test_what_fails_at_once_each_time_is_given_up(text: Path) -> None:
    class Killing(Run):
        def started(self, pids: list[int]) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
            super().started(pids)
            os.kill(pids[0], signal.SIGKILL)

    seen = Killing()
    folder = text.parent / "hopeless"
    with pytest.raises(
        RankError,
        match=r"^rank 0 of 2 ended the job: killed .* it failed 3 times in a row after step 0; with --min-ranks N",
    ):
        run(job_of(folder, text, **TABLES), seen, Settings(1, limits=Limits(in_a_row=2)))
    assert seen.starts == 3
    memory = memory_of(folder)
    assert memory is not None
    assert not memory.exists()


class LosingARank(Run):
    """Of two ranks one is killed, once there is a snapshot, and again whenever two are started."""

    def started(self, pids: list[int]) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        super().started(pids)
        if self.starts > 1 and len(pids) > 1:
            os.kill(pids[1], signal.SIGKILL)


def test_where_a_rank_cannot_be_kept_alive_fewer_go_on(text: Path, undisturbed: Run) -> None:
    seen = LosingARank(at={3: 1})
    report = run(job_of(text.parent / "fewer", text, **TABLES), seen, Settings(1, Limits(in_a_row=1), min_ranks=1))
    assert seen.starts == 3
    assert len(seen.pids) == 1
    assert any('going on with 1 of 2 ranks, mesh "' in note for note in seen.notes), seen.notes
    assert [step.step for step in seen.steps] == [*range(1, STEPS + 1)]
    assert seen.losses == pytest.approx(undisturbed.losses, rel=1e-4), "same data, same batch: rounding alone"
    assert report.trained.tokens == sum(step.tokens for step in undisturbed.steps)
    assert report.ranks == 1
    assert not any("computes otherwise" in note for note in seen.notes)


def test_fewer_devices_than_ranks_take_fewer_ranks(text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fewer, "room_for_ranks", lambda choice: 1)
    job = job_of(text.parent / "lacking", text, run={"steps": 2})
    with pytest.raises(UserError, match="has no plan for fewer than 2 and at least 2 ranks; with --min-ranks 1"):
        supervise.supervised(job, Run(), Settings(1, min_ranks=2))
    seen = Run()
    run(job, seen, Settings(1, min_ranks=1))
    assert len(seen.pids) == 1
    assert [step.step for step in seen.steps] == [1, 2]


def test_too_few_ranks_say_which_would_do(text: Path) -> None:
    seen = LosingARank(at={3: 1})
    with pytest.raises(UserError, match=r"killed .* 2 times in a row .* with --min-ranks 1 it could go on"):
        run(job_of(text.parent / "too_few", text, **TABLES), seen, Settings(1, Limits(in_a_row=1), min_ranks=2))


def test_a_run_that_gives_up_leaves_its_newest_state_on_the_disk(text: Path) -> None:
    folder = text.parent / "given_up"
    seen = Run(at={3: 1})
    with pytest.raises(RankError, match="started again 0 times in a day already"):
        run(job_of(folder, text, **TABLES), seen, Settings(1, limits=Limits(restarts=0)))
    assert [marker.step for _, marker in committed(folder / "checkpoint")][-1] >= 3


def test_where_memory_is_full_checkpoints_go_to_the_disk(
    text: Path, undisturbed: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = text.parent / "small"
    small.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=200k", "tmpfs", small], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("a small file system takes a mount, which this user may not")
    try:
        monkeypatch.setattr(tiers, "SHARED", small)
        seen, folder = Run(), text.parent / "full"
        run(job_of(folder, text, **TABLES), seen)
        left = [*small.iterdir()]
    finally:
        subprocess.run(["umount", small], check=True)
    assert not left, "what is full is not filled further"
    assert seen.losses == undisturbed.losses
    assert [(one.memory, one.lost_steps) for one in seen.recovered] == [(False, 0)], "nor is anything done again"
    first = seen.saved[0].step
    assert any(
        "snapshots in memory have ended" in note and "No space left" in note and "--shm-size" in note
        for note in seen.notes
    ), seen.notes
    assert 0 < first < 20
    assert [marker.step for _, marker in committed(folder / "checkpoint")] == [first, 20, 40, STEPS]


def test_what_is_on_its_way_to_the_disk_as_memory_fills_is_waited_for(
    text: Path, undisturbed: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was begun a second time beside that, in the same folder."""
    small, copying, twice = text.parent / "small_too", threading.Lock(), list[Path]()
    awaited, close = threading.Event(), carrier.Promoter.close
    small.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", small], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("a small file system takes a mount, which this user may not")

    def slow(path: Path, folder: Path) -> Path:
        if not copying.acquire(blocking=False):
            twice.append(path)
            return promote(path, folder)
        try:
            with (small / "others").open("xb", buffering=0) as full:
                while not awaited.wait(1e-4):  # whatever is given back meanwhile is taken, too
                    with contextlib.suppress(OSError):
                        full.write(bytes(4096))
            return promote(path, folder)
        finally:
            copying.release()

    def closed(promoter: carrier.Promoter) -> None:
        awaited.set()
        close(promoter)

    with monkeypatch.context() as patched:
        patched.setattr(tiers, "SHARED", small)
        patched.setattr(carrier, "promote", slow)
        patched.setattr(carrier.Promoter, "close", closed)
        patched.setattr("tangram.resilience.rescue.promote", slow)
        seen, folder = Run(), text.parent / "filled"
        try:
            run(job_of(folder, text, **TABLES), seen)
        finally:
            subprocess.run(["umount", small], check=True)
    assert any("snapshots in memory have ended" in note and "No space left" in note for note in seen.notes), seen.notes
    assert not twice
    assert seen.losses == undisturbed.losses
    assert [one.lost_steps for one in seen.recovered] == [0]
    steps = [marker.step for _, marker in committed(folder / "checkpoint")]
    assert steps == sorted(steps), "what was on its way is older than the state that ranks brought to the disk"
    assert {20, STEPS} < {*steps}


def test_what_the_plan_wants_on_the_disk_is_there_however_seldom_snapshots_are(text: Path, undisturbed: Run) -> None:
    """They came as often as they cost little, and checkpoints of the plan with them, or long after they were due."""
    folder, seen = text.parent / "seldom", Run()
    run(job_of(folder, text, **TABLES | {"checkpoint": {"every_steps": 6, "keep": 20}}), seen, Settings())
    assert seen.losses == undisturbed.losses
    steps = [marker.step for _, marker in committed(folder / "checkpoint")]
    assert [step // 6 for step in steps] == [*range(1, 11)], steps


def test_where_the_one_that_is_due_is_gone_the_next_goes_to_the_disk(
    text: Path, undisturbed: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when the launcher stands still for a while, and hears late of what newer ones have taken the place of."""
    gone, folder, seen = list[Path](), text.parent / "due", Run()

    def late(path: Path) -> Path:
        if len(gone) < 2:
            gone.append(path)
            raise FileNotFoundError(2, "No such file or directory", str(path))
        return pin(path)

    monkeypatch.setattr(carrier, "pin", late)
    run(job_of(folder, text, **TABLES), seen)
    assert seen.losses == undisturbed.losses
    steps = [marker.step for _, marker in committed(folder / "checkpoint")]
    assert len(steps) == 3
    assert 20 < steps[0] < 40 <= steps[1] < STEPS == steps[2]
    assert [event.step for event in seen.saved] == steps
    assert not seen.failed


def test_a_rank_that_stands_still_is_a_failure_too(text: Path, undisturbed: Run) -> None:
    seen = Run(at={3: 1}, signal=signal.SIGSTOP)
    job = job_of(text.parent / "stopped", text, **TABLES)
    job = replace(job, trace=TraceSettings(fresh_folder(job.folder), mesh=job.plan.mesh, hang_seconds=3))
    run(job, seen)
    assert seen.losses == undisturbed.losses
    assert [one.memory for one in seen.recovered] == [True]
    assert any("no rank has moved for 3 s: rank 1" in note for note in seen.notes), seen.notes
    assert sorted(path.name for path in job.folder.glob("trace*")) == ["trace", "trace-2"], "the first says of what"
    assert '"cause": "hang"' in (job.folder / "failures.jsonl").read_text()


def test_what_the_disk_does_not_take_stays_in_memory(
    text: Path, undisturbed: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, folder: Path) -> Path:
        raise OSError(28, "No space left on device", str(folder))

    folder, seen = text.parent / "no_room", Run()
    with monkeypatch.context() as patched:
        patched.setattr(carrier, "promote", full)
        patched.setattr("tangram.resilience.rescue.promote", full)
        with pytest.raises(
            UserError, match=r"of step 60, could not be written to the disk: .*launch --resume --out .*no_room"
        ):
            run(job_of(folder, text, **TABLES), seen)
        with pytest.raises(UserError, match="make room there"):
            rescue(folder, seen)
    assert seen.losses == undisturbed.losses
    rescue(folder, seen)
    assert [marker.step for _, marker in committed(folder / "checkpoint")] == [STEPS]
    assert not (memory_of(folder) or folder).exists()


def test_early_stopping_counts_on_from_where_a_rank_was_lost(text: Path) -> None:
    """With a learning rate of nothing the first measurement is the best: two more end the run, whoever dies between."""
    patient = {
        "run": {"steps": 60, "evaluate_every": 10, "patience": 2},
        "optimiser": {"lr": 1e-30, "warmup_steps": 0},
        "checkpoint": {"every_steps": 0},
    }
    seen = Run(at={13: 1})
    report = run(job_of(text.parent / "patient", text, **patient), seen)
    assert len(seen.recovered) == 1
    assert (report.trained.stopped, report.step) == ("patience", 30)


class KillingAtTheEnd(Run):
    """A rank is killed once the last checkpoint is there, in what is measured after training."""

    def __call__(self, event: object) -> None:
        super().__call__(event)
        if isinstance(event, Evaluated) and event.step == 30 and self.starts == 1:
            assert self.memory is not None
            threading.Thread(target=self._when_saved).start()

    def _when_saved(self) -> None:
        assert self.memory is not None
        while not list(self.memory.glob("attempt-1/step-00000030/tangram.json")):
            time.sleep(0.001)
        os.kill(self.pids[1], signal.SIGKILL)


def test_a_run_that_has_stopped_early_trains_no_further(text: Path) -> None:
    patient = {
        "run": {"steps": 60, "evaluate_every": 10, "patience": 2},
        "optimiser": {"lr": 1e-30, "warmup_steps": 0},
        "data": {"held_out_samples": 400},
        "checkpoint": {"every_steps": 0},
    }
    seen = KillingAtTheEnd()
    report = run(job_of(text.parent / "patient_end", text, **patient), seen)
    assert seen.starts == 2
    assert (report.trained.stopped, report.step) == ("patience", 30)
    assert [one.step for one in seen.steps] == [*range(1, 31)]


class StoppedAndLost(Run):
    """Somebody asks the launcher to stop, and a rank dies before it has: as where a machine goes down."""

    def __call__(self, event: object) -> None:
        asked = isinstance(event, Note) and event.text.startswith("stopping after this step")
        if asked:
            os.kill(self.pids[1], signal.SIGKILL)
        if isinstance(event, StepDone) and event.step == 20:
            os.kill(os.getpid(), signal.SIGTERM)
        super().__call__(event)


def test_who_was_asked_to_stop_does_not_begin_again(text: Path) -> None:
    folder, seen = text.parent / "asked", StoppedAndLost()
    report = run(job_of(folder, text, **{**TABLES, "run": {"steps": 300}}), seen)
    assert seen.starts == 1
    assert report.trained.stopped == "signal"
    (*_, (_, marker)) = committed(folder / "checkpoint")
    assert marker.step == report.step >= 15
    assert not (memory_of(folder) or folder).exists()


class KillingWhenSaved(Run):
    """A rank is killed as soon as the snapshot of a step is there, which is within the next one."""

    def started(self, pids: list[int]) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        super().started(pids)
        if self.starts == 1:
            threading.Thread(target=self._when_saved).start()

    def _when_saved(self) -> None:
        assert self.memory is not None
        while not any(self.memory.glob("attempt-1/step-*[3-9]/tangram.json")):
            time.sleep(0.0005)
        os.kill(self.pids[1], signal.SIGKILL)


class Clock:
    """Of the launcher: the ranks are told how much time is spent, so no machine is too slow for a limit."""

    ahead = 0.0

    def monotonic(self) -> float:
        return time.monotonic() + self.ahead


def test_where_the_time_is_spent_when_a_rank_is_lost_nothing_more_is_trained(
    text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But for steps that were told of, which the state at the end must have."""
    limit, clock = 3600.0, Clock()
    monkeypatch.setattr("tangram.resilience.seen.time", clock)

    def wait(note: str) -> None:
        if note.startswith("after step"):
            clock.ahead = limit

    changes = {**TABLES, "run": {"steps": 100_000, "max_seconds": limit}}
    seen = KillingWhenSaved(on_note=wait)
    report = run(job_of(text.parent / "late", text, **changes), seen)
    assert seen.starts == 2
    (before,) = [int(note.split()[2].strip(":")) for note in seen.notes if note.startswith("after step")]
    assert (report.trained.stopped, report.step, len(seen.steps)) == ("time", before, before)


def test_what_loses_are_judged_by_outlives_a_rank(text: Path) -> None:
    """Steps that have diverged are skipped: which, goes by the losses before, wherever a rank was lost."""
    diverged = {"above": 1.001, "steps": 1, "window": 9}
    changes = {"run": {"steps": STEPS, "on_nonfinite": "skip", "skips_in_a_row": STEPS, "diverged": diverged}}
    alone = Run()
    run(job_of(text.parent / "judged_alone", text, **changes), alone)
    assert STEPS // 6 < len(alone.steps) < STEPS - 5, "some are skipped, and some are not"
    seen = Run(at={20: 1, 40: 0})
    run(job_of(text.parent / "judged", text, **changes), seen)
    assert seen.starts == 3
    assert [(one.step, one.loss) for one in seen.steps] == [(one.step, one.loss) for one in alone.steps]


def test_who_is_asked_to_stop_between_two_attempts_begins_none(text: Path) -> None:
    def ask(note: str) -> None:
        if note.startswith("after step"):
            os.kill(os.getpid(), signal.SIGTERM)

    folder, seen = text.parent / "between", Run(at={3: 1}, on_note=ask)
    late = list[int]()
    before = signal.signal(signal.SIGTERM, lambda number, frame: late.append(number))
    try:
        report = run(job_of(folder, text, **{**TABLES, "run": {"steps": 300}}), seen)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert not late, "it was heard"
    assert (seen.starts, report.trained.stopped) == (1, "signal")
    (*_, (_, marker)) = committed(folder / "checkpoint")
    assert marker.step == report.step >= 3
    assert not (memory_of(folder) or folder).exists()


def test_steps_that_were_still_to_be_heard_of_are_told(text: Path, undisturbed: Run) -> None:
    """Whoever is told is slow, as a terminal or a disk may be, and meanwhile the ranks go on, and one dies."""

    class Slow(Run):
        def __call__(self, event: object) -> None:
            super().__call__(event)
            if isinstance(event, StepDone) and event.step == 5 and self.starts == 1:
                time.sleep(1)
                os.kill(self.pids[1], signal.SIGKILL)
                time.sleep(0.3)

    seen = Slow()
    run(job_of(text.parent / "slow", text, **TABLES), seen)
    assert seen.starts == 2
    assert [one.step for one in seen.steps] == [*range(1, STEPS + 1)]
    assert seen.losses == undisturbed.losses
