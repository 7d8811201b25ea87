"""Explicit formulas against autograd, every recipe's algebra without rounding, and what casts do."""

# ruff: noqa: N803, N806  a tensor carries its dims in its name

import math
from dataclasses import fields, replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from bench._numerics.attention import emulated, traced, truth
from bench._numerics.cases import Case, Mask
from tangram.kernels.lab.formats import E4M3, Format
from tangram.kernels.lab.quant import Operand
from tangram.kernels.lab.recipes import FP32_CHUNKED, RECIPES, TRUTH, Freedom, Recipe, operands_only

WIDE = Format("wide", 8, 44, -900, 2.0**900)
"""A grid so fine that a cast rounds next to nothing, and called 8 bits wide, so that all is done as for such."""


@st.composite
def cases(draw: st.DrawFn) -> Case:
    S = draw(st.integers(1, 20))
    cross = draw(st.booleans())
    T = draw(st.integers(1, 24)) if cross else S
    documents: tuple[int, ...] = ()
    if not cross and draw(st.booleans()):
        cuts = sorted({0, S, *draw(st.lists(st.integers(0, S), max_size=3))})
        documents = tuple(b - a for a, b in pairwise(cuts))
    mask = Mask(draw(st.booleans()), draw(st.integers(0, 6)), documents)
    generator = torch.Generator().manual_seed(draw(st.integers(0, 999)))
    G, rows = draw(st.integers(1, 2)), draw(st.integers(1, 3))
    E, F = draw(st.sampled_from([(4, 4), (8, 4), (6, 8)]))

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    sinks = normal(G * rows) if draw(st.booleans()) else None
    q, k, v, grad = normal(2, G * rows, S, E), normal(2, G, T, E), normal(2, G, T, F), normal(2, G * rows, S, F)
    return Case(q, k, v, grad, mask.visible(S, T), 0.7, sinks, mask)


def by_autograd(case: Case) -> list[Tensor]:
    """In as many words as the definition has: masked logits, softmax with one more column, values; of no keys zeros."""
    leaves = [x.clone().requires_grad_() for x in (case.q, case.k, case.v)]
    q, (k, v) = leaves[0], (x.repeat_interleave(case.rows, 1) for x in leaves[1:])
    logits = (q @ k.mT * case.scale).masked_fill(~case.visible, -math.inf)
    column = torch.full((*logits.shape[:3], 1), -math.inf, dtype=torch.float64)
    if case.sinks is not None:
        column = case.sinks[None, :, None, None].expand_as(column)
    logits = torch.cat([logits, column], -1)
    alive = (logits > -math.inf).any(-1, keepdim=True)
    shares = torch.softmax(torch.where(alive, logits, 0.0), -1) * alive
    out = shares[..., :-1] @ v
    out.backward(case.grad)
    return [out.detach(), *(x.grad for x in leaves if x.grad is not None)]


@given(case=cases(), tile=st.integers(1, 30), descending=st.booleans())
@settings(max_examples=60)
def test_as_autograd(case: Case, tile: int, descending: bool) -> None:
    for found, wanted in zip(emulated(TRUTH, case, Freedom(tile, descending)), by_autograd(case), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


def widened(part: Any) -> Any:
    """Every operand of 8 bits or fewer is cast to next to all that it was, the others not at all."""
    few = {one.name: getattr(part, one.name).format.bits <= 8 for one in fields(part)}
    return type(part)(**{name: Operand(WIDE) if is_few else Operand() for name, is_few in few.items()})


@given(case=cases(), name=st.sampled_from(sorted(RECIPES)), tile=st.integers(1, 30))
@settings(max_examples=100)
def test_every_recipe_computes_attention(case: Case, name: str, tile: int) -> None:
    """Smoothing, turning, sinks beside them, matched or not, either delta: with no rounding all are the truth."""
    recipe = RECIPES[name]
    fine = replace(
        recipe, forward=widened(recipe.forward), backward=widened(recipe.backward), stored=None, registers=None,
        accumulate=TRUTH.accumulate,
    )  # fmt: skip
    if recipe.smooth_k or recipe.smooth_q:  # means are float32's
        case = replace(case, q=case.q.float().double(), k=case.k.float().double())
    for found, wanted in zip(emulated(fine, case, Freedom(tile)), truth(case), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


def some(S: int = 48, seed: int = 0, sinks: bool = False) -> Case:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).bfloat16().double()

    mask = Mask()
    return Case(normal(1, 4, S, 16), normal(1, 2, S, 16), normal(1, 2, S, 16), normal(1, 4, S, 16),
                mask.visible(S, S), 0.25, normal(4) if sinks else None, mask)  # fmt: skip


def error(recipe: Recipe, case: Case, freedom: Freedom = Freedom()) -> list[float]:  # noqa: B008
    pairs = zip(emulated(recipe, case, freedom), truth(case), strict=True)
    return [float((a - b).norm() / b.norm()) for a, b in pairs]


def test_errors_are_those_of_the_formats() -> None:
    """As published tables have them, roughly: bf16 a quarter of a percent, E4M3 some percent, NVFP4 some tens."""
    case = some(96)
    assert all(0.001 < one < 0.006 for one in error(RECIPES["bf16"], case))
    assert all(0.03 < one < 0.09 for one in error(RECIPES["fp8 per tensor"], case))
    assert all(0.1 < one < 0.35 for one in error(RECIPES["nvfp4"], case))
    e4m3, e5m2 = (error(RECIPES[name], case) for name in ("fp8 per tensor", "fp8 per tensor, E5M2 gradients"))
    assert e4m3[0] == e5m2[0]
    assert all(b > 1.25 * a for a, b in zip(e4m3[1:], e5m2[1:], strict=True))


def test_the_running_maximum_changes_which_numbers_are_cast() -> None:
    case = some(96)
    a, b = (emulated(RECIPES["fp8 per tensor"], case, Freedom(tile)) for tile in (16, 96))
    assert not torch.equal(a.o, b.o)
    assert torch.equal(a.dv, b.dv), "the backward of fp8 has no running maximum"


def test_seeds_and_only_seeds_change_what_is_thrown() -> None:
    recipe, case = RECIPES["fp8 per tensor, dice for gradients"], some()
    first, again, other = (emulated(recipe, case, Freedom(seed=seed)) for seed in (0, 0, 1))
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert torch.equal(first.o, other.o)
    assert not any(torch.equal(a, b) for a, b in zip(first[1:], other[1:], strict=True))


def test_rows_of_scores_owed_sum_to_nothing_with_a_delta_that_matches() -> None:
    for sinks in (False, True):
        case = some(96, sinks=sinks)
        low, high = (traced(RECIPES[f"nvfp4 forward, bf16 backward{x}"], case) for x in ("", ", delta high"))
        ratio = [float((one.row_sums.abs() / one.row_size.clamp_min(1e-9))[..., 1:].mean()) for one in (low, high)]
        assert ratio[1] < 0.002 < 0.01 < ratio[0]


def test_operands_only_keeps_the_casts_of_inputs_and_no_other() -> None:
    case = some(64)
    recipe = operands_only(RECIPES["fp8 per tensor"])
    codes = [case.q, case.k, case.v, case.grad]
    for i, x in enumerate(codes):
        scale = (x.abs().max() / 448).float().double()
        codes[i] = (x / scale).float().to(torch.float8_e4m3fn).double() * scale
    wanted = truth(replace(case, q=codes[0], k=codes[1], v=codes[2], grad=codes[3]))
    found = emulated(recipe, case)
    torch.testing.assert_close(found.o, wanted.o)
    torch.testing.assert_close(found.dv, wanted.dv)


def test_counts() -> None:
    case = some(96)
    case = replace(case, q=case.q * 2)
    plain, scaled = (traced(RECIPES[f"fp8 per tensor{x}"], case).underflow for x in (", P not scaled", ""))
    assert plain > scaled + 0.02
    assert traced(RECIPES["mxfp8, scales of OCP"], case).saturated > traced(RECIPES["mxfp8"], case).saturated == 0


def test_accumulation_is_a_freedom_where_the_recipe_says_nothing() -> None:
    case = some(64)
    recipe = replace(RECIPES["bf16"], stored=None)
    a, b = (emulated(recipe, case, Freedom(accumulate=by)) for by in (None, FP32_CHUNKED))
    assert 0 < float((a.dq - b.dq).norm() / a.dq.norm()) < 1e-3


def test_documents_that_do_not_fill_the_sequence_are_refused() -> None:
    with pytest.raises(ValueError, match="documents of 5 tokens do not fill 6 queries"):
        Mask(documents=(2, 3)).visible(6, 6)


def test_operands_say_what_they_are() -> None:
    assert str(RECIPES["mxfp8"].forward.q) == "e4m3 per group 32"
    assert str(Operand()) == "exact"
    assert str(Operand(E4M3)) == "e4m3"
