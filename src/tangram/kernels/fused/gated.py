"""act(gate) * up as one operator: SwiGLU, or with GELU by tanh.

Rounded once, where modules round the activation before they multiply. The backward has the gate and the second factor
and nothing else: the activation is recomputed. Gate and second factor may be halves of one tensor, as a projection
for both gives them: rows are read where they lie. No second derivative.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from tangram.errors import UserError
from tangram.kernels.fused.common import by_kernels, computed, in_rows, refuse_types, refuse_unlike
from tangram.kernels.host import cdiv, kernel, padded

ACTS = ("silu", "gelu_tanh")
_CUBIC = 0.044715
_TWICE_ROOT = math.sqrt(8 / math.pi)


@torch.library.custom_op("tangram::gated", mutates_args=())
def gated(gate: Tensor, up: Tensor, act: str = "silu") -> Tensor:
    """act(gate) * up of two tensors of one shape and dtype. `act`: one of `ACTS`."""
    _refuse(gate, up, act)
    if by_kernels(gate):
        return _forward_by_kernels(gate, up, act)
    g = computed(gate)
    return (g * torch.sigmoid(_exponent(g, act)) * computed(up)).to(gate.dtype).contiguous()


@gated.register_fake
def _(gate: Tensor, up: Tensor, act: str = "silu") -> Tensor:
    return gate.new_empty(gate.shape)


@torch.library.custom_op("tangram::gated_backward", mutates_args=())
def gated_backward(grad: Tensor, gate: Tensor, up: Tensor, act: str) -> tuple[Tensor, Tensor]:
    """What gate and second factor are owed."""
    if by_kernels(gate):
        return _backward_by_kernels(grad, gate, up, act)
    dy, g, u = (computed(x) for x in (grad, gate, up))
    x = _exponent(g, act)
    s, less = torch.sigmoid(x), torch.sigmoid(-x)
    slope = g if act == "silu" else _TWICE_ROOT * g * (1 + 3 * _CUBIC * g * g)
    dgate = dy * u * s * (1 + torch.where(s * less == 0, 0.0, slope) * less)
    return tuple(x.to(gate.dtype).contiguous() for x in (dgate, dy * g * s))  # pyright: ignore[reportReturnType]


@gated_backward.register_fake
def _(grad: Tensor, gate: Tensor, up: Tensor, act: str) -> tuple[Tensor, Tensor]:
    return gate.new_empty(gate.shape), up.new_empty(up.shape)


def _exponent(g: Tensor, act: str) -> Tensor:
    return g if act == "silu" else _TWICE_ROOT * g * (1 + _CUBIC * g * g)


def _forward_by_kernels(gate: Tensor, up: Tensor, act: str) -> Tensor:
    from tangram.kernels.compiled import gated as compiled  # where there is no device there may be no Triton

    g, u, out = in_rows(gate), in_rows(up), gate.new_empty(gate.shape)
    grid, tile = _tiles(g)
    kernel(compiled.forward)[grid](g, u, out, g.stride(0), u.stride(0), *g.shape, *tile, act != "silu")
    return out


def _backward_by_kernels(grad: Tensor, gate: Tensor, up: Tensor, act: str) -> tuple[Tensor, Tensor]:
    from tangram.kernels.compiled import gated as compiled

    dy, g, u = in_rows(grad), in_rows(gate), in_rows(up)
    found = gate.new_empty(gate.shape), up.new_empty(up.shape)
    grid, tile = _tiles(g)
    strides = dy.stride(0), g.stride(0), u.stride(0)
    kernel(compiled.backward)[grid](dy, g, u, *found, *strides, *g.shape, *tile, act != "silu")
    return found


def _tiles(rows: Tensor) -> tuple[tuple[int, int], tuple[int, int]]:
    """The grid, and columns and rows of a tile: some 1024 elements."""
    count, width = rows.shape
    columns = min(1024, padded(width))
    high = 1024 // columns
    return (cdiv(count, high), cdiv(width, columns)), (columns, high)


def _refuse(gate: Tensor, up: Tensor, act: str) -> None:
    if act not in ACTS:
        raise UserError(f'gated units have no activation "{act}": there are {" and ".join(ACTS)}')
    refuse_types("a gated unit", gate, up)
    refuse_unlike("a gated unit", "gate", gate, "second factor", up)
    if not gate.ndim:
        raise UserError("a gated unit wants rows, its gate is one number")


def _saved(ctx: Any, inputs: Any, output: Any) -> None:
    gate, up, ctx.act = inputs
    ctx.save_for_backward(gate, up)


def _owed(ctx: Any, grad: Tensor) -> Any:
    return (*gated_backward(grad, *ctx.saved_tensors, ctx.act), None)


gated.register_autograd(_owed, setup_context=_saved)
GATED = torch.ops.tangram.gated
"""As the dispatcher names it."""
