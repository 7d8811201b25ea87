"""Recipes of low-precision attention as data: which operand of which product is cast how, and what is done around it.

There are six products. Forward S = Q K' and O = P V; backward S again, dV = P' dO, dP = dO V', dQ = dS K, dK = dS' Q.
Each names its operands, for an operand that is summed along tokens in one and along channels in another has two
casts.

    matched      the backward takes the scores of the forward's casts; not: those of its own operands, less the
                 forward's sums
    delta        `low`: rowsum(dO * O) of the O that was stored; `high`: of an O from probabilities that were not cast
                 and the backward's values, so that a row of dS sums to zero (Attn-QAT)
    smooth_k     keys less their mean over tokens, which the softmax does not see (SageAttention)
    smooth_q     queries less the mean of their block, whose scores are added in float32 (SageAttention2)
    hadamard     queries and keys turned by one orthogonal matrix, so that no channel stands out
    dice         operands that are rounded stochastically

`Freedom` is what a kernel may choose and still be the same recipe: order and size of its tiles, how it adds, seeds.

Sums are made as matrix units make them: `chunk` products are added without error, their sum is added to a register that
keeps `mantissa` bits and drops the rest, and after `promote` products the register is added to a float32 number and
starts anew (two levels of accumulation: DeepSeek-V3, section 3.3; SageAttention2). Hopper's FP8 unit is said to keep
about 14 bits, that is 13 after the point. Trade-off: a model; a chip aligns each product before it adds.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor

from tangram.kernels.lab.formats import BF16, E2M1, E4M3, E5M2, FP32, INT8, Format, single, truncated
from tangram.kernels.lab.quant import Operand, Scaling


@dataclass(frozen=True)
class Accumulator:
    """How products are summed. `mantissa` of None: without error; `promote` of 0: in one register to the end."""

    chunk: int = 32
    mantissa: int | None = None
    promote: int = 0

    def __str__(self) -> str:
        if self.mantissa is None:
            return "exact"
        levels = f", float32 every {self.promote}" if self.promote else ""
        return f"{self.mantissa} bits, {self.chunk} at a time{levels}"


EXACT = Accumulator()
FP32_CHUNKED = Accumulator(chunk=16, mantissa=23)
HOPPER_FP8 = Accumulator(chunk=32, mantissa=13)
TWO_LEVEL = Accumulator(chunk=32, mantissa=13, promote=128)


def product(a: Tensor, b: Tensor, by: Accumulator = EXACT) -> Tensor:
    """`a @ b`; the last dim of `a` is summed."""
    if by.mantissa is None:
        return a @ b
    outer = torch.zeros_like(a[..., :1] @ b[..., :1, :])
    register = torch.zeros_like(outer)
    for start in range(0, a.shape[-1], by.chunk):
        end = start + by.chunk
        register = truncated(register + a[..., start:end] @ b[..., start:end, :], by.mantissa)
        if by.promote and end % by.promote == 0:
            outer, register = single(outer + register), torch.zeros_like(register)
    return single(outer + register)


BLOCK = 64
"""Tokens that share a scale of a block; kernels take 64 or 128, the laboratory's sequences are short."""


@dataclass(frozen=True)
class Forward:
    """Operands of S = Q K' and O = P V."""

    q: Operand = Operand()  # noqa: RUF009  frozen
    k: Operand = Operand()  # noqa: RUF009
    p: Operand = Operand()  # noqa: RUF009
    v: Operand = Operand()  # noqa: RUF009


@dataclass(frozen=True)
class Backward:
    """Operands of S = Q K' where it is not the forward's, dV = P' dO, dP = dO V', dQ = dS K and dK = dS' Q."""

    q: Operand = Operand()  # noqa: RUF009
    k: Operand = Operand()  # noqa: RUF009
    dv_p: Operand = Operand()  # noqa: RUF009
    dv_do: Operand = Operand()  # noqa: RUF009
    dp_do: Operand = Operand()  # noqa: RUF009
    dp_v: Operand = Operand()  # noqa: RUF009
    dq_ds: Operand = Operand()  # noqa: RUF009
    dq_k: Operand = Operand()  # noqa: RUF009
    dk_ds: Operand = Operand()  # noqa: RUF009
    dk_q: Operand = Operand()  # noqa: RUF009


@dataclass(frozen=True)
class Recipe:
    """One way to compute attention."""

    name: str
    forward: Forward = field(default_factory=Forward)
    backward: Backward = field(default_factory=Backward)
    matched: bool = True
    delta: Literal["low", "high"] = "low"
    smooth_k: bool = False
    smooth_q: bool = False
    hadamard: bool = False
    dice: frozenset[str] = frozenset()
    accumulate: Accumulator = EXACT
    stored: Format | None = BF16
    """Of O and of the gradients."""
    registers: Format | None = FP32
    """Of scores, probabilities and sums; None: float64."""


@dataclass(frozen=True)
class Freedom:
    """What may differ between two kernels of one recipe."""

    tile: int = 64
    """Keys of a step of the forward, whose probabilities are taken to the largest score so far."""
    descending: bool = False
    accumulate: Accumulator | None = None
    """In the place of a recipe's accumulation where that is exact."""
    seed: int = 0
    jitter: float = 0.0
    """Scores are off by up to this, relatively, as another order of sums or another exponential makes them."""
    reciprocal: bool = False
    """Casts multiply by reciprocals of scales and do not divide."""


TRUTH = Recipe("fp64", stored=None, registers=None)
"""No rounding but float64's."""


def _fp8(to: Format, scaling: Scaling, factor: float = 256.0) -> tuple[Operand, Operand]:
    """Of a tensor, and of probabilities: of a fixed scale, as FlashAttention-3's."""
    return Operand(to, scaling), Operand(to, Scaling("static", factor=factor))


def _fp8_forward(scaling: Scaling, factor: float = 256.0) -> Forward:
    x, p = _fp8(E4M3, scaling, factor)
    return Forward(x, x, p, x)


def _fp8_backward(gradients: Format, scaling: Scaling, scores: Scaling) -> Backward:
    x, p = _fp8(E4M3, scaling)
    do, ds = Operand(gradients, scaling), Operand(gradients, scores)
    return Backward(x, x, p, do, do, x, ds, x, ds, x)


_BF16 = Operand(BF16)
_BF16_FORWARD = Forward(*(_BF16,) * 4)
_BF16_BACKWARD = Backward(*(_BF16,) * 10)
_TENSOR = Scaling("tensor")
_BLOCK, _TILE = Scaling("block", BLOCK), Scaling("tile", BLOCK)
_ROW = Scaling("row")
_MX8 = Operand(E4M3, Scaling("group", 32, "e8m0-up"))
_MX8_OCP = Operand(E4M3, Scaling("group", 32, "e8m0"))
_MX4 = Operand(E2M1, Scaling("group", 32, "e8m0"))
_NV4 = Operand(E2M1, Scaling("group", 16, "e4m3", "tensor"))
_NV4_P = Operand(E2M1, Scaling("group", 16, "e4m3", "row"))
_INT8_P = Operand(INT8, Scaling("static", factor=127.0))

_FP8 = Recipe("fp8 per tensor", _fp8_forward(_TENSOR), _fp8_backward(E4M3, _TENSOR, _TENSOR))
_FP8_BLOCK = Recipe("fp8 per block", _fp8_forward(_BLOCK), _fp8_backward(E4M3, _BLOCK, _TILE))
_MIXED = Recipe("fp8 forward, bf16 backward", _fp8_forward(_BLOCK), _BF16_BACKWARD)
_NVFP4 = Recipe("nvfp4 forward, bf16 backward", Forward(_NV4, _NV4, _NV4_P, _NV4), _BF16_BACKWARD)
_INT8 = Operand(INT8, _BLOCK)
_INT8_SCORES = Operand(INT8, _TILE)
_GRADIENTS = frozenset({"dv_do", "dp_do", "dq_ds", "dk_ds"})

_TABLE = (
    Recipe("bf16", _BF16_FORWARD, _BF16_BACKWARD),
    _FP8,
    replace(_FP8, name="fp8 per tensor, P not scaled", forward=_fp8_forward(_TENSOR, 1.0)),
    replace(_FP8, name="fp8 per tensor, E5M2 gradients", backward=_fp8_backward(E5M2, _TENSOR, _TENSOR)),
    replace(_FP8, name="fp8 per tensor, 14-bit sums", accumulate=HOPPER_FP8),
    replace(_FP8, name="fp8 per tensor, 14-bit sums in two levels", accumulate=TWO_LEVEL),
    replace(_FP8, name="fp8 per tensor, dice for gradients", dice=_GRADIENTS),
    _FP8_BLOCK,
    Recipe("fp8 per row", _fp8_forward(_ROW), _fp8_backward(E4M3, _ROW, _ROW)),
    replace(_FP8_BLOCK, name="fp8 per block, Hadamard", hadamard=True),
    replace(_FP8_BLOCK, name="fp8 per block, K smoothed", smooth_k=True),
    replace(_FP8_BLOCK, name="fp8 per block, Q and K smoothed", smooth_k=True, smooth_q=True),
    replace(_FP8_BLOCK, name="fp8 per block, all of them", smooth_k=True, smooth_q=True, hadamard=True, delta="high"),
    _MIXED,
    replace(_MIXED, name="fp8 forward, bf16 backward, delta high", delta="high"),
    replace(_MIXED, name="fp8 forward, bf16 backward, not matched", matched=False),
    replace(_MIXED, name="fp8 forward, bf16 backward, K smoothed, delta high", smooth_k=True, delta="high"),
    Recipe("mxfp8", Forward(*(_MX8,) * 4), Backward(*(_MX8,) * 10)),
    Recipe("mxfp8, scales of OCP", Forward(*(_MX8_OCP,) * 4), Backward(*(_MX8_OCP,) * 10)),
    Recipe(
        "int8, K smoothed, dP in bf16",
        Forward(_INT8, _INT8, _INT8_P, _INT8),
        Backward(_INT8, _INT8, _INT8_P, _INT8, _BF16, _BF16, _INT8_SCORES, _INT8, _INT8_SCORES, _INT8),
        smooth_k=True,
    ),
    _NVFP4,
    replace(_NVFP4, name="nvfp4 forward, bf16 backward, delta high", delta="high"),
    replace(_NVFP4, name="nvfp4 forward, bf16 backward, K smoothed, delta high", smooth_k=True, delta="high"),
    replace(_NVFP4, name="nvfp4 forward, bf16 backward, not matched", matched=False),
    Recipe("nvfp4", Forward(_NV4, _NV4, _NV4_P, _NV4), Backward(*(_NV4,) * 10)),
    Recipe("mxfp4 forward, bf16 backward, delta high", Forward(*(_MX4,) * 4), _BF16_BACKWARD, delta="high"),
)  # fmt: skip
RECIPES = {one.name: one for one in _TABLE}


def operands_only(recipe: Recipe) -> Recipe:
    """Its inputs cast, and all that follows in float64: what of its error a kernel has no part in."""
    exact, forward, backward = Operand(), recipe.forward, recipe.backward
    return replace(
        recipe,
        name=f"{recipe.name}, operands only",
        forward=replace(forward, p=exact),
        backward=replace(backward, dv_p=exact, dq_ds=exact, dk_ds=exact),
        delta="high",
        accumulate=EXACT,
        stored=None,
        registers=None,
    )
