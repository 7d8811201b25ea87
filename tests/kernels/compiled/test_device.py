"""Casts and products of kernels under the interpreter, and whether it still needs the help that `device` gives it."""

import numpy as np
import pytest
import torch

pytest.importorskip("triton")
import triton.language as tl
from triton.runtime.interpreter import InterpretedFunction

from tangram.kernels.compiled.device import INTERPRETED, dot, e2m1_grid, e4m3_grid, to_bf16, to_e4m3, to_float
from tangram.kernels.lab.formats import E2M1, E4M3, cast

interpreted = InterpretedFunction
"""What `triton.jit` gives where the interpreter is asked for, as it is while a test runs."""
assert INTERPRETED.value


@interpreted
def _casts(X, E4M3_OUT, BF16_OUT, E4M3_GRID, E2M1_GRID, AGAIN, N: tl.constexpr):  # noqa: N803
    at = tl.arange(0, N)
    x = tl.load(X + at)
    tl.store(E4M3_OUT + at, to_e4m3(x))
    tl.store(BF16_OUT + at, to_bf16(x))
    tl.store(E4M3_GRID + at, e4m3_grid(x))
    tl.store(E2M1_GRID + at, e2m1_grid(x))
    tl.store(AGAIN + at, to_float(to_e4m3(x)))


@interpreted
def _own_casts(X, E4M3_OUT, BF16_OUT, N: tl.constexpr):  # noqa: N803
    at = tl.arange(0, N)
    tl.store(E4M3_OUT + at, tl.load(X + at).to(tl.float8e4nv))
    tl.store(BF16_OUT + at, tl.load(X + at).to(tl.bfloat16))


@interpreted
def _product(A, B, OUT, OURS: tl.constexpr):  # noqa: N803
    at = tl.arange(0, 16)[:, None] * 16 + tl.arange(0, 16)[None]
    a, b = tl.load(A + at), tl.load(B + at)
    tl.store(OUT + at, dot(a, b) if OURS else tl.dot(a, b))


def every_bf16() -> torch.Tensor:
    return torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).float()


def every_fp16() -> torch.Tensor:
    return torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.float16).float()


def random(size: float) -> torch.Tensor:
    return torch.randn(2**14, generator=torch.Generator().manual_seed(1)) * size


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.double().nan_to_num(-7.0), b.double().nan_to_num(-7.0))


@pytest.mark.parametrize("x", [every_bf16(), every_fp16(), *(random(s) for s in (0.004, 1.0, 50.0, 1e4))], ids=range(6))
def test_casts_are_exact(x: torch.Tensor) -> None:
    e4m3, bf16 = torch.empty(len(x), dtype=torch.float8_e4m3fn), torch.empty(len(x), dtype=torch.bfloat16)
    grid, four, again = (torch.empty(len(x)) for _ in range(3))
    with np.errstate(invalid="ignore", over="ignore"):
        _casts[(1,)](x, e4m3, bf16, grid, four, again, len(x))
    expected = cast(x, E4M3)
    assert same(e4m3, expected)
    assert same(grid, expected)
    assert same(again, expected)
    assert same(bf16, x.bfloat16())
    numbers = ~x.isnan()
    assert same(four[numbers], cast(x, E2M1)[numbers])


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float8_e4m3fn])
def test_products(kind: torch.dtype) -> None:
    a, b = (random(1.0)[i * 256 : (i + 1) * 256].view(16, 16).to(kind) for i in range(2))
    out = torch.empty(16, 16)
    _product[(1,)](a, b, out, True)
    torch.testing.assert_close(out, a.float() @ b.float(), rtol=1e-6, atol=1e-6)
    a = a.float()
    a[3, 5] = torch.nan
    with np.errstate(invalid="ignore"):
        _product[(1,)](a.to(kind), b, out, True)
    assert out.isnan().any(1).nonzero().flatten().tolist() == [3]


# The next three pass as soon as the interpreter computes as a device does: then `INTERPRETED` of `device` can go.


@pytest.mark.xfail(reason="https://github.com/triton-lang/triton/issues/8322")
def test_the_interpreter_casts_to_e4m3_by_itself() -> None:
    x = random(50.0)
    e4m3, bf16 = torch.empty(len(x), dtype=torch.float8_e4m3fn), torch.empty(len(x), dtype=torch.bfloat16)
    _own_casts[(1,)](x, e4m3, bf16, len(x))
    assert same(e4m3, cast(x, E4M3))


@pytest.mark.xfail(reason="https://github.com/triton-lang/triton/issues/8322")
def test_the_interpreter_casts_to_bf16_by_itself() -> None:
    x = random(1.0)
    e4m3, bf16 = torch.empty(len(x), dtype=torch.float8_e4m3fn), torch.empty(len(x), dtype=torch.bfloat16)
    _own_casts[(1,)](x, e4m3, bf16, len(x))
    assert same(bf16, x.bfloat16())


@pytest.mark.xfail(reason="the interpreter multiplies the bits of bfloat16 as whole numbers")
def test_the_interpreter_multiplies_bf16_by_itself() -> None:
    a, b = (random(1.0)[i * 256 : (i + 1) * 256].view(16, 16).bfloat16() for i in range(2))
    out = torch.empty(16, 16)
    _product[(1,)](a, b, out, False)
    torch.testing.assert_close(out, a.float() @ b.float(), rtol=1e-6, atol=1e-6)
