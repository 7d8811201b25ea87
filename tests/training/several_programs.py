"""Steps of several forwards, each by a program of its own: what ranks make of them beside one process."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint  # pyright: ignore[reportUnknownVariableType]

from tangram.errors import UserError
from tangram.sharding.derive.marking.marks import Mark
from tangram.sharding.local_ops.random_ops import DrawMode
from tangram.training.mesh.tensor_parallel import parallel
from tangram.training.run.launch import Rank


class Again(nn.Module):
    """Computed again in the backward; where it trains, what follows the norm is whole, and in evaluation a part."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.drop, self.norm, self.down = nn.Linear(6, 8), nn.Dropout(0.3), nn.BatchNorm1d(8), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        hidden = cast(Any, checkpoint)(self.up, x, use_reentrant=False)
        return self.down(cast(Any, checkpoint)(self.drop, self.norm(hidden).sin(), use_reentrant=False))


class ReadLate(nn.Module):
    """A parameter that the backward reads as it stands in the model: a function, and no module, is computed again."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.gain = nn.Linear(6, 8), nn.Parameter(torch.rand(8))

    def forward(self, x: Tensor) -> Tensor:
        return cast(Any, checkpoint)(lambda hidden: (hidden * self.gain).sin(), self.up(x), use_reentrant=False)


AMONG: Mapping[str, tuple[tuple[bool, int], tuple[bool, int], bool]] = {
    "an evaluation before the backward": ((True, 6), (False, 6), True),
    "a training before the backward": ((False, 6), (True, 6), True),
    "another size before the backward": ((True, 6), (True, 3), True),
    "a step of both": ((True, 6), (False, 6), False),
    "a step of both, evaluation first": ((False, 6), (True, 3), False),
}
"""Of two forwards in a step, whether the model trains and the samples; and whether the second is the first's backward
alone, or one that has a backward of its own, after that of the first."""


def _among(model: nn.Module, name: str) -> None:
    x = torch.randn(6, 6, generator=torch.Generator().manual_seed(0))
    (trains, n), (trains_then, n_then), before = AMONG[name]
    torch.manual_seed(3)
    first = model.train(trains)(x[:n]).sin().sum()
    if not before:
        first.backward()
    second = model.train(trains_then)(2 * x[:n_then]).cos().sum()
    model.train(trains if before else trains_then)
    (first if before else second).backward()


def read_late(rank: Rank) -> float:
    """How far a gradient is off that of one process, of its norm, after two backwards."""
    torch.manual_seed(0)
    whole, x = ReadLate(), torch.randn(6, 6, generator=torch.Generator().manual_seed(0))
    model = copy.deepcopy(whole)
    parallel(model, [Mark.parse("up: b/tp h")], init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)), {"x": x})
    for one, _ in itertools.product((model, whole), range(2)):
        one(x).square().sum().backward()
    return _furthest(model, whole)


def among(rank: Rank) -> dict[str, float]:
    """By what stands among a forward and its step: how far a gradient is off that of one process, of its norm."""
    devices = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    found: dict[str, float] = {}
    for mark, name in ((mark, name) for mark in ("up.weight: o/tp i", "up: b/tp h") for name in AMONG):
        torch.manual_seed(0)
        whole, x = Again(), torch.empty(6, 6)
        model = copy.deepcopy(whole)
        parallel(model, [Mark.parse(mark)], devices, {"x": x})
        try:
            _among(model, name)
        except UserError:
            found[f"{name}; {mark}"] = float("inf")
            continue
        with DrawMode():
            _among(whole, name)
        found[f"{name}; {mark}"] = _furthest(model, whole)
    return found


def _furthest(model: nn.Module, whole: nn.Module) -> float:
    ours = [p.grad.full_tensor() if isinstance(p.grad, DTensor) else cast(Tensor, p.grad) for p in model.parameters()]
    wanted = [cast(Tensor, p.grad) for p in whole.parameters()]
    off = torch.stack([(a - b).square().sum().sqrt() for a, b in zip(ours, wanted, strict=True)]).max()
    return float(off / torch.cat([one.flatten() for one in wanted]).square().sum().sqrt())
