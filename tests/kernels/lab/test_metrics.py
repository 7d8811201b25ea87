"""Metrics of differences that are known, laws by their statistics."""

import math

import pytest
import torch
from torch import Tensor

from bench._numerics.cases import TENSORS, Mask
from bench._numerics.inputs import LAWS, Shape, drawn
from bench._numerics.metrics import measured, metrics
from tangram.kernels.lab.recipes import RECIPES


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def test_of_a_result_that_is_right() -> None:
    x = normal(2, 3, 20, 8)
    found = metrics(x, x)
    assert (found.relative, found.row_worst, found.head_worst, found.ulps) == (0, 0, 0, 0)
    assert found.cosine == pytest.approx(1)


def test_of_one_wrong_row() -> None:
    x = normal(1, 2, 50, 8)
    y = x.clone()
    y[0, 1, 7] *= -1
    found = metrics(y, x)
    assert found.row_worst == pytest.approx(2)
    assert found.row_median == 0
    row, head = x[0, 1, 7].norm(), x[0, 1].norm()
    assert found.head_worst == pytest.approx(float(2 * row / head))
    assert found.relative == pytest.approx(float(2 * row / x.norm()))


def test_of_a_result_that_is_off_by_a_share_and_one_that_is_negated() -> None:
    x = normal(1, 2, 20, 8)
    found = metrics(x * 1.03, x)
    assert found.relative == pytest.approx(0.03)
    assert found.row_high == pytest.approx(0.03)
    assert found.cosine == pytest.approx(1)
    assert metrics(-x, x).cosine == pytest.approx(-1)


def test_units_in_the_last_place() -> None:
    x = torch.full((1, 1, 4, 4), 1.5, dtype=torch.float64)
    y = x.clone()
    y[..., 0] += 3 * 2.0**-7
    assert metrics(y, x).ulps == pytest.approx(3)
    assert metrics(y * 64, x * 64).ulps == pytest.approx(3)


def test_what_is_not_finite_and_what_is_zero() -> None:
    x = normal(1, 1, 4, 4)
    assert metrics(x * torch.nan, x).relative == math.inf
    assert metrics(torch.zeros_like(x), torch.zeros_like(x)).relative == 0


def test_against_the_operands_a_recipe_of_exact_probabilities_is_near_and_against_inputs_it_is_not() -> None:
    found = measured(RECIPES["fp8 forward, bf16 backward"], drawn("gaussian", Shape(tokens=96, width=16)))
    for name in ("dK", "dV"):
        assert found.against_operands[name].relative < 0.025 < found.against_inputs[name].relative
    assert set(found.against_inputs) == set(TENSORS)
    assert 0 < found.row_sum < 0.1


@pytest.mark.parametrize("law", LAWS)
def test_laws_give_bfloat16_of_the_right_sizes(law: str) -> None:
    case = drawn(law, Shape(tokens=48, keys=56, heads=4, groups=2, width=32, value_width=16, mask=Mask(causal=False)))
    sizes = [(1, 4, 48, 32), (1, 2, 56, 32), (1, 2, 56, 16), (1, 4, 48, 16)]
    for x, size in zip((case.q, case.k, case.v, case.grad), sizes, strict=True):
        assert x.shape == size
        assert torch.equal(x, x.bfloat16().double())
    assert torch.equal(case.q, drawn(law, Shape(tokens=48, keys=56, width=32, value_width=16)).q)


def test_laws_are_what_they_say() -> None:
    shape = Shape(tokens=512, width=64)
    outliers, channels, sink, normed = (drawn(law, shape) for law in ("outliers", "channels", "sink", "normed"))
    assert float(outliers.k.abs().max()) > 8
    assert float(channels.k.mean(2).abs().amax(-1).min()) > 3
    assert float(channels.k.mean(2).abs().median()) < 0.2
    probabilities = torch.softmax((sink.q[:, :2] @ sink.k[:, :1].mT) * sink.scale, -1)
    assert float(probabilities[..., 0].mean()) > 0.5
    assert float(sink.v[:, :, 0].abs().max()) < 0.3
    size = normed.q.square().mean(-1).sqrt()
    assert 0.5 < float(size.min()) < float(size.max()) < 2
