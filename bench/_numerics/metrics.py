"""How far a result is off, tensor by tensor: whole, by rows and heads, in units of the last place.

Against the truth of the inputs, and against float64 of the operands as they were cast: the first is what a recipe
costs, the second what is left for the kernel (its probabilities, sums, roundings), in which its bugs show.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from bench._numerics.attention import emulated, traced, truth
from bench._numerics.cases import TENSORS, Case
from tangram.kernels.lab.formats import BF16
from tangram.kernels.lab.recipes import Freedom, Recipe, operands_only

QUANTILE = 0.99


@dataclass(frozen=True)
class Metrics:
    """Of one tensor (B, H, tokens, channels) beside the true one."""

    relative: float
    """Norm of the difference over the norm of the truth."""
    cosine: float
    row_median: float
    """Of the rows' own relative errors; rows of next to nothing are measured by a hundredth of the usual row."""
    row_high: float
    """Their quantile of 0.99."""
    row_worst: float
    head_worst: float
    ulps: float
    """The largest difference in units of bf16's last place, at the size of the element or of the usual element."""


def metrics(found: Tensor, true: Tensor) -> Metrics:
    """Of a result beside the true one; of what is not finite nothing is said but infinity."""
    if not bool(found.isfinite().all()):
        return Metrics(*(torch.inf, 0.0, *(torch.inf,) * 5))
    rows = relative_rows(found - true, true).flatten()
    apart, size = found - true, float(norm(true))
    usual = size / max(1, true.numel()) ** 0.5
    place = 2.0 ** torch.floor(torch.log2(true.abs().clamp_min(max(usual, 1e-300)))) * 2.0**-BF16.mantissa
    heads = norm(apart, (0, 2, 3)) / norm(true, (0, 2, 3)).clamp_min(1e-300)
    both = float(norm(found)) * size
    return Metrics(
        relative=float(norm(apart)) / size if size else float(norm(found)),
        cosine=float((found * true).sum()) / both if both else 0.0,
        row_median=float(rows.quantile(0.5)),
        row_high=float(rows.quantile(QUANTILE)),
        row_worst=float(rows.max()),
        head_worst=float(heads.max()),
        ulps=float((apart.abs() / place).max()),
    )


def relative_rows(apart: Tensor, true: Tensor, least: float = 0.01) -> Tensor:
    """Norms of rows of a difference over those of the truth (B, H, tokens)."""
    return norm(apart, (-1,)) / row_sizes(true, least)


def row_sizes(true: Tensor, least: float) -> Tensor:
    """Norms of rows (B, H, tokens), of which none counts as less than `least` of the usual one."""
    size = norm(true, (-1,))
    usual = float((size.square().mean()).sqrt())
    return size.clamp_min(max(least * usual, 1e-300))


def norm(x: Tensor, dims: tuple[int, ...] | None = None) -> Tensor:
    """Euclidean, over some dims or all."""
    return x.square().sum(dims).sqrt() if dims is not None else x.square().sum().sqrt()


@dataclass(frozen=True)
class Measured:
    """A recipe on one input."""

    recipe: str
    against_inputs: dict[str, Metrics]
    against_operands: dict[str, Metrics]
    underflow: float
    """Share of the seen probabilities of the forward that their cast makes zero."""
    saturated: int
    row_sum: float
    """Mean of the magnitude of a row of dS summed (nothing, in exact numbers) over the sum of its magnitudes."""
    peak: float
    """The largest score."""


def measured(recipe: Recipe, case: Case, freedom: Freedom = Freedom()) -> Measured:  # noqa: B008  frozen
    """What a recipe costs on an input."""
    run = traced(recipe, case, freedom)
    inputs, operands = truth(case), emulated(operands_only(recipe), case, replace(freedom, accumulate=None))
    alive = run.row_size > 1e-9 * run.row_size.max()
    ratio = (run.row_sums.abs() / run.row_size.clamp_min(1e-300))[alive]
    return Measured(
        recipe.name,
        {name: metrics(a, b) for name, a, b in zip(TENSORS, run.results, inputs, strict=True)},
        {name: metrics(a, b) for name, a, b in zip(TENSORS, run.results, operands, strict=True)},
        run.underflow,
        run.saturated,
        float(ratio.mean()) if len(ratio) else 0.0,
        run.peak,
    )
