"""What `run.attention` may name, each a recipe of the laboratory, and which recipes the kernels have.

    bf16             six products of bfloat16
    fp8-fwd          the forward in E4M3, keys smoothed; the backward in bfloat16, from the scores of the forward
    fp8              both in E4M3, gradients too
    nvfp4-emulated   the forward rounded to NVFP4 and computed in bfloat16, which is exact for such values, as no
                     product of NVFP4 is at hand; the backward in bfloat16

These match: their backward takes the scores of the forward. Of a forward of 8 bits delta is that of the stored result,
as one more product would cost more than it gains; of 4 bits it is that of probabilities as they were, as in Attn-QAT.
Two are no advice: they are what others do, to be trained beside these on a CPU, and the kernels have neither.

    fp8-e5m2-emulated        fp8 with gradients in E5M2, as Transformer Engine's hybrid format has them
    nvfp4-dropin-emulated    a forward in NVFP4 put before a backward that knows nothing of it: scores again from
                             bfloat16, sums and result of the forward, keys as they are

Scales are of one head at most, so they are the same however heads are dealt to devices. Those of a block, and the mean
of the keys, are of tokens that a query does not see, too: these reach it, by a rounding.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Literal

from tangram.kernels.lab.formats import BF16, E2M1, E4M3, E5M2, FP32, Format
from tangram.kernels.lab.quant import Operand, Scaling
from tangram.kernels.lab.recipes import EXACT, Backward, Forward, Recipe

BLOCK = 128
"""Tokens that share a scale."""
SMALLEST = 16
"""Tokens of a tile that matrix units take, at least."""
TILE = 64
"""Queries and keys whose gradients of scores share one."""
Mode = Literal["bf16", "fp8-fwd", "fp8", "nvfp4-emulated", "fp8-e5m2-emulated", "nvfp4-dropin-emulated"]

_BF16 = Operand(BF16)
_BF16_BACKWARD = Backward(*(_BF16,) * 10)
_NVFP4 = Operand(E2M1, Scaling("group", 16, "e4m3", "row"))
_MXFP4 = Operand(E2M1, Scaling("group", 32, "e8m0"))
_FORWARDS = tuple(Forward(*(one,) * 4) for one in (_BF16, _NVFP4, _MXFP4))
"""Beside those in E4M3, of blocks of any size."""


def fp8(block: int = BLOCK, tile: int = TILE, name: str = "fp8", gradients: Format = E4M3) -> Recipe:
    """E4M3 everywhere, of scales for so many tokens, and squares of scores of so many."""
    x, p = Operand(E4M3, Scaling("block", block)), Operand(E4M3, Scaling("static", factor=256.0))
    do, ds = Operand(gradients, Scaling("block", block)), Operand(gradients, Scaling("tile", tile))
    return Recipe(name, Forward(x, x, p, x), Backward(x, x, p, do, do, x, ds, x, ds, x), smooth_k=True)


MODES: Mapping[str, Recipe] = {
    "bf16": Recipe("bf16", Forward(*(_BF16,) * 4), _BF16_BACKWARD),
    "fp8-fwd": replace(fp8(), name="fp8-fwd", backward=_BF16_BACKWARD),
    "fp8": fp8(),
    "nvfp4-emulated": Recipe(
        "nvfp4-emulated", Forward(*(_NVFP4,) * 4), _BF16_BACKWARD, smooth_k=True, delta="high"
    ),
    "fp8-e5m2-emulated": fp8(name="fp8-e5m2-emulated", gradients=E5M2),
    "nvfp4-dropin-emulated": Recipe(
        "nvfp4-dropin-emulated", Forward(*(_NVFP4,) * 4), _BF16_BACKWARD, matched=False
    ),
}  # fmt: skip


def own_sums(recipe: Recipe) -> bool:
    """Whether sums, registers and results are those that kernels have, and no model of a chip's."""
    return (recipe.accumulate, recipe.registers, recipe.stored) == (EXACT, FP32, BF16)


def cannot(recipe: Recipe) -> str:
    """Why the kernels have no such recipe, or ""."""
    if recipe.smooth_q:
        return "queries are not smoothed"
    if not recipe.matched:
        return "a backward takes the scores of its forward"
    if recipe.dice:
        return "nothing is rounded stochastically"
    if not own_sums(recipe):
        return "sums, registers and results are as a device has them"
    forward, backward = recipe.forward, recipe.backward
    block, tile = forward.q.scaling.size, backward.dq_ds.scaling.size
    eight = forward == fp8(block).forward
    if not eight and forward not in _FORWARDS:
        return f"a forward of {forward.q}, {forward.p} and {forward.v} is none of bf16, E4M3 of blocks, NVFP4 or MXFP4"
    if recipe.hadamard and not eight:
        return "turned queries and keys are cast to E4M3"
    if eight and not _is_power(block):
        return f"a block is of a power of two of tokens, not of {block}"
    if backward == _BF16_BACKWARD:
        return ""
    if not eight:
        return "a backward in E4M3 follows a forward in E4M3"
    if backward != fp8(block, tile).backward:
        return "a backward casts its tensors as the forward does and its gradients of scores by tiles, or is in bf16"
    return "" if _is_power(tile) and block % tile == 0 else f"a block of {block} tokens is not so many tiles of {tile}"


def _is_power(size: int) -> bool:
    return size >= SMALLEST and size & (size - 1) == 0
