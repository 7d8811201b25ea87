"""Ranks start, talk and end together; whatever ends one ends all, soon, with its name."""

import itertools
import multiprocessing
import multiprocessing.forkserver
import os
import re
import signal
import subprocess
import sys
import threading
import time
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, cast

import pytest

from tangram.errors import UserError
from tangram.tracing.settings import TraceSettings
from tangram.training.observe.events import StopRequested
from tangram.training.run import fork_server, launch
from tangram.training.run.environment import refuse_too_many
from tangram.training.run.launch import RankError, run_ranks
from tests.training.launch_tasks import (
    a_tensor,
    abort_at_exit,
    add_up,
    be_slow,
    count_frozen,
    die_after_much_was_told,
    diverge,
    fail,
    hang,
    lose_fork_server,
    ready_to_give_way,
    stop_fork_server,
)

SOON = 30.0  # seconds, of which nearly all is the start of two processes on a busy machine


def test_results_in_rank_order_and_events() -> None:
    events: list[object] = []
    assert run_ranks(add_up, 10, world=2, on_event=events.append, device="cpu") == [21, 21]
    assert sorted(map(str, events)) == ["rank 0 is here", "rank 1 is here"]
    assert not multiprocessing.active_children()


def test_what_ranks_are_forked_from_is_not_collected_anew_by_each() -> None:
    ((frozen, collects),) = run_ranks(count_frozen, None, world=1, on_event=print, device="cpu")
    assert frozen > 100_000  # torch alone
    assert collects


@pytest.mark.skipif(not Path("/proc/self/oom_score_adj").exists(), reason="Linux has it")
def test_where_memory_runs_out_ranks_are_killed_before_their_launcher() -> None:
    """Of small models the launcher is the largest process, and the kernel takes that: a run ended with it."""
    mine = int(Path("/proc/self/oom_score_adj").read_text())
    own, writer = run_ranks(ready_to_give_way, None, world=1, on_event=print, device="cpu", spare=True)[0]
    assert (own, writer) == (min(1000, mine + 300), mine)


def test_tensors_of_ranks_that_have_ended_meanwhile_are_there() -> None:
    """A parent that is slow to listen, as on a busy machine: each rank had "exited with code 0"."""

    def wait_for_the_ranks(_: object) -> None:
        end = time.monotonic() + SOON
        while multiprocessing.active_children() and time.monotonic() < end:
            time.sleep(0.05)

    first, second = run_ranks(a_tensor, 3, world=2, on_event=wait_for_the_ranks, device="cpu")
    assert (first.tolist(), second.tolist()) == ([0, 0, 0], [1, 1, 1])


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("raise", "rank 1 of 2 ended the job: ValueError: the disk is on fire"),
        ("bytes", f"rank 1 of 2 ended the job: ValueError: �[31mno text in caf�.txt: {1962 * 'x'}..."),
        ("mute", "rank 1 of 2 ended the job: MuteError"),
        ("exit", "rank 1 of 2 ended the job: exited with code 7 without an error message"),
        ("kill", "rank 1 of 2 ended the job: killed by signal 9, as the kernel does when memory runs out"),
        ("abort", "rank 1 of 2 ended the job: killed by signal 6"),
    ],
)
def test_a_rank_that_dies_ends_the_job(how: str, message: str, tmp_path: Path) -> None:
    started = time.monotonic()
    with pytest.raises(RankError) as caught:
        run_ranks(fail, how, world=2, on_event=print, device="cpu")
    assert str(caught.value) == message
    assert ("and more lines" in caught.value.details) == (how == "raise")
    assert ("Error" in caught.value.details) == (how in ("raise", "bytes", "mute"))
    (tmp_path / "failure.txt").write_text(f"{caught.value}{caught.value.details}", encoding="utf-8")
    assert time.monotonic() - started < SOON
    assert not multiprocessing.active_children()


def test_a_rank_that_is_killed_as_memory_ran_out_is_told_from_others(monkeypatch: pytest.MonkeyPatch) -> None:
    kills = itertools.chain([3], itertools.repeat(4))  # as the job begins, and as ranks have gone
    monkeypatch.setattr(launch, "memory_kills", lambda: next(kills))
    with pytest.raises(RankError, match=r"rank 1 of 2 .*: killed by the kernel, as memory ran out: lower") as caught:
        run_ranks(fail, "kill", world=2, on_event=print, device="cpu")
    assert caught.value.how == "memory"


def test_of_ranks_that_stop_at_a_loss_that_is_none_the_one_that_has_it_is_named(tmp_path: Path) -> None:
    with pytest.raises(RankError, match=r"step 3: the loss is nan; rank 1: the own part of the loss of step 3"):
        run_ranks(diverge, None, world=3, on_event=print, device="cpu", trace=TraceSettings(tmp_path))


def test_a_rank_that_is_done_leaves_without_the_interpreters_own_end(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    codes: list[int | None] = []
    joined = BaseProcess.join

    def join(process: BaseProcess, timeout: float | None = None) -> None:
        joined(process, timeout)
        codes.append(process.exitcode)

    monkeypatch.setattr(BaseProcess, "join", join)
    run_ranks(abort_at_exit, None, world=2, on_event=print, device="cpu")
    assert set(codes) == {0}
    out, err = capfd.readouterr()
    assert sorted(out.split("rank ")) == ["", "0 prints", "1 prints"]
    assert err == ""


def test_no_rank_leaves_while_another_is_at_work(tmp_path: Path) -> None:
    run_ranks(be_slow, tmp_path, world=2, on_event=print, device="cpu")
    done, left = ([float((tmp_path / f"{what}{rank}").read_text()) for rank in range(2)] for what in ("done", "left"))
    assert done[1] < done[0] <= min(left)


@pytest.mark.parametrize(("cores", "threads"), [(1.5, 1), (8.0, 4), (0.5, 1)])
def test_ranks_share_the_cores_that_they_may_use(cores: float, threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "usable_cores", lambda: cores)
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    assert launch.threads_of_a_rank(2) == threads


def test_a_users_mistake_on_a_rank_stays_one() -> None:
    with pytest.raises(UserError, match=r"^mend your plan$"):
        run_ranks(fail, "user", world=2, on_event=print, device="cpu")


def test_a_rank_that_will_not_stop_is_killed(tmp_path: Path) -> None:
    started = time.monotonic()
    with pytest.raises(RankError, match="rank 1 of 2 ended the job: ValueError: first"):
        run_ranks(hang, tmp_path, world=2, on_event=print, device="cpu")
    assert time.monotonic() - started < SOON
    assert not multiprocessing.active_children()


def test_a_rank_that_the_kernel_does_not_end_is_named_and_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As one that waits for a device: the launcher waited for it for ever, without a word."""
    kill = os.kill

    def in_vain(pid: int, number: int) -> None:
        if number != signal.SIGKILL:
            kill(pid, number)

    monkeypatch.setattr(fork_server, "ENDS_SECONDS", 0.5)
    monkeypatch.setattr(os, "kill", in_vain)
    with pytest.raises(UserError, match="rank 1 of 2 ended the job: ValueError: first; the process ") as no:
        run_ranks(hang, tmp_path, world=2, on_event=print, device="cpu")
    found = re.search(r"process (\d+) of rank 0 cannot be ended: it waits for a device or a file system", str(no.value))
    assert found
    assert not multiprocessing.active_children(), "nor does the end of this process wait for it"
    assert _runs(found[1])
    kill(int(found[1]), signal.SIGKILL)


def _runs(pid: str) -> bool:
    """Whether a process does; one that has ended is there until its parent asks, which in containers nobody may do."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_ranks_whose_fork_server_was_killed_are_ended_all_the_same() -> None:
    """Their parent takes them for dead, and they are not."""
    ranks: list[str] = []
    with pytest.raises(RankError, match="rank 1 of 2 ended the job: ValueError: first"):
        run_ranks(lose_fork_server, None, world=2, on_event=lambda event: ranks.append(str(event)), device="cpu")
    assert len(ranks) == 2
    deadline = time.monotonic() + SOON
    while any(map(_runs, ranks)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert [rank for rank in ranks if _runs(rank)] == []
    assert run_ranks(add_up, 10, world=2, on_event=print, device="cpu") == [21, 21]  # another fork server is started


def test_who_is_asked_to_stop_as_a_rank_was_just_lost_says_so() -> None:
    """It is no longer passed on to ranks, and nobody knew of it: other ranks were started and trained on."""
    ranks: list[int] = []
    seen: list[object] = []

    def hear(event: object) -> None:
        seen.append(event)
        if event == 0:
            while Path(f"/proc/{ranks[1]}").exists():  # until its last thread has ended, and with it its pipe
                time.sleep(0.01)
        if event == 8:
            signal.raise_signal(signal.SIGTERM)

    with pytest.raises(RankError, match="rank 1 of 2 ended the job: killed"):
        run_ranks(die_after_much_was_told, None, world=2, on_event=hear, device="cpu", on_start=ranks.extend)
    assert [type(event) for event in seen] == [int] * 9 + [StopRequested]


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere ranks are not forked")
@pytest.mark.parametrize("how", ["killed", "ValueError"])
def test_a_fork_server_that_is_stopped_holds_nobody_up(how: str) -> None:
    """As of Ctrl-Z where the launcher alone is continued: it waited for ever, and heard no signal meanwhile."""
    assert run_ranks(add_up, 10, world=1, on_event=print, device="cpu") == [10]
    server: int = cast(Any, multiprocessing.forkserver)._forkserver._forkserver_pid
    late = threading.Timer(SOON, os.kill, (server, signal.SIGCONT))
    late.start()
    with pytest.raises(RankError, match=f"rank 0 of 1 ended the job: {how}"):
        run_ranks(stop_fork_server, how, world=1, on_event=print, device="cpu")
    os.kill(server, signal.SIGSTOP)
    assert run_ranks(add_up, 10, world=1, on_event=print, device="cpu") == [10]
    assert not late.finished.is_set(), "nobody else has woken it"
    late.cancel()


def test_a_killed_parent_leaves_no_orphan() -> None:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    command = [sys.executable, "-m", "tests.training.orphans"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment, text=True) as parent:
        assert parent.stdout is not None
        assert [parent.stdout.readline() for _ in range(2)] == ["waiting\n"] * 2
        parent.kill()
        # The ranks hold the other end of this pipe: it ends when the last of them has ended.
        output, _ = parent.communicate(timeout=10)
        assert output == ""


@pytest.mark.parametrize("when", ["before", "meanwhile"])
def test_a_rank_that_starts_as_its_launcher_is_killed_does_not_wait_for_a_folder_that_is_gone(
    when: str, tmp_path: Path
) -> None:
    """The ranks remove it, and then end. torch's store looked for its file for five minutes, in one call."""
    code = (
        "import shutil, sys; import torch.distributed as dist; from pathlib import Path\n"
        "from tangram.training.run import fork_server, launch\n"
        "from tangram.training.run.environment import Among\n"
        "store, name = Path(sys.argv[1]), fork_server.lasting_name\n"
        "def lose(file):\n"
        "    shutil.rmtree(file.parent)\n"
        "    return found\n"
        "if sys.argv[2] == 'meanwhile':\n"
        "    found = name(store)\n"
        "    launch.lasting_name = lose\n"
        "else:\n"
        "    shutil.rmtree(store.parent)\n"
        "start = launch._Start(fork_server.Inherited(), 0, Among(1), 'cpu', store, False, None)\n"
        "print(launch._store(start).add('here', 1))\n"
    )
    (folder := tmp_path / "folder").mkdir()
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    command = [sys.executable, "-c", code, str(folder / "store"), when]
    done = subprocess.run(command, capture_output=True, env=environment, text=True, timeout=60)
    if when == "before":
        assert done.stderr.splitlines()[-1].startswith("FileNotFoundError")
    elif sys.platform == "linux":
        assert done.stdout == "1\n"


def test_a_mesh_that_no_machine_holds_is_refused() -> None:
    refuse_too_many(256)
    with pytest.raises(UserError, match="there are 2,000,000 ranks, but this version starts at most 256"):
        refuse_too_many(2_000_000)


def test_what_a_rank_leaves_open_is_no_noise(tmp_path: Path) -> None:
    """A lock that a library makes in a rank, as torch's compiler does, is given back: else Python warns of a leak."""
    program = tmp_path / "program.py"
    program.write_text(
        "from tests.training.launch_tasks import keep_a_lock\n"
        "from tangram.training.run.launch import run_ranks\n"
        "if __name__ == '__main__':\n"
        "    run_ranks(keep_a_lock, None, world=1, on_event=print, device='cpu')\n"
    )
    root = Path(__file__).parents[2]
    where = {**os.environ, "PYTHONPATH": os.pathsep.join([str(root), str(root / "src")])}
    ran = subprocess.run([sys.executable, program], capture_output=True, text=True, check=True, env=where)
    assert (ran.stdout, ran.stderr) == ("", "")
