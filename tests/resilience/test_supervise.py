"""Ranks that are killed while they train: the run goes on from memory, and comes out as if nobody had disturbed it."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tangram.checkpoint.store.commits import whole
from tangram.resilience.policy import Limits
from tangram.resilience.supervise import Settings
from tangram.resilience.tiers import memory_of
from tangram.training.run.launch import RankError
from tests.resilience.runs import Run, job_of, run, text_in
from tests.resilience.test_tiers import flip

STEPS = 9
TABLES = {"run": {"steps": STEPS, "evaluate_every": 4}, "checkpoint": {"every_steps": 4, "keep": 5}}


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
    seen = Run(at={3: 1, 6: 0})
    job = job_of(folder, text, **TABLES)
    report = run(job, seen)
    assert seen.starts == 3
    assert seen.losses == undisturbed.losses, "bit for bit, each step once"
    assert [*report.trained.losses] == undisturbed.losses
    assert (report.first, report.step, report.trained.tokens) == (0, STEPS, sum(one.tokens for one in seen.steps))
    assert len(seen.recovered) == 2
    assert all(one.memory and one.lost_steps <= 2 for one in seen.recovered), seen.recovered
    assert [one.seconds for one in seen.steps] == sorted(one.seconds for one in seen.steps)
    steps = [marker.step for _, marker in whole(folder / "checkpoint")]
    assert steps[-1] == STEPS
    assert [event.step for event in seen.saved] == steps
    assert any(4 <= step <= 7 for step in steps), "as often as the plan says, or at the next snapshot"
    memory = memory_of(folder)
    assert memory is not None
    assert not memory.exists()
    assert any("killed by signal 9" in note and "going on from /dev/shm" in note for note in seen.notes), seen.notes


def test_a_rotten_snapshot_is_left_for_an_older_one(text: Path, undisturbed: Run) -> None:
    folder = text.parent / "rotten"
    memory = memory_of(folder)
    assert memory is not None

    def rot(note: str) -> None:
        if note.startswith("after step"):
            flip(Path(note.rpartition("going on from ")[2]))

    seen = Run(at={6: 1}, on_note=rot)
    run(job_of(folder, text, **TABLES), seen)
    assert seen.losses == undisturbed.losses
    assert any("cannot go on from" in note and "damaged" in note for note in seen.notes), seen.notes


def test_without_snapshots_it_goes_on_from_the_disk(text: Path, undisturbed: Run) -> None:
    seen = Run(at={6: 1})
    run(job_of(text.parent / "disk", text, **TABLES), seen, Settings(snapshot_every=0))
    assert seen.losses == undisturbed.losses
    assert [one.memory for one in seen.recovered] == [False]
    assert 1 <= seen.recovered[0].lost_steps <= 6


def test_what_fails_at_once_each_time_is_given_up(text: Path) -> None:
    class Killing(Run):
        def started(self, pids: list[int]) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
            super().started(pids)
            os.kill(pids[0], signal.SIGKILL)

    seen = Killing()
    folder = text.parent / "hopeless"
    with pytest.raises(RankError, match=r"rank 0 of 2 .* it failed 3 times in a row after step 0"):
        run(job_of(folder, text, **TABLES), seen, Settings(limits=Limits(in_a_row=2)))
    assert seen.starts == 3
    memory = memory_of(folder)
    assert memory is not None
    assert not memory.exists()


def test_a_run_that_gives_up_leaves_its_newest_state_on_the_disk(text: Path) -> None:
    folder = text.parent / "given_up"
    seen = Run(at={3: 1})
    with pytest.raises(RankError, match="started again 0 times already"):
        run(job_of(folder, text, **TABLES), seen, Settings(limits=Limits(restarts=0)))
    assert [marker.step for _, marker in whole(folder / "checkpoint")][-1] in (1, 2, 3)
