"""Snapshots and checkpoints in two places: the newest that is whole, brought from one to the other and proved."""

import os
import shutil
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tangram.checkpoint.inspect.diff import compare
from tangram.checkpoint.inspect.verify import verify
from tangram.checkpoint.loading.block_source import DamagedError
from tangram.checkpoint.loading.load import load
from tangram.checkpoint.saving.async_saver import AsyncSaver, Settings
from tangram.checkpoint.saving.rank_files import share_fields
from tangram.checkpoint.saving.save import About, save
from tangram.checkpoint.saving.snapshot import share
from tangram.checkpoint.saving.writer_process import Order, SaveWriter
from tangram.checkpoint.state.describe import describe
from tangram.checkpoint.store import commits
from tangram.checkpoint.store.commits import committed, read_manifest, read_marker
from tangram.checkpoint.tiers.promote import pin, promote
from tangram.errors import UserError
from tangram.relayout.exchange.peers import Peers
from tangram.resilience import rescue
from tangram.resilience.tiers import Tiers, memory_of
from tangram.training.run.rank import RankJob
from tangram.training.step.loop import StepCosts
from tests.training.small import small_plan


def write(folder: Path, step: int, created: str = "") -> Path:
    path = folder / f"step-{step:08d}"
    save({"model": {"w": torch.arange(1000.0) + step}}, path, about=About(step=step, created=created))
    return path


def value(path: Path) -> float:
    state = {"model": {"w": torch.zeros(1000)}}
    load(state, path)
    return float(state["model"]["w"][0])


def flip(path: Path) -> None:
    """One bit of a tensor."""
    file = next(path.glob("*.safetensors"))
    data = bytearray(file.read_bytes())
    data[-5] ^= 4
    file.write_bytes(data)


def test_what_is_promoted_is_what_was_saved(tmp_path: Path) -> None:
    memory, disk = tmp_path / "memory", tmp_path / "disk"
    write(disk, 1)
    path = promote(write(memory, 2), disk)
    assert path == disk / "step-00000002"
    assert value(path) == 2
    assert [marker.serial for _, marker in committed(disk)] == [1, 2]
    assert read_marker(path).id == read_marker(memory / "step-00000002").id
    assert [report.sound for report in [verify(path)]] == [True]
    assert promote(memory / "step-00000002", disk).name == "step-00000002-2", "never over one that is good"


def test_a_snapshot_gets_its_digests_on_the_way_to_the_disk(tmp_path: Path) -> None:
    torch.manual_seed(0)
    state: dict[str, dict[str, torch.Tensor]] = {
        "model": {"w": torch.randn(300, 70), "scalar": torch.tensor(3.0), **{f"n{i}": torch.randn(9) for i in range(5)}}
    }
    saver = AsyncSaver(tmp_path / "memory", Peers(), Settings(digests=False))
    described = describe(state, Peers())
    for step in range(3):  # the third by what is kept from the second
        saver.save(described, About(step))
        saver.fence()
        kept = state["model"]["w"].clone()
        state["model"]["w"] += 1
    assert [result.reason for result in saver.close()] == [""] * 3
    found = tmp_path / "memory" / "step-00000002"
    assert {tensor.digest for tensor in read_manifest(found).tensors.values()} == {""}
    assert verify(found).sound
    state["model"]["w"].copy_(kept)
    save(state, tmp_path / "plain")
    path = promote(found, tmp_path / "disk")
    assert verify(path).sound
    made, plain = read_manifest(path), read_manifest(tmp_path / "plain")
    assert made.tensors == plain.tensors
    assert made.files.keys() == plain.files.keys(), "with the index that other libraries look for"
    before = tmp_path / "memory" / "step-00000001"
    changed = compare((found, read_manifest(found)), (before, read_manifest(before)))
    assert [(one.name, one.kind) for one in changed.changes] == [("model.w", "values")]
    flip(found)
    assert not verify(found).sound
    with pytest.raises(DamagedError, match="other bytes from 0 to"):
        promote(found, tmp_path / "disk")


def test_snapshots_are_written_over_files_that_no_checkpoint_has_any_more(tmp_path: Path) -> None:
    """Memory that is there costs a third of new; what is pinned stays as it was."""
    state = {"model": {"w": torch.zeros(1000)}}
    saver = AsyncSaver(tmp_path, Peers(), Settings(digests=False, keep=("last=2",)))
    seen: list[int] = []
    pinned = None
    for step in range(1, 9):
        state["model"]["w"].fill_(step)
        saver.save(describe(state, Peers()), About(step))
        saver.wait()
        (saved,) = saver.poll()
        assert saved.path is not None, saved.reason
        seen.append(next(saved.path.glob("*.safetensors")).stat().st_ino)
        assert [value(path) for path, _ in committed(tmp_path)] == [float(n) for n in (step - 1, step) if n]
        if step == 3:
            pinned = pin(saved.path)
    assert len(set(seen)) == 4, "two that stay, the one under way, the one that is pinned"
    assert pinned is not None
    assert value(pinned) == 3
    saver.close()


def test_a_writer_whose_rank_and_whose_folder_are_gone_waits_for_nobody(tmp_path: Path) -> None:
    """As of a rank that was killed, when the run has gone on: it would hold the memory of a copy for an hour."""

    class Gone:
        def send(self, message: dict[str, Any], files: list[int] | None = None) -> None:
            raise OSError(32, "Broken pipe")

        def receive(self, seconds: float | None = None) -> None:
            raise EOFError

    writer, folder = SaveWriter(Gone()), tmp_path / "attempt-1"  # pyright: ignore[reportArgumentType]
    folder.mkdir()
    writer.hear({"share": share_fields(share((), 1, 2), 1, 2)}, [])
    order = Order(id="0" * 32, path=str(folder / "step-00000001"), step=1, retries=1, pause=0.1, limit=600.0)
    waiting = threading.Thread(target=writer.hear, args=({"save": vars(order)}, []), daemon=True)
    waiting.start()
    waiting.join(0.3)
    assert waiting.is_alive(), "the first rank's may come yet"
    shutil.rmtree(folder)
    waiting.join(20)
    assert not waiting.is_alive()


def test_rotten_memory_never_reaches_the_disk(tmp_path: Path) -> None:
    path = write(tmp_path / "memory", 2)
    flip(path)
    with pytest.raises(DamagedError, match="other bytes from 0 to"):
        promote(path, tmp_path / "disk")
    assert list((tmp_path / "disk").iterdir()) == []


def test_a_torn_one_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "memory", 2)
    next(path.glob("*.safetensors")).unlink()
    with pytest.raises(Exception, match="not whole"):
        promote(path, tmp_path / "disk")


def test_a_pinned_one_outlives_its_removal(tmp_path: Path) -> None:
    memory = tmp_path / "memory"
    path = write(memory, 2)
    pinned = pin(path)
    assert committed(memory) == [(path, read_marker(path))], "a second name is no second checkpoint"
    for file in path.iterdir():
        file.unlink()
    path.rmdir()
    assert value(promote(pinned, tmp_path / "disk")) == 2


def test_the_newest_comes_first_from_the_nearest_place(tmp_path: Path) -> None:
    tiers = Tiers(tmp_path / "memory", tmp_path / "disk")
    one, two = tiers.attempt(1), tiers.attempt(2)
    assert one is not None
    assert two is not None
    assert tiers.newest_first() == []
    first = write(tiers.disk, 1)
    third = write(one, 3)
    copy = promote(third, tiers.disk)
    fourth = write(two, 4)
    assert tiers.newest_first() == [fourth, third, copy, first], "the copy, for where the snapshot has rotted"
    (fourth / "tangram.json").unlink()
    assert tiers.newest_first() == [third, copy, first], "torn: passed over"
    tiers.forget(but=two)
    assert tiers.newest_first() == [copy, first]
    tiers.forget()
    assert not (tmp_path / "memory").exists()


def test_a_clock_that_is_set_back_makes_nothing_older(tmp_path: Path) -> None:
    """The checkpoint on the disk of an hour ago was gone on from, and at the end the newer state in memory removed."""
    tiers = Tiers(tmp_path / "memory", tmp_path / "disk")
    old, ours = tiers.attempt(9), tiers.attempt(10)
    assert old is not None
    assert ours is not None
    write(tiers.disk, 10, created="2026-01-01T12:00:00+00:00")
    before = write(old, 12, created="2026-01-01T12:00:01+00:00")
    newest = write(ours, 11, created="2026-01-01T11:00:00+00:00")
    assert tiers.newest_first() == [newest, before, tiers.disk / "step-00000010"]
    assert rescue.rescue_alone(tiers, lambda event: None) == ""
    assert commits.newest(tiers.disk) == tiers.disk / "step-00000011"


def test_what_a_full_disk_does_not_take_stays_in_memory_beside_an_older_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The older one was on the disk already, so all in memory was removed: twenty steps were lost without a word."""
    tiers, told = Tiers(tmp_path / "memory", tmp_path / "disk"), list[object]()
    ours = tiers.attempt(1)
    assert ours is not None
    write(tiers.disk, 10)
    newest = write(ours, 30)

    def full(path: Path, folder: Path) -> Path:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(rescue, "promote", full)
        assert "tangram launch --resume" in rescue.rescue_alone(tiers, told.append)
    assert newest.exists()
    assert rescue.rescue_alone(tiers, told.append) == ""
    assert commits.newest(tiers.disk) == tiers.disk / "step-00000030"


def test_a_launcher_that_was_killed_as_it_copied_is_gone_on_from(tmp_path: Path) -> None:
    """What it had copied by then was in the way of each that came after it: the run could not be gone on with."""
    tiers = Tiers(tmp_path / "memory", tmp_path / "disk")
    ours = tiers.attempt(1)
    assert ours is not None
    newest, old = write(ours, 30), tiers.disk / ".step-00000020-0123456789ab.partial"
    left = commits.begin(tiers.disk / "step-00000030", read_marker(newest).id)
    (left / "model-00001-of-00001.safetensors").write_bytes(b"half of it")
    old.mkdir()
    os.utime(old, (time.time() - 3600, time.time() - 3600))
    assert rescue.rescue_alone(tiers, lambda event: None) == ""
    assert value(tiers.disk / "step-00000030") == 30
    assert [path.name for path in tiers.disk.iterdir()] == ["step-00000030"], "nor is what others had left still there"


def test_a_damaged_snapshot_is_left_for_the_older_checkpoint(tmp_path: Path) -> None:
    tiers = Tiers(tmp_path / "memory", tmp_path / "disk")
    ours = tiers.attempt(1)
    assert ours is not None
    write(tiers.disk, 10)
    flip(write(ours, 30))
    assert rescue.rescue_alone(tiers, lambda event: None) == ""
    assert not (tmp_path / "memory").exists()


def test_what_was_trained_elsewhere_since_is_newer_than_what_was_left_in_memory(tmp_path: Path) -> None:
    tiers = Tiers(tmp_path / "memory", tmp_path / "disk")
    left = tiers.attempt(1)
    assert left is not None
    write(left, 12, created="2026-01-01T12:00:00+00:00")
    further = write(tiers.disk, 30, created="2026-01-01T13:00:00+00:00")
    assert tiers.newest_first()[0] == further
    assert rescue.rescue_alone(tiers, lambda event: None) == ""
    assert commits.newest(tiers.disk) == further


def test_a_run_that_begins_takes_nothing_over_from_one_at_the_same_path(tmp_path: Path) -> None:
    """The launcher of a run was killed, the folder removed, and a run begun there anew: what lies in memory, of later
    steps, is none of its own."""
    folder, told = tmp_path / "run", list[object]()
    memory = memory_of(folder)
    assert memory is not None
    try:
        stale = write(memory / "attempt-1", 100)
        job = RankJob(small_plan(tmp_path), folder, "", StepCosts())
        rescue.forget_others(replace(job, resume=stale))
        assert stale.is_dir(), "of a run that goes on"
        rescue.forget_others(job)
        assert not memory.exists()
        write(folder / "checkpoint", 3)
        rescue.rescue(folder, told.append)
        assert [marker.step for _, marker in committed(folder / "checkpoint")] == [3]
    finally:
        shutil.rmtree(memory, ignore_errors=True)


def test_snapshots_of_two_runs_lie_apart(tmp_path: Path) -> None:
    ours = memory_of(tmp_path / "a")
    assert ours is not None
    assert ours != memory_of(tmp_path / "b")
    assert ours == memory_of(tmp_path / "x" / ".." / "a")


def test_a_folder_of_somebody_elses_is_not_used(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "memory").symlink_to(tmp_path / "other")
    with pytest.raises(OSError, match="somebody else"):
        Tiers(tmp_path / "memory", tmp_path / "disk").attempt(1)


def test_a_folder_for_snapshots_that_is_not_there_is_refused(tmp_path: Path) -> None:
    """Of a node whose local disk has another path; /dev/shm alone may be missing."""
    with pytest.raises(UserError, match=r"--memory .*local: there is no such folder on .* that can be written"):
        memory_of(tmp_path / "run", tmp_path / "local")
    (tmp_path / "local").mkdir()
    found = memory_of(tmp_path / "run", tmp_path / "local")
    assert found is not None
    assert found.parent == tmp_path / "local"
