"""Attention by a recipe as one operator of torch, with a gradient, a shape without values, and two back ends.

    triton     the kernels, on a device, and on the CPU where TRITON_INTERPRET=1 is set (slow: it is for tests)
    emulated   the same casts and formulas in torch's operators, elsewhere on the CPU

`unable` says in a sentence what an operator of some mode cannot do, before anything runs.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from tangram.kernels.attention import Heads, Partial
from tangram.kernels.flash import emulated
from tangram.kernels.flash.modes import MODES, cannot
from tangram.kernels.flash.spans import Spans
from tangram.kernels.host import has_kernels
from tangram.kernels.lab.formats import E4M3

WIDEST = 256
"""Channels of a head that the kernels' tiles hold."""


def backend(device: torch.device) -> Literal["triton", "emulated"]:
    """What computes on such a device."""
    return "triton" if has_kernels(device) else "emulated"


def unable(mode: str, device: torch.device, dtype: torch.dtype, width: int) -> str:
    """Why attention of a mode cannot run so, or "". `width`: of the wider of queries and values."""
    if mode not in MODES:
        return f'there is no attention "{mode}": there are {", ".join(MODES)}'
    if dtype not in (torch.bfloat16, torch.float32):
        return f'attention "{mode}" computes in bfloat16, of which {str(dtype).removeprefix("torch.")} is no part'
    if backend(device) == "emulated":
        return ""
    if why := cannot(MODES[mode]):
        return f'attention "{mode}" is for studies on the CPU, for the kernels have none of it: {why}'
    if width > WIDEST:
        return f"heads of {width} channels do not fit the kernels' tiles: {WIDEST} do"
    if device.type == "cuda" and MODES[mode].forward.q.format is E4M3:
        found = torch.cuda.get_device_capability(device)
        if found < (8, 9):
            return (
                f'attention "{mode}" needs products of FP8, which a device of capability {found[0]}.{found[1]} has not'
            )
    return ""


@torch.library.custom_op("tangram::flash", mutates_args=())
def flash(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    since: Tensor,
    reach: Tensor,
    places: Tensor,
    sinks: Tensor | None,
    scale: float,
    mode: str,
) -> tuple[Tensor, Tensor]:
    """Of queries (B, H, S, E), keys (B, G, T, E) and values (B, G, T, F) the result (B, H, S, F) and sums (B, H, S).

    `since`, `reach` (B, S) and `places` (B, T), int32: `spans.Spans`. `sinks`: (H,). `mode`: a key of `MODES`. The sums
    are those of scores as they were computed, of smoothed keys where the mode smooths.
    """
    if why := unable(mode, q.device, q.dtype, max(q.shape[-1], v.shape[-1])):
        raise ValueError(why)
    heads, spans = Heads(q, k, v), Spans(since, reach, places)
    if backend(q.device) == "emulated":
        found = emulated.forward(heads, spans, sinks, scale, MODES[mode])
    else:
        from tangram.kernels.flash import launch  # where there is no device there may be no Triton

        found = launch.forward(heads, launch.Call(MODES[mode], spans, scale, sinks))
    return found.out.to(q.dtype).contiguous(), found.sums


@flash.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    return q.new_empty(*q.shape[:3], v.shape[3]), q.new_empty(q.shape[:3], dtype=torch.float32)


@torch.library.custom_op("tangram::flash_backward", mutates_args=())
def flash_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    since: Tensor,
    reach: Tensor,
    places: Tensor,
    sinks: Tensor | None,
    out: Tensor,
    sums: Tensor,
    scale: float,
    mode: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradients of `flash`'s queries, keys and values, and what each query's sink owes (B, H, S)."""
    heads, spans, whole = Heads(q, k, v), Spans(since, reach, places), Partial(out, sums)
    if backend(q.device) == "emulated":
        found, owed = emulated.backward(grad, heads, whole, spans, sinks, scale, MODES[mode])
    else:
        from tangram.kernels.flash import launch

        found, owed = launch.backward(grad, heads, whole, launch.Call(MODES[mode], spans, scale, sinks))
    return found.q.contiguous(), found.k.contiguous(), found.v.contiguous(), owed


@flash_backward.register_fake
def _(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *others: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return (*(x.new_empty(x.shape) for x in (q, k, v)), q.new_empty(q.shape[:3], dtype=torch.float32))  # pyright: ignore[reportReturnType]


def _saved(ctx: Any, inputs: Any, output: Any) -> None:
    q, k, v, since, reach, places, sinks, ctx.scale, ctx.mode = inputs
    ctx.save_for_backward(q, k, v, since, reach, places, sinks, *output)
    ctx.mark_non_differentiable(output[1])


def _owed(ctx: Any, grad: Tensor, _: Tensor) -> Any:
    q, k, v, since, reach, places, sinks, out, sums = ctx.saved_tensors
    *found, owed = flash_backward(grad, q, k, v, since, reach, places, sinks, out, sums, ctx.scale, ctx.mode)
    of_sinks = None if sinks is None else -owed.sum((0, 2)).to(sinks.dtype)
    return (*found, None, None, None, of_sinks, None, None)


flash.register_autograd(_owed, setup_context=_saved)
FLASH, FLASH_BACKWARD = torch.ops.tangram.flash, torch.ops.tangram.flash_backward
"""As the dispatcher names them."""
