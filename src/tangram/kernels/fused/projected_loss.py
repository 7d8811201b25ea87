"""The cross-entropy of a projection, hidden (N, H) times weight (V, H), without the logits (N, V) ever being there.

Some classes are taken at a time, of some rows: their logits are made, what they add to each row's sums is kept (three
numbers a row), and they are dropped. The backward makes them again. So there is one product more than where the forward
computes the gradients, four in place of three, and for it

    no gradient of the weight in float32 is held: a block of classes is summed over rows and done with
    gradients of rows may be any numbers, as they are where a caller weighs tokens
    an evaluation, and a forward that is recomputed, cost what they have to
    where classes are cut over ranks, ranks speak once for all rows and not once for each block

What is ignored, and what is no class, is as in `kernels.cross_entropy`. Logits are computed and kept in float32 where
torch can: its products of bfloat16 give float32 on a GPU, where the gradient of logits is rounded to bfloat16 before it
is multiplied; on a CPU operands are made float32, a block at a time. No bias, no second derivative.
"""

# ruff: noqa: N803  a tensor carries its dims in its name

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from tangram.errors import UserError
from tangram.kernels.cross_entropy import Classes
from tangram.kernels.fused.common import by_kernels, computed, refuse_types, registers
from tangram.kernels.host import cdiv, kernel

ROWS = 4096
"""Of logits that are there at a time, at most."""
BLOCK_BYTES = {"cpu": 2**24}
"""What they take in float32, at most, by the kind of device; one class at least."""
OTHERS_BYTES = 2**28
"""On other kinds, whose products want thousands of rows and columns."""


def projected_loss(
    hidden_NH: Tensor, weight_VH: Tensor, labels_N: Tensor, ignored: int = -100, classes: Classes | None = None
) -> Tensor:
    """The loss of each row in nats, in float32 (in float64 of such); 0 where the label is `ignored`.

    With `classes` the weight's rows are those of a part: the gradient of `hidden_NH` is then the part's share, which
    the caller sums over parts, as that of any projection that is cut so. A label that is no class has a loss that is
    not a number.
    """
    if classes is not None:
        _refuse(hidden_NH, weight_VH, labels_N)
        return cast(Tensor, _OfParts.apply(hidden_NH, weight_VH, labels_N, ignored, classes))
    return cast(Tensor, projected(hidden_NH, weight_VH, labels_N, ignored)[0])


class Sums(NamedTuple):
    """Of each row of logits."""

    top: Tensor
    total: Tensor
    """sum(exp(x - top))."""
    label: Tensor
    """The label's logit, 0 where it is not among the classes."""


@torch.library.custom_op("tangram::projected_loss", mutates_args=())
def projected(hidden: Tensor, weight: Tensor, labels: Tensor, ignored: int = -100) -> tuple[Tensor, Tensor, Tensor]:
    """Losses (N), and the largest logit and the sum of exponentials less it, which the backward reads."""
    _refuse(hidden, weight, labels)
    at = torch.where((labels >= 0) & (labels < len(weight)), labels, -1).long()
    found = _sums(hidden, weight, at)
    return _losses(found, labels, ignored, len(weight)), found.top, found.total


@projected.register_fake
def _(hidden: Tensor, weight: Tensor, labels: Tensor, ignored: int = -100) -> tuple[Tensor, Tensor, Tensor]:
    return cast(Any, tuple(hidden.new_empty(hidden.shape[0], dtype=registers(hidden)) for _ in range(3)))


@torch.library.custom_op("tangram::projected_loss_backward", mutates_args=())
def projected_backward(
    grad: Tensor, hidden: Tensor, weight: Tensor, labels: Tensor, top: Tensor, total: Tensor, ignored: int
) -> tuple[Tensor, Tensor]:
    """What hidden and weight are owed."""
    at = torch.where((labels >= 0) & (labels < len(weight)), labels, -1).long()
    return _owed(grad, hidden, weight, at, Sums(top, total, top), labels != ignored)


@projected_backward.register_fake
def _(
    grad: Tensor, hidden: Tensor, weight: Tensor, labels: Tensor, top: Tensor, total: Tensor, ignored: int
) -> tuple[Tensor, Tensor]:
    return hidden.new_empty(hidden.shape), weight.new_empty(weight.shape)


def _save(ctx: Any, inputs: Any, output: Any) -> None:
    hidden, weight, labels, ctx.ignored = inputs
    ctx.save_for_backward(hidden, weight, labels, *output[1:])
    ctx.mark_non_differentiable(*output[1:])


def _backward(ctx: Any, grad: Tensor, *_: Any) -> Any:
    return (*projected_backward(grad, *ctx.saved_tensors, ctx.ignored), None, None)


projected.register_autograd(_backward, setup_context=_save)
PROJECTED_LOSS, PROJECTED_LOSS_BACKWARD = torch.ops.tangram.projected_loss, torch.ops.tangram.projected_loss_backward
"""As the dispatcher names them."""


def _flops(hidden: Any, weight: Any, *_: Any, **__: Any) -> int:
    return 2 * hidden[0] * hidden[1] * weight[0]


def _flops_backward(grad: Any, hidden: Any, weight: Any, *_: Any, **__: Any) -> int:
    """The logits again, and the two gradients."""
    return 3 * _flops(hidden, weight)


FLOPS = {PROJECTED_LOSS: _flops, PROJECTED_LOSS_BACKWARD: _flops_backward}
"""Of shapes, as torch's counter of flops takes them."""


class _OfParts(torch.autograd.Function):
    """Where others hold the other classes; their functions are no arguments of an operator."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, ignored: int, classes: Classes) -> Tensor:
        at = torch.searchsorted(classes.numbers, labels).clamp_(max=len(weight) - 1)
        at = torch.where(classes.numbers[at] == labels, at, -1).long()
        own = _sums(hidden, weight, at)
        top = classes.largest(own.top)
        here = own.total * torch.exp(own.top - top)
        total, label = classes.summed(torch.stack([here, torch.where(at >= 0, own.label - top, 0.0)])).unbind()
        ctx.save_for_backward(hidden, weight, labels, at, top, total)
        ctx.ignored = ignored
        return _losses(Sums(torch.zeros_like(top), total, label), labels, ignored, classes.count)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        hidden, weight, labels, at, top, total = ctx.saved_tensors
        found = _owed(gradients[0], hidden, weight, at, Sums(top, total, top), labels != ctx.ignored)
        return (*found, None, None, None)


# ---------------------------------------------------------------- blocks


def _losses(found: Sums, labels: Tensor, ignored: int, count: int) -> Tensor:
    losses = found.total.log() - (found.label - found.top)
    losses = torch.where((labels < 0) | (labels >= count), math.nan, losses)
    return torch.where(labels != ignored, losses, 0.0)


def _sums(hidden: Tensor, weight: Tensor, at: Tensor) -> Sums:
    kind = registers(hidden)
    top = hidden.new_full((len(hidden),), -math.inf, dtype=kind)
    found = Sums(top, torch.zeros_like(top), torch.zeros_like(top))
    rows, width = _steps(hidden)
    for first in range(0, len(weight), width):
        w = _operand(weight[first : first + width])
        for some in _slices(len(hidden), rows):
            _gather(_logits(_operand(hidden[some]), w), at[some], Sums(*(x[some] for x in found)), first)
    return found


def _gather(x: Tensor, at: Tensor, found: Sums, first: int) -> None:
    """Adds what a block of logits has."""
    if by_kernels(x):
        from tangram.kernels.compiled import loss  # where there is no device there may be no Triton

        kernel(loss.gather)[(len(x),)](x, at, *found, first, x.shape[1], 1024, num_warps=4)
        return
    new = torch.maximum(found.top, x.amax(1))
    safe = torch.where(new == -math.inf, 0.0, new)
    at = at - first
    here = (at >= 0) & (at < x.shape[1])
    label = x.gather(1, at.clamp(0, x.shape[1] - 1)[:, None]).squeeze(1)
    found.label.copy_(torch.where(here, label, found.label))
    found.total.mul_(torch.exp(found.top - safe)).add_(x.sub_(safe[:, None]).exp_().sum(1))
    found.top.copy_(new)


def _owed(grad: Tensor, hidden: Tensor, weight: Tensor, at: Tensor, found: Sums, kept: Tensor) -> tuple[Tensor, Tensor]:
    """Block by block: the weight's gradient is complete when its block is; that of the hidden is summed in float32."""
    kind = registers(hidden)
    grad = torch.where(kept, grad.to(kind), 0.0)
    scale, less = grad / found.total, torch.where(at >= 0, grad, 0.0)
    dhidden, dweight = torch.zeros_like(hidden, dtype=kind), torch.zeros_like(weight)
    rows, width = _steps(hidden)
    for first in range(0, len(weight), width):
        w = _operand(weight[first : first + width])
        block = torch.zeros_like(w, dtype=kind)
        for some in _slices(len(hidden), rows):
            h = _operand(hidden[some])
            x = _logits(h, w)
            dx = _logits_owed(x, h, at[some], found.top[some], scale[some], less[some], first)
            dhidden[some] += _product(dx, w)
            block += _product(dx.T, h)
        dweight[first : first + width] = block
    return dhidden.to(hidden.dtype), dweight


def _logits_owed(x: Tensor, like: Tensor, at: Tensor, top: Tensor, scale: Tensor, less: Tensor, first: int) -> Tensor:
    """In the dtype of the operand that it is multiplied with."""
    if by_kernels(x):
        from tangram.kernels.compiled import loss

        dx = torch.empty_like(x, dtype=like.dtype)
        grid = (len(x), cdiv(x.shape[1], 1024))
        kernel(loss.owed)[grid](x, dx, at, top, scale, less, first, x.shape[1], 1024, num_warps=4)
        return dx
    x.sub_(top[:, None]).exp_().mul_(scale[:, None])
    at = at - first
    here = (at >= 0) & (at < x.shape[1])
    x.scatter_add_(1, at.clamp(0, x.shape[1] - 1)[:, None], torch.where(here, -less, 0.0)[:, None])
    return x.to(like.dtype)


def _operand(x: Tensor) -> Tensor:
    """As it is multiplied: a CPU has no product of bfloat16 that gives float32."""
    return computed(x) if x.device.type == "cpu" else x


def _logits(h: Tensor, w: Tensor) -> Tensor:
    return _product(h, w.T)


def _product(a: Tensor, b: Tensor) -> Tensor:
    """In float32 (float64)."""
    return torch.mm(a, b, out_dtype=torch.float32) if a.dtype == torch.bfloat16 else a @ b


def _steps(hidden: Tensor) -> tuple[int, int]:
    """Rows and classes of a block of logits."""
    rows = max(1, min(len(hidden), ROWS))
    most = BLOCK_BYTES.get(hidden.device.type, OTHERS_BYTES)
    return rows, max(1, most // (rows * registers(hidden).itemsize))


def _slices(count: int, size: int) -> Iterator[slice]:
    return (slice(first, first + size) for first in range(0, count, size))


def _refuse(hidden: Tensor, weight: Tensor, labels: Tensor) -> None:
    refuse_types("the loss of a projection", hidden, weight)
    shapes = [tuple(x.shape) for x in (hidden, weight, labels)]
    if [len(one) for one in shapes] != [2, 2, 1] or shapes[0][1] != shapes[1][1] or shapes[0][0] != shapes[2][0]:
        raise UserError(f"the loss of a projection wants (N, H), (V, H) and labels (N), not {shapes}")
    if hidden.dtype != weight.dtype:
        raise UserError(f"hidden states and weight are of one dtype, not of {hidden.dtype} and {weight.dtype}")
    if not len(weight):
        raise UserError("the loss of a projection wants a class at least")
