"""Attention forward and backward by a recipe, in explicit formulas, so that each operand of each product can be cast.

The forward goes over tiles of keys with a running maximum, as kernels do: the probabilities of a tile are taken to
the largest score so far, and it is these that are cast. Backward: P = exp(S - sums), dV = P' dO, dP = dO V', dS = P
(dP - delta), dQ = dS K, dK = dS' Q. A query that sees nothing gives zeros and takes no part.

A kernel is these formulas and some steps that it can get wrong: `Steps` holds each of them as a function, and
`bench._numerics.mutants` puts wrong ones in their place.
"""

# ruff: noqa: N803, N806  a tensor carries its dims in its name

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from bench._numerics.cases import Case, Results, shared, summed
from tangram.kernels.lab.formats import FP32, Format, cast, single
from tangram.kernels.lab.quant import Along, Operand, Quantised, block_mean, hadamard, quantise
from tangram.kernels.lab.recipes import BLOCK, TRUTH, Accumulator, Freedom, Recipe, product

Quantise = Callable[[str, Tensor, Operand, Along, torch.Generator | None], Quantised]


def _quantised(name: str, x: Tensor, operand: Operand, along: Along, dice: torch.Generator | None) -> Quantised:
    del name  # a mutant tells operands by it
    return quantise(x, operand, along, dice)


def _delta(grad: Tensor, out: Tensor) -> Tensor:
    return (grad * out).sum(-1, keepdim=True)


def _scores_owed(p: Tensor, dp: Tensor, delta: Tensor) -> Tensor:
    return p * (dp - delta)


def _rescale(old: Tensor, new: Tensor) -> Tensor:
    """What sums to an old maximum are multiplied by."""
    return torch.exp(old - torch.where(new == -torch.inf, 0.0, new))


@dataclass(frozen=True)
class Steps:
    """The steps of a kernel that a mutant may spoil; as they stand they are right."""

    quantise: Quantise = _quantised
    exponent: Callable[[Tensor], Tensor] = torch.exp
    maximum: Callable[[Tensor, Tensor], Tensor] = torch.maximum
    rescale_out: Callable[[Tensor, Tensor], Tensor] = _rescale
    rescale_sum: Callable[[Tensor, Tensor], Tensor] = _rescale
    normalise: Callable[[Tensor, Tensor], Tensor] = torch.div
    share: Callable[[Tensor, int], Tensor] = shared
    sum_group: Callable[[Tensor, int], Tensor] = summed
    tiles: Callable[[list[slice]], list[slice]] = list
    sums: Callable[[Tensor], Tensor] = torch.clone
    """Of the logarithms of sums that the backward reads."""
    delta: Callable[[Tensor, Tensor], Tensor] = _delta
    scores_owed: Callable[[Tensor, Tensor, Tensor], Tensor] = _scores_owed
    turn: Callable[[Tensor], Tensor] = torch.clone
    """The Hadamard matrix that queries are turned by (keys: as it is), and gradients back."""
    turn_back: Callable[[Tensor], Tensor] = torch.clone
    correct: Callable[[Tensor], Tensor] = torch.clone
    """What smoothing adds again."""
    product: Callable[[str, Tensor, Tensor, Accumulator], Tensor] = lambda name, a, b, by: product(a, b, by)
    scale: Callable[[str, float], float] = lambda name, scale: scale


RIGHT = Steps()


class Trace(NamedTuple):
    """What a run leaves beside its results."""

    results: Results
    lse: Tensor
    """Logarithms of sums (B, H, S)."""
    row_sums: Tensor
    """Of dS as the products see it, and what a sink owes (B, H, S); nothing in exact numbers."""
    row_size: Tensor
    """Sums of the magnitudes of the same, which they are measured by."""
    underflow: float
    """Share of the probabilities that are seen and that their cast made zero."""
    saturated: int
    """Elements of all operands beyond the largest value of their format."""
    peak: float
    """The largest score."""


@dataclass
class _Run:
    """One forward and backward."""

    recipe: Recipe
    case: Case
    freedom: Freedom
    steps: Steps
    saturated: int = 0
    underflowed: int = 0
    probabilities: int = 0

    def __post_init__(self) -> None:
        self.dice = torch.Generator().manual_seed(self.freedom.seed)
        recipe = self.recipe
        registers = recipe.registers
        self.low: Callable[[Tensor], Tensor] = torch.clone if registers is None else _rounder(registers)
        inner = recipe.accumulate
        if inner.mantissa is None and registers is not None and self.freedom.accumulate is not None:
            inner = self.freedom.accumulate
        self.by = inner
        self.turning = hadamard(self.case.q.shape[-1]) if recipe.hadamard else None
        self.heads = self.case.q.shape[1]

    # ------------------------------------------------------------ parts of both

    def cast(self, name: str, x: Tensor, operand: Operand, along: Along) -> Tensor:
        found = self.quantised(name, x, operand, along)
        self.saturated += found.saturated
        return found.values

    def quantised(self, name: str, x: Tensor, operand: Operand, along: Along) -> Quantised:
        if self.freedom.reciprocal:
            operand = replace(operand, scaling=replace(operand.scaling, reciprocal=True))
        return self.steps.quantise(name, x, operand, along, self.dice if name in self.recipe.dice else None)

    def cast_keys(self, name: str, x_BGT: Tensor, operand: Operand, along: Along) -> Tensor:
        """Of keys or values, then for each query head."""
        return self.steps.share(self.cast(name, x_BGT, operand, along), self.heads)

    def times(self, name: str, a: Tensor, b: Tensor) -> Tensor:
        return self.low(self.steps.product(name, a, b, self.by))

    def scale(self, name: str) -> float:
        return self.steps.scale(name, self.case.scale)

    def treated(self, operand: Operand) -> bool:
        """Whether smoothing and turning are for this operand: not where it keeps 16 bits or more."""
        return operand.format is not None and operand.format.bits <= 8

    def queries(self, operand: Operand) -> tuple[Tensor, Tensor | None]:
        """Queries before the cast, and the means that smoothing took away (both turned)."""
        q, mean = self.case.q, None
        if self.treated(operand):
            if self.recipe.smooth_q:
                mean = single(block_mean(q, BLOCK))
                q = q - mean
            if self.turning is not None:
                turn = self.steps.turn(self.turning)
                q, mean = single(q @ turn), None if mean is None else mean @ turn
        return q, mean

    def keys(self, operand: Operand) -> tuple[Tensor, Tensor | None]:
        """Keys before the cast, and the mean that smoothing took away (not turned)."""
        k, mean = self.case.k, None
        if self.treated(operand):
            if self.recipe.smooth_k:
                mean = single(block_mean(k, 0))
                k = k - mean
            if self.turning is not None:
                k = single(k @ self.turning)
        return k, mean

    def back(self, x: Tensor, operand: Operand) -> Tensor:
        """A gradient of turned queries or keys, turned back."""
        if self.turning is None or not self.treated(operand):
            return x
        return x @ self.steps.turn_back(self.turning).mT

    # ------------------------------------------------------------ forward

    def scores(self, name: str, q_operand: Operand, k_operand: Operand) -> Tensor:
        """S (B, H, S, T) without a mask; less what smoothing of keys takes from each row."""
        q, q_mean = self.queries(q_operand)
        k, _ = self.keys(k_operand)
        codes_q = self.cast("q", q, q_operand, "channels")
        codes_k = self.cast_keys("k", k, k_operand, "channels")
        found = self.times(name, codes_q, codes_k.mT)
        if q_mean is not None:
            found = found + self.low(self.steps.correct(q_mean @ shared(k, self.heads).mT))
        if self.freedom.jitter:
            off = torch.rand(found.shape, generator=self.dice, dtype=torch.float64) * 2 - 1
            found = found * (1 + self.freedom.jitter * off)
        return self.low(found * self.scale(name))

    def shift(self) -> Tensor:
        """What smoothing of keys takes from each row's scores (B, H, S, 1)."""
        if not self.recipe.smooth_k or not self.treated(self.recipe.forward.k):
            return torch.zeros(*self.case.q.shape[:3], 1, dtype=torch.float64)
        mean = shared(single(block_mean(self.case.k, 0)), self.heads)
        return self.low((self.case.q * mean[..., :1, :]).sum(-1, keepdim=True) * self.case.scale)

    def sinks(self) -> Tensor | None:
        """As scores beside those of smoothed keys (B, H, S, 1)."""
        if self.case.sinks is None:
            return None
        return self.case.sinks[:, None, None] - self.steps.correct(self.shift())

    def forward(self, S: Tensor) -> tuple[Tensor, Tensor]:
        """O (not yet stored) and the logarithms of sums in the domain of S (B, H, S, 1)."""
        case, freedom, operands = self.case, self.freedom, self.recipe.forward
        v = self.cast_keys("v", case.v, operands.v, "tokens")
        out, total = torch.zeros_like(case.grad), torch.zeros(*case.q.shape[:3], 1, dtype=torch.float64)
        sinks = self.sinks()
        top = torch.full_like(total, -torch.inf) if sinks is None else sinks.expand_as(total)
        T = case.k.shape[2]
        tiles = [slice(i, min(i + freedom.tile, T)) for i in range(0, T, freedom.tile)]
        for columns in self.steps.tiles(tiles[::-1] if freedom.descending else tiles):
            part = S[..., columns]
            new = self.steps.maximum(top, part.amax(-1, keepdim=True))
            p = self.low(self.steps.exponent(part - torch.where(new == -torch.inf, 0.0, new)))
            total = self.low(total * self.steps.rescale_sum(top, new) + p.sum(-1, keepdim=True))
            found = self.quantised("p", p, operands.p, "channels")
            self.saturated += found.saturated
            self.underflowed += found.underflowed
            self.probabilities += int((p > 0).sum())
            add = self.times("o", found.values, v[..., columns, :])
            out = self.low(self.low(out * self.steps.rescale_out(top, new)) + add)
            top = new
        if sinks is not None:
            total = self.low(total + torch.exp(sinks - top))
        seen = total > 0
        safe = torch.where(seen, total, 1.0)
        out = torch.where(seen, self.low(self.steps.normalise(out, safe)), 0.0)
        lse = torch.where(seen, self.low(torch.where(seen, top, 0.0) + torch.log(safe)), -torch.inf)
        return out, lse

    # ------------------------------------------------------------ backward

    def backward(self, S: Tensor, lse: Tensor, out: Tensor, visible: Tensor) -> tuple[Results, Tensor, Tensor]:
        """Gradients, and the sums of rows of dS as its products see it, with their size."""
        case, operands = self.case, self.recipe.backward
        read = self.steps.sums(lse)
        p = self.low(self.steps.exponent(S - torch.where(read == -torch.inf, 0.0, read)))
        p = torch.where(visible, p, 0.0)
        v = self.cast_keys("dp_v", case.v, operands.dp_v, "channels")
        dp = self.times("dp", self.cast("dp_do", case.grad, operands.dp_do, "channels"), v.mT)
        if self.recipe.delta == "high":
            delta = self.low(self.steps.delta(case.grad, self.low(p @ v)))
        else:
            delta = self.low(self.steps.delta(case.grad, out))
        dv = self.times("dv", self.cast("dv_p", p, operands.dv_p, "tokens").mT,
                        self.cast("dv_do", case.grad, operands.dv_do, "tokens"))  # fmt: skip
        ds = self.low(self.steps.scores_owed(p, dp, delta))
        owed = self.owed_by_sinks(lse, delta)
        dq, codes = self.queries_owed(ds, owed)
        dk = self.keys_owed(ds)
        groups = case.k.shape[1]
        return (
            Results(out, dq, self.steps.sum_group(dk, groups), self.steps.sum_group(dv, groups)),
            codes.sum(-1) - owed[..., 0],
            codes.abs().sum(-1),
        )

    def owed_by_sinks(self, lse: Tensor, delta: Tensor) -> Tensor:
        """What the rows of dS sum to, for a sink owes the rest (B, H, S, 1)."""
        sinks = self.sinks()
        if sinks is None:
            return torch.zeros_like(delta)
        shifted = sinks if self.recipe.matched else sinks + self.shift()
        return torch.exp(shifted - lse) * delta

    def queries_owed(self, ds: Tensor, owed: Tensor) -> tuple[Tensor, Tensor]:
        operands = self.recipe.backward
        k, mean = self.keys(operands.dq_k)
        codes = self.cast("dq_ds", ds, operands.dq_ds, "channels")
        dq = self.back(self.times("dq", codes, self.cast_keys("dq_k", k, operands.dq_k, "tokens")), operands.dq_k)
        if mean is not None and self.case.sinks is not None:
            dq = dq + self.steps.correct(owed * shared(mean, self.heads)[..., :1, :])
        return self.low(dq * self.scale("dq")), codes

    def keys_owed(self, ds: Tensor) -> Tensor:
        operands = self.recipe.backward
        q, mean = self.queries(operands.dk_q)
        codes = self.cast("dk_ds", ds, operands.dk_ds, "tokens")
        dk = self.times("dk", codes.mT, self.cast("dk_q", q, operands.dk_q, "tokens"))
        if mean is not None:
            dk = dk + self.low(self.steps.correct(ds.mT @ mean))
        return self.low(self.back(dk, operands.dk_q) * self.scale("dk"))


def traced(
    recipe: Recipe,
    case: Case,
    freedom: Freedom = Freedom(),  # noqa: B008  frozen
    steps: Steps = RIGHT,
    backward_visible: Tensor | None = None,
) -> Trace:
    """Forward and backward of `case`; `backward_visible`: another mask for the backward (a mutant's)."""
    run = _Run(recipe, case, freedom, steps)
    hidden = ~case.visible
    S = run.scores("s", recipe.forward.q, recipe.forward.k)
    out, lse = run.forward(S.masked_fill(hidden, -torch.inf))
    again, own = S, lse
    if not recipe.matched:
        again, own = run.scores("s again", recipe.backward.q, recipe.backward.k), lse + run.shift()
    store = partial(cast, to=recipe.stored) if recipe.stored is not None else torch.clone
    out = store(out)
    seen = case.visible if backward_visible is None else backward_visible
    seen = seen & case.visible.any(-1, keepdim=True)
    results, row_sums, row_size = run.backward(again, own, out, seen)
    return Trace(
        Results(*(store(one) for one in results)),
        (lse + run.shift())[..., 0],
        row_sums,
        row_size,
        run.underflowed / max(1, run.probabilities),
        run.saturated,
        float(S.masked_fill(hidden, -torch.inf).max()),
    )


def emulated(recipe: Recipe, case: Case, freedom: Freedom = Freedom(), steps: Steps = RIGHT) -> Results:  # noqa: B008
    """What a right kernel of this recipe gives."""
    return traced(recipe, case, freedom, steps).results


def truth(case: Case) -> Results:
    """In float64, nothing rounded."""
    return emulated(TRUTH, case, Freedom(tile=max(1, case.k.shape[2])))


def _rounder(to: Format) -> Callable[[Tensor], Tensor]:
    return single if to is FP32 else partial(cast, to=to)
