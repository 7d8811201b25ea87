"""Plain PyTorch with Tangram's checkpoints: saved beside training, verified when read, loaded into any number of ranks.

torchrun --nproc-per-node 2 examples/checkpoint_plain.py runs/plain      (start it again, with any number of ranks)
"""

# ruff: noqa: N806  a tensor carries its dims in its name

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from tangram.checkpoint import About, AsyncSaver, Settings, describe, load, newest
from tangram.relayout import Peers


def main(folder: Path, steps: int = 40) -> None:
    dist.init_process_group("gloo")
    group = dist.new_group(backend="gloo")  # of its own: what saves talks beside what trains
    assert isinstance(group, dist.ProcessGroup)
    peers = Peers(group)

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
    fully_shard(model)
    optim = torch.optim.AdamW(model.parameters(), lr=1e-3)
    progress = {"step": 0}
    state = {"model": model, "optim": optim, "progress": progress}

    if last := newest(folder):
        load(state, last, group=peers.group)
    saver = AsyncSaver(folder, peers, Settings(keep=("last=2", "every=1000")))

    def wait(*_: object) -> None:
        saver.fence()

    saver.prepare(describe(state, peers).entries)  # memory for the copy, and the process that writes it
    optim.register_step_pre_hook(wait)  # the optimiser waits for the copy of what it will write

    for step in range(progress["step"], progress["step"] + steps):
        x_BH = torch.randn(32, 64, generator=torch.Generator().manual_seed(step))
        loss = (model(x_BH) - x_BH).square().mean()
        optim.zero_grad()
        loss.backward()
        optim.step()
        progress["step"] = step + 1
        if (step + 1) % 10 == 0:
            saver.save(describe(state, peers), About(step + 1))  # goes on while the next steps are trained
            if peers.index == 0:
                print(f"step {step + 1}: loss {loss.item():.4f}")
    for saved in saver.close():
        if peers.index == 0:
            print(saved.path or saved.reason)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
