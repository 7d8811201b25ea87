"""Launchers of several nodes, as threads of one process over real stores, folders and connections.

What each has of a snapshot is found, copied, put together and brought to the disk; what is lost, torn or rotten is left
for an older one.
"""

import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tangram.checkpoint.loading.read import tensor
from tangram.checkpoint.saving.rank_parts import About, new_id
from tangram.checkpoint.store import commits
from tangram.errors import UserError
from tangram.layout import Region
from tangram.resilience import nodes as nodes_module
from tangram.resilience import shares
from tangram.resilience.carrier import Carrier, survives
from tangram.resilience.nodes import ElsewhereError, Nodes
from tangram.resilience.rescue import rescue
from tangram.resilience.tiers import HELD, Tiers
from tangram.training.observe.events import CheckpointSaved, SaveFailed
from tangram.training.run.environment import RankPlace, ReportedElsewhere
from tangram.training.run.launch import RankError
from tangram.training.run.run_folder import alone
from tangram.training.run.torchrun import Meeting
from tests.checkpoint.making import flip, make, regions

T = TypeVar("T")
COUNT, RANKS = 3, 6
WEIGHT = torch.arange(240, dtype=torch.float32).reshape(24, 10)


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "1")


def on_all(work: Callable[[Nodes, int], T], count: int = COUNT) -> list[T | BaseException]:
    """What each launcher comes to."""
    store, found = dist.HashStore(), dict[int, Any]()

    def one(index: int) -> None:
        try:
            nodes = Nodes(Meeting(RankPlace(index, count, 0, 1, f"{index}"), store))
            nodes.divide(RANKS)
            try:
                found[index] = work(nodes, index)
            finally:
                nodes.close()
        except BaseException as error:  # noqa: BLE001  it is what came of it
            found[index] = error

    threads = [threading.Thread(target=one, args=(index,)) for index in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return [found.get(index, TimeoutError()) for index in range(count)]


def tiers_of(folder: Path, index: int) -> Tiers:
    return Tiers(folder / f"memory-{index}", folder / "disk")


def state(step: int) -> Mapping[str, Tensor]:
    return {"model.weight": WEIGHT + step, "optim.weight.exp_avg": torch.full((7,), float(step))}


def snapshot(folder: Path, step: int, nodes: range = range(COUNT)) -> str:
    """Have each node write its share."""
    save_id = new_id()
    cuts = {"model.weight": regions(WEIGHT.shape, "_/dp _", f"dp={RANKS}"), "optim.weight.exp_avg": [Region.full((7,))]}
    for index in nodes:
        attempt = tiers_of(folder, index).attempt(1)
        assert attempt is not None
        about = About(step, f"dp={RANKS}", created=f"2026-01-01T00:00:{step:02d}+00:00")
        node = (save_id, index, COUNT)
        make(attempt / f"step-{step:08d}", state(step), cuts, writers=RANKS, about=about, node=node)
    return save_id


def saved(folder: Path, index: int, step: int) -> CheckpointSaved:
    attempt = tiers_of(folder, index).attempt(1)
    return CheckpointSaved(step, f"{attempt}/step-{step:08d}", 0.0, 0.0, asynchronous=True)


def carried(folder: Path, step: int, disk: bool, copies: int = 1) -> list[list[Any]]:
    """What is told of a snapshot that all nodes carry."""

    def work(nodes: Nodes, index: int) -> list[Any]:
        carrier = Carrier(nodes, tiers_of(folder, index), copies, ("last=2",))
        carrier.offer(saved(folder, index, step), disk=disk)
        time.sleep(0.5)  # else nothing but what is due on the disk is carried
        carrier.close()
        return list(carrier.heard())

    found = on_all(work)
    assert all(isinstance(one, list) for one in found), found
    return found  # pyright: ignore[reportReturnType]


def held(folder: Path) -> list[set[str]]:
    return [{path.name[-1] for path in (folder / f"memory-{i}" / HELD).glob("*-*")} for i in range(COUNT)]


def test_a_share_alone_is_no_checkpoint(tmp_path: Path) -> None:
    snapshot(tmp_path, 1)
    path = Path(saved(tmp_path, 1, 1).path)
    with pytest.raises(UserError, match="what machine 1 of 3 has written of a snapshot"):
        commits.read_manifest(path)
    assert set(commits.read_share(path).files) == {f"model-0000{i}-of-00006.safetensors" for i in (3, 4)} | {
        name for name in commits.read_share(path).files if name.startswith("optim")
    }


def test_each_node_has_its_neighbours_share_and_the_disk_all(tmp_path: Path) -> None:
    snapshot(tmp_path, 4)
    events = carried(tmp_path, 4, disk=True)
    (done,) = events[0]
    assert isinstance(done, CheckpointSaved)
    assert events[1:] == [[], []]
    assert held(tmp_path) == [{"0", "2"}, {"1", "0"}, {"2", "1"}]
    manifest = commits.read_manifest(done.path)
    assert (manifest.step, manifest.mesh) == (4, "dp=6")
    assert all(stored.digest for stored in manifest.tensors.values())
    for name, values in state(4).items():
        assert torch.equal(tensor(Path(done.path), manifest, name), values)


@pytest.mark.parametrize("gone", range(COUNT))
def test_the_memory_of_any_one_node_may_be_lost(tmp_path: Path, gone: int) -> None:
    """Its launcher comes back on another machine, without memory."""
    snapshot(tmp_path, 4)
    carried(tmp_path, 4, disk=False)
    snapshot(tmp_path, 5)  # which nobody has copied yet
    (tmp_path / f"memory-{gone}").rename(tmp_path / "burnt")
    told: list[int] = []
    found = on_all(
        lambda nodes, index: shares.to_disk(nodes, tiers_of(tmp_path, index), lambda step, path: told.append(step))
    )
    assert found == [None] * COUNT
    assert told == [4]
    path = commits.newest(tmp_path / "disk")
    assert path is not None
    manifest = commits.read_manifest(path)
    for name, values in state(4).items():
        assert torch.equal(tensor(path, manifest, name), values)
    assert not [path for i in range(COUNT) for path in (tmp_path / f"memory-{i}").glob("*")], "forgotten"


def test_all_go_on_from_the_newest_of_which_every_share_is_somewhere(tmp_path: Path) -> None:
    good = snapshot(tmp_path, 3)
    snapshot(tmp_path, 4, range(1))  # the other nodes died before
    found = on_all(lambda nodes, index: shares.newest(nodes, tiers_of(tmp_path, index), (), 2))
    everything = set[str]()
    for index, path in enumerate(found):
        assert isinstance(path, Path), path
        assert path.is_relative_to(tmp_path / f"memory-{index}" / "resume-2")
        manifest, here = commits.read_manifest(path), commits.files_here(path)
        assert here is not None
        assert (manifest.id, manifest.step) == (good, 3)
        assert here - {commits.MANIFEST} == set(commits.read_share(Path(saved(tmp_path, index, 3).path)).files)
        everything |= here
    assert everything - {commits.MANIFEST} == set(commits.read_manifest(Path(str(found[0]))).files)


def test_what_no_attempt_came_to_a_step_from_is_left_for_the_disk(tmp_path: Path) -> None:
    bad = snapshot(tmp_path, 3)
    make(tmp_path / "disk" / "step-00000002", state(2), about=About(2))
    found = on_all(lambda nodes, index: shares.newest(nodes, tiers_of(tmp_path, index), {bad}, 2))
    assert found == [tmp_path / "disk" / "step-00000002"] * COUNT


def test_without_any_all_begin_anew(tmp_path: Path) -> None:
    assert on_all(lambda nodes, index: shares.newest(nodes, tiers_of(tmp_path, index), (), 1)) == [None] * COUNT


def test_what_has_rotted_in_memory_is_not_copied(tmp_path: Path) -> None:
    snapshot(tmp_path, 4)
    flip(next(Path(saved(tmp_path, 1, 4).path).glob("model-*")), 300)
    (failed,) = carried(tmp_path, 4, disk=True)[0]
    assert isinstance(failed, SaveFailed)
    assert "has other bytes than were written" in failed.reason
    assert held(tmp_path)[2] == {"2"}, "the copy was refused where it came in"
    assert not list((tmp_path / "disk").glob("*"))


def test_a_disk_that_takes_nothing_leaves_all_in_memory(tmp_path: Path) -> None:
    snapshot(tmp_path, 4)
    (tmp_path / "disk").write_text("a file in the place of a folder")
    found = on_all(lambda nodes, index: shares.to_disk(nodes, tiers_of(tmp_path, index), lambda step, path: None))
    assert all(isinstance(one, UserError) and "make room there" in str(one) for one in found), found
    assert all((tmp_path / f"memory-{i}" / "attempt-1" / "step-00000004").is_dir() for i in range(COUNT))


def test_the_error_that_came_first_counts_on_all(tmp_path: Path) -> None:
    lost = RankError(1, 6, "RuntimeError: [../gloo/transport/tcp/pair.cc] Connection closed by peer", "a trace")
    killed, others = RankError(4, 6, "killed by signal 9", ""), ElsewhereError()
    words = {0: lost, 1: others, 2: killed}
    found = on_all(lambda nodes, index: nodes.settled(1, words[index], index * 10))
    for one in found:
        assert isinstance(one, tuple)
        assert (str(one[0]), one[1]) == (str(killed), 20)
    mistake = UserError("memory ran out: lower the micro-batch")
    found = on_all(lambda nodes, index: nodes.settled(1, [lost, mistake, others][index], 0))
    assert [str(one[0]) for one in found if isinstance(one, tuple)] == [str(mistake)] * COUNT
    assert on_all(lambda nodes, index: nodes.settled(1, None, index)) == [(None, 2)] * COUNT
    raised = RankError(0, 6, "KeyError: what a killed rank would have given", "a trace")

    def late(nodes: Nodes, index: int) -> Any:
        time.sleep(0.3 * (index == 2))  # nothing can have come before a rank that is killed, whenever it is told
        return nodes.settled(1, [raised, others, killed][index], 0)

    assert [str(one[0]) for one in on_all(late) if isinstance(one, tuple)] == [str(killed)] * COUNT


def test_a_launcher_that_is_gone_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nodes_module, "STILL", 1.0)
    monkeypatch.setattr(nodes_module, "BEAT", 0.1)

    def work(nodes: Nodes, index: int) -> Any:
        if index == 1:
            return None  # and its heart stands still
        return nodes.words("")

    found = on_all(work)
    for index in (0, 2):
        assert isinstance(found[index], RankError), found[index]
        assert "rank 2 of 6 ended the job: nothing was heard of its launcher for 1 s" in str(found[index])


def test_who_fails_alone_is_heard_by_those_who_wait_for_it() -> None:
    def work(nodes: Nodes, index: int) -> Any:
        if index == 1:
            nodes._meeting.fails(1, "the disk burns")  # pyright: ignore[reportPrivateUsage]
            return None
        return nodes.words("")

    found = on_all(work)
    assert [str(found[index]) for index in (0, 2)] == ["the disk burns"] * 2
    assert isinstance(found[0], ReportedElsewhere)


def test_ranks_have_to_divide_among_nodes() -> None:
    (first, *_) = on_all(lambda nodes, index: None, count=4)
    assert str(first) == "6 ranks do not divide among 4 nodes: give --processes, of all nodes, or --min-ranks"


@given(st.integers(1, 7), st.data())
def test_with_k_copies_any_k_nodes_may_be_lost(count: int, data: st.DataObject) -> None:
    copies = data.draw(st.integers(0, count - 1))
    some = data.draw(st.permutations(range(count)))
    assert survives(count, copies, frozenset(some[:copies]))
    row = frozenset((some[0] + i) % count for i in range(copies + 1))
    assert not survives(count, copies, row)


def test_a_share_of_several_nodes_is_not_taken_for_a_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`tangram train --resume`, or a launcher of one node, where several have left a snapshot."""
    snapshot(tmp_path, 4)
    (tmp_path / "run").mkdir()
    monkeypatch.setattr("tangram.resilience.rescue.memory_of", lambda run, memory=None: tmp_path / "memory-1")
    with pytest.raises(UserError, match="is a part of that of 3 nodes: tangram launch --resume on"):
        rescue(tmp_path / "run", lambda event: None)
    assert Path(saved(tmp_path, 1, 4).path).is_dir(), "it stays"


def test_nobody_takes_the_memory_of_a_run_that_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    snapshot(tmp_path, 4)
    (tmp_path / "run").mkdir()
    monkeypatch.setattr("tangram.resilience.rescue.memory_of", lambda run, memory: memory)

    def work(nodes: Nodes, index: int) -> None:
        meeting = nodes._meeting  # pyright: ignore[reportPrivateUsage]
        try:
            rescue(tmp_path / "run", lambda event: None, tmp_path / f"memory-{index}", meeting)
        except UserError as error:
            meeting.fails(2, str(error))
            raise

    with alone(tmp_path / "run"):
        found = on_all(work)
    assert all("is training in" in str(error) for error in found), found
    assert all(Path(saved(tmp_path, index, 4).path).is_dir() for index in range(COUNT))


def test_a_node_that_cannot_do_its_part_says_so_and_nobody_waits(tmp_path: Path) -> None:
    """Whatever it is: others wait for its word, and a run would never end."""
    snapshot(tmp_path, 4)
    memory = tmp_path / "memory-1"
    (memory / HELD).write_text("a file in the place of a folder")
    (failed,) = carried(tmp_path, 4, disk=True)[0]
    assert isinstance(failed, SaveFailed)
    assert not list((tmp_path / "disk").glob("*"))
