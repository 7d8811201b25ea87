"""Who reads what on a node, and what happens when one of the ranks is killed."""

import multiprocessing
import os
import re
import signal
from collections import Counter
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from hypothesis import example, given
from hypothesis import strategies as st

from tangram.checkpoint.loading import block_source, exchange
from tangram.checkpoint.loading.assign_blocks import Deal, deal
from tangram.checkpoint.loading.between_nodes import PeerError
from tangram.checkpoint.loading.exchange import SharedWindow, WindowShape
from tangram.checkpoint.loading.read import Want, read_wants
from tangram.checkpoint.store import commits
from tangram.errors import UserError
from tangram.hardware.host import shared
from tangram.layout import Region, intervals
from tangram.relayout.exchange.peers import Peers
from tangram.training.run.fork_server import context_of_ranks
from tests.checkpoint.loading import LARGE, large
from tests.checkpoint.stored import store, with_small_blocks

SIZES = {"a": 30, "b": 1, "c": 12}
wanted = st.fixed_dictionaries(
    {
        name: st.sets(st.integers(0, size - 1)).map(lambda s: intervals.normal((i, i + 1) for i in s))
        for name, size in SIZES.items()
    }
)


def blocks(want: Any) -> set[tuple[str, int]]:
    return {(file, block) for file, some in want.items() for block in intervals.elements(some)}


@st.composite
def jobs(draw: st.DrawFn) -> tuple[list[Any], list[int]]:
    """What each rank wants, often the same as another, and its node."""
    kinds = draw(st.lists(wanted, min_size=1, max_size=4))
    wants = draw(st.lists(st.sampled_from(kinds), min_size=1, max_size=6))
    return wants, [draw(st.integers(0, 3)) for _ in wants]


@st.composite
def scattered(draw: st.DrawFn) -> tuple[list[Any], list[int], list[set[str]] | None]:
    """The same, and the files that are where each rank is: each on some node, or all on all."""
    wants, nodes = draw(jobs())
    if draw(st.booleans()):
        return wants, nodes, None
    some = sorted(set(nodes))
    on = {file: draw(st.sets(st.sampled_from(some), min_size=1)) for file in SIZES}
    return wants, nodes, [{file for file in SIZES if node in on[file]} for node in nodes]


@given(st.lists(wanted, min_size=1, max_size=6))
def test_on_a_node_every_wanted_block_is_dealt_once_and_evenly(wants: list[Any]):
    deals = [deal(wants, [0] * len(wants), rank, SIZES) for rank in range(len(wants))]
    assert not any(task.passes for made in deals for task in made.tasks)
    least = min(len(made.tasks) for made in deals)
    dealt = [len(made.tasks) for rank, made in enumerate(deals) if deals[0].stretches[rank]]
    assert not dealt or max(dealt) - least <= 1
    order = [item for stretch in deals[0].stretches for item in stretch]
    assert order == sorted(order)


_A, _C = {"a": ((0, 1),), "b": (), "c": ((1, 2),)}, {"a": (), "b": (), "c": ((0, 1),)}


@example(([_A, _A, _C, _A, _A], [0, 0, 2, 0, 1], [{*"abc"}, {*"abc"}, {"a"}, {*"abc"}, {"a", "c"}]))  # three nodes
@given(scattered())
def test_every_wanted_block_is_read_once_and_comes_to_all_who_want_it(job: tuple[list[Any], list[int], Any]):
    wants, nodes, holds = job
    deals = [deal(wants, nodes, rank, SIZES, holds) for rank in range(len(wants))]
    read = [task.item for made in deals for task in made.tasks if task.source is None]
    assert sorted(read) == sorted(set[tuple[str, int]]().union(*map(blocks, wants)))
    for rank, made in enumerate(deals):
        here = [i for i, node in enumerate(nodes) if node == nodes[rank]]
        assert made.stretches == deals[here[0]].stretches
        of_window = [task for task in made.tasks if task.slot is not None]
        assert [task.slot for task in of_window] == list(range(len(of_window)))
        assert [task.item for task in of_window] == made.stretches[here.index(rank)]
        got = {task.item for task in made.tasks}.union(*(set(some) for some in made.stretches))
        assert blocks(wants[rank]) <= got
        assert all(
            rank == i or task.item not in blocks(wants[rank])
            for i in here
            for task in deals[i].tasks
            if task.slot is None
        )
        for task in made.tasks:
            assert task.source is not None or holds is None or task.item[0] in holds[rank]
            if task.source is not None:
                sent = [some for some in deals[task.source].tasks if some.item == task.item]
                assert [some.number for some in sent] == [task.number]
                assert rank in sent[0].to
                assert nodes[task.source] != nodes[rank]
            assert len({nodes[i] for i in (rank, *task.to)}) == 1 + len(task.to)
    messages = sum(len(task.to) for made in deals for task in made.tasks)
    assert messages == sum(task.source is not None for made in deals for task in made.tasks)


@given(scattered())
def test_no_deal_comes_to_a_halt_where_each_rank_does_one_thing_after_the_other(job: tuple[list[Any], list[int], Any]):
    """One thread for each rank; a message needs both sides, and a slot all of its window's readers."""
    wants, nodes, holds = job
    left = [list(reversed(deal(wants, nodes, rank, SIZES, holds).tasks)) for rank in range(len(wants))]
    while any(left):
        ready = [some[-1] if some else None for some in left]
        done = [
            rank
            for rank, task in enumerate(ready)
            if task and all((other := ready[i]) and other.item == task.item for i in task.to) and task.source is None
        ]
        assert done
        for rank in done:
            for i in (rank, *left[rank][-1].to):
                left[i].pop()


def test_a_file_that_is_on_no_machine_is_named():
    with pytest.raises(UserError, match='"c" of the checkpoint is on none of the machines'):
        deal([{"c": [(0, 1)]}, {}], [0, 1], 1, SIZES, [{"a"}, {"b"}])


@given(jobs())
def test_what_the_same_nodes_want_they_read_in_turns(job: tuple[list[Any], list[int]]):
    wants, nodes = job
    by_node = {node: set[tuple[str, int]]() for node in nodes}
    read = {node: set[tuple[str, int]]() for node in nodes}
    for rank, node in enumerate(nodes):
        by_node[node] |= blocks(wants[rank])
        read[node] |= {task.item for task in deal(wants, nodes, rank, SIZES).tasks if task.source is None}
    groups = Counter(
        frozenset(n for n, some in by_node.items() if item in some) for item in set().union(*by_node.values())
    )
    for group, count in groups.items():
        for node in group:
            same = {item for item in read[node] if {n for n, some in by_node.items() if item in some} == group}
            assert count // len(group) <= len(same) <= -(-count // len(group))


@pytest.mark.parametrize("way", [shared.nameless, shared.in_a_file])
def test_a_window_is_seen_by_others_and_its_name_goes(way: Any):
    shape = WindowShape(slots=2, ranks=3)
    made = way(shape.size)
    mine = SharedWindow(made.memory, shape, os.getpid())
    theirs = SharedWindow(shared.opened(made.name, shape.size), shape, os.getpid())
    made.close()
    assert made.name.startswith("/proc/") or not Path(made.name).exists()
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
        self.done, self.progress = False, 0

    @property
    def alive(self) -> bool:
        self.failure = ("rank 1 ended while all of them read the checkpoint", True)
        return False


def test_a_rank_that_ends_because_of_another_is_not_the_one_that_is_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange, "LOOK", 0.0)
    waiting = exchange._Exchange(cast(Any, None), Deal([], [[]]), 0, [cast(Any, _Late())], [0], Peers())
    with pytest.raises(PeerError, match=r"^rank 1 ended"):
        waiting._until(lambda: False)


def _rank(rank: int, folder: str, layout: str, nodes: str, how: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", 3), rank=rank, world_size=3)
    with pytest.MonkeyPatch.context() as patch:
        with_small_blocks(patch)
        patch.setattr(shared, "node", lambda: nodes[rank])
        if how == "stopped":
            patch.setattr(exchange, "LIMIT", 2.0)
        manifest = commits.read_manifest(Path(folder) / "large")
        if rank == 1:
            real, left = block_source.Sources.read, iter(range(3))

            def read(*arguments: Any) -> Any:
                if next(left, None) is None:
                    os.kill(os.getpid(), signal.SIGKILL if how == "killed" else signal.SIGSTOP)
                return real(*arguments)

            patch.setattr(block_source.Sources, "read", read)
        region = Region.full(LARGE) if layout == "copied" else Region.box((32 * rank, 0), (32, LARGE[1]))
        into = torch.zeros(region.local_shape or (0,), dtype=torch.int32)
        try:
            read_wants(
                Path(folder) / "large", manifest, [Want("model.large", region, into)], peers=Peers(dist.group.WORLD)
            )
        except PeerError as error:
            Path(f"{folder}/{rank}.txt").write_text(str(error))
    os._exit(0)  # a process group of which one is dead cannot be taken down


def _said(folder: Path, layout: str, nodes: str, how: str) -> list[str]:
    """What the first and the last of three ranks say when the second is killed, or stopped, while all read."""
    with pytest.MonkeyPatch.context() as patch:
        with_small_blocks(patch)
        store(folder / "large", {"model.large": large()}, {})
    ranks = [context_of_ranks().Process(target=_rank, args=(i, str(folder), layout, nodes, how)) for i in range(3)]
    for process in ranks:
        process.start()
    for process in (ranks[0], ranks[2], ranks[1]):
        process.join(0 if how == "stopped" and process is ranks[1] else 120)
    ranks[1].kill()
    ranks[1].join()
    assert [process.exitcode for process in ranks] == [0, -signal.SIGKILL, 0]
    return [(folder / f"{rank}.txt").read_text() for rank in (0, 2)]


@pytest.mark.parametrize(
    ("layout", "nodes"),
    [
        ("copied", "aaa"),
        pytest.param("rows", "aaa", marks=pytest.mark.slow),
        ("copied", "aab"),
        pytest.param("copied", "abb", marks=pytest.mark.slow),
        pytest.param("copied", "abc", marks=pytest.mark.slow),
    ],
)
def test_a_rank_that_is_killed_is_missed_by_the_others(tmp_path: Path, layout: str, nodes: str):
    assert _said(tmp_path, layout, nodes, "killed") == ["rank 1 ended while all of them read the checkpoint"] * 2


@pytest.mark.slow
@pytest.mark.parametrize("nodes", ["aaa", "aab", "abc"])
def test_a_rank_that_stands_still_is_given_up(tmp_path: Path, nodes: str):
    for said in _said(tmp_path, "copied", nodes, "stopped"):
        assert re.fullmatch(
            r"no rank of this node has read, received or copied anything for \d seconds"
            r"|rank [012] has passed nothing on for 2 seconds",
            said,
        )
