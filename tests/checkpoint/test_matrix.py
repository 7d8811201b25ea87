"""Every strategy's checkpoint loads into every other strategy, bit for bit, beside numpy's own indexing."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

from tangram.checkpoint.inspect import verify
from tangram.checkpoint.loading.read import Want, read_wants
from tangram.checkpoint.saving.file_writer import Ring
from tangram.checkpoint.saving.rank_parts import About
from tangram.checkpoint.saving.save import save_described
from tangram.checkpoint.state.describe import describe
from tangram.checkpoint.store import commits, digest
from tangram.checkpoint.store.manifest import Manifest
from tangram.layout import Region
from tests.checkpoint.stored import bits, elements, same
from tests.checkpoint.strategies import CORE, STRATEGIES, WHOLE, Strategy, ThreadPeers, Threads

RINGS = [Ring(1) for _ in range(8)]


class Saved:
    """A checkpoint of each strategy, made by its ranks as threads when it is first wanted."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._made: dict[str, tuple[Path, Manifest]] = {}

    def __getitem__(self, name: str) -> tuple[Path, Manifest]:
        if name not in self._made:
            strategy, path = STRATEGIES[name], self._folder / name

            def rank(peers: ThreadPeers) -> None:
                described = describe(strategy.state(peers.index), peers)
                save_described(described, path, peers, About(mesh=strategy.mesh), RINGS[peers.index])

            Threads(strategy.ranks).run(rank)
            self._made[name] = path, commits.read_manifest(path)
        return self._made[name]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    return Saved(tmp_path_factory.mktemp("strategies"))


@dataclass(frozen=True)
class Target:
    """All that the ranks of a strategy hold, in one memory; what several hold is there once."""

    wants: list[Want]
    memory: torch.Tensor
    expected: torch.Tensor
    """The same bytes, as numpy cuts them."""
    mask: torch.Tensor
    """Which of the bytes are theirs; the others lie between."""


def target(strategy: Strategy) -> Target:
    pairs: list[tuple[str, Region]] = []
    for name in WHOLE:
        pairs += [(name, here) for here in dict.fromkeys(strategy.region(name, r) for r in range(strategy.ranks))]
    parts = [elements(WHOLE[name], here) for name, here in pairs]
    starts = np.cumsum([0, *(-(-part.nbytes // 16) * 16 for part in parts)])
    memory, expected, mask = (torch.zeros(int(starts[-1]), dtype=torch.uint8) for _ in range(3))
    wants: list[Want] = []
    for (name, here), part, start in zip(pairs, parts, starts, strict=False):
        stop = int(start) + part.nbytes
        expected[start:stop] = torch.from_numpy(bits(part).reshape(-1))
        mask[start:stop] = 255
        wants.append(Want(name, here, memory[start:stop].view(part.dtype).view(part.shape)))
    return Target(wants, memory, expected, mask)


def test_there_are_strategies_enough_and_each_cuts_otherwise() -> None:
    cuts = {
        tuple(str(strategy.region(name, rank)) for name in WHOLE for rank in range(strategy.ranks))
        for strategy in STRATEGIES.values()
    }
    assert len(cuts) == len(STRATEGIES)
    assert len(CORE) >= 24
    assert any(not s.region(n, r) for s in STRATEGIES.values() for n in WHOLE for r in range(s.ranks) if WHOLE[n].ndim)


def whole_digest(tensor: torch.Tensor) -> str:
    """Of a tensor that nobody has cut."""
    boxes = Region.full(tensor.shape).boxes
    size, data = tensor.numel(), bits(tensor).reshape(-1)
    own = digest.sums(tensor.shape, tensor.itemsize, boxes[0], 0, size, data) if boxes else digest.NOTHING
    return digest.digest(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), own)


def check_saved(saved: Saved, name: str) -> None:
    path, manifest = saved[name]
    assert verify.verify(path).sound
    assert {n: t.digest for n, t in manifest.tensors.items()} == {n: whole_digest(t) for n, t in WHOLE.items()}
    stored = sum(p.region.size * t.itemsize for t in manifest.tensors.values() for p in t.pieces)
    assert stored == sum(t.nbytes for t in WHOLE.values()), "each element once"


def check_loads(saved: Saved, sources: Sequence[str], into: str) -> None:
    there = target(STRATEGIES[into])
    for name in sources:
        torch.bitwise_xor(there.expected, there.mask, out=there.memory)
        read_wants(*saved[name], there.wants)
        assert torch.equal(there.memory, there.expected), f"{name} -> {into}: {_wrong(there)}"


def _wrong(there: Target) -> list[str]:
    return [f"{w.tensor} {w.region}" for w in there.wants if not same(w.into, elements(WHOLE[w.tensor], w.region))]


@pytest.mark.parametrize("name", CORE)
def test_each_is_written_once_with_the_same_digests(saved: Saved, name: str) -> None:
    check_saved(saved, name)


@pytest.mark.parametrize("into", CORE)
def test_every_strategy_loads_into(saved: Saved, into: str) -> None:
    check_loads(saved, CORE, into)


@pytest.mark.slow
@pytest.mark.parametrize("into", STRATEGIES)
def test_every_strategy_loads_into_with_the_rarer_ones(saved: Saved, into: str) -> None:
    check_saved(saved, into)
    check_loads(saved, [name for name in STRATEGIES if {name, into} - set(CORE)], into)


@pytest.mark.parametrize("name", STRATEGIES)
def test_who_holds_nothing_of_a_tensor_is_no_replica_that_differs(name: str) -> None:
    """As ranks of other stages: a warning is an error here."""
    strategy = STRATEGIES[name]
    Threads(strategy.ranks).run(lambda peers: describe(strategy.state(peers.index), peers))


@pytest.mark.parametrize("name", ["copies of 2", "fsdp of 2", "hsdp", "tp of 2"])
def test_what_several_hold_is_written_by_turns(saved: Saved, name: str) -> None:
    sizes: dict[str, int] = {}
    for tensor in saved[name][1].tensors.values():
        for piece in tensor.pieces:
            writer = piece.file.partition("-")[2]
            sizes[writer] = sizes.get(writer, 0) + piece.region.size * tensor.itemsize
    assert len(sizes) == STRATEGIES[name].ranks
    assert max(sizes.values()) < 2 * min(sizes.values()), sizes


@pytest.mark.parametrize("name", ["key heads fewer than tp", "the same, flat inside"])
def test_parts_that_overlap_without_being_equal_are_written_once(saved: Saved, name: str) -> None:
    """Key heads fewer than ranks: two ranks have a key head in common and a query head each."""
    tensor = saved[name][1].tensors["model.layers.0.qkv"]
    assert sum(piece.region.size for piece in tensor.pieces) == WHOLE["model.layers.0.qkv"].numel()
    by_rank = [sum(p.region.size for p in tensor.pieces if f"-0000{r + 1}-" in p.file) for r in range(4)]
    assert by_rank[0] >= by_rank[1] > 0, "the first has the key and the value, the second its query head alone"
