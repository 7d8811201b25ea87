"""Elements on their way between memory and float32, in which kernels compute whatever the dtype of a tensor is."""

# ruff: noqa: N803  a kernel's pointers are in capitals

from __future__ import annotations

import triton
import triton.language as tl

from tangram.kernels.compiled.device import to_bf16, to_float


@triton.jit
def loaded(X, at, there):
    """In float32, zero where there is nothing."""
    return to_float(tl.load(X + at, mask=there, other=0.0))


@triton.jit
def store(X, at, x, there):
    """Rounded to the dtype of the tensor, once."""
    if X.dtype.element_ty == tl.bfloat16:
        tl.store(X + at, to_bf16(x), mask=there)
    else:
        tl.store(X + at, x, mask=there)


@triton.jit
def as_stored(X, x):
    """What a tensor would give back of it."""
    if X.dtype.element_ty == tl.bfloat16:
        return to_float(to_bf16(x))
    return x


@triton.jit
def sigmoids(x):
    """Of a number and of its negative, neither rounded to zero or one before it has to be."""
    e = tl.exp(-tl.abs(x))
    positive = x >= 0.0
    return tl.where(positive, 1.0, e) / (1.0 + e), tl.where(positive, e, 1.0) / (1.0 + e)
