"""Storage that is full, read-only or hangs: training goes on, is told, and the next checkpoint is right."""

import os
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tangram.checkpoint.inspect import verify
from tangram.checkpoint.store import commits
from tangram.errors import UserError
from tangram.training.observe.events import CheckpointSaved, Note, SaveFailed
from tangram.training.state.checkpointer import Checkpointer, Progress, load, newest
from tests.training.saving import Values, net, plan_of, same, step, values, whole_state

PLAN = plan_of(ranks=1, keep=2)


def mount(*words: str) -> bool:
    """Whether this machine lets a test mount something."""
    try:
        return subprocess.run(["mount", *words], capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        return False


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of a quarter of a megabyte."""
    disk = tmp_path / "disk"
    disk.mkdir()
    if not mount("-t", "tmpfs", "-o", "size=256k", "tmpfs", str(disk)):
        pytest.skip("this machine lets no test mount a file system")
    yield disk
    subprocess.run(["umount", "-l", str(disk)], check=True)


class Training:
    """A job in one process that trains and saves, and what every checkpoint must hold."""

    def __init__(self, folder: Path) -> None:
        self.state = whole_state(net(), steps=1)
        self.checkpointer = Checkpointer(folder, PLAN, None)
        saver = self.checkpointer._saver  # pyright: ignore[reportPrivateUsage]
        assert saver is not None
        self.saver = saver
        saver.settings = replace(saver.settings, pause=0.05)  # before a second attempt
        self.checkpointer.prepare(self.state)
        self.at: dict[int, Values] = {}
        self._plain = whole_state(net(), steps=1)  # the same training without checkpoints

    def go_on(self) -> None:
        """One more step, which no storage may change."""
        for state in (self.state, self._plain):
            assert state.optimiser is not None
            step(state.model, state.optimiser, 1, seed=len(self.at))
        assert same(values(self.state), values(self._plain))

    def save(self, number: int) -> None:
        """Save as a step of this number, and train while it is written."""
        self.state.progress = Progress(number)
        self.at[number] = values(self.state)
        self.checkpointer.save(self.state)
        self.go_on()

    def told(self) -> list[CheckpointSaved | SaveFailed | Note]:
        """What came of it, at last."""
        self.checkpointer._await()  # pyright: ignore[reportPrivateUsage]
        return self.checkpointer.poll()

    def check(self, number: int) -> None:
        """The newest checkpoint has the state of that step, bit for bit, and nothing half written is beside it."""
        folder = self.checkpointer.folder
        path = newest(folder)
        assert path is not None
        assert verify.verify(path).sound
        found = whole_state(net(7), seed=5, steps=3)
        assert load(path, found, PLAN, None) == Progress(number)
        assert same(values(found), self.at[number])
        assert not list(folder.glob(".*"))


@pytest.fixture
def training(small_disk: Path) -> Iterator[Training]:
    job = Training(small_disk / "checkpoint")
    yield job
    job.checkpointer.close()


def only(events: list[CheckpointSaved | SaveFailed | Note]) -> CheckpointSaved | SaveFailed | Note:
    (event,) = events
    return event


def test_a_full_and_then_a_read_only_disk(training: Training, small_disk: Path) -> None:
    training.save(1)
    assert isinstance(only(training.told()), CheckpointSaved)
    room = os.statvfs(small_disk)
    (small_disk / "filler").write_bytes(bytes(room.f_bavail * room.f_bsize - 8192))
    training.save(2)
    failed = only(training.told())
    assert isinstance(failed, SaveFailed)
    assert "No space left on device" in failed.reason
    training.check(1)
    (small_disk / "filler").unlink()
    training.save(3)
    assert isinstance(only(training.told()), CheckpointSaved)
    training.check(3)

    assert mount("-o", "remount,ro", str(small_disk))
    training.save(4)
    failed = only(training.told())
    assert isinstance(failed, SaveFailed)
    assert "Read-only file system" in failed.reason
    training.check(3)
    assert mount("-o", "remount,rw", str(small_disk))
    training.save(5)
    assert isinstance(only(training.told()), CheckpointSaved)
    training.check(5)
    assert [path.name for path, _ in commits.committed(training.checkpointer.folder)] == [
        "step-00000003",
        "step-00000005",
    ]


def test_storage_that_hangs_and_comes_back(tmp_path: Path) -> None:
    training = Training(tmp_path / "checkpoint")
    training.save(1)
    assert isinstance(only(training.told()), CheckpointSaved)
    pid = training.saver.pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    training.save(2)
    for _ in range(5):
        training.go_on()
    assert training.checkpointer.poll() == []
    training.check(1)
    os.kill(pid, signal.SIGCONT)
    assert isinstance(only(training.told()), CheckpointSaved)
    training.check(2)

    folder = training.checkpointer.folder
    aside = folder.rename(folder.with_name("aside"))
    folder.write_text("")
    training.save(3)
    failed = only(training.told())
    assert isinstance(failed, SaveFailed)
    assert "File exists" in failed.reason
    folder.unlink()
    aside.rename(folder)
    training.save(4)
    assert [type(event) for event in training.checkpointer.close()] == [CheckpointSaved]
    training.check(4)


def test_a_damaged_checkpoint_says_which_one_to_go_back_to(tmp_path: Path) -> None:
    state = whole_state(net())
    checkpointer = Checkpointer(tmp_path, plan_of(ranks=1, keep=2, asynchronous=False), None)
    for number in (1, 2):
        state.progress = Progress(number)
        checkpointer.save(state)
    file = tmp_path / "step-00000002" / "model-00001-of-00001.safetensors"
    data = bytearray(file.read_bytes())
    data[4100] ^= 1
    file.write_bytes(data)
    before = tmp_path / "step-00000001"
    with pytest.raises(UserError, match=f'has other bytes .*; the one before it is "{before}"'):
        load(tmp_path / "step-00000002", whole_state(net(3)), PLAN, None)
