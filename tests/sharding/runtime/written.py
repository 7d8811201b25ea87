"""Models whose code writes into tensors and into views of them, over two ranks beside one process."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from tangram.errors import UserError
from tangram.sharding.derive.marking.marks import Mark
from tangram.training.mesh.tensor_parallel import parallel
from tangram.training.run.launch import Rank

SHAPE = (4, 6, 8)


def _several_views(y: Tensor) -> Tensor:
    y[..., 3, :4] = y[..., 2, :4].clone() * 2
    return y


def _rows_and_columns(y: Tensor) -> Tensor:
    z = torch.zeros_like(y)
    z[1:, 2, 1:3] = y[1:, 3, 2:4]
    return z


def _no_even_part(y: Tensor) -> Tensor:
    z = y.new_zeros(y.shape[0], y.shape[1], 9)
    z[..., 1:] = y
    return z[..., :8]


def _columns(y: Tensor) -> Tensor:
    y[..., 2:5] += y[..., :3]
    return y


def _diagonal(y: Tensor) -> Tensor:
    y.diagonal(0, 1, 2).copy_(torch.ones(()))
    return y


def _every_other(y: Tensor) -> Tensor:
    y[..., 1::2].mul_(0.5)
    return y


def _seen_as_rows(y: Tensor) -> Tensor:
    y.view(-1, 8).add_(1)
    return y


def _by_mask(y: Tensor) -> Tensor:
    y[y < 0] = 0
    return y


def _column_by_column(y: Tensor) -> Tensor:
    z = torch.zeros_like(y)
    for i in range(y.shape[-1]):
        z[..., i] = y[..., -1 - i] * i
    return z


def _samples(y: Tensor) -> Tensor:
    y[2:] = y[:2]
    return y


class Inner(nn.Module):
    """A module that writes into what it is given."""

    def forward(self, x: Tensor) -> Tensor:
        x[:, 2, :3] = x[:, 1, 3:6] * 2
        return x.add_(1.0)


class _Left(nn.Module):
    """Whose result nobody takes."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Inner()

    def forward(self, y: Tensor) -> Tensor:
        self.inner(y)
        return y


class _Taken(_Left):
    def forward(self, y: Tensor) -> Tensor:
        return self.inner(y)


class Written(nn.Module):
    """Products around something that writes. It gives what was written, too."""

    def __init__(self, write: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.up, self.mid, self.down = nn.Linear(8, 8), nn.Linear(8, 8, bias=False), nn.Linear(8, 8)
        self.write = write

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.write(self.up(x) * 1.0)
        return self.down(torch.tanh(self.mid(y))), y


WRITES: Mapping[str, Callable[[], Callable[[Tensor], Tensor]]] = {
    **{
        own.__name__[1:]: lambda own=own: own
        for own in (
            _several_views, _rows_and_columns, _no_even_part, _columns, _diagonal, _every_other, _seen_as_rows,
            _by_mask, _column_by_column, _samples,
        )
    },
    "left": _Left,
    "taken": _Taken,
}  # fmt: skip
MARKS: Mapping[str, Sequence[str]] = {
    "samples": ["up: b/tp s h"],
    "sequence, then samples": ["up: b s/tp h", "mid: b/tp s h"],
    "hidden": ["up.weight: o/tp i", "mid.weight: o i/tp"],
    "sums": ["up.weight: o i/tp", "mid: b/tp s h"],
}


def run_all(rank: Rank, kinds: Sequence[str]) -> dict[str, float | str]:
    """The task of the ranks: how far each model is from one process, in results and gradients, or why it is refused.

    `kinds`: of marks.
    """
    torch.set_num_threads(1)
    found: dict[str, float | str] = {}
    for name, write in WRITES.items():
        for kind in kinds:
            marks = MARKS[kind]
            group = dist.new_group([0, 1], timeout=datetime.timedelta(seconds=30))
            assert group is not None
            devices = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("tp",))
            try:
                found[f"{name}, {kind}"] = _apart(write, [Mark.parse(mark) for mark in marks], devices)
            except UserError as error:
                found[f"{name}, {kind}"] = str(error)
    return found


def _apart(write: Callable[[], Callable[[Tensor], Tensor]], marks: Sequence[Mark], devices: DeviceMesh) -> float:
    torch.manual_seed(0)
    whole, model, x = Written(write()), Written(write()), torch.randn(SHAPE)
    model.load_state_dict(whole.state_dict())
    parallel(model, marks, devices, {"x": x})
    off = 0.0
    for trains in (True, False):
        with torch.set_grad_enabled(trains):
            want, got = torch.cat(whole(x)), torch.cat(model(x))
        off = max(off, float((want - got).abs().max()))
        if trains:
            want.square().sum().backward()
            got.square().sum().backward()
    for (_, right), (_, own) in zip(whole.named_parameters(), model.named_parameters(), strict=True):
        grad = own.grad.full_tensor() if isinstance(own.grad, DTensor) else own.grad
        assert grad is not None
        assert right.grad is not None
        off = max(off, float((grad - right.grad).abs().max() / right.grad.abs().max()))
    return off
