"""How long training is blocked by saves beside it: a measurement, not a test.

    python -m tests.checkpoint.blocked [FOLDER] [GB a rank] [saves]

Two ranks, 330 tensors in FSDP-style shards, half a second of matmuls between each save and its fence. `slower`
is what these products lose to the copy. The load is printed too: on a busy machine the figures are the others'.
"""

import os
import shutil
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from tangram.checkpoint.saving.async_saver import AsyncSaver, Settings
from tangram.checkpoint.saving.rank_parts import About
from tangram.checkpoint.state.describe import describe
from tangram.relayout.exchange.peers import Peers

TENSORS, COLUMNS, COMPUTE = 110, 4096, 0.5


def main(rank: int, folder: str, gigabytes: float, saves: int) -> None:
    """One rank."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", 2), rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    rows = int(gigabytes * 1e9 / 3 / TENSORS / COLUMNS / 4)

    def shard() -> Tensor:
        return DTensor.from_local(torch.randn(rows, COLUMNS), mesh, [Shard(0)], run_check=False)

    names = [f"layers.{i}.weight" for i in range(TENSORS)]
    moments = {f"{name}.{kind}": shard() for name in names for kind in ("exp_avg", "exp_avg_sq")}
    peers = Peers(dist.group.WORLD)
    saver = AsyncSaver(Path(folder) / "runs", peers, Settings(keep=("last=1",)))
    began = time.monotonic()
    state = describe({"model": {name: shard() for name in names}, "optim": moments}, peers)
    described = time.monotonic()
    saver.prepare(state.entries)
    prepared = time.monotonic()
    time.sleep(5.0)  # step 1 begins when the process has its imports behind it
    left, right = torch.randn(300, 300), torch.randn(300, 300)

    def compute() -> int:
        count, end = 0, time.monotonic() + COMPUTE
        while time.monotonic() < end:
            torch.mm(left, right)
            count += 1
        return count

    lines: list[str] = []
    for step in range(saves):
        dist.barrier()
        alone = compute()
        dist.barrier()
        start = time.monotonic()
        saver.save(state, About(step))
        saved = time.monotonic()
        beside = compute()
        fence = time.monotonic()
        saver.fence()
        free = time.monotonic()
        saver.wait()
        (result,) = saver.poll()
        lines.append(
            f"rank {rank} save {step}: blocked {1e3 * result.blocked:6.1f} ms = save {1e3 * (saved - start):5.1f}"
            f" + fence {1e3 * (free - fence):5.1f}; slower {alone / beside - 1:4.0%}; durable after"
            f" {result.seconds:.2f} s ({result.nbytes / 1e9:.2f} GB); load {os.getloadavg()[0]:.1f} {result.reason}"
        )
    saver.close()
    times = f"described in {described - began:.2f} s, prepared in {prepared - described:.2f} s"
    print(f"rank {rank}: {times}", *lines, sep="\n", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    arguments = [*sys.argv[1:], *["", "1.0", "5"][len(sys.argv) - 1 :]]
    place = tempfile.mkdtemp(dir=arguments[0] or None)
    try:
        mp.spawn(main, (place, float(arguments[1]), int(arguments[2])), nprocs=2)
    finally:
        shutil.rmtree(place)
