"""What the ranks of the launcher's tests run."""

import atexit
import gc
import multiprocessing
import multiprocessing.util
import os
import signal
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from tangram.errors import UserError
from tangram.tracing.files.format import LOSS_NOT_FINITE
from tangram.training.run.launch import Rank


def a_tensor(rank: Rank, size: int) -> Tensor:
    """Something to hear, and a result with a tensor in it."""
    rank.emit("here")
    return torch.full((size,), rank.index)


def ready_to_give_way(rank: Rank, payload: None) -> tuple[int, int]:
    """How much sooner than others the kernel would kill this rank, and its writer, where memory runs out."""
    assert rank.spare is not None
    own, writer = (int(Path(f"/proc/{pid}/oom_score_adj").read_text()) for pid in ("self", rank.spare.pid))
    rank.spare.kill()
    return own, writer


def add_up(rank: Rank, payload: int) -> int:
    """Talk to the others, to the parent, and return a result."""
    rank.emit(f"rank {rank.index} is here")
    value = torch.tensor(payload + rank.index)
    dist.all_reduce(value)
    return int(value)


def count_frozen(rank: Rank, payload: None) -> tuple[int, bool]:
    """How many objects the garbage collector passes over, and whether it is on."""
    return gc.get_freeze_count(), gc.isenabled()


def keep_a_lock(rank: Rank, payload: None) -> None:
    """Make a lock that lives as long as the process."""
    globals()["kept"] = multiprocessing.get_context("spawn").Lock()


class MuteError(Exception):
    """Which cannot be told."""

    def __str__(self) -> str:
        raise KeyError("words")


def fail(rank: Rank, how: str) -> None:
    """Rank 1 fails; the others wait for it in a collective."""
    if rank.index == 1:
        if how == "raise":
            raise ValueError("the disk is on fire\nand more lines")
        if how == "bytes":  # of a name that is no text, and too many
            raise ValueError("\x1b[31mno text in caf\udce9.txt: " + 10_000 * "x")
        if how == "mute":
            raise MuteError
        if how == "user":
            raise UserError("mend your plan")
        if how == "exit":
            os._exit(7)
        if how == "abort":
            os.abort()
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def diverge(rank: Rank, payload: None) -> None:
    """The loss of rank 1 is not finite, and so is that of all: rank 0 is the first to say so."""
    rank.trace.step(3)
    if rank.index == 1:
        rank.trace.not_finite(LOSS_NOT_FINITE)
        time.sleep(0.1)
    raise FloatingPointError("step 3: the loss is nan")


def hang(rank: Rank, payload: Path) -> None:
    """Rank 1 fails while the others look at no collective and no signal."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    dist.barrier()
    if rank.index == 1:
        raise ValueError("first")
    time.sleep(600)


def lose_fork_server(rank: Rank, payload: None) -> None:
    """Rank 1 kills the process that ranks are forked from, and fails; the others sleep on."""
    rank.emit(os.getpid())
    dist.barrier()
    if rank.index == 1:
        os.kill(os.getppid(), signal.SIGKILL)
        raise ValueError("first")
    time.sleep(600)


def stop_fork_server(rank: Rank, how: str) -> None:
    """The process that ranks are forked from is stopped, and then the rank ends."""
    os.kill(os.getppid(), signal.SIGSTOP)
    if how == "ValueError":
        raise ValueError("first")
    os.kill(os.getpid(), signal.SIGKILL)


def die_after_much_was_told(rank: Rank, payload: None) -> None:
    """Rank 1 is killed, and rank 0 has told of more by then than its parent has heard."""
    if rank.index == 0:
        for number in range(9):
            rank.emit(number)
    dist.barrier()
    if rank.index == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(600)


def abort_at_exit(rank: Rank, payload: None) -> None:
    """The interpreter's own end would abort, as threads of torch make it do now and then."""
    print(f"rank {rank.index} prints", end="")
    atexit.register(os.abort)


def be_slow(rank: Rank, folder: Path) -> None:
    """Rank 0 is done a while after the others; every rank says when it was done, and when its process ended."""
    multiprocessing.util.Finalize(None, write_time, args=(folder / f"left{rank.index}",), exitpriority=1)
    if rank.index == 0:
        time.sleep(1)
    write_time(folder / f"done{rank.index}")


def write_time(path: Path) -> None:
    path.write_text(str(time.monotonic()))


def wait_for_ever(rank: Rank, payload: None) -> None:
    """Until somebody ends this process."""
    rank.emit("waiting")
    time.sleep(600)
