"""A snapshot is what the files will be, byte for byte, whatever the state does once the fence has returned."""

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tangram.checkpoint.saving.save import write_share
from tangram.checkpoint.saving.snapshot import CHUNK, Pool, RankShare, Snapshot, places, share
from tangram.checkpoint.state.describe import describe
from tangram.checkpoint.state.entries import Described, LocalPart, StateEntry
from tangram.errors import UserError

SAVE = "ab" * 16


@pytest.fixture
def pool() -> Iterator[Pool]:
    pool = Pool()
    yield pool
    pool.close()


def awkward() -> dict[str, Tensor | LocalPart]:
    """Values of many kinds, that lie in memory in many ways."""
    torch.manual_seed(3)
    some = torch.randn(6, 10)
    return {
        "scalar": torch.tensor(2.5),
        "transposed": some.t(),
        "every_other": some[:, ::2],
        "inside": torch.randn(100)[17:34],
        "bits": torch.randn(9) > 0,
        "half": torch.randn(5, 3).bfloat16(),
        "eighth": torch.randn(4, 4).to(torch.float8_e4m3fn),
        "complex": torch.randn(3, 2, dtype=torch.complex64),
        "conjugate": torch.randn(3, 2, dtype=torch.complex64).conj(),
        "negative": torch.randn(4, dtype=torch.complex64).conj().imag,
        "nothing": torch.empty(0, 4),
        "long": torch.arange(7),
        "rows": LocalPart(torch.randn(3, 4), (6, 4), "out/tp in", "tp=2", 1),
        "several_chunks": torch.randn(CHUNK // 4 + 1000),
    }


def described(model: dict[str, Tensor | LocalPart]) -> tuple[StateEntry, ...]:
    return describe({"model": model, "optim": {"exp_avg": torch.randn(64, 3)}}).entries


def in_memory(own: RankShare, pool: Pool) -> dict[str, bytes]:
    """The files as they lie in the memory, with the headers that the writer adds."""
    assert pool.memory is not None
    found = places(own.pieces, 0, 1, SAVE)
    assert found.starts == own.places.starts
    files: dict[str, bytes] = {}
    for file, start in zip(found.files, found.starts, strict=True):
        pool.memory.bytes[start : start + len(file.head)] = bytearray(file.head)
        files[file.name] = pool.memory.bytes[start : start + file.size].tobytes()
    return files


def on_disk(entries: tuple[StateEntry, ...], folder: Path) -> dict[str, bytes]:
    """The files as a save that waits writes them."""
    folder.mkdir()
    write_share(Described(entries, {}), folder, 0, 1, SAVE)
    return {file.name: file.read_bytes() for file in folder.glob("*.safetensors")}


def test_what_lies_in_memory_is_what_is_written(pool: Pool, tmp_path: Path):
    entries = described(awkward())
    own = share(entries, 0, 1)
    Snapshot().run(own, pool.reserve(own.places.size))
    expected = on_disk(entries, tmp_path / "x")
    assert len(expected) == 2
    assert in_memory(own, pool) == expected
    assert [*own.empty] == ["model.nothing"]


def test_after_the_fence_the_state_may_change(pool: Pool, tmp_path: Path):
    model = awkward()
    entries = described(model)
    own = share(entries, 0, 1)
    expected = on_disk(entries, tmp_path / "x")
    for _ in range(3):
        snapshot = Snapshot()
        thread = threading.Thread(target=snapshot.run, args=(own, pool.reserve(own.places.size)))
        thread.start()
        snapshot.fence()
        kept = [entry.local.clone() for entry in own.own]
        for entry in own.own:
            entry.local.zero_()
        thread.join()
        assert in_memory(own, pool) == expected
        for entry, values in zip(own.own, kept, strict=True):
            entry.local.copy_(values)


def test_memory_is_kept_unless_it_is_too_small(pool: Pool, tmp_path: Path):
    large, small = described(awkward()), described({"w": torch.randn(8)})
    own = share(large, 0, 1)
    first = pool.reserve(own.places.size)
    Snapshot().run(own, first)
    less = share(small, 0, 1)
    assert pool.reserve(less.places.size) is first
    Snapshot().run(less, first)
    assert in_memory(less, pool) == on_disk(small, tmp_path / "small")

    grown = described({**awkward(), "freed": torch.randn(100, 100)})
    more = share(grown, 0, 1)
    second = pool.reserve(more.places.size)
    assert second is not first
    assert first.descriptor < 0, "the old memory is still there"
    Snapshot().run(more, second)
    assert in_memory(more, pool) == on_disk(grown, tmp_path / "grown")


def test_a_copy_that_fails_keeps_nobody_waiting(pool: Pool):
    (whole, _) = described({"w": torch.randn(4)})
    broken = StateEntry(whole.name, whole.spec, whole.region, whole.local.to("meta"), whole.replicas)
    own = share([broken], 0, 1)
    snapshot = Snapshot()
    with pytest.raises((RuntimeError, NotImplementedError)):
        snapshot.run(own, pool.reserve(own.places.size))
    snapshot.give_up()
    snapshot.fence()


def test_memory_that_cannot_be_had(pool: Pool):
    with pytest.raises(UserError, match=r"1000000\.00 GB of memory are needed for a copy of the state, but"):
        pool.reserve(10**15)
    assert pool.memory is None
    pool.reserve(100)
