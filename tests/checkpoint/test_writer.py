"""The writers of a save agree through its folder: one that is late, dead, replaced or unable keeps nobody waiting."""

import dataclasses
import errno
import os
import shutil
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tangram.checkpoint.saving import rank_parts
from tangram.checkpoint.saving.rank_files import share_fields
from tangram.checkpoint.saving.snapshot import Pool, RankShare, Snapshot, share
from tangram.checkpoint.saving.writer_process import Order, SaveWriter, _refuse_failed, attempt_id
from tangram.checkpoint.state.describe import describe
from tangram.checkpoint.state.entries import LocalPart
from tangram.checkpoint.store import commits
from tangram.hardware.host.channel import Channel

SAVE = "0123456789abcdef" * 2
WRITERS = 3
WHOLE = torch.arange(3 * 4, dtype=torch.float32).reshape(3, 4)


class Desk:
    """One rank's writer, in a thread, and the rank's end of the channel."""

    def __init__(self, own: RankShare, pool: Pool, index: int) -> None:
        self.index = index
        here, there = socket.socketpair()
        self.channel, self._there = Channel(here), Channel(there)
        self._writer = SaveWriter(self._there)
        self._thread: threading.Thread | None = None
        memory = pool.memory
        assert memory is not None
        message = {"share": share_fields(own, index, WRITERS), "memory": memory.nbytes}
        self._writer.hear(message, [os.dup(memory.descriptor)])

    def begin(self, order: Order, **changes: Any) -> threading.Thread:
        message = {"save": dataclasses.asdict(dataclasses.replace(order, **changes))}
        self._thread = threading.Thread(target=self._writer.hear, args=(message, []))
        self._thread.start()
        return self._thread

    def done(self) -> tuple[str, str]:
        self.waited = False
        while True:
            received = self.channel.receive(60)
            assert received is not None
            if "done" in received[0]:
                break
            self.waited |= "waiting" in received[0]
        assert self._thread is not None
        self._thread.join()
        return str(received[0]["path"]), str(received[0]["reason"])

    def close(self) -> None:
        self.channel.close()
        self._there.close()


class Desks:
    """The writers of all ranks; a new one for a rank takes the place of the old."""

    def __init__(self) -> None:
        self._all: list[Desk] = []
        self._shares: list[tuple[RankShare, Pool]] = []
        for index in range(WRITERS):
            held = LocalPart(WHOLE[index : index + 1].clone(), (3, 4), "out/tp in", f"tp={WRITERS}", index)
            own, pool = share(describe({"model": {"w": held}}).entries, 0, 1), Pool()
            Snapshot().run(own, pool.reserve(own.places.size))
            self._shares.append((own, pool))

    def new(self, index: int) -> Desk:
        self._all.append(Desk(*self._shares[index], index))
        return self._all[-1]

    def close(self) -> None:
        for desk in self._all:
            desk.close()
        for _, pool in self._shares:
            pool.close()


@pytest.fixture
def desks() -> Iterator[Desks]:
    desks = Desks()
    yield desks
    desks.close()


@pytest.fixture
def order(tmp_path: Path) -> Order:
    return Order("cd" * 16, str(tmp_path / "step-00000001"), 1, retries=1, pause=0.01, limit=30, objects={})


def check(path: str, order: Order, attempt: int) -> None:
    """A whole checkpoint by this attempt, and nothing beside it."""
    manifest = commits.read_manifest(Path(path))
    assert manifest.id == attempt_id(order.id, attempt)
    files = sorted(Path(path).glob("*.safetensors"))
    rows = [load_file(file) for file in files]
    assert torch.equal(torch.cat([next(iter(row.values())) for row in rows]), WHOLE)
    assert [p.name for p in Path(path).parent.iterdir()] == [Path(path).name]


def test_writers_that_come_in_any_order_finish(desks: Desks, order: Order):
    for step, turn in enumerate(((0, 1, 2), (2, 1, 0))):
        now = dataclasses.replace(order, id=f"{step:032x}", path=f"{order.path}{step}/x")
        some = [desks.new(index) for index in turn]
        for desk in some:
            desk.begin(now)
        for desk in some:
            assert desk.done() == (now.path, "")
        check(now.path, now, 0)


@pytest.mark.parametrize("unable", range(WRITERS))
def test_what_one_cannot_do_all_try_again(desks: Desks, order: Order, unable: int):
    some = [desks.new(index) for index in range(WRITERS)]
    for desk in some:
        desk.begin(order, problem="its process ended" if desk.index == unable else "")
    for desk in some:
        assert desk.done() == (order.path, "")
    check(order.path, order, 1)


@pytest.mark.parametrize("unable", range(WRITERS))
def test_what_one_can_never_do_is_given_up(desks: Desks, order: Order, unable: int, tmp_path: Path):
    some = [desks.new(index) for index in range(WRITERS)]
    for desk in some:
        desk.begin(order, **({"problem": "no memory", "hopeless": True} if desk.index == unable else {}))
    said = [desk.done() for desk in some]
    assert said[0] == ("", f"rank {unable} cannot write: no memory")
    assert all(path == "" and reason for path, reason in said)
    assert list(tmp_path.iterdir()) == []


def test_who_never_comes_is_waited_for_to_the_limit(desks: Desks, order: Order, tmp_path: Path):
    first = desks.new(0)
    first.begin(order, limit=0.7, retries=0)
    assert first.done() == ("", "for 0.7 s nothing was heard of the writer of another rank")
    assert list(tmp_path.iterdir()) == []


def test_who_waits_for_nothing_can_be_told(desks: Desks, order: Order):
    second = desks.new(1)
    second.begin(order)
    second.channel.send({"verdict": {"id": "of another save", "path": "", "reason": "it came late"}})
    second.channel.send({"verdict": {"id": order.id, "path": "", "reason": "the first said so"}})
    assert second.done() == ("", "the first said so")


@pytest.mark.parametrize("index", [0, 1])
def test_who_is_left_alone_ends_where_the_checkpoints_are_removed(index: int, desks: Desks, order: Order):
    """As a rank's writer that goes on when its run is over: it waited 20 minutes, or made the folder again."""
    desk, folder = desks.new(index), Path(order.path).parent
    partial = commits.partial_path(Path(order.path), order.id)
    if index:
        commits.begin(Path(order.path), order.id)
    thread = desk.begin(order, limit=60.0)
    wait_for((partial / f"part-{index:05d}.json").exists)
    desk.channel.close()
    shutil.rmtree(folder)
    thread.join(20)
    assert not thread.is_alive()
    assert not folder.exists()


def test_who_comes_after_a_failed_attempt_joins_the_next(desks: Desks, order: Order):
    first, second, third = (desks.new(index) for index in range(WRITERS))
    first.begin(order, problem="it was killed")
    third.begin(order)
    failed = commits.partial_path(Path(order.path), order.id)
    wait_for(lambda: (failed / "failed-00000.json").exists() and any(failed.glob("*-00002.json")))
    second.begin(order)
    assert [desk.done()[0] for desk in (first, second, third)] == [order.path] * 3
    check(order.path, order, 1)


def test_one_in_the_place_of_a_dead_one_finds_what_that_committed(desks: Desks, order: Order):
    some = [desks.new(index) for index in range(WRITERS)]
    for desk in some:
        desk.begin(order)
    assert [desk.done()[0] for desk in some] == [order.path] * 3
    for index in range(WRITERS):
        again = desks.new(index)
        again.begin(order, problem="its process ended (SIGKILL)")
        assert again.done() == (order.path, "")
    check(order.path, order, 0)


def test_one_in_the_place_of_a_dead_first_begins_the_next_attempt(desks: Desks, order: Order):
    left = commits.begin(Path(order.path), order.id)
    (left / "model-00001-of-00003.safetensors").write_bytes(b"torn")
    some = [desks.new(index) for index in range(WRITERS)]
    for desk in some:
        desk.begin(order, problem="its process ended (SIGKILL)" if desk.index == 0 else "")
    assert [desk.done()[0] for desk in some] == [order.path] * 3
    check(order.path, order, 1)


def test_one_in_the_place_of_one_that_had_written_waits_on(desks: Desks, order: Order):
    first, second, third = (desks.new(index) for index in range(WRITERS))
    first.begin(order)
    second.begin(order)
    partial = commits.partial_path(Path(order.path), order.id)
    wait_for(lambda: (partial / "part-00001.json").exists())
    again = desks.new(1)
    again.begin(order, problem="its process ended (SIGKILL)")
    third.begin(order)
    assert [desk.done()[0] for desk in (first, second, third, again)] == [order.path] * 4
    check(order.path, order, 0)


@pytest.mark.parametrize("index", [0, 1])
def test_the_others_hear_of_one_that_has_no_room_to_say_why(
    index: int, desks: Desks, order: Order, monkeypatch: pytest.MonkeyPatch
):
    """As where memory fills and stays full: an empty file is all that it takes. Its first waited for ten minutes."""
    real = rank_parts.write_file

    def full(file: Path, data: bytes) -> None:
        if data and file.stem.endswith(f"-{index:05d}"):
            file.touch()
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(file, data)

    monkeypatch.setattr(rank_parts, "write_file", full)
    some = [desks.new(number) for number in range(WRITERS)]
    for desk in some:
        desk.begin(order, retries=0)
    reasons = [desk.done() for desk in some]
    assert reasons[index][1].startswith(f"rank {index} cannot write: No space left")
    others = {reason for number, (_, reason) in enumerate(reasons) if number != index}
    heard = f"rank {index} has no room to write, nor to say why"
    assert others <= {heard, "it was given up; the first rank says why"}, "the first removes the folder"
    assert index == 0 or reasons[0][1] == heard


def test_a_first_that_can_leave_nothing_waits_for_nobody(desks: Desks, order: Order, monkeypatch: pytest.MonkeyPatch):
    """As on a disk that is read-only since: nobody can leave a word there, and it waited for ten minutes."""

    def read_only(file: Path, data: bytes) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(rank_parts, "write_file", read_only)
    first = desks.new(0)
    first.begin(order, retries=0)
    assert "Read-only file system" in first.done()[1]
    assert not first.waited


def test_who_looks_while_the_folder_is_closing_sees_no_failure(order: Order, tmp_path: Path):
    partial = commits.begin(Path(order.path), order.id)
    closing, ended = commits.closing_path(partial), threading.Event()

    def close_and_open() -> None:
        while not ended.is_set():
            partial.rename(closing)
            closing.rename(partial)

    thread = threading.Thread(target=close_and_open)
    thread.start()
    try:
        for _ in range(3000):
            _refuse_failed(partial)
    finally:
        ended.set()
        thread.join()


def wait_for(true: Any) -> None:
    waited = threading.Event()
    for _ in range(6000):
        if true():
            return
        waited.wait(0.01)
    raise AssertionError("it never came")


def test_a_word_that_comes_too_late_is_in_no_checkpoint(tmp_path: Path) -> None:
    """A writer says that it cannot while the first one, which has heard enough, is at the commit."""
    partial = commits.begin(tmp_path / "a", SAVE)
    closing = commits.closing_path(partial)
    rank_parts.leave_failure(partial, 1, "too late")
    (partial / ".failed-00002.json").write_text("half of one")
    partial.rename(closing)
    with pytest.raises(FileNotFoundError):
        rank_parts.leave_failure(partial, 1, "later still")
    rank_parts.remove_words(closing)
    assert not list(closing.iterdir())
