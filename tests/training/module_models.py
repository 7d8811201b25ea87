"""Modules of torch with their defaults, run as derived on ranks beside one process: training and evaluation."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, cast
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.nn.utils import parametrizations

from tangram.models.capturing.opened import without_fast_path
from tangram.sharding.derive.marking.marks import Mark
from tangram.sharding.local_ops.random_ops import DrawMode
from tangram.training.mesh import tensor_parallel
from tangram.training.mesh.tensor_parallel import parallel
from tangram.training.run.launch import Rank


class Around(nn.Module):
    """A product, and what a function makes of it with other modules."""

    def __init__(self, code: Callable[[Any, Tensor], Tensor], **modules: nn.Module) -> None:
        super().__init__()
        self.code, self.first = code, nn.Linear(8, 8)
        for name, module in modules.items():
            self.add_module(name, module)

    def forward(self, x: Tensor) -> Tensor:
        return self.code(self, x)


@dataclass(frozen=True)
class Work:
    """A model and its marks."""

    make: Callable[[], Around]
    marks: tuple[str, ...]


X = torch.randn(4, 6, 8, generator=torch.Generator().manual_seed(3))
PADDED = torch.arange(6) >= torch.tensor([6, 4, 6, 5])[:, None]
ROWS = ("first: b/tp s h",)
ATTENTION = ("*self_attn.in_proj_weight: (3 o/tp) i", "*self_attn.in_proj_bias: (3 o/tp)",
             "*self_attn.out_proj.weight: o i/tp")  # fmt: skip
LAYER = (*ATTENTION, "*linear1.weight: o/tp i", "*linear1.bias: o/tp", "*linear2.weight: o i/tp")
CUT = ("last.parametrizations.weight.original1: o/tp i",)


def _causal(n: int) -> Tensor:
    return nn.Transformer.generate_square_subsequent_mask(n)


def _attends(weights: bool, batch_first: bool) -> Callable[[], Around]:
    def code(m: Any, x: Tensor) -> Tensor:
        y = m.first(x if batch_first else x.transpose(0, 1))
        found, seen = m.self_attn(y, y, y, key_padding_mask=PADDED, need_weights=weights)
        return found if seen is None else found * seen.sum()

    return lambda: Around(code, self_attn=nn.MultiheadAttention(8, 2, dropout=0.1, batch_first=batch_first))


def _layers() -> Around:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    return Around(lambda m, x: m.all(m.first(x), mask=_causal(6)), all=nn.TransformerEncoder(layer, 2))


def _unmasked() -> Around:
    return Around(lambda m, x: m.all(m.first(x)), all=_layers().all)


def _decodes(m: Any, x: Tensor) -> Tensor:
    y = m.first(x)
    return m.all(y, y, tgt_mask=_causal(4))


def _recurs(layer: nn.Module) -> Around:
    return Around(lambda m, x: m.layer(m.first(x))[0], layer=layer)


def _normed(wrap: Callable[[nn.Module], nn.Module]) -> Callable[[], Around]:
    return lambda: Around(lambda m, x: m.last(torch.relu(m.first(x))), last=wrap(nn.Linear(8, 8)))


def _each(m: Any, x: Tensor) -> Tensor:
    return cast(Any, torch.vmap)(lambda row: m.down(torch.tanh(m.up(row))))(m.first(x))


def _net(code: Callable[[Any, Tensor], Tensor]) -> Callable[[], Around]:
    return lambda: Around(code, up=nn.Linear(8, 16), down=nn.Linear(16, 1))


WORKS: Mapping[str, Work] = {
    "attention, samples": Work(_attends(weights=True, batch_first=True), ROWS),
    "attention, heads": Work(_attends(weights=False, batch_first=False), ATTENTION),
    "encoder, samples": Work(_layers, ROWS),
    "encoder, heads": Work(_layers, LAYER),
    "encoder, sequence": Work(_unmasked, ("all.layers.*.norm1: b s/tp h", "all.layers.0: b s/tp h")),
    "decoder, samples": Work(
        lambda: Around(_decodes, all=nn.Transformer(8, 2, 1, 1, 16)),
        ("first: s b/tp h",),
    ),
    "LSTM": Work(lambda: _recurs(nn.LSTM(8, 8, bidirectional=True, batch_first=True)), ROWS),
    "GRU": Work(lambda: _recurs(nn.GRU(8, 8, 2, dropout=0.2)), ("first: s b/tp h",)),
    "weight norm": Work(_normed(cast(Any, parametrizations.weight_norm)), CUT),
    "the older weight norm": Work(_normed(cast(Any, nn.utils.weight_norm)), ("last.weight_v: o/tp i",)),
    "spectral norm": Work(_normed(cast(Any, parametrizations.spectral_norm)), ("last.*.original: o/tp i",)),
    "the older spectral norm": Work(_normed(cast(Any, nn.utils.spectral_norm)), ("last.weight_orig: o/tp i",)),
    "vmap": Work(_net(_each), ROWS),
}  # fmt: skip
FAST = "encoder, sequence"
"""What torch runs in evaluation without gradients by a fused operator, past modules at whose borders tensors move."""
CALLS = ("train", "train", "eval", "eval")


@dataclass(frozen=True)
class Off:
    """How far each call is off one process, and its furthest gradient."""

    values: tuple[float, ...]
    gradients: tuple[float, ...]
    buffers: float


def run_all(rank: Rank, _: None) -> dict[str, Off]:
    """The task of the ranks."""
    found = {name: _run(work, rank.world) for name, work in WORKS.items()}
    with patch.object(tensor_parallel, "without_fast_path", nullcontext):
        found["by the fast path"] = _run(WORKS[FAST], rank.world)
    return {**found, "labels": _labels(rank.world)}


class Labelled(nn.Module):
    """A loss of which torch has no gradient for the labels."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)

    def forward(self, x: Tensor, signs: Tensor) -> Tensor:
        return F.soft_margin_loss(self.first(x), signs)


def _labels(world: int) -> Off:
    """A call that wants a gradient of nothing that it is given, and one that wants one of its numbers."""
    torch.manual_seed(0)
    model, signs = Labelled(), X.roll(1, 0).sign()
    other = deepcopy(model)
    devices = init_device_mesh("cpu", (world,), mesh_dim_names=("tp",))
    parallel(model, [Mark.parse("first: b/tp s h")], devices, {"x": X, "signs": signs})
    values, gradients = list[float](), list[float]()
    for wanted in (False, True):
        leaves: list[Tensor] = []
        for one in (model, other):
            one.zero_grad()
            x = X.clone().requires_grad_(wanted)
            loss = one(x, signs)
            loss.backward()
            leaves.append(x)
            values.append(float(loss.detach()))
        own = dict(model.named_parameters())
        gradients.append(max(_off(own[name].grad, p.grad) for name, p in other.named_parameters()))
        gradients.append(_off(leaves[0].grad, leaves[1].grad))
    return Off((abs(values[0] - values[1]), abs(values[2] - values[3])), tuple(gradients), 0.0)


def _run(work: Work, world: int) -> Off:
    torch.manual_seed(0)
    model = work.make()
    other = model if _left(model) else deepcopy(model)
    if other is model:
        torch.manual_seed(0)
        other = work.make()
    devices = init_device_mesh("cpu", (world,), mesh_dim_names=("tp",))
    parallel(model, [Mark.parse(mark) for mark in work.marks], devices, {"x": X})
    values, gradients = list[float](), list[float]()
    for turn, mode in enumerate(CALLS):
        results: list[Tensor] = []
        for one in (model, other):
            one.train(mode == "train").zero_grad()
            torch.manual_seed(turn)
            apart = DrawMode() if one is other else nullcontext()
            # of padding, torch's fast path makes zeros
            with apart, without_fast_path() if one is other else nullcontext(), torch.set_grad_enabled(turn != 3):
                results.append(one(X))
        values.append(_off(results[0], results[1]))
        if turn != 3:
            for found in results:
                (found * torch.sin(1 + torch.arange(found.numel())).view(found.shape)).sum().backward()
            own = dict(model.named_parameters())
            gradients.append(max(_off(own[name].grad, p.grad) for name, p in other.named_parameters()))
    buffers = zip(model.buffers(), other.buffers(), strict=True)
    return Off(tuple(values), tuple(gradients), max([_off(*pair) for pair in buffers], default=0.0))


def _left(model: nn.Module) -> bool:
    """Whether a module has what torch cannot copy."""
    return any(isinstance(x, Tensor) and not x.is_leaf for m in model.modules() for x in vars(m).values())


def _off(x: Tensor | None, want: Tensor | None) -> float:
    if x is None or want is None:
        return 0.0 if x is want else float("inf")
    full = x.full_tensor() if isinstance(x, DTensor) else x
    if full.shape != want.shape:
        return float("inf")
    return float((full - want).detach().abs().max() / want.detach().abs().max().clamp(min=1e-6))
