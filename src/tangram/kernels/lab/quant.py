"""Scales: a tensor divided by what makes it fit a format, cast, and multiplied again.

A scale belongs to a tile of the last two dims, tokens and channels (of scores: queries and keys). Which tiles a
matrix unit can take depends on the dim that is summed, `along`: a row of scales must not change within a sum, a group
is a part of it. So a tensor that is summed along channels in one product and along tokens in another is quantised
twice, differently.

    tensor, head     one scale for all, for each batch and head
    block            `size` tokens, all channels
    tile             `size` x `size`, of scores
    row              all that is summed: a token's channels, or a channel's tokens
    group            `size` neighbours of what is summed: of MX 32, with powers of two; of NVFP4 16, with E4M3 over a
                     second scale
    static           none is measured: multiplied by `factor`, for the probabilities, which are at most one

Scales of float32 are rounded as a kernel rounds them, and so is the quotient before it is cast.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from tangram.kernels.lab.formats import E4M3, Format, cast, power_of_two, single

Along = Literal["tokens", "channels"]
Per = Literal["none", "static", "tensor", "head", "block", "tile", "row", "group"]
Kind = Literal["fp32", "e8m0", "e8m0-up", "e4m3"]


@dataclass(frozen=True)
class Scaling:
    """Which elements share a scale, and what a scale is."""

    per: Per
    size: int = 0
    kind: Kind = "fp32"
    """`e8m0`: the power of two below (OCP), which saturates; `e8m0-up`: the one above (Transformer Engine)."""
    second: Literal["none", "tensor", "row"] = "none"
    """Of E4M3 scales: what shares the float32 scale over them; `row`: SageAttention3's two levels for probabilities."""
    factor: float = 1.0
    reciprocal: bool = False
    """Multiplied by the scale's rounded reciprocal in the place of a division: a kernel's choice."""


@dataclass(frozen=True)
class Operand:
    """What becomes of one operand of a product; without a format it stays as it is."""

    format: Format | None = None
    scaling: Scaling = Scaling("none")

    def __str__(self) -> str:
        if self.format is None:
            return "exact"
        size = f" {self.scaling.size}" if self.scaling.size else ""
        return f"{self.format}" + (f" per {self.scaling.per}{size}" if self.scaling.per != "none" else "")


class Quantised(NamedTuple):
    """Values after the cast and multiplied by their scales again, and what happened on the way."""

    values: Tensor
    saturated: int = 0
    """Elements that lay beyond the format's largest value."""
    underflowed: int = 0
    """Elements that were not zero and are."""


Rounding = Callable[[Tensor, Format, torch.Generator | None], Tensor]


def quantise(
    x: Tensor, operand: Operand, along: Along, dice: torch.Generator | None = None, rounding: Rounding = cast
) -> Quantised:
    """`x` (..., tokens, channels) as a product with this operand sees it."""
    if operand.format is None:
        return Quantised(x)
    tiles, shape = _tiles(x, operand.scaling, along)
    scales = _scales(tiles, operand.format, operand.scaling, along)
    scaled = _scaled(tiles, scales, operand.scaling)
    codes = rounding(torch.where(scales == 0, torch.zeros_like(scaled), scaled), operand.format, dice)
    saturated = int((scaled.abs() > operand.format.largest * (1 + 2.0**-20)).sum())
    underflowed = int(((codes == 0) & (tiles != 0)).sum())
    return Quantised(_untiled(codes * scales, shape), saturated, underflowed)


def hadamard(width: int, seed: int = 0) -> Tensor:
    """An orthogonal matrix (width, width) of +-1 over a root: Sylvester's, columns negated at random.

    A width that is no power of two gets blocks of powers of two, the largest first (96: 64 and 32).
    """
    blocks: list[Tensor] = []
    left = width
    while left:
        size = 1 << (left.bit_length() - 1)
        block = torch.ones(1, 1, dtype=torch.float64)
        while block.shape[0] < size:
            block = torch.cat([torch.cat([block, block], 1), torch.cat([block, -block], 1)])
        blocks.append(block / size**0.5)
        left -= size
    signs = torch.randint(2, (width,), generator=torch.Generator().manual_seed(seed)).double() * 2 - 1
    whole = torch.zeros(width, width, dtype=torch.float64)
    start = 0
    for block in blocks:
        end = start + len(block)
        whole[start:end, start:end] = block
        start = end
    return signs[:, None] * whole


def block_mean(x: Tensor, size: int) -> Tensor:
    """The mean of each `size` tokens (of all where `size` is 0), as often as there are tokens."""
    tokens = x.shape[-2]
    if not size or size >= tokens:
        mean: Tensor = x.mean(-2, keepdim=True)
        return mean.expand_as(x)
    means = [x[..., i : i + size, :].mean(-2, keepdim=True) for i in range(0, tokens, size)]
    found: Tensor = torch.cat(means, -2).repeat_interleave(size, -2)
    return found[..., :tokens, :]


# ---------------------------------------------------------------- tiles


def _tile(shape: torch.Size, scaling: Scaling, along: Along) -> tuple[int, int]:
    tokens, channels = shape[-2], shape[-1]
    if scaling.per == "block":
        return min(scaling.size, tokens), channels
    if scaling.per == "tile":
        return min(scaling.size, tokens), min(scaling.size, channels)
    if scaling.per == "row":
        return (1, channels) if along == "channels" else (tokens, 1)
    if scaling.per == "group":
        return (1, min(scaling.size, channels)) if along == "channels" else (min(scaling.size, tokens), 1)
    return tokens, channels


def _tiles(x: Tensor, scaling: Scaling, along: Along) -> tuple[Tensor, torch.Size]:
    """(..., tiles, tile, tiles, tile), filled up with zeros."""
    high, wide = _tile(x.shape, scaling, along)
    padded = F.pad(x, (0, -x.shape[-1] % wide, 0, -x.shape[-2] % high))
    rows, columns = padded.shape[-2] // high, padded.shape[-1] // wide
    return padded.reshape(*x.shape[:-2], rows, high, columns, wide), x.shape


def _untiled(tiles: Tensor, shape: torch.Size) -> Tensor:
    return tiles.flatten(-4, -3).flatten(-2)[..., : shape[-2], : shape[-1]]


def _scaled(tiles: Tensor, scales: Tensor, scaling: Scaling) -> Tensor:
    if scaling.per == "none":
        return tiles
    return single(tiles * single(1.0 / scales)) if scaling.reciprocal else single(tiles / scales)


def _scales(tiles: Tensor, to: Format, scaling: Scaling, along: Along) -> Tensor:
    """What the tiles are divided by; zero where a scale underflows, one where all elements are zero."""
    if scaling.per == "none":
        return tiles.new_ones(())
    if scaling.per == "static":
        return tiles.new_tensor(1.0 / scaling.factor)
    most = tiles.abs().amax((-3, -1), keepdim=True)
    if scaling.per == "tensor":
        most = most.amax().reshape(())
    if scaling.kind == "e4m3":
        found = _over_second(most, to, scaling, along)
    elif scaling.kind == "fp32":
        found = single(most / to.largest)
    else:
        found = _powers(most, to, up=scaling.kind == "e8m0-up")
    return torch.where(most == 0, torch.ones_like(found), found)


def _powers(most: Tensor, to: Format, up: bool) -> Tensor:
    if up:
        return power_of_two(single(most / to.largest), up=True)
    top = power_of_two(torch.tensor(to.largest, dtype=torch.float64), up=False)
    return power_of_two(power_of_two(most, up=False) / top, up=False)


def _over_second(most: Tensor, to: Format, scaling: Scaling, along: Along) -> Tensor:
    """Scales of E4M3 times one of float32, by which the largest of them is E4M3's largest."""
    if scaling.second == "none":
        return cast(single(most / to.largest), E4M3)
    over = most.amax() if scaling.second == "tensor" else most.amax(-2 if along == "channels" else -4, keepdim=True)
    second = single(over / (to.largest * E4M3.largest))
    second = torch.where(second == 0, torch.ones_like(second), second)
    return cast(single(most / to.largest / second), E4M3) * second
