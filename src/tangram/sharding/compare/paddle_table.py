"""Operators that Paddle has a rule for and aten a name: how each is called, there and here.

A row is Paddle's name, aten's, the shapes of aten's tensors, what else aten is called with, and what else Paddle is.
Tensors stand in aten's order; `order` says in which Paddle takes them. Attributes of a wrong type end Paddle's process,
so every row has been run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tangram.sharding.ops.calls import Call, schema_of

__all__ = ["PAIRS", "Pair"]

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Pair:
    """One operator, by both names."""

    paddle: str
    aten: str
    shapes: tuple[Shape, ...]
    args: tuple[Any, ...] = ()
    """Of aten, but for its tensors."""
    attributes: tuple[Any, ...] = ()
    """Of Paddle, after its tensors."""
    order: tuple[int, ...] = ()
    """Where Paddle's tensors stand among aten's; as they are where nothing is said."""
    below: tuple[tuple[int, int], ...] = ()
    """Tensors of indices, and what these are below of; below 2 they are true or false."""
    listed: bool = False
    """The tensors are one list."""
    results: int = 1
    """How many results are compared."""

    @property
    def operator(self) -> Any:
        """Aten's."""
        name, _, overload = self.aten.partition(".")
        return getattr(getattr(torch.ops.aten, name), overload or "default")

    def tensors(self) -> list[Tensor]:
        """Random ones of both signs; the same in every call."""
        torch.manual_seed(0)
        below = dict(self.below)
        found: list[Tensor] = []
        for i, shape in enumerate(self.shapes):
            drawn = torch.randint(below[i], shape) if i in below else torch.randn(shape, dtype=torch.float64)
            found.append(drawn > 0 if below.get(i) == 2 else drawn)
        return found

    def call(self, tensors: Sequence[Tensor]) -> Call:
        """Aten's call: tensors and other arguments each in the order in which the schema has them."""
        if self.listed:
            return Call.of(self.operator, ([*tensors], *self.args), {})
        own, others = iter(tensors), iter(self.args)
        found: dict[str, Any] = {}
        for argument in schema_of(self.operator).arguments:
            if "Tensor" in str(argument.type):
                found[argument.name] = next(own, None)
            else:
                found[argument.name] = next(others, argument.default_value if argument.has_default_value() else None)
        return Call.of(self.operator, (), found)


_X: Shape = (4, 6)
_UNARY = (
    "abs", "acos", "acosh", "asin", "asinh", "atan", "atanh", "ceil", "cos", "cosh", "digamma", "erf", "erfinv",
    "exp", "expm1", "floor", "hardsigmoid", "hardswish", "lgamma", "log", "log10", "log1p", "log2", "mish",
    "reciprocal", "relu", "relu6", "round", "rsqrt", "selu", "sigmoid", "sign", "silu", "sin", "sinh", "softplus",
    "sqrt", "square", "tan", "tanh", "trunc", "elu", "celu", "leaky_relu", "conj",
)  # fmt: skip
_OTHER_NAMES = {"sign": "sgn", "conj": "conj_physical"}
_BINARY = {
    "add": "add.Tensor",
    "subtract": "sub.Tensor",
    "multiply": "mul.Tensor",
    "divide": "div.Tensor",
    "maximum": "maximum",
    "minimum": "minimum",
    "fmax": "fmax",
    "fmin": "fmin",
    "remainder": "remainder.Tensor",
    "floor_divide": "floor_divide",
    "elementwise_pow": "pow.Tensor_Tensor",
    "greater_than": "gt.Tensor",
    "less_than": "lt.Tensor",
    "not_equal": "ne.Tensor",
    "logical_and": "logical_and",
    "logical_or": "logical_or",
}
_CUBE: Shape = (4, 6, 8)

PAIRS: tuple[Pair, ...] = (
    *(Pair(name, _OTHER_NAMES.get(name, name), (_X,)) for name in _UNARY),
    *(Pair(name, aten, (_X, _X)) for name, aten in _BINARY.items()),
    Pair("add", "add.Tensor", (_X, (6,))),
    Pair("multiply", "mul.Tensor", (_CUBE, (6, 1))),
    Pair("gelu", "gelu", (_X,), ("none",), (False,)),
    Pair("logical_not", "logical_not", (_X,)),
    Pair("pow", "pow.Tensor_Scalar", (_X,), (2,), (2.0,)),
    Pair("clip", "clamp", (_X,), (0.0, 1.0), (0.0, 1.0)),
    Pair("scale", "mul.Scalar", (_X,), (3.0,), (3.0, 0.0, True)),
    Pair("where", "where.self", (_X, _X, _X), below=((0, 2),)),
    Pair("matmul", "mm", ((4, 6), (6, 8)), (), (False, False)),
    Pair("matmul", "bmm", ((2, 4, 6), (2, 6, 8)), (), (False, False)),
    Pair("bmm", "bmm", ((2, 4, 6), (2, 6, 8))),
    Pair("sum", "sum.dim_IntList", (_CUBE,), ([1], False), ([1], False)),
    Pair("sum", "sum.dim_IntList", (_CUBE,), ([0, -1], True), ([0, -1], True)),
    Pair("max", "amax", (_CUBE,), ([1], False), ([1], False)),
    Pair("min", "amin", (_CUBE,), ([1], True), ([1], True)),
    Pair("prod", "prod.dim_int", (_CUBE,), (1, False), ([1], False)),
    Pair("any", "any.dim", (_CUBE,), (1, False), ([1], False), below=((0, 2),)),
    Pair("all", "all.dim", (_CUBE,), (1, False), ([1], False), below=((0, 2),)),
    Pair("mean_all", "mean", (_CUBE,)),
    Pair("logsumexp", "logsumexp", (_CUBE,), ([1], False), ([1], False, False)),
    Pair("p_norm", "linalg_vector_norm", (_CUBE,), (2.0, [1], False), (2.0, 1, 1e-12, False, False)),
    Pair("argmax", "argmax", (_CUBE,), (1, False), (1, False, False)),
    Pair("argmin", "argmin", (_CUBE,), (1, True), (1, True, False)),
    Pair("cumsum", "cumsum", (_CUBE,), (1,), (1, False, False, False)),
    Pair("cumsum", "cumsum", (_CUBE,), (-1,), (-1, False, False, False)),
    Pair("softmax", "_softmax", (_CUBE,), (-1, False), (-1,)),
    Pair("log_softmax", "_log_softmax", (_CUBE,), (1, False), (1,)),
    Pair("layer_norm", "native_layer_norm", (_CUBE, (8,), (8,)), ([8], 1e-5), (1e-5, 2)),
    Pair("group_norm", "native_group_norm", ((4, 6, 5, 5), (6,), (6,)), (4, 6, 25, 3, 1e-5), (1e-5, 3, "NCHW")),
    Pair("embedding", "embedding", ((10, 4), (3, 5)), (-1, False, False), (-1, False), order=(1, 0), below=((1, 10),)),
    Pair("c_embedding", "embedding", ((10, 4), (3, 5)), (-1, False, False), (0, 10), below=((1, 10),)),
    Pair("index_select", "index_select", (_X, (3,)), (1,), (1,), below=((1, 6),)),
    Pair("gather", "index_select", (_X, (3,)), (0,), (0,), below=((1, 4),)),
    Pair("take_along_axis", "gather", (_X, (4, 3)), (1, False), (1,), below=((1, 6),)),
    Pair("put_along_axis", "scatter.src", (_X, (4, 3), (4, 3)), (1,), (1, "assign", True), below=((1, 6),)),
    Pair("concat", "cat", (_X, _X), (1,), (1,), listed=True),
    Pair("stack", "stack", (_X, _X), (1,), (1,), listed=True),
    Pair("split", "split_with_sizes", (_CUBE,), ([2, 4], 1), ([2, 4], 1), results=2),
    Pair("split_with_num", "split.Tensor", (_CUBE,), (3, 1), (2, 1), results=2),
    Pair("unbind", "unbind.int", (_CUBE,), (1,), (1,), results=6),
    Pair("slice", "slice.Tensor", (_CUBE,), (1, 1, 5), ([1], [1], [5], [1], [])),
    Pair("strided_slice", "slice.Tensor", (_CUBE,), (1, 0, 6, 2), ([1], [0], [6], [2])),
    Pair("transpose", "permute", (_CUBE,), ([2, 0, 1],), ([2, 0, 1],)),
    Pair("reshape", "view", (_CUBE,), ([24, 8],), ([24, 8],)),
    Pair("reshape", "view", (_CUBE,), ([2, 2, 6, 8],), ([2, 2, 6, 8],)),
    Pair("reshape", "view", (_CUBE,), ([12, 16],), ([12, 16],)),
    Pair("flatten", "view", (_CUBE,), ([4, 48],), (1, 2)),
    Pair("squeeze", "squeeze.dims", ((4, 1, 6),), ([1],), ([1],)),
    Pair("unsqueeze", "unsqueeze", (_X,), (1,), ([1],)),
    Pair("tile", "repeat", (_X,), ([2, 1, 3],), ([2, 1, 3],)),
    Pair("triu", "triu", (_CUBE,), (0,), (0,)),
    Pair("tril_triu", "tril", (_CUBE,), (0,), (0, True)),
    Pair("topk", "topk", (_CUBE,), (2, 1, True, True), (2, 1, True, True), results=2),
    Pair("argsort", "sort", (_CUBE,), (1, False), (1, False, False), results=2),
    Pair("pad", "constant_pad_nd", (_X,), ([1, 1, 0, 0],), ([0, 0, 1, 1], 0)),
    Pair("roll", "roll", (_CUBE,), ([1], [1]), ([1], [1])),
    Pair(
        "conv2d", "convolution", ((4, 6, 5, 5), (8, 6, 3, 3)), ([1, 1], [1, 1], [1, 1], False, [0, 0], 1),
        ([1, 1], [1, 1], "EXPLICIT", [1, 1], 1, "NCHW"),
    ),
)  # fmt: skip
