"""Divergences over a teacher's likeliest classes and the rest, beside formulas written out."""

# ruff: noqa: N803, N806  a tensor carries its dims in its name

from __future__ import annotations

from typing import get_args

import pytest
import torch
from torch import Tensor

from tangram.kernels import cross_entropy
from tangram.kernels.divergence import FAR, FORMULAS, Comparison, TopRows, divergence, top_divergence
from tangram.schema.tuning import Divergence
from tests.kernels.test_divergence import PLAIN, N, V, in_two_parts, logits

NAMES = get_args(Divergence)


def top_of(teacher_NV: Tensor, k: int, shared: int, temperature: float = 1.0) -> TopRows:
    logp_NV = (teacher_NV[:, :shared] / temperature).log_softmax(1)
    top = logp_NV.topk(k)
    rest_NV = logp_NV.scatter(1, top.indices, -torch.inf)
    return TopRows(top.indices, torch.cat([top.values, rest_NV.logsumexp(1, keepdim=True).clamp(min=FAR)], 1))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("shared", [V, V - 2])
@pytest.mark.parametrize("k", [1, 4])
def test_values_and_gradients_are_those_of_formulas(
    name: str, shared: int, k: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    student_NV, teacher_NV, counted_N, weights_N = logits()
    top = top_of(teacher_NV, k, shared, 2.5)
    q_NV = (student_NV[:, :shared] / 2.5).softmax(1)
    rest_NV = q_NV.scatter(1, top.classes_NK, 0.0)
    q_NC = torch.cat([q_NV.gather(1, top.classes_NK), rest_NV.sum(1, keepdim=True)], 1)
    expected_N = PLAIN[name](top.logp_NC.exp(), q_NC, 0.3).where(counted_N, 0.0)
    (slope_NV,) = torch.autograd.grad((expected_N * weights_N).sum(), student_NV)
    for rows in (N, 3, 1):  # at a time
        monkeypatch.setitem(cross_entropy.SOME_BYTES, "cpu", 8 * V * rows)
        found_N = top_divergence(student_NV, top, counted_N, Comparison(FORMULAS[name], 0.3, 2.5, shared))
        (found_NV,) = torch.autograd.grad((found_N * weights_N).sum(), student_NV)
        torch.testing.assert_close(found_N, expected_N, rtol=1e-12, atol=1e-14)
        torch.testing.assert_close(found_NV, slope_NV, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("shared", [V, V - 2])
def test_all_classes_are_the_whole_divergence_and_fewer_never_more(name: str, shared: int) -> None:
    student_NV, teacher_NV, counted_N, weights_N = logits()
    how = Comparison(FORMULAS[name], 0.3, 2.0, shared)
    whole_N = divergence(student_NV, teacher_NV, counted_N, how)
    (whole_NV,) = torch.autograd.grad((whole_N * weights_N).sum(), student_NV)
    found_N = before_N = torch.zeros_like(whole_N)
    for k in range(1, shared + 1):
        found_N = top_divergence(student_NV, top_of(teacher_NV, k, shared, 2.0), counted_N, how)
        assert bool((found_N >= before_N - 1e-12).all()), k
        before_N = found_N.detach()
    (found_NV,) = torch.autograd.grad((found_N * weights_N).sum(), student_NV)
    torch.testing.assert_close(found_N, whole_N, rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(found_NV, whole_NV, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("shared", [V, V - 2])
def test_parts_of_the_vocabulary_give_the_same(name: str, shared: int) -> None:
    student_NV, teacher_NV, counted_N, _ = logits()
    how, top = Comparison(FORMULAS[name], 0.3, 2.0, shared), top_of(teacher_NV, 4, shared, 2.0)
    expected_N = top_divergence(student_NV, top, counted_N, how)
    (slope_NV,) = torch.autograd.grad(expected_N.sum(), student_NV)
    parts = in_two_parts(student_NV, lambda own_NW, _, classes: top_divergence(own_NW, top, counted_N, how, classes))
    for found_N, _ in parts:
        torch.testing.assert_close(found_N, expected_N.detach(), rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(torch.cat([slope for _, slope in parts], 1), slope_NV, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("name", NAMES)
def test_logits_that_are_far_apart_stay_finite(name: str) -> None:
    """Of classes that float32 has no share for, and a rest of nothing."""
    student_NV = torch.tensor([[0.0, -300.0, 200.0, -80.0]], requires_grad=True)
    top = top_of(torch.tensor([[0.0, 5.0, -200.0, -1.0]]), 2, 4)
    found_N = top_divergence(student_NV, top, torch.ones(1, dtype=torch.bool), Comparison(FORMULAS[name], 0.3, 1.0, 4))
    found_N.sum().backward()
    assert student_NV.grad is not None
    assert bool(found_N.isfinite().all())
    assert bool(student_NV.grad.isfinite().all())
    if name == "forward_kl":
        p, logq = top.logp_NC.exp(), student_NV.detach().log_softmax(1)
        wanted = (p[0, :2] * (top.logp_NC[0, :2] - logq[0, top.classes_NK[0]])).sum()
        assert float(found_N.detach()[0]) == pytest.approx(float(wanted), rel=1e-2)
