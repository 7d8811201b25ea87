"""A user's file: an operator of their own, calls of it, a module and an activation of transformers that use it."""

from typing import Any

import torch
from torch import Tensor, nn
from transformers.activations import ACT2FN


@torch.library.custom_op("tangram_gate::gated", mutates_args=())
def gated(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
    """A gated product."""
    return torch.sigmoid(x @ w) * (x @ v)


@gated.register_fake
def _(x, w, v):  # pyright: ignore
    return x.new_empty(x.shape[0], w.shape[1])


def _keep(ctx, inputs, output):  # pyright: ignore
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, grad: Tensor):
    x, w, v = ctx.saved_tensors
    s, y = torch.sigmoid(x @ w), x @ v
    a, b = grad * y * s * (1 - s), grad * s
    return a @ w.T + b @ v.T, x.T @ a, x.T @ b


gated.register_autograd(_backward, setup_context=_keep)


@torch.library.custom_op("tangram_gate::act", mutates_args=())
def act(x: Tensor) -> Tensor:
    """An activation."""
    return x * torch.sigmoid(x)


@act.register_fake
def _(x):  # pyright: ignore
    return torch.empty_like(x)


def _act_backward(ctx: Any, grad: Tensor):
    (x,) = ctx.saved_tensors
    s = torch.sigmoid(x)
    return grad * s * (1 + x * (1 - s))


act.register_autograd(_act_backward, setup_context=_keep)


@torch.library.custom_op("tangram_gate::packed", mutates_args=())
def packed(x: Tensor) -> Tensor:
    """A gate and what it lets through, side by side in the last dim."""
    a, b = x.chunk(2, -1)
    return torch.sigmoid(a) * b


@packed.register_fake
def _(x):  # pyright: ignore
    return x.new_empty((*x.shape[:-1], x.shape[-1] // 2))


def _packed_backward(ctx: Any, grad: Tensor):
    a, b = ctx.saved_tensors[0].chunk(2, -1)
    s = torch.sigmoid(a)
    return torch.cat([grad * b * s * (1 - s), grad * s], -1)


packed.register_autograd(_packed_backward, setup_context=_keep)


@torch.library.custom_op("tangram_gate::rope", mutates_args=())
def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Halves of the last dim, turned: as wide as the angles are."""
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


@torch.library.custom_op("tangram_gate::biased", mutates_args=())
def biased(x: Tensor, w: Tensor) -> Tensor:
    """A bias of the columns where it has as many elements, else of the rows: of a square its author thought of one."""
    return x + (w if len(w) == x.shape[-1] else w[:, None])


@torch.library.custom_op("tangram_gate::attend", mutates_args=())
def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention by torch's own kernels, which look at how many keys there are, and not at how many values."""
    return torch.nn.functional.scaled_dot_product_attention(q, k, v).contiguous()


@torch.library.custom_op("tangram_gate::joined", mutates_args=())
def joined(xs: list[Tensor]) -> Tensor:
    """An operator of which no call can be drawn."""
    return torch.cat(xs)


class Act(nn.Module):
    """The activation as a module."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.tangram_gate.act(x)


ACT2FN["tangram_gate_act"] = Act


def calls():
    """Of the gated product."""
    yield torch.randn(4, 6), torch.randn(6, 5), torch.randn(6, 5)
    yield torch.randn(3, 7), torch.randn(7, 9), torch.randn(7, 9)


class Net(nn.Module):
    """The gated product and one back."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator("cpu").manual_seed(0)
        self.w, self.v = (nn.Parameter(torch.randn(8, 16, generator=generator, device="cpu")) for _ in range(2))
        self.down = nn.Parameter(torch.randn(16, 8, generator=generator, device="cpu"))

    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.tangram_gate.gated(x, self.w, self.v) @ self.down


def model(batch: int, sequence: int) -> tuple[nn.Module, dict[str, Tensor]]:
    """For `tangram shard`."""
    return Net(), {"x": torch.randn(batch, 8)}
