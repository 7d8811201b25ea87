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

from tangram.sharding.ops.calls import OpCall, schema_of

Shape = tuple[int, ...]


@dataclass(frozen=True)
class PaddlePair:
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

    def call(self, tensors: Sequence[Tensor]) -> OpCall:
        """Aten's call: tensors and other arguments each in the order in which the schema has them."""
        if self.listed:
            return OpCall.of(self.operator, ([*tensors], *self.args), {})
        own, others = iter(tensors), iter(self.args)
        found: dict[str, Any] = {}
        for argument in schema_of(self.operator).arguments:
            if "Tensor" in str(argument.type):
                found[argument.name] = next(own, None)
            else:
                found[argument.name] = next(others, argument.default_value if argument.has_default_value() else None)
        return OpCall.of(self.operator, (), found)


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

PAIRS: tuple[PaddlePair, ...] = (
    *(PaddlePair(name, _OTHER_NAMES.get(name, name), (_X,)) for name in _UNARY),
    *(PaddlePair(name, aten, (_X, _X)) for name, aten in _BINARY.items()),
    PaddlePair("add", "add.Tensor", (_X, (6,))),
    PaddlePair("multiply", "mul.Tensor", (_CUBE, (6, 1))),
    PaddlePair("gelu", "gelu", (_X,), ("none",), (False,)),
    PaddlePair("logical_not", "logical_not", (_X,)),
    PaddlePair("pow", "pow.Tensor_Scalar", (_X,), (2,), (2.0,)),
    PaddlePair("clip", "clamp", (_X,), (0.0, 1.0), (0.0, 1.0)),
    PaddlePair("scale", "mul.Scalar", (_X,), (3.0,), (3.0, 0.0, True)),
    PaddlePair("where", "where.self", (_X, _X, _X), below=((0, 2),)),
    PaddlePair("matmul", "mm", ((4, 6), (6, 8)), (), (False, False)),
    PaddlePair("matmul", "bmm", ((2, 4, 6), (2, 6, 8)), (), (False, False)),
    PaddlePair("bmm", "bmm", ((2, 4, 6), (2, 6, 8))),
    PaddlePair("sum", "sum.dim_IntList", (_CUBE,), ([1], False), ([1], False)),
    PaddlePair("sum", "sum.dim_IntList", (_CUBE,), ([0, -1], True), ([0, -1], True)),
    PaddlePair("max", "amax", (_CUBE,), ([1], False), ([1], False)),
    PaddlePair("min", "amin", (_CUBE,), ([1], True), ([1], True)),
    PaddlePair("prod", "prod.dim_int", (_CUBE,), (1, False), ([1], False)),
    PaddlePair("any", "any.dim", (_CUBE,), (1, False), ([1], False), below=((0, 2),)),
    PaddlePair("all", "all.dim", (_CUBE,), (1, False), ([1], False), below=((0, 2),)),
    PaddlePair("mean_all", "mean", (_CUBE,)),
    PaddlePair("logsumexp", "logsumexp", (_CUBE,), ([1], False), ([1], False, False)),
    PaddlePair("p_norm", "linalg_vector_norm", (_CUBE,), (2.0, [1], False), (2.0, 1, 1e-12, False, False)),
    PaddlePair("argmax", "argmax", (_CUBE,), (1, False), (1, False, False)),
    PaddlePair("argmin", "argmin", (_CUBE,), (1, True), (1, True, False)),
    PaddlePair("cumsum", "cumsum", (_CUBE,), (1,), (1, False, False, False)),
    PaddlePair("cumsum", "cumsum", (_CUBE,), (-1,), (-1, False, False, False)),
    PaddlePair("softmax", "_softmax", (_CUBE,), (-1, False), (-1,)),
    PaddlePair("log_softmax", "_log_softmax", (_CUBE,), (1, False), (1,)),
    PaddlePair("layer_norm", "native_layer_norm", (_CUBE, (8,), (8,)), ([8], 1e-5), (1e-5, 2)),
    PaddlePair("group_norm", "native_group_norm", ((4, 6, 5, 5), (6,), (6,)), (4, 6, 25, 3, 1e-5), (1e-5, 3, "NCHW")),
    PaddlePair(
        "embedding", "embedding", ((10, 4), (3, 5)), (-1, False, False), (-1, False), order=(1, 0), below=((1, 10),)
    ),
    PaddlePair("c_embedding", "embedding", ((10, 4), (3, 5)), (-1, False, False), (0, 10), below=((1, 10),)),
    PaddlePair("index_select", "index_select", (_X, (3,)), (1,), (1,), below=((1, 6),)),
    PaddlePair("gather", "index_select", (_X, (3,)), (0,), (0,), below=((1, 4),)),
    PaddlePair("take_along_axis", "gather", (_X, (4, 3)), (1, False), (1,), below=((1, 6),)),
    PaddlePair("put_along_axis", "scatter.src", (_X, (4, 3), (4, 3)), (1,), (1, "assign", True), below=((1, 6),)),
    PaddlePair("concat", "cat", (_X, _X), (1,), (1,), listed=True),
    PaddlePair("stack", "stack", (_X, _X), (1,), (1,), listed=True),
    PaddlePair("split", "split_with_sizes", (_CUBE,), ([2, 4], 1), ([2, 4], 1), results=2),
    PaddlePair("split_with_num", "split.Tensor", (_CUBE,), (3, 1), (2, 1), results=2),
    PaddlePair("unbind", "unbind.int", (_CUBE,), (1,), (1,), results=6),
    PaddlePair("slice", "slice.Tensor", (_CUBE,), (1, 1, 5), ([1], [1], [5], [1], [])),
    PaddlePair("strided_slice", "slice.Tensor", (_CUBE,), (1, 0, 6, 2), ([1], [0], [6], [2])),
    PaddlePair("transpose", "permute", (_CUBE,), ([2, 0, 1],), ([2, 0, 1],)),
    PaddlePair("reshape", "view", (_CUBE,), ([24, 8],), ([24, 8],)),
    PaddlePair("reshape", "view", (_CUBE,), ([2, 2, 6, 8],), ([2, 2, 6, 8],)),
    PaddlePair("reshape", "view", (_CUBE,), ([12, 16],), ([12, 16],)),
    PaddlePair("flatten", "view", (_CUBE,), ([4, 48],), (1, 2)),
    PaddlePair("squeeze", "squeeze.dims", ((4, 1, 6),), ([1],), ([1],)),
    PaddlePair("unsqueeze", "unsqueeze", (_X,), (1,), ([1],)),
    PaddlePair("tile", "repeat", (_X,), ([2, 1, 3],), ([2, 1, 3],)),
    PaddlePair("triu", "triu", (_CUBE,), (0,), (0,)),
    PaddlePair("tril_triu", "tril", (_CUBE,), (0,), (0, True)),
    PaddlePair("topk", "topk", (_CUBE,), (2, 1, True, True), (2, 1, True, True), results=2),
    PaddlePair("argsort", "sort", (_CUBE,), (1, False), (1, False, False), results=2),
    PaddlePair("pad", "constant_pad_nd", (_X,), ([1, 1, 0, 0],), ([0, 0, 1, 1], 0)),
    PaddlePair("roll", "roll", (_CUBE,), ([1], [1]), ([1], [1])),
    PaddlePair(
        "conv2d", "convolution", ((4, 6, 5, 5), (8, 6, 3, 3)), ([1, 1], [1, 1], [1, 1], False, [0, 0], 1),
        ([1, 1], [1, 1], "EXPLICIT", [1, 1], 1, "NCHW"),
    ),
)  # fmt: skip
