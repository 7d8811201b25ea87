"""Whether a kernel's results are those of a recipe: one rule for all recipes, whose limits are the recipe's own errors.

The recipe is emulated on the very inputs of the kernel, and some more times with what a kernel may choose (`Freedom`:
tiles, their order, how it adds, seeds). These say how far right kernels lie from the emulation, and how much that
varies:

    limit = furthest + 2 (furthest - nearest) + slack

where the slack is what roundings that fall the other way may do, by the emulation's own error: of one row, twice its
error; of all, a tenth. Distance is taken in several ways, with every row (a token of a head) in units of the true
one, so that a mistake in one row, head or diagonal is not lost in the sum of all:

    whole     root of the mean square of all rows
    head      the same of the worst head
    stretch   the same of the worst 16 tokens in a row
    row       the worst row, of which none counts as less than a tenth of the usual one; elsewhere, than half
    slope     the worst head's mean difference along the true value: what is too large or too small
    offset    the difference along what tokens a fixed way off would add: a mask or a window that is off by one

A result that is not finite is never right. There is no constant for a recipe, tensor, input or length. The rule was
chosen on Gaussian inputs of 96, 128 and 144 tokens; the bench judges by it on others. Trade-off: it says whether a
kernel is this recipe, not whether it is good, so one that is more exact than its recipe is refused, too; and it costs
some emulations.
"""

# ruff: noqa: N803, N806  a tensor carries its dims in its name

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from bench._numerics.attention import emulated, truth
from bench._numerics.cases import TENSORS, Case, Results, shared, summed
from bench._numerics.metrics import norm, row_sizes
from tangram.kernels.lab.recipes import FP32_CHUNKED, Accumulator, Freedom, Recipe

WAYS = ("whole", "head", "stretch", "row", "slope", "offset")
STRETCH = 16
SPREAD = 2.0
FEW = 0.1
"""Of the emulation's own error, what the roundings that fall the other way may come to over all rows."""
_OFF = 2.0**-20
BASE = Freedom()
VARIANTS = (
    Freedom(tile=32, accumulate=FP32_CHUNKED, seed=1, jitter=_OFF),
    Freedom(tile=32, descending=True, seed=2, reciprocal=True),
    Freedom(tile=128, seed=3, jitter=_OFF),
    Freedom(tile=64, descending=True, accumulate=Accumulator(8, 23), seed=4, jitter=_OFF),
    Freedom(tile=96, seed=5, jitter=_OFF, reciprocal=True),
    Freedom(tile=32, seed=6),
    Freedom(tile=96, descending=True, seed=7, jitter=_OFF),
    Freedom(tile=128, descending=True, seed=8),
)
"""The emulations that limits are made of. Tiles are multiples of 32, so that no group of scales is cut."""

Distances = Mapping[str, Mapping[str, float]]
"""By tensor and way."""


@dataclass(frozen=True)
class Limits:
    """What a right kernel keeps on one input."""

    case: Case
    true: Results
    emulation: Results
    limits: Distances


@dataclass(frozen=True)
class Verdict:
    """What was found; `worst`: the largest distance over its limit, with where it was."""

    worst: float
    where: str

    @property
    def accepted(self) -> bool:
        """Whether all distances are within their limits."""
        return self.worst <= 1.0


def limits(recipe: Recipe, case: Case, variants: Sequence[Freedom] = VARIANTS) -> Limits:
    """Of a recipe on an input, from nothing but its own emulations."""
    true, base = truth(case), emulated(recipe, case, BASE)
    own = slack(base, true, case)
    apart = [distances(emulated(recipe, case, one), base, true, case) for one in variants]

    def limit(name: str, way: str) -> float:
        far, near = (pick(one[name][way] for one in apart) for pick in (max, min))
        return far + SPREAD * (far - near) + own[name][way]

    found = {name: {way: limit(name, way) for way in WAYS} for name in TENSORS}
    return Limits(case, true, base, found)


def judged(results: Results, own: Limits) -> Verdict:
    """Whether these are the results of a right kernel; of any dtype."""
    for name, one, true in zip(TENSORS, results, own.true, strict=True):
        if one.shape != true.shape:
            return Verdict(torch.inf, f"{name}, {tuple(one.shape)} for {tuple(true.shape)}")
        if not bool(one.isfinite().all()):
            return Verdict(torch.inf, f"{name}, not finite")
    found = distances(results, own.emulation, own.true, own.case)
    ratios = {f"{name}, {way}": _over(found[name][way], own.limits[name][way]) for name in TENSORS for way in WAYS}
    where = max(ratios, key=ratios.__getitem__)
    return Verdict(ratios[where], where)


def _over(distance: float, limit: float) -> float:
    if distance == 0:
        return 0.0
    return distance / limit if limit else torch.inf


def distances(results: Results, other: Results, true: Results, case: Case) -> Distances:
    """How far two results are apart, in every way; each row (a token of a head) in units of the true one."""
    found: dict[str, dict[str, float]] = {}
    for name, mine, theirs, x, partner in zip(TENSORS, results, other, true, _partners(case), strict=True):
        apart, along = _rows(mine - theirs, x), _rows(x, x)
        squares = apart.square().sum(-1)
        found[name] = {
            "whole": float(squares.mean().sqrt()),
            "head": float(squares.mean((0, 2)).max().sqrt()),
            "stretch": float(_stretches(squares).max().sqrt()),
            "row": float(_rows(mine - theirs, x, least=0.1).square().sum(-1).max().sqrt()),
            "slope": float((apart * along).sum(-1).mean((0, 2)).abs().max()),
            "offset": float(by_offset(apart @ partner.mT).abs().max()),
        }
    return found


def slack(emulation: Results, true: Results, case: Case) -> Distances:
    """What roundings that fall the other way may do, by the emulation's own error."""
    found: dict[str, dict[str, float]] = {}
    for name, mine, x, partner in zip(TENSORS, emulation, true, _partners(case), strict=True):
        apart, along = _rows(mine - x, x), _rows(x, x)
        squares = apart.square().sum(-1)
        found[name] = {
            "whole": FEW * float(squares.mean().sqrt()),
            "head": FEW * float(squares.mean((0, 2)).max().sqrt()),
            "stretch": 2 * float((squares.max() / (STRETCH * x.shape[0] * x.shape[1])).sqrt()),
            "row": 2 * float(_rows(mine - x, x, least=0.1).square().sum(-1).max().sqrt()),
            "slope": 2 * float((apart * along).sum(-1).abs().max()) / (x.shape[0] * x.shape[2]),
            "offset": 2 * float((apart @ partner.mT).abs().max()),
        }
    return found


def _stretches(squares_BHS: Tensor) -> Tensor:
    """Means of so many tokens in a row, of all heads."""
    return squares_BHS.mean((0, 1)).unfold(0, min(STRETCH, squares_BHS.shape[2]), 1).mean(-1)


def _rows(x: Tensor, true: Tensor, least: float = 0.5) -> Tensor:
    return x / row_sizes(true, least)[..., None]


def _partners(case: Case) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What a token that is seen by mistake would add to each result: values, keys, queries and gradients."""
    groups, heads = case.k.shape[1], case.q.shape[1]
    found = (shared(case.v, heads), shared(case.k, heads), summed(case.q, groups), summed(case.grad, groups))
    v, k, q, grad = (x / norm(x) for x in found)
    return v, k, q, grad


def by_offset(products: Tensor) -> Tensor:
    """Sums of (..., i, j) over all i and j with one difference, for every difference."""
    S, T = products.shape[-2:]
    total = products.flatten(0, -3).sum(0).flip(0)
    # Each row filled up by S zeros and read as rows of one element less: what were antidiagonals are columns.
    padded = F.pad(total, (0, S)).flatten()[: S * (S + T - 1)]
    return padded.reshape(S, S + T - 1).sum(0)
