"""Casts against tables that are written out here, against torch's own, and by their statistics."""

import math
from fractions import Fraction
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from tangram.kernels.lab.formats import (
    BF16,
    E2M1,
    E4M3,
    E5M2,
    FORMATS,
    FP16,
    FP32,
    INT8,
    Format,
    cast,
    power_of_two,
    truncated,
    values,
)

TORCH = {E4M3: torch.float8_e4m3fn, E5M2: torch.float8_e5m2, BF16: torch.bfloat16, FP16: torch.float16}
SMALL = (E4M3, E5M2, E2M1, INT8)


def codes(of: Format) -> list[Fraction]:
    """Every finite value of a format, decoded bit by bit as its standard says, without the module under test."""
    if of is INT8:
        return [Fraction(i) for i in range(-127, 128)]
    exponents, mantissa, bias = {"e4m3": (4, 3, 7), "e5m2": (5, 2, 15), "e2m1": (2, 1, 1)}[of.name]
    found: set[Fraction] = set()
    for code in range(2 ** (1 + exponents + mantissa)):
        sign = -1 if code >> (exponents + mantissa) else 1
        e, m = (code >> mantissa) % 2**exponents, code % 2**mantissa
        if of is E4M3 and e == 15 and m == 7:
            continue  # NaN
        if of is E5M2 and e == 31:
            continue  # infinity and NaN
        whole = Fraction(m, 2**mantissa) + (1 if e else 0)
        found.add(sign * whole * Fraction(2) ** (max(e, 1) - bias))
    return sorted(found)


def even(of: Format) -> set[Fraction]:
    """Those whose code's last bit is zero: every other of the magnitudes, in order, from zero on."""
    magnitudes = [x for x in codes(of) if x >= 0][::2]
    return {*magnitudes, *(-x for x in magnitudes)}


def tensor(xs: list[Fraction]) -> Tensor:
    return torch.tensor([float(x) for x in xs], dtype=torch.float64)


@pytest.mark.parametrize("of", SMALL, ids=str)
def test_every_value_is_in_the_table_and_stays_itself(of: Format) -> None:
    table = tensor(codes(of))
    assert len(table) == {"e4m3": 253, "e5m2": 247, "e2m1": 15, "int8": 255}[of.name]
    assert torch.equal(values(of), table)
    assert torch.equal(cast(table, of), table)
    assert float(table[-1]) == of.largest


@pytest.mark.parametrize("of", SMALL, ids=str)
def test_every_halfway_point_goes_to_the_even_neighbour_and_a_hair_beside_it_to_the_nearer(of: Format) -> None:
    table, even_ones = codes(of), even(of)
    low, high = tensor(table[:-1]), tensor(table[1:])
    middle = tensor([(a + b) / 2 for a, b in pairwise(table)])
    wanted = tensor([a if a in even_ones else b for a, b in pairwise(table)])
    assert torch.equal(cast(middle, of), wanted)
    down, up = torch.tensor(-math.inf, dtype=torch.float64), torch.tensor(math.inf, dtype=torch.float64)
    assert torch.equal(cast(torch.nextafter(middle, down), of), low)
    assert torch.equal(cast(torch.nextafter(middle, up), of), high)


@pytest.mark.parametrize("of", TORCH, ids=str)
def test_as_torch_casts(of: Format) -> None:
    """Every value of 16 bits, each halfway point of fp8 as float32, and many at random."""
    kind = torch.finfo(TORCH[of])
    bits = torch.arange(2**16, dtype=torch.int32).to(torch.int16)
    x = torch.cat(
        [
            bits.view(torch.bfloat16).float(),
            bits.view(torch.float16).float(),
            torch.randn(20000, generator=torch.Generator().manual_seed(0)) * 2.0 ** torch.arange(-20, 20).repeat(500),
        ]
    )
    if of in SMALL:
        table = tensor(codes(of)).float()
        x = torch.cat([x, (table[1:] + table[:-1]) / 2])
    theirs = x.to(TORCH[of]).double()
    ours = cast(x, of, saturate=of is E4M3)  # torch 2.13 saturates in this one alone
    same = (ours == theirs) | (ours.isnan() & theirs.isnan())
    assert bool(same.all()), (x[~same], ours[~same], theirs[~same])
    assert float(kind.max) == of.largest


def test_where_torch_differs() -> None:
    """Beyond the largest value hardware's casts saturate in both 8-bit formats, torch 2.13's in E4M3 alone."""
    far = torch.tensor([61439.0, 61440.0, -1e9, math.inf])
    assert far.to(torch.float8_e5m2).float().tolist() == [57344.0, math.inf, -math.inf, math.inf]
    assert cast(far, E5M2).tolist() == [57344.0, 57344.0, -57344.0, 57344.0]
    assert torch.equal(cast(far, E5M2, saturate=False), far.to(torch.float8_e5m2).double())
    beyond = torch.tensor([464.0, 465.0, -1e6, math.inf])
    assert beyond.to(torch.float8_e4m3fn).float().tolist() == cast(beyond, E4M3).tolist() == [448, 448, -448, 448]
    assert cast(beyond, E4M3, saturate=False).isnan().tolist() == [False, True, True, True]


def test_where_torch_differs_in_scales() -> None:
    """Its cast to E8M0 takes the nearer power of two, by the mantissa; MX asks for the one below or above."""
    x = torch.tensor([1.0, 1.4, 1.6, 3.0, 3.1])
    assert x.to(torch.float8_e8m0fnu).float().tolist() == [1, 1, 2, 4, 4]
    assert power_of_two(x, up=False).tolist() == [1, 1, 1, 2, 2]
    assert power_of_two(x, up=True).tolist() == [1, 2, 2, 4, 4]


def test_double_rounding_of_torch() -> None:
    """From float64 torch goes by float32 and rounds twice; once is right."""
    x = torch.tensor([1.0625 + 2.0**-40], dtype=torch.float64)  # a hair above a halfway point of E4M3
    assert x.to(torch.float8_e4m3fn).double().item() == 1.0
    assert cast(x, E4M3).item() == 1.125


@pytest.mark.parametrize("of", FORMATS.values(), ids=str)
def test_what_is_not_finite(of: Format) -> None:
    x = torch.tensor([math.nan, math.inf, -math.inf, 0.0, -0.0])
    found = cast(x, of)
    assert found[1:3].tolist() == [of.largest, -of.largest]
    assert found[3:].tolist() == [0.0, 0.0]
    assert math.copysign(1, found[4].item()) == -1
    assert math.isnan(found[0].item()) if of.nan else found[0].item() == of.largest
    if of.nan:
        loose = cast(x, of, saturate=False)
        assert loose[1].item() == math.inf if of.infinity else math.isnan(loose[1].item())


@pytest.mark.parametrize("of", SMALL, ids=str)
def test_stochastic_rounding_takes_one_of_two_neighbours_and_is_right_on_average(of: Format) -> None:
    table = values(of)
    low, high = table[:-1], table[1:]
    share = 0.3
    x = low + share * (high - low)
    n = 4000
    thrown = cast(x.expand(n, -1), of, torch.Generator().manual_seed(1))
    up = thrown == high
    assert bool((up | (thrown == low)).all())
    z = (up.double().mean(0) - share) / math.sqrt(share * (1 - share) / n)
    assert float(z.abs().max()) < 5
    assert abs(float(z.mean())) < 5 / math.sqrt(len(z))
    assert torch.equal(thrown, cast(x.expand(n, -1), of, torch.Generator().manual_seed(1)))
    assert torch.equal(cast(table, of, torch.Generator().manual_seed(2)), table)


def test_scales_that_are_powers_of_two() -> None:
    x = torch.tensor([1.0, 1.5, 2.0, 3.999, 2.0**-140, 2.0**130, 0.0])
    assert power_of_two(x, up=False).tolist() == [1, 1, 2, 2, 2.0**-127, 2.0**127, 2.0**-127]
    assert power_of_two(x, up=True).tolist() == [1, 2, 2, 4, 2.0**-127, 2.0**127, 2.0**-127]


def test_truncation_drops_bits() -> None:
    x = torch.tensor([1 + 2.0**-13 + 2.0**-14, -(1 + 2.0**-14), 3.0, 0.0], dtype=torch.float64)
    assert truncated(x, 13).tolist() == [1 + 2.0**-13, -1.0, 3.0, 0.0]


def test_float32_is_float32() -> None:
    x = torch.randn(20000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    x = torch.cat([x, x * 2.0**-130, x * 2.0**-150])
    assert torch.equal(cast(x, FP32), x.float().double())
