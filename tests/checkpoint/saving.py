"""States on four ranks, cut in many ways, and what they are whole."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.optim import AdamW

from tangram.checkpoint.state.entries import LocalPart
from tangram.layout import Layout, Mesh, region

RANKS = 4


class Net(nn.Module):
    """Odd sizes, a bias of one element, tied weights, a frozen scale, buffers of both kinds, an empty one."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.block = nn.Linear(6, 6)
        self.gain = nn.Linear(6, 1)
        self.scale = nn.Parameter(torch.rand(6), requires_grad=False)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("seen", torch.tensor([1, 2, 3]))
        self.register_buffer("table", torch.ones(2), persistent=False)
        self.register_buffer("none", torch.zeros(0, 3))

    def forward(self, ids: Tensor) -> Tensor:
        """A value for each place."""
        x = torch.tanh(self.block(self.embed(ids))) * self.scale
        return self.head(x).logsumexp(-1) + self.gain(x)[..., 0]


def trained(cut: Callable[[Net], Any] = lambda net: net, seed: int = 0) -> tuple[Net, AdamW]:
    """A module, cut or not, that has taken two steps on the same batch."""
    torch.manual_seed(seed)
    net = Net()
    cut(net)
    optimiser = AdamW([p for p in net.parameters() if p.requires_grad], lr=0.01)
    for _ in range(2):
        net(torch.arange(8).reshape(2, 4)).sum().backward()
        optimiser.step()
        optimiser.zero_grad()
    return net, optimiser


@dataclass(frozen=True)
class Meshes:
    """Of four ranks."""

    flat: DeviceMesh
    grid: DeviceMesh


def meshes() -> Meshes:
    """Collective."""
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    return Meshes(init_device_mesh("cpu", (4,), mesh_dim_names=("dp",)), grid)


WEIGHT = torch.arange(77.0).reshape(7, 11)


def fsdp(found: Meshes) -> dict[str, Any]:
    """FSDP2 over all ranks; some have nothing of the small tensors."""
    net, optimiser = trained(lambda net: fully_shard(net, mesh=found.flat))
    return {"model": net, "optim": optimiser, "progress": {"step": 2, "name": "fsdp"}}


def hsdp(found: Meshes) -> dict[str, Any]:
    """Cut over tp, copied over dp."""
    net, optimiser = trained(lambda net: fully_shard(net, mesh=found.grid))
    return {"model": net, "optim": optimiser}


def copies(_: Meshes) -> dict[str, Any]:
    """Everything whole on every rank."""
    net, optimiser = trained()
    return {"model": net, "optim": optimiser}


def stages(_: Meshes) -> dict[str, Any]:
    """Ranks hold different tensors, and one that is everywhere."""
    rank = dist.get_rank()
    return {"model": {f"layers.{rank // 2}.weight": WEIGHT + rank // 2, "tied": WEIGHT}}


def grids(found: Meshes) -> dict[str, Any]:
    """DTensors over a part of the mesh, over all of it, and FSDP2 inside tensor parallelism, unevenly."""
    tp, both = found.grid["tp"], found.grid
    inside = nn.Module()
    inside.weight = nn.Parameter(distribute_tensor(WEIGHT, tp, [Shard(0)]))
    fully_shard(inside, mesh=found.grid["dp"])
    return {
        "model": {
            "over tp": distribute_tensor(WEIGHT, tp, [Shard(1)]),
            "columns": distribute_tensor(WEIGHT, both, [Replicate(), Shard(1)]),
            "both": distribute_tensor(WEIGHT, both, [Shard(0), Shard(1)]),
            "strided": inside.weight,
        }
    }


BY_HAND = {"fused": "(2 f/tp) h", "zigzag": "s/dp:zigzag h", "flat": "a/tp b //dp", "copied": "a/tp b"}
SHAPE = (8, 12)


def whole_of(layout: str) -> np.ndarray[Any, Any]:
    """What is cut by hand, whole."""
    return np.arange(96, dtype=np.int16).reshape(SHAPE) + len(layout)


def by_hand(_: Meshes) -> dict[str, Any]:
    """Parts with their layouts said in the notation, as numpy arrays."""
    mesh, rank = Mesh.parse("dp=2 tp=2"), dist.get_rank()
    parts: dict[str, LocalPart] = {}
    for name, layout in BY_HAND.items():
        here = region(Layout.parse(layout).bind(SHAPE), mesh, rank)
        flat = np.concatenate([np.arange(a, b) for a, b in here.runs(SHAPE)])
        parts[name] = LocalPart(whole_of(layout).reshape(-1)[flat], SHAPE, layout, str(mesh), rank)
    return {"parts": parts}


STATES: dict[str, Callable[[Meshes], dict[str, Any]]] = {
    "fsdp": fsdp,
    "hsdp": hsdp,
    "copies": copies,
    "stages": stages,
    "grids": grids,
    "by hand": by_hand,
}


def whole_values(name: str) -> dict[str, Tensor]:
    """What the checkpoint of a state must hold, by one process."""
    if name in ("fsdp", "hsdp", "copies"):
        net, optimiser = trained()
        found = {f"model.{n}": p for n, p in net.named_parameters()}
        found |= {"model.seen": net.seen, "model.none": net.get_buffer("none")}
        for n, p in net.named_parameters():
            found |= {f"optim.{n}.{key}": value for key, value in optimiser.state.get(p, {}).items()}
        return {n: t.detach() for n, t in found.items()}
    if name == "stages":
        return {"model.layers.0.weight": WEIGHT, "model.layers.1.weight": WEIGHT + 1, "model.tied": WEIGHT}
    if name == "grids":
        return {f"model.{key}": WEIGHT for key in ("over tp", "columns", "both", "strided")}
    return {f"parts.{key}": torch.from_numpy(whole_of(layout)) for key, layout in BY_HAND.items()}


def local(tensor: Any) -> Tensor:
    """The part of a DTensor that is here."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
