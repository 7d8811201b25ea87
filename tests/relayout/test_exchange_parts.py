"""The exchange between ranks, a part at a time: requests, cuts, the choice of a way; and ranks that are killed."""

from __future__ import annotations

import itertools
import mmap
import multiprocessing
import os
import re
import signal
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from tangram.hardware.host import shared
from tangram.layout import intervals
from tangram.relayout import TensorSpec, bind
from tangram.relayout.exchange import rounds, shared_lanes
from tangram.relayout.exchange.messages import BoxRequest, cut, decoded, encoded
from tangram.relayout.exchange.peers import Peers
from tangram.relayout.exchange.redistribute import move
from tangram.relayout.exchange.rounds import (
    ENOUGH,
    ROOM,
    ExchangeReport,
    Load,
    RankTraffic,
    RoundChoice,
    choose,
    decide,
)
from tangram.relayout.mapping.errors import PeerError
from tests.relayout.exchange_jobs import QKV, job


def test_requests_are_numbers_and_back() -> None:
    bound = bind(QKV, {"q": TensorSpec((24, 8)), "k": TensorSpec((12, 8)), "v": TensorSpec((12, 8))}, g=4)
    cells = bound.cells["qkv"]
    made = [
        BoxRequest(1, (((0, 1), (2, 4)), ((0, 3),), ((1, 2), (5, 8))), 0, False),
        BoxRequest(0, (((0, 4),), ((0, 2),), ((0, 3),), ((0, 8),)), 2, True),
    ]
    assert [len(cell.factors) for cell in cells[:2]] == [4, 3]
    assert decoded(encoded(made), cells) == made
    assert decoded([], cells) == []


def pairs(edges: list[int]) -> tuple[tuple[int, int], ...]:
    """Sorted edges as intervals that do not touch."""
    return tuple(zip(sorted(edges)[::2], sorted(edges)[1::2], strict=False))


sets = st.lists(st.integers(0, 12), min_size=2, max_size=6, unique=True).map(pairs)


@given(st.lists(sets, max_size=3).map(tuple), st.data())
def test_a_box_is_cut_in_row_major_order(box: Any, data: st.DataObject) -> None:
    elements = list(itertools.product(*[intervals.elements(s) for s in box]))
    first = data.draw(st.integers(0, len(elements)))
    stop = data.draw(st.integers(first, len(elements)))
    parts = cut(box, first, stop)
    found = [x for part in parts for x in itertools.product(*[intervals.elements(s) for s in part])]
    assert found == elements[first:stop]
    assert len(parts) <= max(1, 2 * len(box))


def traffic(*sent: int, alike: int = -1, received: int = 100) -> RankTraffic:
    return RankTraffic(sum(n > 0 for n in sent), 1, sum(sent), received, alike)


PATTERNS = {
    "nothing": [RankTraffic(0, 0, 0, 0, -1)] * 3,
    "broadcast": [traffic(100, 100, alike=100, received=0), *[traffic()] * 2],
    "all-gather": [traffic(100, 100, alike=100, received=200)] * 3,
    "all-to-all": [traffic(100, 100, received=200)] * 3,
    "pairs": [traffic(100), traffic(), traffic(0)],
}


@pytest.mark.parametrize("name", PATTERNS)
def test_the_way_follows_from_the_pattern(name: str) -> None:
    loads = [Load(0, of, of) for of in PATTERNS[name]]
    assert decide(loads, 1 << 20, None) == RoundChoice(False, choose(PATTERNS[name]), 1)
    assert choose(PATTERNS[name]).name == name
    uneven = [replace(of, alike=of.alike + (i == 1)) if of.alike > 0 else of for i, of in enumerate(PATTERNS[name])]
    assert choose(uneven).name == ("all-to-all" if name == "all-gather" else name)  # it gathers equal lengths only
    assert choose([replace(of, alike=-1) for of in PATTERNS[name]]).name not in ("broadcast", "all-gather")


def test_ranks_of_a_node_share_memory_if_they_have_enough_to_move() -> None:
    far, every = RankTraffic(1, 1, 50, 50, -1), RankTraffic(2, 2, 50 + ENOUGH, 50 + ENOUGH, -1)
    loads = [Load(ENOUGH, far, every)] * 4
    assert decide(loads, 1 << 30, None) == RoundChoice(True, choose([far] * 4), ENOUGH // ROOM)
    assert decide([replace(load, near=ENOUGH - 1) for load in loads], 1 << 30, None).near is False
    assert decide([replace(load, near=1) for load in loads], 1 << 30, "shared memory").near is True
    assert decide(loads, 1 << 30, "pairs").near is False
    assert decide(loads, 1 << 30, None, shared=False).near is False
    assert decide(loads, ENOUGH, None).rounds == ENOUGH // ROOM  # rooms that stay in a cache
    assert decide(loads, ROOM, None).rounds == 2 * ENOUGH // ROOM + 1  # two rooms, and what passes between nodes


def test_a_process_alone_moves_in_memory() -> None:
    bound, source, target, have = job("w: a b -> v: b a", {"w": "3 4"}, "x=1", {"w": "a/x b"}, {"v": "b a/x"})
    out = torch.zeros(4, 3)
    assert move(bound, source, target, have, {(0, "v"): out}, Peers()) == ExchangeReport(0, 0, 48, 1, {})
    assert torch.equal(out.view(torch.int32), have[0, "w"].T.contiguous().view(torch.int32))


def _dying(rank: int, folder: str, way: str) -> None:
    """One of three ranks; the second dies when it packs for the third time."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", 3), rank=rank, world_size=3)
    bound, source, target, have = job("w -> w", {"w": "30 30"}, "x=3", {"w": "a/x b"}, {"w": "a b/x"})
    out = {(rank, "w"): torch.zeros(target.piece("w", rank).region.local_shape or ())}
    left, real = iter(range(2)), rounds.pack

    def pack(*arguments: Any) -> None:
        if rank == 1 and next(left, None) is None:
            os.kill(os.getpid(), signal.SIGKILL)
        real(*arguments)

    rounds.pack = shared_lanes.pack = pack
    try:
        move(bound, source, target, have, out, Peers(dist.group.WORLD), memory=800, way=way)
    except PeerError as error:
        Path(f"{folder}/{rank}.txt").write_text(str(error))
    os._exit(0)  # a process group of which one is dead cannot be taken down


def test_who_was_killed_is_blamed_by_all() -> None:
    """Also by a rank that looks only after another one has missed it, and has ended for that."""
    here, plot = [3, 5, 7], shared_lanes.Plot(64, 2, 3)
    ended = multiprocessing.get_context("spawn").Process()
    ended.start()
    ended.join()
    nowhere, alive = ended.pid or 0, shared.process()
    every = [shared_lanes.Lane(mmap.mmap(-1, plot.size), plot) for _ in here]
    for me, processes in ((3, [alive, nowhere, alive]), (7, [nowhere, nowhere, alive])):
        mine = shared_lanes.Lanes(every, here, processes, me, plot)
        with pytest.raises(PeerError, match="rank 5 ended"), mine.in_use():
            mine._until(lambda: False)
    every = [shared_lanes.Lane(mmap.mmap(-1, plot.size), plot) for _ in here]
    with pytest.raises(ZeroDivisionError), shared_lanes.Lanes(every, here, [alive] * 3, 7, plot).in_use():
        _ = 1 / 0
    with pytest.raises(PeerError, match="rank 7 ended"):
        shared_lanes.Lanes(every, here, [alive] * 3, 3, plot)._until(lambda: False)


@pytest.mark.parametrize("way", ["shared memory", "all-to-all", "pairs"])
def test_a_rank_that_is_killed_is_missed_by_the_others(tmp_path: Path, way: str) -> None:
    context = multiprocessing.get_context("fork")
    ranks = [context.Process(target=_dying, args=(i, str(tmp_path), way)) for i in range(3)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of a fork beside threads: new imports would take longest
        for process in ranks:
            process.start()
    for process in ranks:
        process.join(60)
    assert [process.exitcode for process in ranks] == [0, -signal.SIGKILL, 0]
    for rank in (0, 2):
        assert re.match(r"(rank 1|another rank) ended while all", (tmp_path / f"{rank}.txt").read_text())
