"""Errors in ulps and their histogram, by values that were worked out by hand; bounds against exact fractions."""

from fractions import Fraction

import pytest
import torch

from bench._accuracy.bounds import Truth, gamma, limit, probable
from bench._accuracy.judge import digest, judge
from bench._accuracy.ulps import EDGES, compared, histogram, ulp
from tangram.kernels.lab.formats import BF16, FP16, FP32

INF, NAN = float("inf"), float("nan")


def of(*numbers: float) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.float64)


def test_an_ulp_is_the_distance_of_neighbours() -> None:
    assert ulp(of(1.0, 1.999, 2.0, -4.0, 0.0), BF16).tolist() == [2**-7, 2**-7, 2**-6, 2**-5, 2.0**-133]
    assert ulp(of(1.0, 2.0**-20, 1e9, INF, NAN), FP16).tolist() == [2**-10, 2**-24, 2**5, 2**5, 2**-10]
    assert ulp(of(2.0**-126, 2.0**-140, 1e300), FP32).tolist() == [2.0**-149, 2.0**-149, 2.0**104]


@pytest.mark.parametrize(
    ("got", "true", "ulps"),
    [
        (1.0, 1.0, 0.0),
        (1.0, 1 + 2**-9, 0.25),
        (1.0, 1 + 2**-8, 0.5),  # a tie
        (1 + 2**-7, 1.0, 1.0),
        (1.0, -1.0, 256.0),
        (0.0, 2.0**-133, 1.0),  # the smallest subnormal
        (INF, 3.39e38, 1 - (3.39e38 - BF16.largest) / 2.0**120),  # overflow is a step of a size
        (INF, 1e60, 0.0),
        (BF16.largest, 1e60, 1.0),
    ],
)
def test_errors(got: float, true: float, ulps: float) -> None:
    found = compared(of(got).bfloat16(), of(true), BF16)
    assert found.ulps.tolist() == [pytest.approx(ulps)]
    assert not found.special.any()


def test_nan_and_infinity_must_be_where_they_belong() -> None:
    got, true = of(NAN, INF, 1.0, NAN, INF, -INF, 5.0), of(NAN, INF, NAN, 1.0, -INF, -INF, INF)
    assert compared(got.float(), true, FP32).special.tolist() == [False, False, True, True, True, False, True]


def test_zeros_have_signs_and_subnormals_are_not_flushed() -> None:
    found = compared(of(0.0, -0.0, 0.0, 0.0, 0.0).float(), of(-0.0, -0.0, -1e-60, 2.0**-130, 2.0**-120), FP32)
    assert (found.signs, found.flushed) == (2, 1)


def test_the_histogram_counts_by_upper_ends() -> None:
    step = 2.0**-7
    got = of(1, 1, 1, 1, 1, 1, 1, NAN).bfloat16()
    true = of(1, 1 + 0.5 * step, 1 + 0.501 * step, 1 + 0.7 * step, 1 + 1.5 * step, 1 + 2 * step, 1 + 100 * step, 1)
    found = histogram(compared(got, true, BF16))
    assert len(found) == len(EDGES) + 1
    assert found == (2, 1, 1, 2, 0, 0, 0, 0, 0, 1, *[0] * 10, 1)


def test_bounds_hold_for_exact_sums() -> None:
    """Of 4,096 numbers added one after the other in float32."""
    numbers = torch.randn(4096, generator=torch.Generator().manual_seed(0))
    total, exact = torch.zeros(()), Fraction(0)
    for x in numbers:
        total, exact = total + x, exact + Fraction(x.item())
    off, size = abs(Fraction(total.item()) - exact), sum(abs(Fraction(x.item())) for x in numbers)
    assert 0 < off < probable(4096, 2.0**-24) * size < gamma(4096, 2.0**-24) * size / 8
    assert gamma(10, 0.01) == pytest.approx(0.1 / 0.9)
    assert gamma(100, 0.01) == INF


def test_a_limit_is_half_an_ulp_where_nothing_was_rounded_before() -> None:
    truth = Truth(of(1.0), of(100.0))
    assert limit(truth, torch.bfloat16).item() == pytest.approx(2.0**-8, rel=1e-5)
    more = limit(Truth(of(1.0), of(100.0), 64), torch.bfloat16).item()
    assert more == pytest.approx(2.0**-8 + gamma(64, 2.0**-24) * 100, rel=1e-5)
    assert limit(Truth(of(1.0), of(100.0), 64, casts=of(3.0)), torch.bfloat16).item() - more == pytest.approx(3 * 2**-8)


@pytest.mark.parametrize(
    ("got", "steps", "size", "verdict"),
    [
        (1.0, 3, 1.0, "correct"),
        (1 + 2**-7, 3, 1.0, "faithful"),
        (1 + 2**-7, 0, 1.0, "outside"),  # IEEE 754 demands the nearest
        (1 + 2**-6, 3, 1.0, "outside"),
        (1 + 2**-6, 3, 1e6, "bounded"),
        (NAN, 3, 1e6, "outside"),
    ],
)
def test_classes(got: float, steps: int, size: float, verdict: str) -> None:
    assert judge(of(got).bfloat16(), Truth(of(1 + 2**-10), of(size), steps)).verdict == verdict


def test_where_nothing_is_demanded_nothing_is_wrong() -> None:
    truth = Truth(of(NAN, 1.0), of(1.0, 1.0), 3, free=torch.tensor([True, False]))
    assert judge(of(0.0, 1.0).float(), truth).verdict == "correct"
    assert judge(of(0.0, NAN).float(), truth).special == 1


def test_a_digest_is_of_the_bits_and_the_shape() -> None:
    x = torch.tensor([1.0, NAN])
    other = torch.tensor([0x3F800000, 0x7F800001], dtype=torch.int32).view(torch.float32)
    assert digest(x) == digest(other)
    assert len({digest(y) for y in (x, x.view(1, 2), torch.tensor([0.0]), torch.tensor([-0.0]))}) == 4


def test_no_elements_are_right() -> None:
    found = judge(torch.zeros(0), Truth(of(), of(), 3))
    assert (found.verdict, found.count, found.right) == ("correct", 0, 1.0)
    with pytest.raises(ValueError, match=r"results of shape \(1,\) are no \(0,\)"):
        judge(torch.zeros(1), Truth(of(), of(), 3))
