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

from tangram.kernels.lab.formats import BF16, E2M1, E4M3, E5M2, Format
from tangram.kernels.lab.quant import Operand, Scaling
from tangram.kernels.lab.recipes import Backward, Forward, Recipe

BLOCK = 128
"""Tokens that share a scale."""
TILE = 64
"""Queries and keys whose gradients of scores share one."""
Mode = Literal["bf16", "fp8-fwd", "fp8", "nvfp4-emulated", "fp8-e5m2-emulated", "nvfp4-dropin-emulated"]

_BF16 = Operand(BF16)
_BF16_BACKWARD = Backward(*(_BF16,) * 10)
_NVFP4 = Operand(E2M1, Scaling("group", 16, "e4m3", "row"))


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


def cannot(recipe: Recipe) -> str:
    """Why the kernels have no such recipe, or ""."""
    forward, backward = recipe.forward, recipe.backward
    if recipe.smooth_q:
        return "queries are not smoothed"
    if not recipe.matched:
        return "a backward takes the scores of its forward"
    if recipe.dice:
        return "nothing is rounded stochastically"
    if forward.q != forward.k:
        return "queries and keys are cast alike"
    if wrong := _forward_cannot(forward):
        return wrong
    if backward == _BF16_BACKWARD:
        return ""
    return _fp8_backward_cannot(forward, backward)


def _forward_cannot(own: Forward) -> str:
    kinds = {_kind(one) for one in (own.q, own.v)}
    if kinds == {"bf16"} and _kind(own.p) == "bf16":
        return ""
    if kinds == {"e4m3 block"} and _kind(own.p) == "e4m3 static" and own.q == own.v:
        return ""
    if kinds == {"e2m1 group"} and own.p == own.v == own.q and own.q.scaling.second != "tensor":
        return ""
    return f"a forward of {own.q}, {own.p} and {own.v} is none of bf16, E4M3 of blocks, or E2M1 of groups"


def _fp8_backward_cannot(forward: Forward, own: Backward) -> str:
    tensors = (own.dv_do, own.dp_do, own.dp_v, own.dq_k, own.dk_q)
    scores = (own.dq_ds, own.dk_ds)
    if _kind(forward.q) != "e4m3 block":
        return "a backward in E4M3 follows a forward in E4M3"
    if any(one != forward.q for one in tensors) or own.dv_p != forward.p:
        return "a backward in E4M3 casts its tensors as the forward does"
    if _kind(scores[0]) != "e4m3 tile" or scores[0] != scores[1]:
        return f"gradients of scores are cast to E4M3 of tiles, not {scores[0]} and {scores[1]}"
    if forward.q.scaling.size % scores[0].scaling.size:
        return "a block is not so many tiles"
    return ""


def _kind(operand: Operand) -> str:
    to: Format | None = operand.format
    scaling = operand.scaling
    if to is None:
        return "exact"
    if to is BF16 and scaling.per == "none":
        return "bf16"
    float32 = scaling.kind == "fp32" and scaling.second == "none"
    if to is E2M1 and scaling.per == "group" and scaling.kind in ("e4m3", "e8m0", "e8m0-up"):
        return "e2m1 group"
    return f"{to} {scaling.per}" if float32 else str(operand)
