"""Kill -9 at moments drawn by seed: afterwards the newest checkpoint is the last one or the new one, bit for bit."""

import random
import shutil
from functools import partial
from pathlib import Path

import pytest

from tests.checkpoint.killing import Doom, check, die_after, die_at, forked, go_on, killed, save_and_prune, save_step
from tests.checkpoint.killing import two_ranks as run_two_ranks

ALONE, TOGETHER = range(14), range(6)
"""Seeds for every run; with those that once failed."""
MORE_ALONE, MORE_TOGETHER = range(100, 250), range(100, 160)


@pytest.fixture(scope="module")
def before(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What was saved earlier."""
    folder = tmp_path_factory.mktemp("before")
    for step in (0, 1):
        save_step(folder, step)
    return folder


def kill_alone(before: Path, folder: Path, seed: int) -> None:
    """A process that saves and prunes dies before one of its operations, or in the midst of one."""
    draw = random.Random(seed)
    runs = folder / "runs"
    shutil.copytree(before, runs)
    if draw.random() < 0.75:
        moment = draw.randrange(54)
        died = killed(forked(lambda: save_and_prune(runs, 2, lambda: die_at(moment))))
    else:
        delay = draw.uniform(0, 0.06)
        died = killed(forked(lambda: save_and_prune(runs, 2, lambda: die_after(delay))))
    step = check(runs, 1, 2)
    assert died or step == 2
    go_on(runs, 3)
    shutil.rmtree(folder)


def kill_together(before: Path, folder: Path, seed: int) -> None:
    """Two ranks with their writers, of which some die."""
    folder.mkdir(exist_ok=True)
    runs = folder / "runs"
    shutil.copytree(before, runs)
    doom = Doom(seed)
    run_two_ranks(folder, doom)
    check(runs, 1, 2)
    go_on(runs, 3)
    shutil.rmtree(folder)


def test_every_operation_of_a_save_and_a_removal_is_counted(before: Path, tmp_path: Path) -> None:
    """So the moments that are drawn reach to the end, and not much further."""
    for moment, dies in ((45, True), (70, False)):
        runs = tmp_path / str(moment)
        shutil.copytree(before, runs)
        pid = forked(partial(save_and_prune, runs, 2, partial(die_at, moment)))
        assert killed(pid) is dies
    assert [p.name for p in (tmp_path / "70").iterdir()] == ["step-00000002"]


@pytest.mark.parametrize("seed", ALONE)
def test_killed_alone(before: Path, tmp_path: Path, seed: int) -> None:
    kill_alone(before, tmp_path, seed)


@pytest.mark.parametrize("seed", TOGETHER)
def test_ranks_and_writers_killed(before: Path, tmp_path: Path, seed: int) -> None:
    kill_together(before, tmp_path, seed)


def test_nobody_killed(before: Path, tmp_path: Path) -> None:
    doom = Doom(0)
    doom.delays, doom.moments = {}, {}
    shutil.copytree(before, tmp_path / "runs")
    run_two_ranks(tmp_path, doom)
    check(tmp_path / "runs", 2)
    assert [p.name for p in (tmp_path / "runs").iterdir()] == ["step-00000002"]


@pytest.mark.slow
def test_killed_alone_at_many_more_moments(before: Path, tmp_path: Path) -> None:
    for seed in MORE_ALONE:
        kill_alone(before, tmp_path / str(seed), seed)


@pytest.mark.slow
def test_ranks_and_writers_killed_at_many_more_moments(before: Path, tmp_path: Path) -> None:
    for seed in MORE_TOGETHER:
        kill_together(before, tmp_path / str(seed), seed)
