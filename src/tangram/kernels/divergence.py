"""How far a student's distribution over classes is from a teacher's, of which a device may hold some of the classes.

    q, p    softmax of the student's and of the teacher's logits, each divided by the temperature T
    m       beta p + (1 - beta) q

    forward_kl   sum p (log p - log q)                             Hinton et al. 2015; Agarwal et al. 2023 (GKD), eq. 1
    reverse_kl   sum q (log q - log p)                             Gu et al. 2023 (MiniLLM); GKD
    jsd          beta KL(p || m) + (1 - beta) KL(q || m)           generalised Jensen-Shannon; GKD, eq. 2

A row of the table gives each class's summand, and s = q dD/dq of it (less multiples of q, which cancel); then the
gradient of D by the student's logits is (s - q sum(s)) / T, of each part by itself once the sum is known. So over the
parts go two numbers a row for the largest logits, two for the totals, two for D and sum(s). All is computed in float32,
of some rows at a time, as by `kernels.cross_entropy`. The teacher gets no gradient.
"""

# ruff: noqa: N803, N806, N815  a tensor carries its dims in its name

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import pad

from tangram.kernels.cross_entropy import Classes, chunks, columns, computed

FAR = -1e4
"""The logit of a class that has no part, or that a model masks by minus infinity: far enough that its share is 0, near
enough that no difference is infinite."""


class Summands(NamedTuple):
    """Of each class."""

    divergence: Tensor
    slope: Tensor
    """s of the module's docstring."""


Formula = Callable[[Tensor, Tensor, float], Summands]
"""Of log p, log q and beta."""


def _forward(logp: Tensor, logq: Tensor, beta: float) -> Summands:
    p = logp.exp()
    return Summands(p * (logp - logq), -p)


def _reverse(logp: Tensor, logq: Tensor, beta: float) -> Summands:
    summands = logq.exp() * (logq - logp)
    return Summands(summands, summands)


def _jsd(logp: Tensor, logq: Tensor, beta: float) -> Summands:
    logm = torch.logaddexp(logp + math.log(beta), logq + math.log1p(-beta))
    slope = (1 - beta) * logq.exp() * (logq - logm)
    return Summands(beta * logp.exp() * (logp - logm) + slope, slope)


FORMULAS: Mapping[str, Formula] = MappingProxyType({"forward_kl": _forward, "reverse_kl": _reverse, "jsd": _jsd})


class Comparison(NamedTuple):
    """What is compared, and how."""

    formula: Formula
    beta: float
    temperature: float
    shared: int
    """Of how many classes, from the first: those that both have."""


def divergence(
    student_NV: Tensor, teacher_NV: Tensor, counted_N: Tensor, how: Comparison, classes: Classes | None = None
) -> Tensor:
    """The divergence of each row in nats, in float32 (in float64 of such logits); 0 of rows that are not counted.

    Of a part, its columns of both. No second derivative.
    """
    return cast(Tensor, _Divergence.apply(student_NV, teacher_NV, counted_N, how, classes))


class _Divergence(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, student_NV: Tensor, teacher_NV: Tensor, counted_N: Tensor, how: Comparison, classes: Classes | None
    ) -> Tensor:
        student_NV, teacher_NV = student_NV.detach(), teacher_NV.detach()
        shared_V = shared_columns(student_NV, how, classes)
        tops_2N = student_NV.new_empty(2, len(student_NV), dtype=computed(student_NV))
        totals_2N, sums_2N = torch.empty_like(tops_2N), torch.empty_like(tops_2N)
        for some in chunks(student_NV):
            for side, x_NV in enumerate((student_NV, teacher_NV)):
                own_NV = x_NV[some] if shared_V is None else torch.where(shared_V, x_NV[some], FAR)
                tops_2N[side, some] = own_NV.amax(1).to(tops_2N.dtype) / how.temperature
        tops_2N = tops_2N if classes is None else classes.largest(tops_2N)
        for some in chunks(student_NV):
            for side, x_NV in enumerate((student_NV, teacher_NV)):
                totals_2N[side, some] = less(x_NV[some], tops_2N[side, some, None], shared_V, how).exp_().sum(1)
        totals_2N = totals_2N if classes is None else classes.summed(totals_2N)
        less_2N = tops_2N + totals_2N.log()
        for some in chunks(student_NV):
            found = _summands(student_NV, teacher_NV, less_2N, some, shared_V, how)[1]
            sums_2N[0, some], sums_2N[1, some] = found.divergence.sum(1), found.slope.sum(1)
        sums_2N = sums_2N if classes is None else classes.summed(sums_2N)
        ctx.save_for_backward(student_NV, teacher_NV, less_2N, sums_2N[1], counted_N, shared_V)
        ctx.how = how
        return torch.where(counted_N, sums_2N[0], 0.0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        student_NV, teacher_NV, less_2N, slope_N, counted_N, shared_V = ctx.saved_tensors
        scale_N = torch.where(counted_N, gradients[0], 0.0) / ctx.how.temperature
        found_NV = torch.empty_like(student_NV)
        for some in chunks(student_NV):
            logq_NV, each = _summands(student_NV, teacher_NV, less_2N, some, shared_V, ctx.how)
            part_NV = (each.slope - logq_NV.exp_().mul_(slope_N[some, None])).mul_(scale_N[some, None])
            found_NV[some] = torch.where(counted_N[some, None], part_NV, 0.0)
        return found_NV, None, None, None, None


def shared_columns(x_NV: Tensor, how: Comparison, classes: Classes | None) -> Tensor | None:
    """Which columns both have; None: all of them."""
    if how.shared >= (x_NV.shape[1] if classes is None else classes.count):
        return None
    numbers = torch.arange(x_NV.shape[1], device=x_NV.device) if classes is None else classes.numbers
    return numbers < how.shared


def less(x_NV: Tensor, less_N1: Tensor, shared_V: Tensor | None, how: Comparison) -> Tensor:
    """Some logits over the temperature, less a number of their row."""
    if how.temperature == 1:
        found_NV = torch.sub(x_NV, less_N1)  # in float32, without a copy of the logits in it
    else:
        found_NV = torch.mul(x_NV.to(less_N1.dtype), 1 / how.temperature).sub_(less_N1)
    return found_NV if shared_V is None else torch.where(shared_V, found_NV, FAR)


def _summands(
    student_NV: Tensor, teacher_NV: Tensor, less_2N: Tensor, some: slice, shared_V: Tensor | None, how: Comparison
) -> tuple[Tensor, Summands]:
    """log q of some rows, and what the formula says of them."""
    logq_NV, logp_NV = (
        less(x_NV[some], less_2N[side, some, None], shared_V, how).clamp_(min=FAR)  # of a class that is masked
        for side, x_NV in enumerate((student_NV, teacher_NV))
    )
    return logq_NV, how.formula(logp_NV, logq_NV, how.beta)


# ----------------------------------------------------------------
# From a teacher that says its K likeliest classes, and how likely the rest is. All other classes are one, "the rest",
# of both: of K + 1 classes the formulas are those above. It is 0 where both agree on these, never above the
# divergence over all classes, and that with K of all. What other trainers do, renormalising the K or leaving the rest
# out, learns to put nothing on the rest (Anshumann et al. 2025). The gradient by a logit of the K is (s_c - q sum(s))
# / T as there; one of the rest has its share of the rest's s.


class TopRows(NamedTuple):
    """What a teacher says of rows."""

    classes_NK: Tensor
    """Its likeliest classes: int64, each once."""
    logp_NC: Tensor
    """The logarithm of the share of each, and of the rest (N, K + 1); `FAR` of nothing. At the temperature T."""


def top_divergence(
    student_NV: Tensor, teacher: TopRows, counted_N: Tensor, how: Comparison, classes: Classes | None = None
) -> Tensor:
    """The divergence of each row in nats, in float32 (in float64 of such logits); 0 of rows that are not counted.

    `student_NV`: of a part, its columns. No second derivative.
    """
    return cast(Tensor, _TopDivergence.apply(student_NV, *teacher, counted_N, how, classes))


class _TopDivergence(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        student_NV: Tensor,
        classes_NK: Tensor,
        logp_NC: Tensor,
        counted_N: Tensor,
        how: Comparison,
        classes: Classes | None,
    ) -> Tensor:
        x_NV, width = student_NV.detach(), student_NV.shape[1]
        shared_V = shared_columns(x_NV, how, classes)
        at_NK, own_NK = columns(classes_NK, width, classes)
        at_NK = torch.where(own_NK, at_NK, width)  # a column beside those that are there
        less_N = x_NV.new_empty(len(x_NV), dtype=computed(x_NV))
        for some in chunks(x_NV):
            own_NV = x_NV[some] if shared_V is None else torch.where(shared_V, x_NV[some], FAR)
            less_N[some] = own_NV.amax(1).to(less_N.dtype) / how.temperature
        less_N = less_N if classes is None else classes.largest(less_N)
        found_NC = less_N.new_empty(*logp_NC.shape)  # the K as they are, of the rest the sum of exponentials
        for some in chunks(x_NV):
            away_NW = pad(less(x_NV[some], less_N[some, None], shared_V, how), (0, 1))
            found_NC[some, :-1] = torch.where(own_NK[some], away_NW.gather(1, at_NK[some]), 0.0)
            found_NC[some, -1] = away_NW.exp_().scatter_(1, at_NK[some], 0.0)[:, :-1].sum(1)
        found_NC = found_NC if classes is None else classes.summed(found_NC)
        # Where the K are nearly all, rounding may leave nothing of the rest, and the logarithm has to be finite.
        found_NC[:, -1] = found_NC[:, -1].clamp(min=torch.finfo(found_NC.dtype).tiny).log()
        total_N = found_NC.logsumexp(1)
        logq_NC = found_NC.sub_(total_N[:, None])
        found = how.formula(logp_NC.to(less_N.dtype), logq_NC, how.beta)
        slope_N1, share_NC = found.slope.sum(1, keepdim=True), logq_NC.exp()
        rest_N1 = found.slope[:, -1:] / share_NC[:, -1:]
        less_N = less_N + total_N
        ctx.save_for_backward(
            x_NV, less_N, at_NK, found.slope[:, :-1] - share_NC[:, :-1] * slope_N1, rest_N1 - slope_N1,
            counted_N, shared_V,
        )  # fmt: skip
        ctx.how = how
        return torch.where(counted_N, found.divergence.sum(1), 0.0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        x_NV, less_N, at_NK, top_NK, rest_N1, counted_N, shared_V = ctx.saved_tensors
        scale_N = torch.where(counted_N, gradients[0], 0.0) / ctx.how.temperature
        found_NV = torch.empty_like(x_NV)
        for some in chunks(x_NV):
            part_NW = pad(less(x_NV[some], less_N[some, None], shared_V, ctx.how), (0, 1)).exp_().mul_(rest_N1[some])
            part_NW = part_NW.scatter_(1, at_NK[some], top_NK[some])[:, :-1].mul_(scale_N[some, None])
            found_NV[some] = torch.where(counted_N[some, None], part_NW, 0.0)
        return found_NV, None, None, None, None, None
