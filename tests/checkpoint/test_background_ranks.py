"""Saves beside training on two real ranks: killed with or without their writers, the newest checkpoint is whole."""

import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tangram.checkpoint.store import commits
from tests.checkpoint.saving_beside import ROWS, whole
from tests.hardware.test_workers import gone, wait_until_gone

RANKS = 2


class Job:
    """Two ranks that do what they are told, together or one by one."""

    def __init__(self, folder: Path) -> None:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        self.runs = folder / "runs"
        self.ranks = [
            subprocess.Popen(
                [sys.executable, "-m", "tests.checkpoint.saving_beside", str(rank), str(RANKS), str(folder)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env=environment,
            )
            for rank in range(RANKS)
        ]

    def ask(self, rank: int, name: str, **arguments: Any) -> None:
        stream = self.ranks[rank].stdin
        assert stream is not None
        stream.write(json.dumps([name, arguments]) + "\n")
        stream.flush()

    def answer(self, rank: int) -> Any:
        stream = self.ranks[rank].stdout
        assert stream is not None
        return json.loads(stream.readline())

    def all(self, name: str, **arguments: Any) -> list[Any]:
        for rank in range(RANKS):
            self.ask(rank, name, **arguments)
        return [self.answer(rank) for rank in range(RANKS)]

    def one(self, rank: int, name: str, **arguments: Any) -> Any:
        self.ask(rank, name, **arguments)
        return self.answer(rank)

    def kill(self, *ranks: int) -> None:
        for rank in ranks:
            self.ranks[rank].kill()
            self.ranks[rank].wait()

    def end(self) -> None:
        self.kill(*range(RANKS))
        for process in self.ranks:
            for stream in (process.stdin, process.stdout):
                assert stream is not None
                stream.close()


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Job]:
    """A job that nobody kills."""
    job = Job(tmp_path_factory.mktemp("job"))
    try:
        job.all("begin", step=1)
        job.all("wait")
        yield job
        pids = job.all("pid")
        assert job.all("close") == [[], []]
        assert wait_until_gone(pids)
        assert [p.name for p in job.runs.iterdir() if p.name.startswith(".")] == []
    finally:
        job.end()


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    job = Job(tmp_path)
    yield job
    job.end()


def check(path: Path, step: int) -> None:
    """A checkpoint has the state of a step, bit for bit, each replica once."""
    manifest = commits.read_manifest(path)
    assert (manifest.step, manifest.objects) == (step, {"progress.step": step})
    first, second = (load_file(path / f"model-0000{rank}-of-00002.safetensors") for rank in (1, 2))
    half, width = ROWS // 2, whole(step)["cut"].shape[1]
    cut = torch.cat([first.pop(f"cut [0:{half} 0:{width}]"), second.pop(f"cut [{half}:{ROWS} 0:{width}]")])
    assert not set(first) & set(second)
    values = {"cut": cut, **first, **second}
    expected = whole(step)
    assert values.keys() == expected.keys()
    assert all(torch.equal(values[name], tensor) for name, tensor in expected.items())


def until_committed(runs: Path, step: int) -> Path:
    deadline = time.monotonic() + 90
    while not (found := [path for path, marker in commits.committed(runs) if marker.step == step]):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return found[0]


def test_two_ranks_agree(shared: Job):
    shared.all("begin", step=2)
    for said in shared.all("wait"):
        assert said == [[2, str(shared.runs / "step-00000002"), "", []]]
    check(shared.runs / "step-00000002", 2)


def test_a_writer_that_is_killed_costs_one_attempt(shared: Job):
    for step, rank in ((11, 0), (12, 1)):
        number = shared.one(rank, "stop")
        shared.all("begin", step=step)
        shared.one(rank, "handed_over")
        os.kill(number, signal.SIGKILL)
        said = shared.all("wait")
        path = shared.runs / f"step-000000{step}"
        assert [s[0][:3] for s in said] == [[step, str(path), ""]] * 2
        assert said[rank][0][3] == ["the process that writes ended (SIGKILL); a new one goes on"]
        check(path, step)


def test_a_full_disk_of_one_rank_is_reported_on_all(shared: Job):
    for rank in (0, 1):
        number = shared.one(rank, "pid")
        resource.prlimit(number, resource.RLIMIT_FSIZE, (2048, -1))
        shared.all("begin", step=20 + rank)
        said = shared.all("wait")
        assert said[0] == [[20 + rank, "", f"rank {rank} cannot write: File too large", []]]
        assert said[1][0][:2] == [20 + rank, ""]
        assert said[1][0][2] != ""
        resource.prlimit(number, resource.RLIMIT_FSIZE, (-1, -1))
        assert [p.name for p in shared.runs.iterdir() if f"step-000000{20 + rank}" in p.name] == []
        shared.all("begin", step=30 + rank)
        shared.all("wait")
        check(shared.runs / f"step-000000{30 + rank}", 30 + rank)


def test_where_no_folder_can_be_made_nobody_waits_for_one(shared: Job):
    aside = shared.runs.rename(shared.runs.with_name("aside"))
    shared.runs.write_text("")
    shared.all("begin", step=40)
    began = time.monotonic()
    for said in shared.all("wait"):
        assert said[0][:2] == [40, ""]
        assert said[0][2] == f'"{shared.runs}": File exists'
    assert time.monotonic() - began < 25, "the other rank waited to the limit"
    shared.runs.unlink()
    aside.rename(shared.runs)


def test_all_ranks_are_killed_when_the_writers_have_it(job: Job):
    job.all("begin", step=1)
    job.all("wait")
    pids = job.all("stop")
    job.all("begin", step=2)
    job.all("handed_over")
    job.kill(0, 1)
    assert commits.newest(job.runs) == job.runs / "step-00000001"
    for pid in pids:
        os.kill(pid, signal.SIGCONT)
    check(until_committed(job.runs, 2), 2)
    assert wait_until_gone(pids)
    assert sorted(p.name for p in job.runs.iterdir()) == ["step-00000001", "step-00000002"]


def test_a_rank_is_killed_with_its_writer(job: Job):
    job.all("settings", limit=3, retries=0)
    job.all("begin", step=1)
    job.all("wait")
    left, _ = job.all("pid")
    pid = job.one(1, "stop")
    job.all("begin", step=2)
    os.kill(pid, signal.SIGKILL)
    job.kill(1)
    deadline = time.monotonic() + 60
    while not (said := job.one(0, "poll")):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert said == [[2, "", "for 3 s nothing was heard of the writer of another rank", []]]
    assert [p.name for p in job.runs.iterdir()] == ["step-00000001"]
    check(job.runs / "step-00000001", 1)
    assert not gone(left)
    job.kill(0)
    assert wait_until_gone([left])
