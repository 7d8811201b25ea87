"""The back end of torch's operators against the laboratory, and its fast casts against the laboratory's."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bench._numerics.cases import Mask
from bench._numerics.criterion import judged, limits
from bench._numerics.inputs import Shape, drawn
from tangram.kernels.flash.emulated import cast, e2m1, e4m3
from tangram.kernels.flash.modes import MODES
from tangram.kernels.lab import formats
from tangram.kernels.lab.quant import Along, quantise
from tangram.kernels.lab.recipes import RECIPES, Recipe
from tests.kernels.flash.cases import by_emulation, spans_of

SHAPES = (
    Shape(tokens=150, heads=4, groups=2, width=64),
    Shape(tokens=90, keys=140, heads=2, groups=2, width=40, value_width=24, mask=Mask(window=50)),
    Shape(tokens=130, heads=2, groups=1, width=32, mask=Mask(causal=False, documents=(50, 80)), sinks=True),
)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("mode", MODES)
def test_of_the_recipe(mode: str, shape: Shape) -> None:
    case = drawn("outliers", shape)
    results, _, _ = by_emulation(case, MODES[mode], spans_of(case))
    verdict = judged(results, limits(MODES[mode], case))
    assert verdict.accepted, verdict


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("law", ["channels", "sink"])
def test_a_backward_that_does_not_match_and_keys_that_are_smoothed(law: str, shape: Shape) -> None:
    recipe = replace(MODES["nvfp4-dropin-emulated"], smooth_k=True)
    case = drawn(law, shape)
    results, _, _ = by_emulation(case, recipe, spans_of(case))
    verdict = judged(results, limits(recipe, case))
    assert verdict.accepted, verdict
    assert not judged(results, limits(replace(recipe, matched=True), case)).accepted


def test_what_does_not_match_is_in_bfloat16() -> None:
    case, recipe = drawn("gaussian", SHAPES[0]), replace(MODES["fp8"], matched=False)
    with pytest.raises(ValueError, match="does not match its forward is in bfloat16"):
        by_emulation(case, recipe, spans_of(case))


@pytest.mark.parametrize("name", ["fp8 per block, all of them", "mxfp4 forward, bf16 backward, delta high"])
def test_not_of_another(name: str) -> None:
    case = drawn("channels", SHAPES[0])
    results, _, _ = by_emulation(case, MODES["fp8"], spans_of(case))
    assert not judged(results, limits(RECIPES[name], case)).accepted


def test_sinks_get_the_gradient_of_a_softmax_with_one_more_logit() -> None:
    case = drawn("gaussian", SHAPES[2])
    assert case.sinks is not None
    _, found, _ = by_emulation(case, MODES["bf16"], spans_of(case))
    sinks = case.sinks.clone().requires_grad_()
    k, v = (x.repeat_interleave(case.rows, 1) for x in (case.k, case.v))
    logits = (case.q @ k.mT * case.scale).masked_fill(~case.visible, -torch.inf)
    column = sinks[None, :, None, None].expand(*logits.shape[:3], 1)
    shares = torch.softmax(torch.cat([logits, column], -1), -1)[..., :-1]
    (shares @ v * case.grad).sum().backward()
    torch.testing.assert_close(found.double(), sinks.grad, rtol=2e-2, atol=2e-2)


@given(st.sampled_from([*MODES]), st.integers(1, 70), st.integers(1, 70), st.integers(-20, 20), st.integers(0, 999))
def test_casts_as_the_laboratory_has_them(mode: str, rows: int, columns: int, exponent: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(2, rows, columns, generator=generator) * 2.0**exponent
    x = x * torch.rand(2, rows, columns, generator=generator).round()  # zeros, too
    recipe = MODES[mode]
    operands: list[tuple[torch.Tensor, object, Along]] = [
        (x, recipe.forward.q, "channels"),
        (x, recipe.forward.v, "tokens"),
        (torch.exp2(-x.abs()), recipe.forward.p, "channels"),
        (x, recipe.backward.dq_ds, "channels"),
        (x, recipe.backward.dv_do, "tokens"),
    ]
    for values, operand, along in operands:
        found = cast(values, operand, along)  # pyright: ignore[reportArgumentType]
        expected = quantise(values.double(), operand, along).values.float()  # pyright: ignore[reportArgumentType]
        torch.testing.assert_close(found, expected, rtol=3e-7, atol=0.0)


def test_every_value_is_rounded_as_the_laboratory_rounds() -> None:
    x = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.float16).float()
    x = x[x.isfinite()]
    assert torch.equal(e4m3(x).double(), formats.cast(x, formats.E4M3))
    assert torch.equal(e2m1(x).double(), formats.cast(x, formats.E2M1))
    assert e4m3(torch.tensor([torch.nan])).isnan().all()


@pytest.mark.parametrize(
    "recipe",
    [
        RECIPES["fp8 per block, Q and K smoothed"],
        RECIPES["fp8 per tensor, dice for gradients"],
        RECIPES["int8, K smoothed, dP in bf16"],
        RECIPES["nvfp4"],
        RECIPES["fp8 per tensor, 14-bit sums"],
    ],
    ids=lambda recipe: recipe.name,
)
def test_what_is_not_emulated_is_refused(recipe: Recipe) -> None:
    """And not computed as another recipe."""
    case = drawn("gaussian", Shape(tokens=8, heads=1, groups=1, width=16))
    with pytest.raises(ValueError, match="is not emulated"):
        by_emulation(case, recipe, spans_of(case))
