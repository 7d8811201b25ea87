"""Ranks that torchrun or a Slurm script has started: they meet, agree, tell one error once, and stop when asked."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch.distributed as dist

from tangram.cli import main
from tangram.errors import UserError
from tangram.tracing.show.report import report
from tangram.training.run.environment import place, speaks, started_by_torchrun
from tangram.training.run.signals import SAME_SECONDS
from tangram.training.run.torchrun import agree, on_one, together

SOON = 60.0
MODULE = "tests.training.started"
RANK = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511"}


def environment(**more: str) -> dict[str, str]:
    return os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path), **more}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def start_ranks(scenes: str, *more: str) -> list[subprocess.Popen[str]]:
    """Two ranks, started as a Slurm script would."""
    port = str(free_port())
    return [
        subprocess.Popen(
            [sys.executable, "-m", MODULE, scenes, *more],
            env=environment(**RANK | {"RANK": str(rank), "LOCAL_RANK": str(rank), "MASTER_PORT": port}),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]


def ended(ranks: list[subprocess.Popen[str]]) -> tuple[list[int], list[str], list[str]]:
    """Exit codes, and what was printed on stdout and on stderr; nothing is left running, however it goes."""
    try:
        said = [rank.communicate(timeout=SOON) for rank in ranks]
    finally:
        for rank in ranks:
            if rank.poll() is None:
                rank.terminate()
                rank.communicate()
    return [rank.returncode for rank in ranks], [out for out, _ in said], [err for _, err in said]


def torchrun(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", *arguments],
        env=environment(OMP_NUM_THREADS="1"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_two_ranks_of_torchrun_do_all_that_a_job_needs() -> None:
    started = torchrun("--standalone", "--nproc-per-node=2", "-m", MODULE, "work")
    codes, (out,), err = ended([started])
    assert codes == [0], err
    lines = out.splitlines()
    assert [lines.count(line) for line in ("once", "once per node", "event: rank 0 emits", "proved")] == [1] * 4
    mistake = "the plan's mesh has 3 ranks, but 2 were started (WORLD_SIZE): start 3, or change the mesh"
    for rank in range(2):
        assert f"rank {rank} | of rank 0 | 0 | 21 | {mistake}" in lines
    assert len(lines) == 6
    assert lines.index("proved") > max(lines.index(line) for line in lines if line.startswith("rank"))


def test_a_mistake_is_told_once() -> None:
    codes, out, err = ended(start_ranks("mistaken,mistaken_once,mistaken_elsewhere,other_mesh"))
    assert codes == [2, 2]
    assert out == ["codes 2 2 2 2\n"] * 2
    assert sorted("".join(err).splitlines()) == [
        "error: mend your plan",
        "error: mend your plan, rank 0",
        "error: the plan's mesh has 3 ranks, but 2 were started (WORLD_SIZE): start 3, or change the mesh",
        "error: where is the text, rank 1",
    ]


def test_the_rank_that_fails_first_is_named() -> None:
    codes, out, err = ended(start_ranks("crash"))
    assert codes == [1, 1]
    assert out == ["", ""]
    assert err == ["", "error: rank 1 of 2 ended the job: ValueError: the disk is on fire\n"]


def test_of_ranks_that_stop_at_a_loss_that_is_none_the_one_that_has_it_is_named(tmp_path: Path) -> None:
    codes, _, err = ended(start_ranks("astray", str(tmp_path / "trace")))
    assert codes == [1, 1]
    assert err == [
        "error: rank 0 of 2 ended the job: FloatingPointError: step 3: the loss is nan; "
        "rank 1: the own part of the loss of step 3 is not finite\n",
        "",
    ]


@pytest.mark.parametrize(
    ("scene", "code", "said"),
    [
        (
            "killed_in_save",
            2,
            'error: the checkpoint "{}" was not written: another rank has ended, or cannot be reached (',
        ),
        ("killed_in_step", 1, "error: rank 0 of 2 ended the job: another rank has ended, or cannot be reached ("),
    ],
)
def test_a_rank_that_is_killed_is_missed_in_a_sentence(scene: str, code: int, said: str, tmp_path: Path) -> None:
    codes, _, (err, _) = ended(start_ranks(scene, str(tmp_path / "saved")))
    assert codes == [code, -signal.SIGKILL]
    assert err.splitlines()[-1].startswith(said.format(tmp_path / "saved"))
    assert not (tmp_path / "saved").exists()


@pytest.mark.slow
def test_a_job_of_torchrun_that_hangs_is_ended_and_says_for_whom(tmp_path: Path) -> None:
    started = torchrun("--standalone", "--nproc-per-node=2", "-m", MODULE, "stuck", str(tmp_path / "trace"))
    codes, _, (err,) = ended([started])
    assert codes == [1]
    said = [line for line in err.splitlines() if line.startswith("error: ")]
    assert len(said) == 1, err
    assert said[0].startswith("error: rank 1 of 2 ended the job: no rank has moved for "), said
    assert "rank 1 has not joined the others in barrier over dp" in said[0]
    assert "forward of step 3 at training/started.py:" in said[0]
    found = report(tmp_path / "trace")
    assert [(one.kind, one.ranks) for one in found.findings] == [("absent", (1,))]
    assert found.state.startswith("ended badly: rank 1 of 2 ended the job: no rank has moved")


def process_ids(ranks: list[subprocess.Popen[str]]) -> None:
    """Read up to where the ranks are in their steps."""
    for rank in ranks:
        assert rank.stdout is not None
        assert rank.stdout.readline().startswith("pid")


def test_a_signal_to_one_rank_stops_all_after_their_step() -> None:
    ranks = start_ranks("stop")
    process_ids(ranks)
    os.kill(ranks[0].pid, signal.SIGTERM)
    codes, (first, second), err = ended(ranks)
    note, stopped = first.splitlines()
    assert note == "event: SIGTERM: stopping after this step (again to stop at once)"
    assert second.splitlines() == [stopped]
    assert (codes, err) == ([0, 0], ["", ""])


def test_the_second_signal_ends_a_rank_at_once() -> None:
    ranks = start_ranks("stubborn")
    process_ids(ranks)
    for rank in ranks:
        rank.send_signal(signal.SIGINT)
    time.sleep(SAME_SECONDS)
    assert [rank.poll() for rank in ranks] == [None, None]
    while any(rank.poll() is None for rank in ranks):  # on a busy machine the first one may have just been heard
        for rank in ranks:
            rank.send_signal(signal.SIGINT)
        time.sleep(SAME_SECONDS)
    assert ended(ranks) == ([130, 130], ["", ""], ["", ""])


def test_ranks_agree_on_a_word_in_a_store_that_a_dead_attempt_has_used() -> None:
    store = dist.HashStore()
    store.set("tangram/hello/1", "of the dead")
    words: list[str] = []

    def come(rank: int) -> None:
        words.append(agree(store, rank, 3, SOON))

    for attempt in range(2):
        ranks = [threading.Thread(target=come, args=(rank,)) for rank in (0, 2, 1)]
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join()
        assert len(words) == 3 * (attempt + 1)
        assert len(set(words)) == attempt + 1


@pytest.mark.parametrize(
    ("rank", "message"),
    [
        (0, r"^of 2 ranks only 1 have come within 0\.05 s: were all of them started\?$"),
        (1, r"^rank 1 of 2 has waited 0\.05 s for rank 0: were all ranks started\?$"),
    ],
)
def test_a_rank_that_never_comes_is_missed(rank: int, message: str) -> None:
    store = dist.HashStore()
    with pytest.raises(UserError, match=message):
        agree(store, rank, 2, 0.05)


@pytest.fixture
def as_rank(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name, value in RANK.items():
        monkeypatch.setenv(name, value)
    return monkeypatch


def test_nobody_else_has_started_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in RANK:
        monkeypatch.delenv(name, raising=False)
    assert not started_by_torchrun()
    assert speaks()
    with together() as meeting:
        assert meeting is None
        assert on_one(meeting, lambda: 7) == 7


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"RANK": "x"}, 'the environment variable RANK is "x": it must be a whole number'),
        ({"RANK": "2"}, "RANK is 2 and WORLD_SIZE 2: ranks count from 0 to one less than WORLD_SIZE"),
        ({"MASTER_PORT": ""}, "MASTER_PORT is not set: start the ranks with torchrun, or set what torchrun sets"),
        ({"LOCAL_WORLD_SIZE": "-1"}, 'the environment variable LOCAL_WORLD_SIZE is "-1": it must be a whole number'),
    ],
)
def test_variables_that_make_no_place(change: Mapping[str, str], message: str, as_rank: pytest.MonkeyPatch) -> None:
    for name, value in change.items():
        as_rank.setenv(name, value)
    assert started_by_torchrun()
    with pytest.raises(UserError) as caught:
        place()
    assert str(caught.value) == message


@pytest.mark.parametrize(("rank", "said"), [("0", 1), ("1", 0)])
def test_an_unknown_option_is_told_by_rank_0(
    rank: str, said: int, as_rank: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    as_rank.setenv("RANK", rank)
    codes: list[int] = []
    as_rank.setattr(os, "_exit", codes.append)  # the only thing here that would end pytest, too
    main(["doctor", "--nonsense"])
    assert codes == [2]
    assert capsys.readouterr().err.count("error: No such option") == said


@pytest.mark.slow
@pytest.mark.parametrize("agents", [1, 2])
def test_a_job_that_torchrun_restarts_in_place_goes_on(agents: int, tmp_path: Path) -> None:
    """On one node, and on two, of which only one counts the restart."""
    port = free_port()
    shared = (
        "--max-restarts=1", f"--nproc-per-node={2 // agents}", f"--nnodes={agents}", "--rdzv-backend=c10d",
        f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-conf=last_call_timeout=1", "-m", MODULE, "restart",
        str(tmp_path / "died"),
    )  # fmt: skip
    started = [torchrun(*shared) for _ in range(agents)]
    codes, out, err = ended(started)
    assert codes == [0] * agents, err
    lines = "".join(out).splitlines()
    assert lines.count("total 21") == 2
    assert sorted(line for line in lines if line.startswith("restarts")) == [f"restarts {2 - agents}", "restarts 1"]
    assert (tmp_path / "died").exists()


@pytest.mark.slow
def test_two_agents_make_one_job() -> None:
    port = free_port()
    shared = ("--nproc-per-node=1", "--nnodes=2", "--master-addr=127.0.0.1", f"--master-port={port}")
    started = [torchrun(*shared, f"--node-rank={node}", "-m", MODULE, "work") for node in range(2)]
    codes, out, err = ended(started)
    assert codes == [0, 0], err
    lines = "".join(out).splitlines()
    assert [lines.count(line) for line in ("once", "once per node", "event: rank 0 emits", "proved")] == [1, 2, 1, 1]
    assert [sum(f"rank {rank} | of rank 0 | {rank} | 21" in line for line in lines) for rank in range(2)] == [1, 1]
