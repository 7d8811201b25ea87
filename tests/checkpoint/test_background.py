"""A save beside training is the state at `save`; nothing that happens to its process or its storage stops training."""

import os
import resource
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tangram.checkpoint.saving.async_saver import AsyncSaver, SaveResult, Settings
from tangram.checkpoint.saving.rank_parts import About
from tangram.checkpoint.saving.save import save
from tangram.checkpoint.state.describe import describe
from tangram.checkpoint.store import commits
from tangram.hardware.host import hostmemory
from tangram.relayout.exchange.peers import Peers

QUICK = Settings(pause=0.05, limit=60, retries=1)


@pytest.fixture(scope="module")
def only() -> Iterator[AsyncSaver]:
    """One saver, and so one process, for all tests: its imports take seconds."""
    saver = AsyncSaver(Path("/nowhere"), Peers())
    assert saver.prepare(describe({"model": model()}).entries) == ""
    yield saver
    pid = saver.pid
    assert pid is not None
    saver.close()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


@pytest.fixture
def saver(only: AsyncSaver, tmp_path: Path) -> AsyncSaver:
    only.folder = tmp_path / "runs"
    only.settings = QUICK
    return only


def model(seed: int = 0) -> dict[str, Tensor]:
    torch.manual_seed(seed)
    return {"weight": torch.randn(40, 30), "bias": torch.randn(7).bfloat16(), "count": torch.tensor(3)}


def begin(saver: AsyncSaver, tensors: Mapping[str, Tensor], step: int) -> None:
    """Save, and change everything as soon as that is allowed."""
    saver.save(describe({"model": dict(tensors), "progress": {"step": step}}), About(step))
    saver.fence()
    for tensor in tensors.values():
        tensor.add_(1)


def whole_save(saver: AsyncSaver, step: int = 1, seed: int = 0) -> SaveResult:
    begin(saver, model(seed), step)
    saver.wait()
    (saved,) = saver.poll()
    assert saved.step == step
    return saved


def check(saved: SaveResult, seed: int = 0) -> None:
    """The checkpoint is whole, and has the values that a model was made with."""
    assert saved.reason == ""
    assert saved.path is not None
    manifest = commits.read_manifest(saved.path)
    assert manifest.objects == {"progress.step": saved.step}
    values = load_file(saved.path / "model-00001-of-00001.safetensors")
    assert {n: (t.dtype, t.tolist()) for n, t in values.items()} == {
        n: (t.dtype, t.tolist()) for n, t in model(seed).items()
    }
    assert [p.name for p in saved.path.parent.iterdir() if p.name.startswith(".")] == []


def pid(saver: AsyncSaver) -> int:
    assert saver.pid is not None
    return saver.pid


def stop(saver: AsyncSaver) -> int:
    """Let the process hang, as one whose storage does, once it listens; its number."""
    os.kill(pid(saver), signal.SIGSTOP)
    return pid(saver)


def until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.01)


# ---------------------------------------------------------------- when all goes well


def test_what_is_saved_is_the_state_at_the_save(saver: AsyncSaver, tmp_path: Path):
    saved = whole_save(saver)
    check(saved)
    assert saved.path == tmp_path / "runs" / "step-00000001"
    assert saved.nbytes == sum(file.stat().st_size for file in saved.path.glob("*.safetensors"))
    assert 0 <= saved.blocked <= saved.seconds
    save({"model": model()}, tmp_path / "waited")
    waited, beside = (commits.read_manifest(p) for p in (tmp_path / "waited", saved.path))
    assert {n: t.digest for n, t in waited.tensors.items()} == {n: t.digest for n, t in beside.tensors.items()}


def test_small_files_come_along(saver: AsyncSaver):
    state = describe({"model": model()})
    saver.save(state, About(4, "dp=1", {"config.json": '{"a": 1}'}))
    saver.wait()
    (saved,) = saver.poll()
    assert saved.path is not None
    assert (saved.path / "config.json").read_text() == '{"a": 1}'
    assert (saved.path / "model.safetensors.index.json").exists()
    assert commits.read_manifest(saved.path).mesh == "dp=1"


def test_other_structures_need_other_memory(saver: AsyncSaver):
    for size in (10, 1_000_000, 1000):
        values = torch.arange(size, dtype=torch.float32)
        saver.save(describe({"model": {"some": values, f"name{size}": values[:3]}}), About(size))
        saver.fence()
        values.zero_()
        saver.wait()
        (saved,) = saver.poll()
        assert saved.path is not None
        assert saved.reason == ""
        found = load_file(saved.path / "model-00001-of-00001.safetensors")
        assert torch.equal(found["some"], torch.arange(size, dtype=torch.float32))
        assert torch.equal(found[f"name{size}"], torch.arange(3.0))


def test_the_newest_are_kept(saver: AsyncSaver):
    saver.settings = Settings(keep=("last=2",))
    for step in (1, 2, 3):
        check(whole_save(saver, step, seed=step), seed=step)
    assert sorted(p.name for p in saver.folder.iterdir()) == ["step-00000002", "step-00000003"]


def test_a_good_checkpoint_is_never_written_over(saver: AsyncSaver):
    first, second = whole_save(saver, 5, seed=1), whole_save(saver, 5, seed=2)
    check(first, seed=1)
    check(second, seed=2)
    assert second.path == saver.folder / "step-00000005-2"
    assert commits.newest(saver.folder) == second.path


def test_what_a_dead_run_left_goes_when_nothing_moves_there(saver: AsyncSaver):
    old, young = (saver.folder / f".step-0000000{i}-abc.partial" for i in (1, 2))
    for orphan in (old, young):
        orphan.mkdir(parents=True)
        (orphan / "data").write_text("")
    for path in (old / "data", old):
        os.utime(path, (time.time() - 1000,) * 2)
    assert whole_save(saver).path is not None
    assert not old.exists()
    assert young.exists()


# ---------------------------------------------------------------- saves that come too fast


def test_a_save_that_comes_early_waits(saver: AsyncSaver):
    number = stop(saver)
    begin(saver, model(1), 1)
    threading.Timer(0.5, os.kill, (number, signal.SIGCONT)).start()
    begin(saver, model(2), 2)
    saver.wait()
    first, second = saver.poll()
    check(first, seed=1)
    check(second, seed=2)
    assert second.blocked > 0.3


def test_or_is_left_out(saver: AsyncSaver):
    saver.settings = Settings(policy="skip")
    number = stop(saver)
    begin(saver, model(1), 1)
    begin(saver, model(2), 2)
    (left_out,) = saver.poll()
    assert (left_out.step, left_out.path) == (2, None)
    assert left_out.reason == "left out: the save of step 1 is still being written"
    os.kill(number, signal.SIGCONT)
    saver.wait()
    (saved,) = saver.poll()
    check(saved, seed=1)


# ---------------------------------------------------------------- storage that fails


@pytest.fixture
def small_files(saver: AsyncSaver) -> Iterator[Callable[[int], None]]:
    """Limit the size of files that the process may write."""
    _, most = resource.prlimit(pid(saver), resource.RLIMIT_FSIZE)

    def limit(size: int) -> None:
        resource.prlimit(pid(saver), resource.RLIMIT_FSIZE, (size, most))

    yield limit
    limit(most)


def test_a_full_disk_is_reported_and_tried_again_from_the_same_copy(
    saver: AsyncSaver, small_files: Callable[[int], None]
):
    check(whole_save(saver, 1))
    small_files(4096)
    failed = whole_save(saver, 2, seed=2)
    assert failed.path is None
    assert failed.reason == "rank 0 cannot write: File too large"
    assert [p.name for p in saver.folder.iterdir()] == ["step-00000001"]

    saver.settings = Settings(retries=1, pause=1.0)
    begin(saver, model(3), 3)
    until(lambda: any(p.name.startswith(".step-00000003") for p in saver.folder.iterdir()))
    until(lambda: any(saver.folder.glob(".step-00000003*/failed-*")))
    small_files(-1)
    saver.wait()
    (saved,) = saver.poll()
    check(saved, seed=3)
    assert {m.step for _, m in commits.committed(saver.folder)} == {1, 3}


def test_a_folder_that_cannot_be_made(saver: AsyncSaver, tmp_path: Path):
    (tmp_path / "file").write_text("")
    saver.folder = tmp_path / "file" / "runs"
    failed = whole_save(saver)
    assert failed.path is None
    assert failed.reason == f'"{tmp_path}/file/runs": Not a directory'
    saver.folder = tmp_path / "runs"
    check(whole_save(saver))


def test_memory_that_cannot_be_had(saver: AsyncSaver, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(hostmemory, "SPARE", 1 << 60)
    entries = describe({"model": {"w": torch.zeros(3_000_000)}})
    assert "GB of memory are needed for a copy of the state" in saver.prepare(entries.entries)
    saver.save(entries, About(1))
    saver.fence()
    saver.wait()
    (failed,) = saver.poll()
    assert failed.path is None
    assert failed.reason.startswith("rank 0 cannot write: 0.01 GB of memory are needed for a copy of the state, but")
    assert list(saver.folder.iterdir()) == []
    monkeypatch.undo()
    check(whole_save(saver))


# ---------------------------------------------------------------- a process that dies


def test_a_process_killed_between_saves_is_replaced(saver: AsyncSaver):
    number = pid(saver)
    os.kill(number, signal.SIGKILL)
    until(lambda: saver.pid != number)
    saved = whole_save(saver)
    check(saved)
    assert saved.notes == ()


def test_a_process_killed_in_a_save_is_replaced_and_the_save_goes_on(saver: AsyncSaver):
    assert whole_save(saver).reason == ""
    number = stop(saver)
    begin(saver, model(2), 2)
    until(lambda: saver.handed_over)
    os.kill(number, signal.SIGKILL)
    saver.wait()
    (saved,) = saver.poll()
    check(saved, seed=2)
    assert saved.notes == ("the process that writes ended (SIGKILL); a new one goes on",)


def test_a_process_that_hangs_is_replaced(saver: AsyncSaver):
    saver.settings = Settings(limit=3.0, pause=0.05)
    stop(saver)
    begin(saver, model(3), 3)
    saver.wait()
    (saved,) = saver.poll()
    check(saved, seed=3)
    assert saved.notes == ("the process that writes ended (it hung); a new one goes on",)


def test_nothing_has_a_name_in_shared_memory(saver: AsyncSaver):
    before = set(Path("/dev/shm").iterdir())
    check(whole_save(saver))
    assert {p for p in Path("/dev/shm").iterdir() if "tangram" in p.name} <= before


def test_a_saver_that_saved_nothing_closes(tmp_path: Path):
    saver = AsyncSaver(tmp_path, Peers())
    saver.fence()
    assert saver.progress() == (0, 0)
    assert saver.close() == []
