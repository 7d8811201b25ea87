"""The memory that a save or a load takes beyond the state, at its peak, in processes that do nothing else."""

import shutil
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from bench._checkpoint import disk, peers
from bench._checkpoint.state import fill, make, wrong
from tangram.relayout.exchange.peers import Peers
from tangram.training.run.launch import Rank

SMALL = 2e6


@dataclass(frozen=True)
class Task:
    """What fresh ranks measure."""

    folder: str
    name: str
    nbytes: float
    act: str
    """save or load; the second needs what the first has left."""


def measure(rank: Rank, task: Task) -> int:
    """The bytes, of the rank that takes most. Pages that a peer maps from a file count: the process holds them."""
    mesh = init_device_mesh("cpu", (rank.world,), mesh_dim_names=("dp",))
    (contender,) = peers.contenders([task.name])
    words = Peers(dist.group.WORLD)
    warm, path = Path(task.folder, f"warm-{task.name}"), Path(task.folder, f"memory-{task.name}")
    small = make(SMALL, mesh, "rows")
    contender.save(small, warm)  # so that libraries that are imported on first use do not count
    contender.load(small, warm)
    words.wait()
    if words.index == 0:
        shutil.rmtree(warm)
    state = make(task.nbytes, mesh, "rows")
    if task.act == "save":
        fill(state)
    elif words.index == 0:
        disk.evict(path)
    words.wait()
    peak = disk.Peak()
    if task.act == "save":
        contender.save(state, path)
        extra = peak.extra()
    else:
        found = contender.load(state, path)
        extra = peak.extra()
        if bad := wrong(found):
            raise RuntimeError(f"{task.name} loaded other values of {bad[0]} than were saved")
    return max(words.all_words(extra))
