"""Who reads what on a node, and what happens when one of the ranks is killed."""

import multiprocessing
import os
import signal
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from tangram.checkpoint import commits, exchange, source
from tangram.checkpoint.exchange import PeerError, deal
from tangram.checkpoint.read import Want, read_wants
from tangram.checkpoint.windows import Shape, Window
from tangram.hardware import shared
from tangram.layout import Region, intervals
from tangram.relayout.peers import Peers
from tests.checkpoint.loading import LARGE, large
from tests.checkpoint.stored import store, with_small_blocks

SIZES = {"a": 30, "b": 1, "c": 12}
wanted = st.fixed_dictionaries(
    {
        name: st.sets(st.integers(0, size - 1)).map(lambda s: intervals.normal((i, i + 1) for i in s))
        for name, size in SIZES.items()
    }
)


@given(st.lists(wanted, min_size=1, max_size=6))
def test_every_wanted_block_is_dealt_once_and_evenly(wants: list[dict[str, intervals.IntSet]]):
    deals = [deal(wants, rank, SIZES) for rank in range(len(wants))]
    assert all(made.stretches == deals[0].stretches for made in deals)
    sets = [{(file, block) for file, some in want.items() for block in intervals.elements(some)} for want in wants]
    read = [made.alone + made.stretches[rank] for rank, made in enumerate(deals)]
    every = [item for some in read for item in some]
    assert len(every) == len(set(every))
    assert set(every) == set().union(*sets)
    for rank, made in enumerate(deals):
        others = set().union(*(s for i, s in enumerate(sets) if i != rank))
        assert set(made.alone) == sets[rank] - others
    least = min(len(some) for some in read)
    dealt = [len(some) for rank, some in enumerate(read) if deals[0].stretches[rank]]
    assert not dealt or max(dealt) - least <= 1
    order = [item for stretch in deals[0].stretches for item in stretch]
    assert order == sorted(order)


@pytest.mark.parametrize("way", [shared.nameless, shared.in_a_file])
def test_a_window_is_seen_by_others_and_its_name_goes(way: Any):
    shape = Shape(slots=2, ranks=3)
    made = way(shape.size)
    mine, theirs = Window(made.memory, shape), Window(shared.opened(made.name, shape.size), shape)
    made.close()
    assert made.name.startswith("/proc/") or not Path(made.name).exists()
    mine.begin()
    mine.slots[1][:] = 7
    mine.ready[1] = 5
    theirs.passed[2] = 9
    assert theirs.alive
    assert bool((theirs.slots[1] == 7).all())
    assert not theirs.slots[0].any()
    assert theirs.ready.tolist() == [0, 5]
    assert mine.passed.tolist() == [0, 0, 9]
    assert theirs.failure == (None, False)
    mine.fail("one sentence", gone=True)
    assert theirs.failure == ("one sentence", True)


def test_a_process_that_is_gone_does_not_run():
    process = multiprocessing.get_context("spawn").Process(target=int)
    process.start()
    pid = process.pid
    assert pid is not None
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)  # a zombie
    assert not shared.runs(pid)
    process.join()
    assert not shared.runs(pid)
    assert shared.runs(os.getpid())


class _Late:
    """The window of a rank that says whom it misses and ends, just before somebody looks whether it lives."""

    def __init__(self) -> None:
        self.failure: tuple[str | None, bool] = (None, False)
        self.done, self.moves = False, 0

    @property
    def alive(self) -> bool:
        self.failure = ("rank 1 ended while all of them read the checkpoint", True)
        return False


def test_a_rank_that_ends_because_of_another_is_not_the_one_that_is_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange, "LOOK", 0.0)
    waiting = exchange._Exchange(cast(Any, None), exchange.Deal([], [[]]), 0, [cast(Any, _Late())], [0])
    with pytest.raises(PeerError, match=r"^rank 1 ended"):
        waiting._until(lambda: False)


def _rank(rank: int, folder: str, layout: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", 3), rank=rank, world_size=3)
    with pytest.MonkeyPatch.context() as patch:
        with_small_blocks(patch)
        manifest = commits.read_manifest(Path(folder) / "large")
        if rank == 1:
            real, left = source.Sources.read, iter(range(3))

            def read(*arguments: Any) -> Any:
                if next(left, None) is None:
                    os.kill(os.getpid(), signal.SIGKILL)
                return real(*arguments)

            patch.setattr(source.Sources, "read", read)
        region = Region.full(LARGE) if layout == "copied" else Region.box((32 * rank, 0), (32, LARGE[1]))
        into = torch.zeros(region.local_shape or (0,), dtype=torch.int32)
        try:
            read_wants(
                Path(folder) / "large", manifest, [Want("model.large", region, into)], peers=Peers(dist.group.WORLD)
            )
        except PeerError as error:
            Path(f"{folder}/{rank}.txt").write_text(str(error))
    os._exit(0)  # a process group of which one is dead cannot be taken down


@pytest.mark.parametrize("layout", ["copied", "rows"])
def test_a_rank_that_is_killed_is_missed_by_the_others(tmp_path: Path, layout: str):
    with pytest.MonkeyPatch.context() as patch:
        with_small_blocks(patch)
        store(tmp_path / "large", {"model.large": large()}, {})
    context = multiprocessing.get_context("spawn")
    ranks = [context.Process(target=_rank, args=(i, str(tmp_path), layout)) for i in range(3)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(120)
    assert [process.exitcode for process in ranks] == [0, -signal.SIGKILL, 0]
    for rank in (0, 2):
        assert (tmp_path / f"{rank}.txt").read_text() == "rank 1 ended while all of them read the checkpoint"
