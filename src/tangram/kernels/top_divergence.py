"""The divergence of a student from a teacher that says its K likeliest classes, and how likely the rest is.

All other classes are one, "the rest", of both: of K + 1 classes the formulas are those of `kernels.divergence`. It is 0
where both agree on these, never above the divergence over all classes, and that with K of all. What other trainers do,
renormalising the K or leaving the rest out, learns to put nothing on the rest (Anshumann et al. 2025).

The gradient by a logit of the K is (s_c - q sum(s)) / T as there; one of the rest has its share of the rest's s.
"""

# ruff: noqa: N803, N806, N815  a tensor carries its dims in its name

from __future__ import annotations

from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import pad

from tangram.kernels.cross_entropy import Classes, chunks, columns, computed
from tangram.kernels.divergence import FAR, Comparison, less, shared_columns


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
