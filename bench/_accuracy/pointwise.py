"""Operators that take element by element, and their backwards.

True values are by formulas that lose no digits (erfc for the tail of gelu); sizes are those of the formula that torch
computes: 1 + erf(x) is as large as one where the result is next to nothing. A function of the mathematical library
counts as two roundings: one ulp.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bench._accuracy.bounds import Truth
from bench._accuracy.operator import Case, Draw, Inputs, Operator
from tangram.kernels.lab.formats import cast

A: Any = torch.ops.aten
ROOT = math.sqrt(2 / math.pi)
CUBE = 0.044715


def _cases(dtype: torch.dtype, *more: str) -> Sequence[Case]:
    """Of 16-bit types every value; lengths that vectors do not divide; none and one; without vectors."""
    laws = ("normal", "wide", "tiny", "special", *more)
    if dtype.itemsize == 2:
        laws = ("every", *more)
    wide = {"every": 1 << 16, "special": 102}
    all_of = [Case((wide.get(law, 4099),), law) for law in laws]
    return [*all_of, *(Case((n,), "normal") for n in (0, 1, 61, 4096)), replace(all_of[0], apart=True)]


def _one(draw: Draw) -> Inputs:
    return [draw.values(*draw.case.shape)]


def _two(draw: Draw) -> Inputs:
    """Of special values each with each; beside every value a plain one."""
    (n,) = draw.case.shape
    x = draw.values(n)
    if draw.case.law != "special":
        return [x, draw.normal(n) if draw.case.law == "every" else draw.values(n)]
    x = draw.values(17)
    return [x.repeat_interleave(17), x.repeat(17)]


def _unary(
    name: str,
    call: Callable[[Tensor], Tensor],
    value: Callable[[Tensor], Tensor],
    steps: int,
    aten: tuple[str, ...] = (),
    size: Callable[[Tensor], Tensor] | None = None,
    more: tuple[str, ...] = (),
    decays: bool = False,
) -> Operator:
    """`decays`: towards minus infinity, where the formula takes nothing times infinity."""

    def truth(x: Tensor) -> Truth:
        found = value(x)
        free = x == -torch.inf if decays else None
        return Truth(found, found.abs() if size is None else size(x), steps, free=free)

    return Operator(name, "pointwise", aten or (f"{name}.default",), _one, call, truth, lambda d: _cases(d, *more))


def _binary(
    name: str,
    call: Callable[[Tensor, Tensor], Tensor],
    value: Callable[[Tensor, Tensor], Tensor],
    steps: int,
    aten: tuple[str, ...] = (),
    size: Callable[[Tensor, Tensor], Tensor] | None = None,
) -> Operator:
    def truth(a: Tensor, b: Tensor) -> Truth:
        found = value(a, b)
        return Truth(found, found.abs() if size is None else size(a, b), steps)

    return Operator(name, "pointwise", aten or (f"{name}.default",), _two, call, truth, _cases)


def _sigmoid(x: Tensor) -> Tensor:
    """Without overflow."""
    small = torch.exp(-x.abs())
    return torch.where(x >= 0, torch.ones_like(x), small) / (1 + small)


def _inverse_root(x: Tensor) -> Tensor:
    """As IEEE 754 has pow: of both zeros infinity, of minus infinity zero."""
    none = torch.zeros_like(x)
    right = torch.where(x == -torch.inf, -x, torch.where(x == 0, none, x))
    return torch.reciprocal(torch.sqrt(right))


def _normal_cdf(x: Tensor) -> Tensor:
    return 0.5 * torch.erfc(-x / math.sqrt(2))


def _density(x: Tensor) -> Tensor:
    return torch.exp(-0.5 * x * x) / math.sqrt(2 * math.pi)


def _inner(x: Tensor) -> Tensor:
    return ROOT * (x + CUBE * x * x * x)


def _gelu_tanh_backward(g: Tensor, x: Tensor) -> Truth:
    """1 - tanh^2 cancels: what it is off by goes with the slope of what is inside."""
    s, slope = _sigmoid(2 * _inner(x)), ROOT * (1 + 3 * CUBE * x * x)
    size = g.abs() * (1 + (x * slope).abs())
    return Truth(g * (s + 2 * x * s * (1 - s) * slope), size, 16, free=x.isinf())


def _gelu_backward(g: Tensor, x: Tensor) -> Truth:
    turn = x * _density(x)
    size = g.abs() * (1 + turn.abs() * (1 + 0.5 * x * x))
    return Truth(g * (_normal_cdf(x) + turn), size, 12, free=x.isinf())


def _silu_backward(g: Tensor, x: Tensor) -> Truth:
    s, rest = _sigmoid(x), _sigmoid(-x)
    return Truth(g * s * (1 + x * rest), g.abs() * s * (1 + x.abs() * rest), 12, free=x.isinf())


def _softplus(x: Tensor) -> Tensor:
    return x.clamp_min(0) + torch.log1p(torch.exp(-x.abs()))


def _backward(
    name: str, call: Callable[[Tensor, Tensor], Tensor], truth: Callable[[Tensor, Tensor], Truth], draw: Any = None
) -> Operator:
    def two(d: Draw) -> Inputs:
        if d.case.law == "every":  # beside every input a plain gradient
            (n,) = d.case.shape
            return [d.normal(n), d.values(n)]
        return _two(d)

    return Operator(name, "pointwise", (f"{name.split(',')[0]}.default",), draw or two, call, truth, _cases)


def _of_results(squash: Callable[[Tensor], Tensor]) -> Callable[[Draw], Inputs]:
    """A gradient, and what the forward gave."""

    def draw(d: Draw) -> Inputs:
        n = 289 if d.case.law == "special" else d.case.shape[0]
        law = "wide" if d.case.law in ("every", "special") else d.case.law
        return [d.values(n, law="normal" if d.case.law != "tiny" else "tiny"), cast(squash(d.values(n, law=law)), d.of)]

    return draw


POINTWISE = (
    _binary("add", torch.add, torch.add, 0, ("add.Tensor", "add_.Tensor")),
    _binary("sub", torch.sub, torch.sub, 0, ("sub.Tensor", "rsub.Scalar")),
    _binary("mul", torch.mul, torch.mul, 0, ("mul.Tensor",)),
    _binary("div", torch.div, torch.div, 0, ("div.Tensor", "div_.Tensor")),
    _unary("mul by 0.1", lambda x: x * 0.1, lambda x: x * 0.1, 2, ("mul.Scalar",)),
    _unary("div by 3", lambda x: x / 3, lambda x: x / 3, 2, ("div.Scalar", "div_.Scalar")),
    _unary("neg", torch.neg, torch.neg, 0),
    _unary("relu", F.relu, lambda x: x.clamp_min(0), 0),
    _unary("clamp", lambda x: x.clamp(-1.0, 2.0), lambda x: x.clamp(-1.0, 2.0), 0),
    _unary("floor", torch.floor, torch.floor, 0),
    _unary("sqrt", torch.sqrt, torch.sqrt, 0),
    _unary("rsqrt", torch.rsqrt, lambda x: 1 / torch.sqrt(x), 2),
    _unary("pow 2", lambda x: x.pow(2), lambda x: x * x, 0, ("pow.Tensor_Scalar",)),
    _unary("pow 3", lambda x: x.pow(3), lambda x: x * x * x, 2, ("pow.Tensor_Scalar",)),
    _unary("pow -0.5", lambda x: x.pow(-0.5), _inverse_root, 2, ("pow.Tensor_Scalar",)),
    _unary("exp", torch.exp, torch.exp, 2),
    _unary("log", torch.log, torch.log, 2),
    _unary("log1p", torch.log1p, torch.log1p, 2),
    _unary("sin", torch.sin, torch.sin, 2, more=("angles",)),
    _unary("cos", torch.cos, torch.cos, 2, more=("angles",)),
    _unary("tanh", torch.tanh, torch.tanh, 2),
    _unary("sigmoid", torch.sigmoid, _sigmoid, 6),
    _unary("silu", F.silu, lambda x: x * _sigmoid(x), 7, decays=True),
    _unary("gelu", F.gelu, lambda x: x * _normal_cdf(x), 8, size=torch.abs, decays=True),
    _unary(
        "gelu, tanh", lambda x: F.gelu(x, approximate="tanh"), lambda x: x * _sigmoid(2 * _inner(x)), 14,
        ("gelu.default",), torch.abs, decays=True,
    ),
    _unary("softplus", F.softplus, _softplus, 8),
    _backward("silu_backward", A.silu_backward, _silu_backward),
    _backward("gelu_backward", A.gelu_backward, _gelu_backward),
    _backward("gelu_backward, tanh", lambda g, x: A.gelu_backward(g, x, approximate="tanh"), _gelu_tanh_backward),
    _backward(
        "softplus_backward", lambda g, x: A.softplus_backward(g, x, 1.0, 20.0),
        lambda g, x: Truth(g * _sigmoid(x), (g * _sigmoid(x)).abs(), 8),
    ),
    _backward(
        "threshold_backward", lambda g, x: A.threshold_backward(g, x, 0.0),
        lambda g, x: Truth(torch.where(x <= 0, torch.zeros_like(g), g), g.abs(), 0),
    ),
    _backward(
        "tanh_backward", A.tanh_backward, lambda g, y: Truth(g * (1 - y) * (1 + y), g.abs() * (1 + y * y), 4),
        _of_results(torch.tanh),
    ),
    _backward(
        "sigmoid_backward", A.sigmoid_backward, lambda g, y: Truth(g * y * (1 - y), (g * y * (1 - y)).abs(), 4),
        _of_results(_sigmoid),
    ),
)  # fmt: skip
