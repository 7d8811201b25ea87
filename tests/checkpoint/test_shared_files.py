"""What did not change since an earlier checkpoint is shared with it and not written again."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from tangram.checkpoint.inspect.diff import compare
from tangram.checkpoint.inspect.verify import verify
from tangram.checkpoint.loading.load import load
from tangram.checkpoint.loading.read import DamagedError
from tangram.checkpoint.saving import save as waiting
from tangram.checkpoint.saving.async_saver import AsyncSaver, Settings
from tangram.checkpoint.saving.rank_parts import About
from tangram.checkpoint.state.describe import describe
from tangram.checkpoint.store import commits, retention
from tangram.checkpoint.tiers.promote import promote
from tangram.relayout.exchange.peers import Peers

FROZEN = "model-frozen-00001-of-00001.safetensors"


class Adapted(nn.Module):
    """A large frozen base under a small adapter."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.base = nn.Linear(1500, 1000).requires_grad_(False)  # more than a block
        self.adapter = nn.Linear(10, 10)


Save = Callable[..., list[Path]]


@pytest.fixture
def model() -> Adapted:
    return Adapted()


@pytest.fixture
def saves(model: Adapted) -> Save:
    def save(folder: Path, first: int = 1, count: int = 3, *, digests: bool = True) -> list[Path]:
        """Checkpoints one after the other, the adapter another one in each."""
        saver = AsyncSaver(folder, Peers(), Settings(digests=digests))
        described, found = describe({"model": model}, Peers()), list[Path]()
        for step in range(first, first + count):
            with torch.no_grad():
                model.adapter.weight.fill_(step)
            saver.save(described, About(step))
            saver.wait()
        for result in saver.close():
            assert result.path is not None, result.reason
            found.append(result.path)
        return found

    return save


def weights(path: Path) -> tuple[torch.Tensor, float]:
    model = Adapted()
    with torch.no_grad():
        model.base.weight.zero_()
    load({"model": model}, path)
    return model.base.weight, float(model.adapter.weight[0, 0].detach())


def written(folder: Path) -> int:
    """Bytes on the disk, what several checkpoints share counted once."""
    files = {file.stat().st_ino: file.stat().st_size for file in folder.rglob("*.safetensors")}
    return sum(files.values())


def test_a_frozen_base_is_written_once(model: Adapted, saves: Save, tmp_path: Path) -> None:
    paths = saves(tmp_path)
    base, adapter = (tmp_path / "step-00000001" / name for name in (FROZEN, FROZEN.replace("-frozen", "")))
    assert written(tmp_path) == base.stat().st_size + 3 * adapter.stat().st_size
    assert [verify(path).findings for path in paths] == [()] * 3
    for step, path in enumerate(paths, 1):
        found = weights(path)
        assert torch.equal(found[0], model.base.weight)
        assert found[1] == step
    one, three = ((path, commits.read_manifest(path)) for path in (paths[0], paths[2]))
    assert [change.name for change in compare(one, three).changes] == ["model.adapter.weight"]


def test_one_that_waits_shares_it_too(model: Adapted, saves: Save, tmp_path: Path) -> None:
    before = saves(tmp_path, count=1)[0]
    for step in (2, 3):
        with torch.no_grad():
            model.adapter.weight.fill_(step)
        waiting.save({"model": model}, tmp_path / f"step-{step:08d}", about=About(step))
    base, adapter = (before / name for name in (FROZEN, FROZEN.replace("-frozen", "")))
    assert written(tmp_path) == base.stat().st_size + 3 * adapter.stat().st_size
    last = tmp_path / "step-00000003"
    assert verify(last).findings == ()
    found = weights(last)
    assert torch.equal(found[0], model.base.weight)
    assert found[1] == 3
    with torch.no_grad():
        model.base.weight[-1, -1] += 1  # in the last block
    waiting.save({"model": model}, tmp_path / "other")
    assert torch.equal(weights(tmp_path / "other")[0], model.base.weight)
    assert not torch.equal(weights(last)[0], model.base.weight)


def test_what_others_share_outlives_the_one_that_wrote_it(model: Adapted, saves: Save, tmp_path: Path) -> None:
    paths = saves(tmp_path)
    retention.prune(retention.plan(tmp_path, retention.parse(["last=1"])))
    assert not paths[0].exists()
    assert verify(paths[2]).sound
    assert torch.equal(weights(paths[2])[0], model.base.weight)


def test_what_changed_after_all_is_written(model: Adapted, saves: Save, tmp_path: Path) -> None:
    before = saves(tmp_path, count=2)
    with torch.no_grad():
        model.base.weight[-1, -1] += 1  # in the last block
    (after,) = saves(tmp_path, first=3, count=1)
    assert not (after / FROZEN).samefile(before[1] / FROZEN)
    assert torch.equal(weights(after)[0], model.base.weight)
    assert not torch.equal(weights(before[1])[0], model.base.weight)
    (again,) = saves(tmp_path, first=4, count=1)
    assert (again / FROZEN).samefile(after / FROZEN), "also by a process that did not write it"


def test_a_shared_file_that_has_rotted_is_told_of_in_all(saves: Save, tmp_path: Path) -> None:
    paths = saves(tmp_path, count=2)
    with (paths[0] / FROZEN).open("r+b") as stream:
        stream.seek(5_000_000)
        stream.write(b"rot")
    for path in paths:
        assert [(one.kind, one.file) for one in verify(path).findings] == [("block", FROZEN)]
    with pytest.raises(DamagedError, match=r'its file "model-frozen.*other bytes from 4194304 to'):
        weights(paths[1])


def test_a_file_of_another_save_is_refused(saves: Save, tmp_path: Path) -> None:
    (one,), (other,) = saves(tmp_path / "a", count=1), saves(tmp_path / "b", count=1)
    (one / FROZEN).unlink()
    (other / FROZEN).rename(one / FROZEN)
    with pytest.raises(DamagedError, match="is of another save"):
        weights(one)


def test_on_the_way_to_the_disk_it_is_shared_with_that_of_other_ranks(
    model: Adapted, saves: Save, tmp_path: Path
) -> None:
    """As of those that are started again after a failure: they have written the same base anew, in another save."""
    (first,), (again,) = saves(tmp_path / "1", count=1, digests=False), saves(tmp_path / "2", first=2, count=1)
    disk = [promote(path, tmp_path / "disk") for path in (first, again)]
    assert (disk[0] / FROZEN).samefile(disk[1] / FROZEN)
    assert [verify(path).findings for path in disk] == [()] * 2
    found = weights(disk[1])
    assert torch.equal(found[0], model.base.weight)
    assert found[1] == 2
    with torch.no_grad():
        model.base.weight[0, 0] += 1  # in the first block, which has the id of its save, too
    other = promote(saves(tmp_path / "3", first=3, count=1)[0], tmp_path / "disk")
    assert not (other / FROZEN).samefile(disk[1] / FROZEN)
    assert torch.equal(weights(other)[0], model.base.weight)


def test_on_the_way_to_the_disk_it_is_shared_too(model: Adapted, saves: Save, tmp_path: Path) -> None:
    memory = saves(tmp_path / "memory", digests=False)
    disk = [promote(path, tmp_path / "disk") for path in memory]
    assert written(tmp_path / "disk") == written(tmp_path / "memory")
    assert [verify(path).findings for path in disk] == [()] * 3
    assert all(tensor.digest for tensor in commits.read_manifest(disk[2]).tensors.values())
    assert torch.equal(weights(disk[2])[0], model.base.weight)
    with (memory[2] / FROZEN).open("r+b") as stream:
        stream.seek(5_000_000)
        stream.write(b"rot")
    with pytest.raises(DamagedError, match="other bytes"):
        promote(memory[2], tmp_path / "disk")
