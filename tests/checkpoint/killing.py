"""Processes that kill themselves at a drawn moment of a save, a commit or a removal; forked, so that many are cheap."""

import contextlib
import os
import random
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from tangram.checkpoint.inspect import verify
from tangram.checkpoint.loading.load import load
from tangram.checkpoint.saving import async_saver, writer_process
from tangram.checkpoint.saving.async_saver import AsyncSaver, Settings
from tangram.checkpoint.saving.rank_parts import About
from tangram.checkpoint.saving.save import save
from tangram.checkpoint.state.describe import describe
from tangram.checkpoint.state.entries import LocalPart
from tangram.checkpoint.store import commits, retention
from tangram.hardware.host.channel import Channel
from tangram.hardware.host.workers import Detached
from tangram.relayout.exchange.peers import Peers
from tests.checkpoint.stored import random_tensor, same

RANKS = 2
ROWS = 6
OPERATIONS = {
    *("open", "mkdir", "rename", "unlink", "rmdir", "write", "pwrite", "fsync", "ftruncate", "flush", "close"),
    *("scandir", "listdir", "truncate"),
}
"""Functions of the operating system, and methods of files, by which a folder changes or is looked at."""


def whole(step: int) -> dict[str, Tensor]:
    """The model of a step."""
    return {
        "cut": random_tensor((ROWS, 5), torch.float32, 10 * step),
        "half": random_tensor((3, 3), torch.bfloat16, 10 * step + 1),
        "none": torch.empty(0, 2),
    }


def save_step(runs: Path, step: int) -> None:
    """One process saves the state of a step."""
    save({"model": whole(step), "progress": {"step": step}}, runs / f"step-{step:08d}", about=About(step))


def check(runs: Path, *allowed: int) -> int:
    """The newest checkpoint is of one of these steps, whole, sound and bit for bit; the step.

    No checkpoint is seen half: each folder with a name is whole and sound.
    """
    path = commits.newest(runs)
    assert path is not None
    named = sorted(one for one in runs.iterdir() if not one.name.startswith("."))
    assert named == sorted(one for one, _ in commits.committed(runs))
    wrong = [finding for one in named for finding in verify.verify(one).findings]
    assert not wrong, wrong
    found: dict[str, Any] = {"model": {n: torch.full_like(t, 1) for n, t in whole(0).items()}, "progress": {"step": 0}}
    load(found, path)
    step = int(found["progress"]["step"])
    assert step in allowed, f"{path} has the state of step {step}"
    assert all(same(found["model"][name], tensor) for name, tensor in whole(step).items())
    return step


def go_on(runs: Path, step: int) -> None:
    """What the dead left disturbs neither the next save nor anything else, and can be swept away."""
    save_step(runs, step)
    check(runs, step)
    commits.sweep(runs)
    assert not list(runs.glob(".*"))
    check(runs, step)


# ---------------------------------------------------------------- dying


def die_at(number: int) -> None:
    """Kill this process before its operation of this number, counted over all threads."""
    left = number

    def hook(_: FrameType, event: str, function: Any) -> None:
        nonlocal left
        if event == "c_call" and getattr(function, "__name__", "") in OPERATIONS:
            left -= 1
            if left < 0:
                os.kill(os.getpid(), signal.SIGKILL)

    threading.setprofile(hook)
    sys.setprofile(hook)


def die_after(seconds: float) -> None:
    """Have the kernel end this process in so many seconds, whatever it is at then."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, max(seconds, 1e-6))


def forked(act: Callable[[], None]) -> int:
    """A process that does this and ends; its number."""
    # What DTensor has cached for this thread may have the last word on a group of an earlier test: a process that forks
    # in another thread ends this thread's memory, and waits for ever for threads of gloo that it does not have.
    torch._C._clear_DTensor_sharding_propagator_cache()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of threads beside a fork: new imports would take longest
        pid = os.fork()
    if pid == 0:
        code = 1
        with contextlib.suppress(Exception):
            act()
            code = 0
        os._exit(code)
    return pid


def killed(pid: int) -> bool:
    """Wait for a process; whether a signal ended it."""
    _, status = os.waitpid(pid, 0)
    return os.WIFSIGNALED(status)


# ---------------------------------------------------------------- one process


def save_and_prune(runs: Path, step: int, die: Callable[[], None] = lambda: None) -> None:
    """The next save, after which only the newest stays; `die` says when this process does."""
    die()
    save_step(runs, step)
    retention.prune(retention.plan(runs, retention.Policy(last=1)))


# ---------------------------------------------------------------- two ranks and their writers


class Forked:
    """A process as `subprocess` has it."""

    returncode: int | None = None

    def __init__(self, pid: int) -> None:
        self.pid = pid

    def poll(self) -> int | None:
        """How it ended."""
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def kill(self) -> None:
        """End it."""
        os.kill(self.pid, signal.SIGKILL)

    def wait(self, limit: float) -> int:
        """Wait for its end."""
        end = time.monotonic() + limit
        while self.poll() is None:
            if time.monotonic() > end:
                raise subprocess.TimeoutExpired("writer", limit)
            time.sleep(0.002)
        return cast(int, self.returncode)


def start_forked(moment: int | None) -> Detached:
    """The process that writes, without its imports; it dies at an operation of this number."""
    here, there = socket.socketpair()

    def act() -> None:
        here.close()
        if moment is not None:
            die_at(moment)
        writer_process.serve(Channel(there))

    pid = forked(act)
    there.close()
    return Detached(cast("subprocess.Popen[bytes]", Forked(pid)), Channel(here))


class Doom:
    """Who dies, and when: drawn by a seed."""

    def __init__(self, seed: int) -> None:
        draw = random.Random(seed)
        ranks = draw.choice([(), (), (0,), (1,), (0, 1)])
        writers = draw.choice([(0,), (1,), (0, 1)] if not ranks else [(), (), (0,), (1,), (0, 1)])
        together = draw.random() < 0.5
        delays = [draw.uniform(0, 0.12) for _ in range(RANKS)]
        self.delays = {rank: delays[0 if together else rank] for rank in ranks}
        self.moments = {rank: draw.randrange(50) for rank in writers}

    def __str__(self) -> str:
        return f"ranks {self.delays}, writers {self.moments}"


def rank_main(rank: int, folder: Path, doom: Doom) -> None:
    """One rank: save step 2 beside nothing at all, and wait for it."""
    processes = [start_forked(doom.moments.get(rank))]

    def start(*_: object) -> Detached:
        return processes.pop() if processes else start_forked(None)

    async_saver.start_detached = start
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(str(folder / "store"), RANKS), rank=rank, world_size=RANKS)
    peers = Peers(dist.group.WORLD)
    saver = AsyncSaver(folder / "runs", peers, Settings(retries=1, pause=0.01, limit=1.0, keep=("last=1",)))
    model = whole(2)
    parts = {**model, "cut": LocalPart(model["cut"].chunk(RANKS)[rank], (ROWS, 5), "a/tp b", f"tp={RANKS}", rank)}
    described = describe({"model": parts, "progress": {"step": 2}}, peers)
    saver.prepare(described.entries)
    peers.wait()
    if rank in doom.delays:
        die_after(doom.delays[rank])
    saver.save(described, About(2))
    saver.close()


def two_ranks(folder: Path, doom: Doom) -> None:
    """A job of two ranks; returns when all of its processes, the writers too, have ended."""
    read, write = os.pipe()
    pids = [forked(lambda rank=rank: rank_main(rank, folder, doom)) for rank in range(RANKS)]
    os.close(write)  # every process of the job has it open until its end
    for pid in pids:
        end = time.monotonic() + 30
        while os.waitpid(pid, os.WNOHANG)[0] == 0:
            if time.monotonic() > end:
                os.kill(pid, signal.SIGKILL)
            time.sleep(0.005)
    ended = select.select([read], [], [], 60)[0]
    os.close(read)
    assert ended, "a writer goes on for ever"
