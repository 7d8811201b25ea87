"""Models of public reports with marks in their code, run both ways on ranks beside one process."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils.checkpoint import checkpoint  # pyright: ignore[reportUnknownVariableType]

from tangram import mark
from tangram.errors import UserError
from tangram.sharding.eager import layout_of, relayout
from tangram.sharding.local_ops.random_ops import DrawMode
from tangram.training.mesh.eager_marks import eager
from tangram.training.mesh.tensor_parallel import parallel
from tangram.training.run.launch import Rank


class Layers(nn.Module):
    """Two layers with biases, of which the weights alone are marked."""

    def __init__(self, code: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.up, self.down, self.norm, self.code = nn.Linear(8, 16), nn.Linear(16, 8), nn.RMSNorm(8), code
        mark(self.up.weight, "f/tp h")
        mark(self.down.weight, "h f/tp")

    def forward(self, x: Tensor) -> Tensor:
        return self.code(self, x)


class Tied(nn.Module):
    """A head that is the embeddings, which are cut over the vocabulary."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(16, 8), nn.Linear(8, 16, bias=False)
        self.head.weight = mark(self.words.weight, "v/tp h")

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.words(x)))


def _mlp(m: Any, x: Tensor) -> Tensor:
    return m.down(F.relu(m.up(x)))


def _by_sequence(m: Any, x: Tensor) -> Tensor:
    """Norms of hidden states that are cut by sequence, and their residual."""
    x = mark(x * 1, "b s/tp h")
    n = m.norm(x)
    m.seen = _layout(n)
    return x + relayout(_mlp(m, relayout(n, "b s h")), "b s/tp h")


def _layout(x: Tensor) -> str:
    try:
        return str(layout_of(x))
    except UserError:  # in a capture, and on one process
        return ""


def _by_value(m: Any, x: Tensor) -> Tensor:
    """A number is read of hidden states that are cut."""
    h = F.relu(m.up(x))
    return m.down(h / h.max().item())


def _dropping(m: Any, x: Tensor) -> Tensor:
    return x + F.dropout(m.down(F.dropout(F.relu(m.up(x)), 0.4)), 0.2)


def _again(m: Any, x: Tensor) -> Tensor:
    return cast(Any, checkpoint)(m.up, x, use_reentrant=False).relu() @ m.down.weight.T


@dataclass(frozen=True)
class Work:
    """A model, and how many forwards there are before its backward."""

    make: Callable[[], nn.Module]
    forwards: int = 1


WORKS: Mapping[str, Work] = {
    "bias": Work(lambda: Layers(_mlp)),
    "tied": Work(Tied),
    "norm": Work(lambda: Layers(_by_sequence)),
    "value": Work(lambda: Layers(_by_value)),
    "dropout": Work(lambda: Layers(_dropping)),
    "twice": Work(lambda: Layers(_again), 2),
}
WAYS = ("as it runs", "captured")


@dataclass(frozen=True)
class Ran:
    """What came of a model on one rank."""

    value: float = 0.0
    """How far a result is off one process."""
    gradient: float = 0.0
    """Of the parameter whose gradient is furthest off."""
    refused: str = ""
    parts: Mapping[str, tuple[int, ...]] | None = None
    """The sizes of this rank's parts of parameters."""
    said: str = ""
    """What the code has seen."""
    one: bool = False
    """Whether two names are still one parameter."""


def run_all(rank: Rank, _: None) -> dict[str, dict[str, Ran]]:
    """The task of the ranks."""
    devices = init_device_mesh("cpu", (rank.world,), mesh_dim_names=("tp",))
    return {name: {way: _run(work, way, devices) for way in WAYS} for name, work in WORKS.items()}


def _run(work: Work, way: str, devices: DeviceMesh) -> Ran:
    torch.manual_seed(0)
    whole = work.make()
    torch.manual_seed(0)
    model = work.make()
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(16, (2, 3, 4), generator=generator)
    xs = [*ids] if isinstance(model, Tied) else [*torch.randn(2, 3, 4, 8, generator=generator)]
    torch.manual_seed(2)
    with DrawMode():
        want = [whole(x) for x in xs[: work.forwards]]
    _backward(want)
    torch.manual_seed(2)
    try:
        found = (_eagerly if way == WAYS[0] else _captured)(model, xs[: work.forwards], devices)
    except UserError as error:
        return Ran(refused=str(error))
    own = dict(model.named_parameters(remove_duplicate=False))
    off = [_off(_full(own[name].grad), p.grad) for name, p in whole.named_parameters() if p.grad is not None]
    return Ran(
        max(map(_off, found, want)), max(off), "",
        {name: tuple(cast(Any, getattr(p, "to_local", lambda p=p: p)()).shape) for name, p in own.items()},
        str(getattr(model, "seen", "")), "head.weight" in own and own["head.weight"] is own["words.weight"],
    )  # fmt: skip


def _eagerly(model: nn.Module, xs: Sequence[Tensor], devices: DeviceMesh) -> list[Tensor]:
    with eager(model, devices) as held, DrawMode():
        found = [model(x) for x in xs]
        found = [held.session.full_tensor(relayout(one, " ".join("abc"[: one.ndim]))) for one in found]
    _backward(found)
    return found


def _captured(model: nn.Module, xs: Sequence[Tensor], devices: DeviceMesh) -> list[Tensor]:
    parallel(model, [], devices, {"x": xs[0]})
    found = [model(x) for x in xs]
    _backward(found)
    return found


def _backward(found: Sequence[Tensor]) -> None:
    sum((one.sin().sum() for one in found), torch.zeros(())).backward()


def _full(x: Any) -> Tensor | None:
    return x.full_tensor() if hasattr(x, "full_tensor") else x


def _off(x: Tensor | None, want: Tensor | None) -> float:
    if x is None or want is None or x.shape != want.shape:
        return float("inf")
    return float((x - want).detach().abs().max() / want.detach().abs().max())
