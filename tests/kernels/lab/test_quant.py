"""Scales against loops over their tiles; smoothing and Hadamard by what they must keep."""

import math

import pytest
import torch
from torch import Tensor

from tangram.kernels.lab.formats import E2M1, E4M3, INT8, Format, cast
from tangram.kernels.lab.quant import Along, Operand, Scaling, block_mean, hadamard, quantise
from tangram.kernels.lab.recipes import EXACT, FP32_CHUNKED, HOPPER_FP8, TWO_LEVEL, product


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def by_tiles(x: Tensor, to: Format, high: int, wide: int) -> Tensor:
    """With a float32 scale for each tile of one matrix."""
    found = torch.zeros_like(x)
    for i in range(0, x.shape[0], high):
        for j in range(0, x.shape[1], wide):
            part = x[i : i + high, j : j + wide]
            scale = (part.abs().max() / to.largest).float()
            found[i : i + high, j : j + wide] = cast((part.double() / scale.double()).float(), to) * scale.double()
    return found


@pytest.mark.parametrize("along", ["tokens", "channels"])
@pytest.mark.parametrize(
    ("per", "size", "tiles"),
    [
        ("head", 0, {"channels": (37, 20), "tokens": (37, 20)}),
        ("block", 16, {"channels": (16, 20), "tokens": (16, 20)}),
        ("tile", 16, {"channels": (16, 16), "tokens": (16, 16)}),
        ("row", 0, {"channels": (1, 20), "tokens": (37, 1)}),
        ("group", 16, {"channels": (1, 16), "tokens": (16, 1)}),
    ],
)
def test_a_scale_for_each_tile(per: str, size: int, tiles: dict[str, tuple[int, int]], along: Along) -> None:
    x = normal(2, 37, 20)
    found = quantise(x, Operand(E4M3, Scaling(per, size)), along)  # pyright: ignore[reportArgumentType]
    for one, own in zip(found.values, x, strict=True):
        assert torch.equal(one, by_tiles(own, E4M3, *tiles[along]))
    assert found.saturated == 0


def test_one_scale_for_all() -> None:
    x = normal(2, 8, 4)
    found = quantise(x, Operand(INT8, Scaling("tensor")), "channels").values
    assert torch.equal(found.flatten(0, 1), by_tiles(x.flatten(0, 1), INT8, 16, 4))


def test_a_fixed_scale_counts_what_it_loses() -> None:
    x = torch.tensor([[1.0, 0.5, 2.0**-18, 2.0**-20, 0.0, 3.0]], dtype=torch.float64)
    found = quantise(x, Operand(E4M3, Scaling("static", factor=256.0)), "channels")
    assert found.values.tolist() == [[1.0, 0.5, 0.0, 0.0, 0.0, 448 / 256]]  # the third is half of E4M3's smallest
    assert found.underflowed == 2
    assert found.saturated == 1


def test_powers_of_two_below_saturate_and_above_do_not() -> None:
    x = torch.tensor([[7.9, 1.0]], dtype=torch.float64)
    below = quantise(x, Operand(E2M1, Scaling("group", 32, "e8m0")), "channels")
    above = quantise(x, Operand(E2M1, Scaling("group", 32, "e8m0-up")), "channels")
    assert (below.values.tolist(), below.saturated) == ([[6.0, 1.0]], 1)
    assert (above.values.tolist(), above.saturated) == ([[8.0, 1.0]], 0)


def test_two_levels_of_nvfp4() -> None:
    """By hand: the second scale makes the largest block scale E4M3's largest."""
    x = normal(3, 32) * torch.tensor([[1e-4], [1.0], [100.0]], dtype=torch.float64)
    found = quantise(x, Operand(E2M1, Scaling("group", 16, "e4m3", "tensor")), "channels").values
    second = (x.abs().max() / (6 * 448)).float().double()
    for i in range(3):
        for j in (0, 16):
            part = x[i, j : j + 16]
            block = ((part.abs().max() / 6).float().double() / second).float().to(torch.float8_e4m3fn).double()
            scale = block * second
            wanted = cast((part / scale).float(), E2M1) * scale if scale else torch.zeros(16)
            assert torch.equal(found[i, j : j + 16], wanted)
    assert bool((found[0] == 0).all()), "blocks a million times smaller than the largest have no scale"
    rows = quantise(x, Operand(E2M1, Scaling("group", 16, "e4m3", "row")), "channels").values
    assert float((rows[0] - x[0]).norm() / x[0].norm()) < 0.2, "with a second scale for each row they have"


def test_zeros_stay_zeros() -> None:
    for scaling in (Scaling("tensor"), Scaling("group", 16, "e4m3", "tensor"), Scaling("group", 32, "e8m0")):
        found = quantise(torch.zeros(2, 32, dtype=torch.float64), Operand(E2M1, scaling), "channels")
        assert torch.equal(found.values, torch.zeros(2, 32, dtype=torch.float64))


@pytest.mark.parametrize("width", [16, 64, 96, 192])
def test_hadamard_is_orthogonal_and_spreads(width: int) -> None:
    turn = hadamard(width)
    assert torch.allclose(turn @ turn.mT, torch.eye(width, dtype=torch.float64), atol=1e-14)
    spike = torch.zeros(width, dtype=torch.float64)
    spike[3] = 1.0
    assert float((spike @ turn).abs().max()) <= 1 / math.sqrt(width & -width) + 1e-12
    assert not torch.equal(hadamard(width), hadamard(width, seed=1))


def test_the_mean_of_each_block() -> None:
    x = normal(2, 10, 3)
    found = block_mean(x, 4)
    assert torch.allclose(found[:, 9], x[:, 8:].mean(1))
    assert torch.allclose(found[:, 1], x[:, :4].mean(1))
    assert torch.allclose(block_mean(x, 0)[:, 5], x.mean(1))


def test_sums_of_products() -> None:
    a, b = normal(4, 4096).abs(), normal(4096, 5, seed=1).abs()
    exact = a @ b
    errors = {
        by: float(((product(a, b, by) - exact) / exact).abs().max())
        for by in (EXACT, FP32_CHUNKED, HOPPER_FP8, TWO_LEVEL)
    }
    assert errors[EXACT] == 0
    assert 0 < errors[FP32_CHUNKED] < 256 * 2.0**-23
    assert 2.0**-12 < errors[HOPPER_FP8] < 128 * 2.0**-13
    assert errors[TWO_LEVEL] < errors[HOPPER_FP8] / 4
    assert bool((product(a, b, HOPPER_FP8) <= exact).all()), "truncated: never more"


def test_what_a_register_drops() -> None:
    ones = torch.ones(1, 64, dtype=torch.float64)
    small = torch.full((64, 1), 2.0**-20, dtype=torch.float64)
    small[0] = 1.0
    assert product(ones, small, HOPPER_FP8).item() == 1.0
    assert product(ones, small, FP32_CHUNKED).item() == 1.0 + 63 * 2.0**-20
