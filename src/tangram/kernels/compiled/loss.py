"""What a block of classes adds to the loss of rows, and the gradient of its logits; the products are made elsewhere.

A row's largest logit so far, the sum of exp(x - largest) and its label's logit are kept in float32.
"""

# ruff: noqa: N803  a kernel's constants and pointers are in capitals

from __future__ import annotations

import triton
import triton.language as tl

from tangram.kernels.compiled.elements import loaded, store


@triton.jit
def gather(X, AT, TOP, TOTAL, LABEL, first, C, BC: tl.constexpr):
    """Logits (N, C) in a row of classes from `first` on, one row a program; AT (N): columns of labels, or -1."""
    row, columns = tl.program_id(0).to(tl.int64), tl.arange(0, BC)
    top, total = tl.load(TOP + row), tl.load(TOTAL + row)
    for start in range(0, C, BC):
        there = start + columns < C
        x = tl.where(there, loaded(X, row * C + start + columns, there), float("-inf"))
        wrong = tl.max((x != x).to(tl.int32), 0) > 0
        new = tl.maximum(top, tl.max(x, 0))
        safe = tl.where(new == float("-inf"), 0.0, new)
        total = total * tl.exp(top - safe) + tl.sum(tl.exp(x - safe), 0)
        total = tl.where(wrong, float("nan"), total)
        top = new
    tl.store(TOP + row, top)
    tl.store(TOTAL + row, total)
    at = tl.load(AT + row) - first
    if (at >= 0) & (at < C):
        tl.store(LABEL + row, loaded(X, row * C + at, at >= 0))


@triton.jit
def owed(X, DX, AT, TOP, SCALE, LESS, first, C, BC: tl.constexpr):
    """The gradient of such logits, exp(x - top) SCALE, and LESS less at the label."""
    row, columns = tl.program_id(0).to(tl.int64), tl.program_id(1) * BC + tl.arange(0, BC)
    there = columns < C
    x = loaded(X, row * C + columns, there)
    found = tl.exp(x - tl.load(TOP + row)) * tl.load(SCALE + row)
    found = tl.where(columns == tl.load(AT + row) - first, found - tl.load(LESS + row), found)
    store(DX, row * C + columns, found, there)
