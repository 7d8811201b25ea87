"""Rotary positions of queries and keys in one operator, halves turned against each other as transformers does.

Of a head's elements the first R are turned, as many as the cosines have; the others are as they were. Cosines and sines
may be float32 where queries are bfloat16 (transformers casts them first, which is most of its error). Where they are
trained, their gradient is computed by torch's operators, and queries and keys are kept for it. No second derivative.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tangram.errors import UserError
from tangram.kernels.fused.common import by_kernels, computed, refuse_types
from tangram.kernels.host import cdiv, kernel, padded


@torch.library.custom_op("tangram::rotary", mutates_args=())
def rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Queries (B, H, S, D) and keys (B, G, S, D) turned by cosines and sines (B or 1, S, R); strides are kept."""
    _refuse(q, k, cos, sin)
    return _turned(q, k, cos, sin, back=False)


@rotary.register_fake
def _(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(q), torch.empty_like(k)


@torch.library.custom_op("tangram::rotary_backward", mutates_args=())
def rotary_backward(grad_q: Tensor, grad_k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """What queries and keys are owed: the gradients turned back."""
    return _turned(grad_q, grad_k, cos, sin, back=True)


@rotary_backward.register_fake
def _(grad_q: Tensor, grad_k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(grad_q), torch.empty_like(grad_k)


def _turned(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, back: bool) -> tuple[Tensor, Tensor]:
    turned = cos.shape[-1]
    found = torch.empty_like(q), torch.empty_like(k)
    for x, out in zip((q, k), found, strict=True):
        out[..., turned:] = x[..., turned:]
    if by_kernels(q) and by_kernels(k) and by_kernels(cos):
        _by_kernels(q, k, cos, sin, found, back)
        return found
    c1, c2, s1, s2 = (half[:, None] for x in (cos, sin) for half in computed(x).chunk(2, -1))
    of_second, of_first = (s2, -s1) if back else (-s1, s2)
    for x, out in zip((q, k), found, strict=True):
        x1, x2 = computed(x[..., :turned]).chunk(2, -1)
        out[..., :turned] = torch.cat([x1 * c1 + x2 * of_second, x2 * c2 + x1 * of_first], -1)
    return found


def _by_kernels(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, found: tuple[Tensor, Tensor], back: bool) -> None:
    from tangram.kernels.compiled import rotary as compiled  # where there is no device there may be no Triton

    given = [x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, cos, sin)]
    made = [out if out.stride(-1) == 1 else torch.empty_like(out, memory_format=torch.contiguous_format)
            for out in found]  # fmt: skip
    (B, H, S, _), half = q.shape, cos.shape[-1] // 2  # noqa: N806
    width = padded(half)
    tokens = max(1, min(32, 1024 // width))
    angles = ((0 if x.shape[0] == 1 else x.stride(0), x.stride(1)) for x in given[2:])
    kernel(compiled.rotate)[(cdiv(S, tokens), B)](
        *given, *made, *given[0].stride()[:3], *given[1].stride()[:3], *made[0].stride()[:3], *made[1].stride()[:3],
        *next(angles), *next(angles), H, k.shape[1], S, half, width, tokens, back,
    )  # fmt: skip
    for out, own in zip(found, made, strict=True):
        if own is not out:
            out[..., : 2 * half] = own[..., : 2 * half]


def _refuse(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> None:
    refuse_types("rotary positions", q, k, cos, sin)
    wanted = [x.ndim for x in (q, k, cos, sin)] == [4, 4, 3, 3]
    if not wanted or q.shape[0::2] != k.shape[0::2] or q.shape[-1] != k.shape[-1] or q.dtype != k.dtype:
        raise UserError(
            "rotary positions want queries (B, H, S, D), keys (B, G, S, D) of one dtype and cosines (B or 1, S, R), "
            f"not {tuple(q.shape)}, {tuple(k.shape)} and {tuple(cos.shape)}"
        )
    if cos.shape != sin.shape or cos.shape[0] not in (1, q.shape[0]) or cos.shape[1] != q.shape[2]:
        raise UserError(
            f"rotary positions of {q.shape[0]} rows of {q.shape[2]} tokens want as many cosines and sines "
            f"(or one row of them), not {tuple(cos.shape)} and {tuple(sin.shape)}"
        )
    if cos.shape[-1] % 2 or cos.shape[-1] > q.shape[-1]:
        raise UserError(f"of heads of {q.shape[-1]} elements an even number is turned, not {cos.shape[-1]}")


def _of_angles(grads: tuple[Tensor, Tensor], given: tuple[Tensor, Tensor], like: Tensor) -> tuple[Tensor, Tensor]:
    """What cosines and sines are owed, summed over heads, and rows that share them."""
    turned, cos, sin = like.shape[-1], 0, 0
    for grad, x in zip(grads, given, strict=True):
        dy, x1x2 = computed(grad[..., :turned]), computed(x[..., :turned])
        x1, x2 = x1x2.chunk(2, -1)
        cos, sin = cos + (dy * x1x2).sum(1), sin + (dy * torch.cat([-x2, x1], -1)).sum(1)
    return tuple(x.sum_to_size(like.shape).to(like.dtype) for x in (cos, sin))  # pyright: ignore


def _saved(ctx: Any, inputs: Any, output: Any) -> None:
    q, k, cos, sin = inputs
    ctx.save_for_backward(cos, sin, *((q, k) if cos.requires_grad or sin.requires_grad else ()))


def _owed(ctx: Any, grad_q: Tensor, grad_k: Tensor) -> Any:
    cos, sin, *given = ctx.saved_tensors
    found = rotary_backward(grad_q, grad_k, cos, sin)
    return (*found, *(_of_angles((grad_q, grad_k), tuple(given), cos) if given else (None, None)))


rotary.register_autograd(_owed, setup_context=_saved)
ROTARY = torch.ops.tangram.rotary
"""As the dispatcher names it."""
