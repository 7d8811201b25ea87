"""Layouts in a model's own code: each operator derived as it runs, then the same model derived as a whole.

python examples/in_code.py      (starts two processes; `Block` itself runs on one as it is)
"""

# ruff: noqa: N803, N806  a tensor carries its dims in its name

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from tangram import parallelize
from tangram.sharding import layout_of, mark, relayout
from tangram.training import Rank, eager, run_ranks


class Block(nn.Module):
    """What Megatron does with a feed-forward layer, said where it happens."""

    def __init__(self, talks: bool) -> None:
        super().__init__()
        self.talks = talks
        self.norm, self.up, self.down = nn.LayerNorm(32), nn.Linear(32, 128), nn.Linear(128, 32)
        mark(self.up.weight, "inner/tp hidden")
        mark(self.up.bias, "inner/tp")
        mark(self.down.weight, "hidden inner/tp")

    def forward(self, x_BSH: Tensor) -> Tensor:
        x_BSH = mark(x_BSH, "batch seq/tp hidden")
        whole_BSH = relayout(self.norm(x_BSH), "batch seq hidden")
        h_BSI = self.up(whole_BSH).relu()
        y_BSH = self.down(h_BSI)
        if self.talks:
            print("h lies as", layout_of(h_BSI), "and y as", layout_of(y_BSH))
        return x_BSH + relayout(y_BSH, "batch seq/tp hidden")


def loss_of(model: nn.Module) -> Tensor:
    """Of numbers that are the same on every rank."""
    x_BSH = torch.randn(4, 16, 32, generator=torch.Generator().manual_seed(1))
    return model(x_BSH).square().mean()


def block(talks: bool = False) -> Block:
    """With the same weights everywhere."""
    torch.manual_seed(0)
    return Block(talks)


def task(rank: Rank, alone: float) -> tuple[float, float]:
    """What each rank does: how far its losses are from that of one process."""
    devices = init_device_mesh(rank.device.type, (2,), mesh_dim_names=("tp",))

    model = block(talks=rank.index == 0)
    with eager(model, devices):  # breakpoints and prints see tensors with layouts
        loss = loss_of(model)
    loss.backward()

    whole = block()  # a whole graph has its layouts when it is derived, and not while its code runs
    parallelize(whole, devices, inputs={"x_BSH": torch.empty(4, 16, 32, device="meta")})
    found = loss_of(whole)
    found.backward()

    same = all(
        torch.allclose(_local(a.grad), _local(b.grad), atol=1e-6)
        for a, b in zip(model.parameters(), whole.parameters(), strict=True)
    )
    if rank.index == 0:
        print("both give the same gradients:", same)
    return abs(float(loss.detach()) - alone), abs(float(found.detach()) - alone)


def _local(x: Tensor | None) -> Tensor:
    assert x is not None
    return x.to_local() if isinstance(x, DTensor) else x


if __name__ == "__main__":
    alone = float(loss_of(block()).detach())  # nobody in particular: the marks do nothing
    ranks = run_ranks(task, alone, world=2, on_event=print, device="cpu")
    print("the loss of one process, on every rank and in both ways:", all(max(off) < 1e-6 for off in ranks))
