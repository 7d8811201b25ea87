"""The bench itself: it counts no load of wrong values, no warm file as cold, and no damage that it did not do."""

import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from bench import checkpoint
from bench._checkpoint import damage, disk, export, peers, speed
from bench._checkpoint.peers import Contender, Dcp, Ours
from bench._checkpoint.speed import Phase
from bench._checkpoint.state import State, fill, make, shapes, wrong
from tangram.errors import UserError
from tangram.training.run.launch import Rank
from tangram.training.run.signals import Stop

SIZE = 2e6


@pytest.fixture(scope="module")
def rank(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rank]:
    """The only rank of a world."""
    store = tmp_path_factory.mktemp("store") / "store"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    yield Rank(0, 1, torch.device("cpu"), lambda event: None, Stop())
    dist.destroy_process_group()


@pytest.fixture
def phase(tmp_path: Path) -> Phase:
    return Phase(str(tmp_path), ("raw", "ours", "DCP"), SIZE, 2, save_as="x", load_from=("x",))


def small() -> State:
    state = make(SIZE, init_device_mesh("cpu", (1,), mesh_dim_names=("dp",)), "rows")
    fill(state)
    return state


def test_a_single_changed_value_is_found(rank: Rank) -> None:
    state = small()
    assert wrong(state.tensors) == []
    assert wrong(state.locals()) == []
    assert len(wrong(state.tensors, step=2)) == len(state.tensors) == 330
    assert len(wrong(state.tensors, negated=True)) == 330
    name = "optim.layers.7.up.weight.exp_avg_sq"
    state.locals()[name].view(torch.int32)[-1, -1] ^= 1
    assert wrong(state.tensors) == [name]


def test_the_state_is_as_large_as_asked() -> None:
    for nbytes in (5e7, 2.05e9):
        size = sum(4 * int(np.prod(shape)) for shape in shapes(nbytes).values())
        assert abs(size / nbytes - 1) < 0.15


def test_every_contender_is_timed_and_reads_each_byte(rank: Rank, phase: Phase) -> None:
    figures = speed.measure(rank, phase)
    assert figures.failures == {}
    assert set(figures.saves) == set(figures.loads["x"]) == {"raw", "ours", "DCP"}
    assert figures.nbytes > SIZE / 2
    for read in figures.storage["x"].values():  # cold: nothing comes from the page cache
        assert 1 <= read < 1.6


class Liar(Dcp):
    """Loads one value wrong."""

    name = "DCP"

    def load(self, state: State, path: Path) -> Mapping[str, Tensor]:
        found = super().load(state, path)
        state.memory[17] ^= 1
        return found


class Broken(Contender):
    """Cannot save."""

    def save(self, state: State, path: Path) -> None:
        raise ValueError("no")


@pytest.mark.parametrize(("kind", "word"), [(Liar, "other values"), (Broken, "ValueError")])
def test_a_peer_that_fails_or_loads_other_values_is_left_out(
    rank: Rank, phase: Phase, kind: type[Contender], word: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kind, "name", "DCP")
    monkeypatch.setattr(peers, "ALL", {**peers.ALL, "DCP": kind})
    figures = speed.measure(rank, phase)
    assert word in figures.failures["DCP"]
    assert "DCP" not in figures.loads["x"]
    assert "ours" in figures.loads["x"]


def test_ours_may_not_fail(rank: Rank, phase: Phase, monkeypatch: pytest.MonkeyPatch) -> None:
    class WrongOurs(Ours):
        def load(self, state: State, path: Path) -> Mapping[str, Tensor]:
            return {**super().load(state, path), "model.norm.weight": torch.zeros(32)}

    monkeypatch.setattr(peers, "ALL", {**peers.ALL, "ours": WrongOurs})
    with pytest.raises(speed.FailedError, match=r"model\.norm\.weight"):
        speed.measure(rank, replace(phase, names=("ours",)))


def test_what_is_evicted_is_out_of_the_page_cache(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(os.urandom(1 << 20))
    descriptor = os.open(file, os.O_RDONLY)
    assert disk.resident(descriptor) == 256
    disk.evict(tmp_path)
    assert disk.resident(descriptor) == 0
    os.close(descriptor)


def test_raw_bytes_come_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "BLOCK", 1 << 14)
    memory = disk.pages(5 << 14)
    memory[:] = np.frombuffer(os.urandom(len(memory)), np.uint8)
    disk.write_raw(tmp_path / "raw", memory)
    back = disk.pages(len(memory) - 4096)
    disk.read_raw(tmp_path / "raw", 4096, back)
    assert np.array_equal(back, memory[4096:])


@pytest.mark.parametrize("name", ["ours", "safetensors"])
def test_damage_is_done_and_counted(rank: Rank, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(damage, "_quiet", lambda: None)  # it is for processes of their own
    task = damage.Task(str(tmp_path), name, SIZE, 4)
    damage.prepare(rank, task)
    counts = damage.count(rank, task)
    if name == "ours":
        assert set(counts.loads) == set(counts.verifies) == set(damage.KINDS)
        for some, of in [*counts.loads.values(), *counts.verifies.values()]:
            assert some == of > 0
    else:
        some, of = counts.loads["4 KiB of zeros"]
        assert some < of == 4  # it does not notice, so what the bench does is damage
        assert "a file of another step" not in counts.loads


def test_exports_are_checked_and_verified(rank: Rank, phase: Phase) -> None:
    speed.measure(rank, phase)
    found = export.measure(rank, export.Task(phase.folder, "x", SIZE, 1, 512 << 20, ("ours", "DCP")))
    assert set(found.exports) == {"raw", "ours", "DCP + safetensors"}
    assert set(found.verifies) == {"raw", "ours"}


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"only": ("spead",)}, "spead"),
        ({"size": 1e6}, "smaller --size"),
        ({"folder": Path("/nowhere")}, "is no folder"),
    ],
)
def test_what_cannot_be_measured_is_refused(options: dict[str, object], word: str) -> None:
    with pytest.raises(UserError, match=word):
        list(checkpoint.rows(True, **options))  # pyright: ignore[reportArgumentType]


def test_a_group_by_itself(tmp_path: Path) -> None:
    load, speed_of_digest, _ = checkpoint.rows(True, size=0.002, only=("digest",), folder=tmp_path)
    assert load.figure.startswith("load average")
    assert (speed_of_digest.unit, speed_of_digest.better) == ("GB/s", "higher")
    assert set(speed_of_digest.peers) == {"XXH3", "crc32", "SHA-256"}
    assert list(tmp_path.iterdir()) == []
