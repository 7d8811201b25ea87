"""Divergences beside formulas written out: whole, in parts of the vocabulary, in any chunks, of few classes."""

# ruff: noqa: N803, N806  a tensor carries its dims in its name

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import get_args

import pytest
import torch
from torch import Tensor

from tangram.kernels import cross_entropy
from tangram.kernels.cross_entropy import Classes, OverParts
from tangram.kernels.divergence import FORMULAS, Comparison, TopRows, divergence, top_divergence
from tangram.schema.tuning import Divergence

N, V = 7, 11
PLAIN: Mapping[str, Callable[[Tensor, Tensor, float], Tensor]] = {
    "forward_kl": lambda p, q, beta: (p * (p.log() - q.log())).sum(1),
    "reverse_kl": lambda p, q, beta: (q * (q.log() - p.log())).sum(1),
    "jsd": lambda p, q, beta: (
        (beta * p * (p / (beta * p + (1 - beta) * q)).log()).sum(1)
        + ((1 - beta) * q * (q / (beta * p + (1 - beta) * q)).log()).sum(1)
    ),
}


def logits() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    student_NV, teacher_NV = (3 * torch.randn(N, V, dtype=torch.float64) for _ in range(2))
    return student_NV.requires_grad_(), teacher_NV, torch.arange(N) % 3 != 2, torch.randn(N, dtype=torch.float64)


@pytest.mark.parametrize("name", get_args(Divergence))
@pytest.mark.parametrize("shared", [V, V - 2])
@pytest.mark.parametrize("temperature", [1.0, 2.5])
def test_values_and_gradients_are_those_of_formulas(
    name: str, shared: int, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert FORMULAS.keys() == PLAIN.keys() == set(get_args(Divergence))
    student_NV, teacher_NV, counted_N, weights_N = logits()
    q, p = ((x[:, :shared] / temperature).softmax(1) for x in (student_NV, teacher_NV))
    expected_N = PLAIN[name](p, q, 0.3).where(counted_N, 0.0)
    (slope_NV,) = torch.autograd.grad((expected_N * weights_N).sum(), student_NV)
    for rows in (N, 3, 1):  # at a time
        monkeypatch.setitem(cross_entropy.SOME_BYTES, "cpu", 8 * V * rows)
        found_N = divergence(student_NV, teacher_NV, counted_N, Comparison(FORMULAS[name], 0.3, temperature, shared))
        (found_NV,) = torch.autograd.grad((found_N * weights_N).sum(), student_NV)
        torch.testing.assert_close(found_N, expected_N, rtol=1e-12, atol=1e-14)
        torch.testing.assert_close(found_NV, slope_NV, rtol=1e-12, atol=1e-14)


def in_two_parts(
    student_NV: Tensor, of_part: Callable[[Tensor, Tensor, Classes], Tensor]
) -> list[tuple[Tensor, Tensor]]:
    """What a function of logits, of their numbers and of `Classes` gives of each part, and its gradient: two threads
    have a part each, and meet where ranks would."""
    meet, sent = Barrier(2, timeout=60), dict[int, Tensor]()

    def over(part: int, join: Callable[[Tensor, Tensor], Tensor]) -> OverParts:
        def run(x: Tensor) -> Tensor:
            sent[part] = x
            meet.wait()
            found = join(sent[0], sent[1])
            meet.wait()
            return found

        return run

    def run(part: int) -> tuple[Tensor, Tensor]:
        numbers = (torch.arange(0, 4), torch.arange(4, V))[part]
        classes = Classes(numbers, V, over(part, torch.maximum), over(part, torch.add))
        own_NW = student_NV.detach()[:, numbers].requires_grad_()
        found_N = of_part(own_NW, numbers, classes)
        return found_N.detach(), torch.autograd.grad(found_N.sum(), own_NW)[0]

    with ThreadPoolExecutor(2) as pool:
        return [*pool.map(run, range(2))]


@pytest.mark.parametrize("name", get_args(Divergence))
@pytest.mark.parametrize("shared", [V, V - 2])
def test_parts_of_the_vocabulary_give_the_same(name: str, shared: int) -> None:
    student_NV, teacher_NV, counted_N, _ = logits()
    how = Comparison(FORMULAS[name], 0.3, 2.0, shared)
    expected_N = divergence(student_NV, teacher_NV, counted_N, how)
    (slope_NV,) = torch.autograd.grad(expected_N.sum(), student_NV)
    parts = in_two_parts(
        student_NV, lambda own, at, classes: divergence(own, teacher_NV[:, at], counted_N, how, classes)
    )
    for found_N, _ in parts:
        torch.testing.assert_close(found_N, expected_N.detach(), rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(torch.cat([slope for _, slope in parts], 1), slope_NV, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("name", get_args(Divergence))
@pytest.mark.parametrize("kept", [0, 4])
def test_classes_that_both_mask_have_no_part(name: str, kept: int) -> None:
    """By minus infinity, as models mask what their vocabulary is padded with; `kept`: likeliest classes alone."""
    student_NV, teacher_NV, counted_N, weights_N = logits()
    how, fewer = (Comparison(FORMULAS[name], 0.3, 2.0, n) for n in (V, V - 2))
    masked_NV = student_NV.detach().clone()
    masked_NV[:, V - 2 :] = -torch.inf
    masked_NV.requires_grad_()
    theirs_NV = teacher_NV.clone()
    theirs_NV[:, V - 2 :] = -torch.inf
    expected_N = divergence(student_NV, teacher_NV, counted_N, fewer)
    found_N = divergence(masked_NV, theirs_NV, counted_N, how)
    if kept:
        expected_N = top_divergence(student_NV, top_rows_of(teacher_NV, kept, V - 2), counted_N, fewer)
        found_N = top_divergence(masked_NV, top_rows_of(teacher_NV, kept, V - 2), counted_N, how)
    (slope_NV,) = torch.autograd.grad((expected_N * weights_N).sum(), student_NV)
    (found_NV,) = torch.autograd.grad((found_N * weights_N).sum(), masked_NV)
    torch.testing.assert_close(found_N, expected_N, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(found_NV, slope_NV, rtol=1e-12, atol=1e-14)


def top_rows_of(teacher_NV: Tensor, top: int, shared: int) -> TopRows:
    logp_NV = (teacher_NV[:, :shared] / 2.0).log_softmax(1)
    found = logp_NV.topk(top)
    rest_NV = logp_NV.scatter(1, found.indices, -torch.inf)
    return TopRows(found.indices, torch.cat([found.values, rest_NV.logsumexp(1, keepdim=True)], 1))


@pytest.mark.parametrize("name", get_args(Divergence))
def test_a_class_that_one_masks_alone_is_far_and_no_number_is_none(name: str) -> None:
    student_NV, teacher_NV, counted_N, _ = logits()
    for side in range(2):
        both = [student_NV.detach().clone(), teacher_NV.clone()]
        both[side][:, 0] = -torch.inf
        found_N = divergence(both[0].requires_grad_(), both[1], counted_N, Comparison(FORMULAS[name], 0.3, 1.0, V))
        (slope_NV,) = torch.autograd.grad(found_N.sum(), both[0])
        assert bool(found_N.isfinite().all())
        assert bool(slope_NV.isfinite().all())
    broken_NV = student_NV.detach().clone()
    broken_NV[0, 3] = torch.nan
    assert bool(divergence(broken_NV, teacher_NV, counted_N, Comparison(FORMULAS[name], 0.3, 1.0, V))[0].isnan())
