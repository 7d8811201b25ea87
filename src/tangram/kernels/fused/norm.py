"""RMSNorm as one operator, and one that adds to the stream of residuals first and gives the sum, too.

    rms_norm(x, weight, eps, offset)                 x / rms(x) * (weight + offset), and 1 / rms(x)
    add_rms_norm(x, residual, weight, eps, offset)   the same of x + residual, that sum, and 1 / rms

`offset` is 1 where a model keeps weights less one (Gemma), else 0. Everything is computed in float32 and rounded once,
at the end; transformers' modules round before they multiply by the weight. What is kept for the backward is one number
a row. No second derivative.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tangram.errors import UserError
from tangram.kernels.fused.common import (
    by_kernels,
    computed,
    in_rows,
    refuse_types,
    refuse_unlike,
    registers,
    wide,
)
from tangram.kernels.host import cdiv, kernel

PARTS = 256
"""Into how many sums, at most, rows are gathered for the weight's gradient before those are added."""


@torch.library.custom_op("tangram::rms_norm", mutates_args=())
def rms_norm(x: Tensor, weight: Tensor | None, eps: float, offset: float = 0.0) -> tuple[Tensor, Tensor]:
    """Of x (..., H) and weight (H) the norm (..., H), and 1 / rms (...) in float32."""
    _refuse(x, weight)
    out, _, rstd = _forward(x, None, weight, eps, offset)
    return out, rstd


@rms_norm.register_fake
def _(x: Tensor, weight: Tensor | None, eps: float, offset: float = 0.0) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(x.shape[:-1], dtype=registers(x))


@torch.library.custom_op("tangram::add_rms_norm", mutates_args=())
def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None, eps: float, offset: float = 0.0
) -> tuple[Tensor, Tensor, Tensor]:
    """Of x and residual (..., H) and weight (H) the norm of their sum (..., H), the sum, and 1 / rms (...)."""
    _refuse(x, weight)
    refuse_unlike("RMSNorm", "x", x, "residual", residual)
    return _forward(x, residual, weight, eps, offset)


@add_rms_norm.register_fake
def _(
    x: Tensor, residual: Tensor, weight: Tensor | None, eps: float, offset: float = 0.0
) -> tuple[Tensor, Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(x.shape), x.new_empty(x.shape[:-1], dtype=registers(x))


@torch.library.custom_op("tangram::rms_norm_backward", mutates_args=())
def rms_norm_backward(
    grad: Tensor, grad_sum: Tensor | None, x: Tensor, weight: Tensor | None, rstd: Tensor, offset: float
) -> tuple[Tensor, Tensor]:
    """What x and the weight are owed; `grad_sum`: what the sum is owed that x is. Without a weight: an empty one."""
    if by_kernels(x):
        return _backward_by_kernels(grad, grad_sum, x, weight, rstd, offset)
    dy, rstd = computed(grad), rstd[..., None]
    n = computed(x) * rstd
    g = dy if weight is None else dy * (computed(weight) + offset)
    dx = rstd * (g - n * (g * n).mean(-1, keepdim=True))
    dx = dx if grad_sum is None else dx + computed(grad_sum)
    owed = x.new_empty(0) if weight is None else (dy * n).flatten(0, -2).sum(0).to(weight.dtype)
    return dx.to(x.dtype).contiguous(), owed


@rms_norm_backward.register_fake
def _(
    grad: Tensor, grad_sum: Tensor | None, x: Tensor, weight: Tensor | None, rstd: Tensor, offset: float
) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(0) if weight is None else weight.new_empty(weight.shape)


# ---------------------------------------------------------------- the two back ends


def _forward(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, eps: float, offset: float
) -> tuple[Tensor, Tensor, Tensor]:
    if by_kernels(x):
        return _forward_by_kernels(x, residual, weight, eps, offset)
    summed = x if residual is None else (computed(x) + computed(residual)).to(x.dtype)
    wider = computed(summed)
    rstd = torch.rsqrt(wider.square().mean(-1) + eps)
    found = wider * rstd[..., None]
    found = found if weight is None else found * (computed(weight) + offset)
    return found.to(x.dtype).contiguous(), summed.contiguous(), rstd


def _forward_by_kernels(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, eps: float, offset: float
) -> tuple[Tensor, Tensor, Tensor]:
    from tangram.kernels.compiled import norm  # where there is no device there may be no Triton

    rows, (width, tile, warps) = in_rows(x), _tile(x)
    added = rows if residual is None else in_rows(residual)
    out, rstd = x.new_empty(x.shape), x.new_empty(x.shape[:-1], dtype=torch.float32)
    summed = x if residual is None else x.new_empty(x.shape)
    count, length = rows.shape
    kernel(norm.forward)[(cdiv(count, tile),)](
        rows, added, out if weight is None else weight.contiguous(), out, summed, rstd, rows.stride(0),
        added.stride(0), count, length, eps, offset, width, tile, residual is not None, weight is not None,
        num_warps=warps,
    )  # fmt: skip
    return out, summed, rstd


def _backward_by_kernels(
    grad: Tensor, grad_sum: Tensor | None, x: Tensor, weight: Tensor | None, rstd: Tensor, offset: float
) -> tuple[Tensor, Tensor]:
    from tangram.kernels.compiled import norm

    rows, owed, (width, tile, warps) = in_rows(x), in_rows(grad), _tile(x)
    beside = owed if grad_sum is None else in_rows(grad_sum)
    dx, (count, length) = x.new_empty(x.shape), rows.shape
    steps = cdiv(count, PARTS * tile)
    programs = cdiv(count, steps * tile)
    parts = x.new_empty((programs if weight is not None else 0, length), dtype=torch.float32)
    kernel(norm.backward)[(programs,)](
        owed, beside, rows, dx if weight is None else weight.contiguous(), rstd.contiguous(), dx, parts,
        owed.stride(0), beside.stride(0), rows.stride(0), count, length, offset, steps, width, tile,
        grad_sum is not None, weight is not None, num_warps=warps,
    )  # fmt: skip
    return dx, x.new_empty(0) if weight is None else parts.sum(0).to(weight.dtype)


def _tile(x: Tensor) -> tuple[int, int, int]:
    """Columns and rows of a tile, and warps: some 4096 elements, or a row."""
    width = wide("RMSNorm", x.shape[-1])
    return width, max(1, min(32, 4096 // width)), max(4, min(16, width // 1024))


def _refuse(x: Tensor, weight: Tensor | None) -> None:
    refuse_types("RMSNorm", x, weight)
    if not x.ndim:
        raise UserError("RMSNorm wants rows, x is one number")
    if weight is not None and weight.shape != x.shape[-1:]:
        raise UserError(f"RMSNorm of rows of {x.shape[-1]} wants as many weights, not {tuple(weight.shape)}")


# ---------------------------------------------------------------- gradients


def _saved(ctx: Any, inputs: Any, output: Any) -> None:
    x, weight, _, ctx.offset = inputs
    ctx.save_for_backward(x, weight, output[1])
    ctx.mark_non_differentiable(output[1])


def _owed(ctx: Any, grad: Tensor, _: Tensor) -> Any:
    x, weight, rstd = ctx.saved_tensors
    dx, owed = rms_norm_backward(grad, None, x, weight, rstd, ctx.offset)
    return dx, None if weight is None else owed, None, None


def _saved_sum(ctx: Any, inputs: Any, output: Any) -> None:
    _, _, weight, _, ctx.offset = inputs
    ctx.save_for_backward(output[1], weight, output[2])
    ctx.mark_non_differentiable(output[2])


def _owed_sum(ctx: Any, grad: Tensor, grad_sum: Tensor, _: Tensor) -> Any:
    x, weight, rstd = ctx.saved_tensors
    dx, owed = rms_norm_backward(grad, grad_sum, x, weight, rstd, ctx.offset)
    return dx, dx, None if weight is None else owed, None, None


rms_norm.register_autograd(_owed, setup_context=_saved)
add_rms_norm.register_autograd(_owed_sum, setup_context=_saved_sum)
RMS_NORM, ADD_RMS_NORM = torch.ops.tangram.rms_norm, torch.ops.tangram.add_rms_norm
"""As the dispatcher names them."""
