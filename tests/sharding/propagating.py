"""Calls, meshes and layouts drawn at random, for the tests of propagation."""

import math

import torch
from hypothesis import strategies as st
from torch import Tensor

from tangram.layout import Layout, Mesh, validate
from tangram.layout.syntax import Cut, Dim
from tangram.sharding.ops.calls import OpCall

aten = torch.ops.aten
SIZE = st.integers(1, 7)
AXES = "xyzu"


def some(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(sum(shape)))


@st.composite
def calls(draw: st.DrawFn) -> OpCall:
    """A call of one of the operators that models are made of."""
    a, b, c, d = (draw(SIZE) for _ in range(4))
    dim = draw(st.integers(-3, 2))
    keep = draw(st.booleans())
    makers = {
        "mm": lambda: (aten.mm.default, some(a, b), some(b, c)),
        "bmm": lambda: (aten.bmm.default, some(a, b, c), some(a, c, d)),
        "addmm": lambda: (aten.addmm.default, some(*draw(st.sampled_from([(c,), (a, c)]))), some(a, b), some(b, c)),
        "add": lambda: (
            aten.add.Tensor,
            some(a, b, c),
            some(*draw(st.sampled_from([(a, b, c), (b, c), (b, 1), (1,)]))),
        ),
        "mul_": lambda: (aten.mul_.Tensor, some(a, b, c), some(b, c)),
        "sum": lambda: (aten.sum.dim_IntList, some(a, b, c), [dim], keep),
        "mean": lambda: (aten.mean.dim, some(a, b, c), [dim], keep),
        "amax": lambda: (aten.amax.default, some(a, b, c), [dim], keep),
        "softmax": lambda: (aten._softmax.default, some(a, b, c), dim, False),
        "layer_norm": lambda: (aten.native_layer_norm.default, some(a, b, c), [c], some(c), some(c), 1e-5),
        "merge": lambda: (aten.view.default, some(a, b, c), draw(st.sampled_from([[a * b, c], [a, b * c], [-1]]))),
        "split": lambda: (aten.view.default, some(a * b, c * d), draw(st.sampled_from([[a, b, c * d], [a, b, c, d]]))),
        "permute": lambda: (aten.permute.default, some(a, b, c), draw(st.permutations([0, 1, 2]))),
        "unsqueeze": lambda: (aten.unsqueeze.default, some(a, b), draw(st.integers(-3, 2))),
        "embedding": lambda: (aten.embedding.default, some(a, b), torch.arange(c * d).reshape(c, d) % a),
        "cat": lambda: (aten.cat.default, [some(a, b, c), some(a, b, c)], dim),
        "sdpa": lambda: (
            aten._scaled_dot_product_flash_attention_for_cpu.default,
            some(a, b, c, 4),
            some(a, b, d, 4),
            some(a, b, d, 4),
        ),
    }
    operator, *args = makers[draw(st.sampled_from(sorted(makers)))]()
    return OpCall.of(operator, args, {})


@st.composite
def meshes(draw: st.DrawFn) -> Mesh:
    """One to four axes of one to three ranks, 24 ranks at most."""
    sizes = draw(st.lists(st.integers(1, 3), min_size=1, max_size=4).filter(lambda s: math.prod(s) <= 24))
    return Mesh.parse(" ".join(f"{axis}={n}" for axis, n in zip(AXES, sizes, strict=False)))


@st.composite
def cuts(draw: st.DrawFn, axis: str) -> Cut:
    """A cut over an axis by any map that fits every size."""
    name, args = draw(
        st.sampled_from(
            [("", ()), ("", ()), ("", ()), ("zigzag", ()), ("cyclic", (2,)), ("cyclic", ()), ("strided", (2,))]
        )
    )
    return Cut(axis, name, args)


@st.composite
def layouts(draw: st.DrawFn, shape: tuple[int, ...], mesh: Mesh, numbers: bool) -> Layout:
    """A layout of a tensor of this shape: each axis cuts a dim, or a factor of one, or is pending, or does nothing."""
    dims: list[list[Cut]] = [[] for _ in shape]
    inner: list[list[Cut]] = [[] for _ in shape]
    pending: list[tuple[str, str]] = []
    at: list[tuple[str, tuple[int, ...]]] = []
    for axis, (n, _) in draw(st.permutations(list(mesh.axes.items()))):
        what = draw(st.sampled_from(["cut", "cut", "cut", "inner", "pending", "at", "whole", "whole"]))
        if what in ("cut", "inner") and shape:
            (dims if what == "cut" else inner)[draw(st.integers(0, len(shape) - 1))].append(draw(cuts(axis)))
        elif what == "pending" and numbers:
            pending.append(("sum", axis))
        elif what == "at" and draw(st.booleans()):
            at.append((axis, (draw(st.integers(0, n - 1)),)))
    made: list[Dim] = []
    for n, own, inside in zip(shape, dims, inner, strict=True):
        p = draw(st.sampled_from([k for k in (1, 2, 3, n) if k and n % k == 0]))
        factors = (Dim("_", p, cuts=tuple(inside)), Dim("_", n // p))
        if draw(st.booleans()):
            factors = (Dim("_", n // p), Dim("_", p, cuts=tuple(inside)))
        made.append(Dim(terms=(factors,), cuts=tuple(own)) if inside else Dim("_", n, cuts=tuple(own)))
    return validate(Layout(tuple(made), (), tuple(pending), tuple(at)), mesh)
