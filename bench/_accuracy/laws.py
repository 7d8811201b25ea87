"""What inputs are drawn from.

    normal       of size one
    wide         normal times powers of two from 2^-10 to 2^10
    tiny         normal times 2^-120 (2^-14 in float16) and less: results that are subnormal
    positive     the magnitudes of normal ones: sums that grow until a term is too small for them
    cancelling   terms in pairs that nearly cancel
    special      signed zeros, the smallest subnormal and normal, one, the largest finite, infinities, NaN
    nonfinite    normal, but for a zero, an infinity or NaN in each row
    angles       evenly from 0 to 131,072, as positions times frequencies are
    every        all values of a 16-bit type

numpy draws them: torch's own normal numbers depend on the processor's vectors.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from tangram.kernels.lab.formats import Format, cast

LAWS = ("normal", "wide", "tiny", "positive", "cancelling", "special", "nonfinite", "angles", "every")


def specials(of: Format) -> list[float]:
    """The values that special cases are made of."""
    positive = [0.0, 2.0 ** (of.lowest - of.mantissa), 2.0**of.lowest, 0.5, 1.0, 3.0, of.largest, float("inf")]
    return [*positive, *(-x for x in positive), float("nan")]


def drawn(law: str, shape: Sequence[int], rng: np.random.Generator, of: Format) -> Tensor:
    """Values of the format, in float64."""
    return cast(_raw(law, tuple(shape), rng, of), of, saturate=False)


def _raw(law: str, shape: tuple[int, ...], rng: np.random.Generator, of: Format) -> Tensor:
    if law == "every":
        return _every(of)
    if law == "angles":
        return torch.from_numpy(rng.uniform(0.0, 131072.0, shape))
    plain = torch.from_numpy(rng.standard_normal(shape))
    if law == "wide":
        return plain * torch.from_numpy(np.exp2(rng.integers(-10, 11, shape)))
    if law == "tiny":
        highest = of.lowest + 6 if of.lowest < -100 else of.lowest
        return plain * torch.from_numpy(np.exp2(rng.integers(highest - 12, highest + 1, shape)))
    if law == "positive":
        return plain.abs()
    if law == "cancelling":
        return _cancelling(plain, rng)
    if law == "special":
        values = specials(of)
        return (
            torch.tensor(values, dtype=torch.float64)
            .repeat(-(-plain.numel() // len(values)))[: plain.numel()]
            .view(shape)
        )
    if law == "nonfinite":
        return _nonfinite(plain, rng)
    if law == "normal":
        return plain
    raise ValueError(f"there is no law {law!r}")


def _cancelling(plain: Tensor, rng: np.random.Generator) -> Tensor:
    """Along the last dim, the second half takes the first away again, but for a part in a thousand."""
    half = plain.shape[-1] // 2
    first = plain[..., :half] * 8
    change = torch.from_numpy(rng.standard_normal(first.shape))
    both = torch.cat([first, -first * (1 + change / 1024), plain[..., 2 * half :]], -1)
    return both[..., torch.from_numpy(rng.permutation(both.shape[-1]))]


def _nonfinite(plain: Tensor, rng: np.random.Generator) -> Tensor:
    """Row by row of the last dim, one value each."""
    rows = plain.reshape(-1, plain.shape[-1]).clone() if plain.numel() else plain
    values = (0.0, float("inf"), -float("inf"), float("nan"), -0.0)
    for i, row in enumerate(rows if plain.numel() else ()):
        row[int(rng.integers(len(row)))] = values[i % len(values)]
    return rows.view(plain.shape)


def _every(of: Format) -> Tensor:
    if of.bits != 16:
        raise ValueError(f"{of} has too many values to take them all")
    kind = {"bf16": torch.bfloat16, "fp16": torch.float16}[of.name]
    bits = torch.from_numpy(np.arange(1 << 16, dtype=np.uint16).view(np.int16))
    return bits.view(kind).double()
