"""Plain tensors are taken to be the same on all ranks: what is not is refused, or the first rank's, with a warning."""

import json
import os
import threading
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tangram.checkpoint.loading.load import load
from tangram.checkpoint.saving.save import save
from tangram.checkpoint.state.entries import StateEntry
from tangram.checkpoint.state.replicated import _sums, contents, with_replicas
from tangram.errors import UserError
from tangram.layout import Region
from tangram.relayout import TensorSpec
from tests.ranks import start

STATISTICS = ("1.running_mean", "1.running_var", "1.num_batches_tracked")


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.1), nn.Linear(6, 2))


def refused(state: dict[str, Any], path: str) -> str:
    try:
        save(state, path)
    except UserError as error:
        return str(error)
    return "saved"


def on_ranks(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    found: dict[str, Any] = {}

    # what a loop in DDP has: statistics of batches of one's own, a generator of one's own
    model = network()
    wrapped = DistributedDataParallel(model)
    optim = torch.optim.AdamW(model.parameters(), lr=0.01)
    torch.manual_seed(rank)
    for _ in range(3):
        wrapped(torch.randn(8, 4)).square().mean().backward()
        optim.step()
        optim.zero_grad()
    state: dict[str, Any] = {"model": wrapped, "optim": optim, "rng": {"cpu": torch.get_rng_state()}}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found["ddp"] = refused(state, f"{folder}/ddp")
    found["warned"] = [str(one.message) for one in caught if "ranks differ" in str(one.message)]
    found["statistics"] = {name: model.state_dict()[name].tolist() for name in STATISTICS}
    found["rng"] = torch.get_rng_state().tolist()

    # layers that are cut by hand, and ranks that have come apart by a bit
    half = nn.Linear(4, 6)
    found["parts"] = refused({"model": half}, f"{folder}/a")
    found["shapes"] = refused({"model": nn.Linear(4, 6 + rank)}, f"{folder}/b")
    torch.manual_seed(0)
    same = nn.Linear(4, 6)
    optim = torch.optim.SGD(same.parameters(), lr=0.1, momentum=0.9)
    same(torch.ones(4)).sum().backward()
    optim.step()
    with torch.no_grad():
        optim.state[same.weight]["momentum_buffer"][2, 3] += 1e-7 * rank
    found["states"] = refused({"model": same, "optim": optim}, f"{folder}/c")
    found["alike"] = refused({"model": same}, f"{folder}/d")
    found["large"] = refused({"ema": {"w": torch.full((300_000,), float(rank))}}, f"{folder}/e")
    found["kinds"] = refused(
        {"x": {str(t): torch.zeros(3, 2, dtype=t).t() for t in (torch.float8_e4m3fn, torch.bool, torch.complex64)}},
        f"{folder}/f",
    )
    torch.manual_seed(rank)
    other = nn.Linear(4, 6)
    load({"model": other}, f"{folder}/d")  # what is to be filled may differ
    found["filled"] = torch.equal(other.weight, same.weight)
    Path(f"{folder}/{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    os._exit(0)  # torch may hang as it frees DDP's reducer: that ends gloo's threads, of which one waits for the GIL


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("replicated")
    start(on_ranks, str(folder), ranks=2)
    return folder


@pytest.fixture
def found(folder: Path) -> list[dict[str, Any]]:
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


def test_statistics_and_generators_are_all_of_the_first_rank(folder: Path, found: list[dict[str, Any]]) -> None:
    assert found[0]["statistics"] != found[1]["statistics"], "or nothing is shown"
    assert [one["ddp"] for one in found] == ["saved"] * 2
    words = "model.1.running_mean, model.1.running_var, rng.cpu: ranks differ, and what the first one has is kept"
    assert found[0]["warned"][0].startswith(words)
    assert found[1]["warned"] == [], "once is enough"
    model, rng = network(), {"cpu": torch.get_rng_state()}
    load({"model": model, "rng": rng}, folder / "ddp")
    assert {name: model.state_dict()[name].tolist() for name in STATISTICS} == found[0]["statistics"]
    assert rng["cpu"].tolist() == found[0]["rng"]


def test_parts_and_ranks_that_have_come_apart_are_refused(found: list[dict[str, Any]]) -> None:
    for one in found:
        assert one["parts"].startswith("model.weight (and 1 more) differs between ranks 0 and 1: a tensor without")
        assert one["shapes"].startswith("model.weight (and 1 more) differs between ranks 0 and 1")
        assert one["states"].startswith("optim.weight.momentum_buffer differs between ranks 0 and 1: a tensor without")
        assert one["large"].startswith("ema.w differs between ranks 0 and 1")


def test_what_is_alike_is_saved_and_loaded(found: list[dict[str, Any]]) -> None:
    assert [(one["alike"], one["kinds"], one["filled"]) for one in found] == [("saved", "saved", True)] * 2


@dataclass
class Threads:
    """Ranks that are threads of this process."""

    index: int
    size: int
    words: list[Any]
    barrier: threading.Barrier

    def all_words(self, word: Any) -> list[Any]:
        self.words[self.index] = json.dumps(word)
        self.barrier.wait()
        found = [json.loads(one) for one in self.words]
        self.barrier.wait()
        return found

    def from_first(self, word: Any) -> Any:
        return self.all_words(word)[0]


def compared(
    states: list[dict[str, torch.Tensor]],
    trained: set[str],
    objects: Callable[[int], dict[str, Any]] = lambda _: {},
    replicas: Callable[[int, str], tuple[int, ...]] = lambda *_: (),
) -> list[Any]:
    """What each of some ranks finds: who has its tensors, or why not. `replicas`: as layouts say."""
    return told(states, trained, objects, replicas)[0]


def told(
    states: list[dict[str, torch.Tensor]],
    trained: set[str],
    objects: Callable[[int], dict[str, Any]],
    replicas: Callable[[int, str], tuple[int, ...]],
) -> tuple[list[Any], list[str]]:
    """The same, and the warnings."""
    size, words = len(states), [""] * len(states)
    barrier, found = threading.Barrier(size, timeout=20), [None] * size

    def rank(index: int) -> None:
        entries = [
            StateEntry(
                name, TensorSpec(tuple(x.shape), str(x.dtype)), Region.full(tuple(x.shape)), x, replicas(index, name)
            )
            for name, x in states[index].items()
        ]
        peers: Any = Threads(index, size, words, barrier)
        own: Any
        try:
            own = {e.name: e.replicas for e in with_replicas(entries, objects(index), peers, trained, compare=True)}
        except UserError as error:
            own = str(error)
        found[index] = own

    threads = [threading.Thread(target=rank, args=(i,)) for i in range(size)]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for one in threads:
            one.start()
        for one in threads:
            one.join()
    return found, [str(one.message) for one in caught]


@pytest.mark.parametrize("elements", [5, 100_003])
def test_one_bit_anywhere_is_seen(elements: int) -> None:
    for place in (0, elements // 3, elements - 1):
        other = torch.zeros(elements)
        other[place] = -0.0
        found = compared([{"w": torch.zeros(elements)}, {"w": other}], {"w"})
        assert [one[:30] for one in found] == ["w differs between ranks 0 and 1"[:30]] * 2


@pytest.mark.parametrize("number", [lambda x: contents([x])[0], lambda x: bytes(_sums(x))], ids=["CPU", "accelerator"])
def test_another_order_is_seen(number: Callable[[torch.Tensor], object]) -> None:
    x = torch.arange(40_000)
    swapped = x.clone()
    swapped[[3, 5]] = swapped[[5, 3]]  # within 4 KiB
    assert len({number(one) for one in (x, x.flip(0), x.roll(512), x.roll(1), swapped)}) == 5


def test_strides_and_places_in_memory_make_no_difference() -> None:
    x = torch.randn(300, 70)
    base = torch.cat([torch.zeros(1, 70), x])
    odd = torch.zeros(21_001)[1:].copy_(x.reshape(-1)).view(300, 70)
    assert len({*contents([x, x.t().contiguous().t(), base[1:], odd, torch.randn(600, 70)[::2].copy_(x)])}) == 1
    large = torch.randn(40, 1 << 17)  # of more than a slab
    assert len({*contents([large, large.t().contiguous().t()])}) == 1
    z = torch.randn(1000, dtype=torch.complex64)
    assert len({*contents([z.conj(), z.conj().resolve_conj()])}) == 1
    assert len({*contents([z.conj().imag, z.conj().imag.resolve_neg()])}) == 1
    assert contents([torch.empty(0), torch.empty(3, 0)]) == contents([torch.empty(0)] * 2)


def test_stages_whose_statistics_differ_are_no_mistake_of_other_stages() -> None:
    """A rank without a buffer, or a value, cannot know by itself that its holders may differ in it."""
    first = {"a": torch.zeros(3)}
    second = [{"b": torch.zeros(3), "b.mean": torch.full((3,), float(i))} for i in range(2)]
    found = compared([first, *second], {"a", "b"}, lambda rank: {"rng": rank} if rank else {})
    assert found == [{"a": (0,)}, {"b": (1, 2), "b.mean": (1,)}, {"b": (1, 2), "b.mean": (1,)}]
    second[1]["b"] = torch.ones(3)
    found = compared([first, *second], {"a", "b"})
    assert [one[:31] for one in found] == ["b differs between ranks 1 and 2"] * 3


def replicated(off: dict[int, int]) -> list[str]:
    """What is told of six ranks, each third of which has a half of `w`, and all of which have `b`; by rank: in which of
    its own numbers of `w` one bit is another."""
    states: list[dict[str, torch.Tensor]] = []
    for rank in range(6):
        half = torch.arange(8.0) + 100 * (rank % 2)
        if rank in off:
            half.view(torch.int32)[off[rank]] ^= 1
        states.append({"w": half, "b": torch.ones(3)})
    step = {"w": 2, "b": 1}
    found, said = told(states, {"w", "b"}, lambda _: {}, lambda rank, name: (*range(rank % step[name], 6, step[name]),))
    assert [one["w"] for one in found] == [(0, 2, 4), (1, 3, 5)] * 3
    return said


def test_replicas_of_what_has_a_layout_are_compared_and_the_one_that_is_off_named() -> None:
    assert replicated({}) == []
    (one,) = replicated({3: 7})
    assert one.startswith("w has other values on rank 3 than on ranks 1 and 5, which hold the same part of it")
    assert replicated({0: 1})[0].startswith("w has other values on rank 0 than on ranks 2 and 4")
    assert replicated({0: 1, 3: 1})[0].startswith("w (and 1 more) has other values on rank 0 than on ranks 2 and 4")
