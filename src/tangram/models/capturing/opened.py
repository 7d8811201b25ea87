"""Operators that are taken apart before they are seen, or written another way: a graph has what they are made of.

    fused ones                         a weight norm as products and sums
    of a backward that code asks for   what torch decomposes, as the backward of a slice
    primitives of torch's own          as the operator that everyone calls, prims::add as aten::add

`Opening` is a mode that does it; whoever captures, or rehearses what was captured, derives from it, so both see alike.
Operators that call functions of Python (torch.cond, scan) are refused there: they call them out of sight.
`plainly` is what has to hold around a model's code then: fused paths that are taken by a processor or in evaluation
alone, and that no rule cuts, are not taken.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor
from torch._decomp import decomposition_table  # pyright: ignore[reportUnknownVariableType]
from torch._ops import HigherOrderOperator, OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from tangram.models.capturing.called import of_hooks
from tangram.models.capturing.graph import Ref

aten = torch.ops.aten
_ALIASES = frozenset({aten.detach.default, aten.alias.default, aten.lift_fresh.default})
DECOMPOSED = (
    aten.diagonal_backward.default,
    aten.unfold_backward.default,
)
"""As torch decomposes them."""
PRIMITIVE = (
    "add",
    "sub",
    "mul",
    "div",
    "neg",
    "exp",
    "log",
    "sin",
    "cos",
    "tan",
    "tanh",
    "sqrt",
    "rsqrt",
    "erf",
    "abs",
)
"""Of torch's primitives, those that are an operator of the same name."""


GROUPED = aten._grouped_mm.default
DEVICE = torch.ops.prim.device.default


def _norm_of(v: Tensor, dim: int) -> Tensor:
    others = [d for d in range(v.ndim) if d != dim % v.ndim] if dim != -1 else [*range(v.ndim)]
    return v.square().sum(others, keepdim=True).sqrt() if others else v.abs()


def _weight_norm(v: Tensor, g: Tensor, dim: int = 0) -> tuple[Tensor, Tensor]:
    norm = _norm_of(v, dim)
    return v * (g / norm), norm


def _weight_norm_backward(y: Tensor, v: Tensor, g: Tensor, norm: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    others = [d for d in range(v.ndim) if norm.shape[d] == 1 and v.shape[d] != 1]
    along = (y * v).sum(others, keepdim=True) / norm if others else y * v / norm
    return (y - v * (along / norm)) * (g / norm), along


def _select_backward(y: Tensor, sizes: Sequence[int], dim: int, index: int) -> Tensor:
    d = dim % len(sizes)
    return _slice_backward(y.unsqueeze(d), sizes, d, index % sizes[d], index % sizes[d] + 1, 1)


def _slice_backward(y: Tensor, sizes: Sequence[int], dim: int, start: int, end: int, step: int) -> Tensor:
    """Padded, so that it is cut as the gradient is; torch's begins with zeros that every rank has all of."""
    d = dim % len(sizes)
    first, n = (start % sizes[d] if start < 0 else min(start, sizes[d])), y.shape[d]
    if step != 1:
        return cast(Any, decomposition_table)[aten.slice_backward.default](y, sizes, dim, start, end, step)
    return cast(
        Tensor, cast(Any, aten).constant_pad_nd(y, [0, 0] * (len(sizes) - 1 - d) + [first, sizes[d] - first - n])
    )


def _norm(x: Tensor, p: float = 2) -> Tensor:
    return cast(Tensor, cast(Any, torch.linalg).vector_norm(x, p))


def _at_places(x: Tensor, indices: Sequence[Tensor | None]) -> Tensor:
    """With the places of masks in their stead, as torch looks them up: how many there are is then asked by nonzero."""
    each = ([one] if one is None or not _is_mask(one) else one.nonzero().unbind(1) for one in indices)
    return cast(Any, aten.index.Tensor)(x, [place for some in each for place in some])


def _is_mask(x: object) -> bool:
    return isinstance(x, Tensor) and x.dtype == torch.bool


def grouped(func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor:
    """The grouped product, which torch can only fake in bfloat16, in any type."""

    def rounded(x: Any) -> Any:
        return x.to(torch.bfloat16) if isinstance(x, Tensor) and x.is_floating_point() else x

    return func(*map(rounded, args), **{name: rounded(x) for name, x in kwargs.items()}).to(args[0].dtype)


OPENED: Mapping[OpOverload, Callable[..., Any]] = {
    **{one: cast("Mapping[OpOverload, Callable[..., Any]]", decomposition_table)[one] for one in DECOMPOSED},
    aten._weight_norm_interface.default: _weight_norm,
    aten._weight_norm_interface_backward.default: _weight_norm_backward,
    aten.norm.Scalar: _norm,
    aten.select_backward.default: _select_backward,
    aten.slice_backward.default: _slice_backward,
    **{getattr(torch.ops.prims, name).default: getattr(aten, name) for name in PRIMITIVE},
}


class Opening(TorchDispatchMode):
    """What runs below it, with such operators taken apart."""

    supports_higher_order_operators = True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is DEVICE and isinstance(args[0], FakeTensor):
            return args[0].device  # torch asks so at every call, two times in three that something runs
        given = {**(kwargs or {})}
        if isinstance(func, HigherOrderOperator):
            raise NotImplementedError(f"torch.ops.higher_order.{func.name()} calls functions out of sight")
        parts = OPENED.get(func)
        if func is aten.index.Tensor and any(map(_is_mask, args[1])):
            parts = _at_places
        return self.ran_below(func, args, given) if parts is None else self.opened(parts, args, given)

    def opened(self, parts: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Run what an operator is made of. Its gradient is that of the operator, which stands above."""
        with self:
            return parts(*args, **kwargs)

    def ran_below(self, func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Run an operator."""
        return func(*args, **kwargs)


@contextmanager
def plainly() -> Generator[None]:
    """Within, there is no fast path, and recurrent layers run as the same operators on every processor."""
    own = cast(Any, torch)._C
    before = own._get_mkldnn_enabled()
    own._set_mkldnn_enabled(False)
    try:
        with without_fast_path():
            yield
    finally:
        own._set_mkldnn_enabled(before)


@contextmanager
def without_fast_path() -> Generator[None]:
    """Within, encoders run by their modules, which may have parts of their parameters, in evaluation as well."""
    fast = cast(Any, torch.backends.mha)
    before = fast.get_fastpath_enabled()
    fast.set_fastpath_enabled(False)
    try:
        yield
    finally:
        fast.set_fastpath_enabled(before)


def plain(x: object) -> bool:
    """Whether it is a tensor of its own, and none that torch.func's transforms wrap."""
    return isinstance(x, Tensor) and not cast(Any, torch)._C._functorch.is_functorch_wrapped_tensor(x)


# ----------------------------------------------------------------
# What is written through a view, as operators that give new tensors: a graph has no memory that values could share.
#
#     x[..., :3].copy_(y)      slice, copy_            ->  slice, copy_, slice_scatter: a new value for x
#     x.view(-1).add_(1)       view, add_              ->  view, add_, view back
#
# One row a view: how the base follows from what was written. A view that has no row is refused by the capture.


Given = Mapping[str, Any]
Made = tuple[OpOverload, dict[str, Any]]
"""An operator and its arguments, all of them, in the schema's order."""


def _same(_: Ref, new: Ref, __: Given, ___: tuple[int, ...]) -> Made:
    return aten.alias.default, {"self": new}


def _slice(base: Ref, new: Ref, given: Given, _: tuple[int, ...]) -> Made:
    where = {name: given[name] for name in ("dim", "start", "end", "step")}
    return aten.slice_scatter.default, {"self": base, "src": new, **where}


def _select(base: Ref, new: Ref, given: Given, _: tuple[int, ...]) -> Made:
    return aten.select_scatter.default, {"self": base, "src": new, "dim": given["dim"], "index": given["index"]}


def _diagonal(base: Ref, new: Ref, given: Given, _: tuple[int, ...]) -> Made:
    where = {name: given[name] for name in ("offset", "dim1", "dim2")}
    return aten.diagonal_scatter.default, {"self": base, "src": new, **where}


def _reshaped(_: Ref, new: Ref, __: Given, shape: tuple[int, ...]) -> Made:
    return aten.view.default, {"self": new, "size": [*shape]}


def _transposed(_: Ref, new: Ref, given: Given, __: tuple[int, ...]) -> Made:
    return aten.transpose.int, {"self": new, "dim0": given["dim0"], "dim1": given["dim1"]}


def _turned(_: Ref, new: Ref, __: Given, ___: tuple[int, ...]) -> Made:
    return aten.t.default, {"self": new}


def _permuted(_: Ref, new: Ref, given: Given, __: tuple[int, ...]) -> Made:
    dims = [d % len(given["dims"]) for d in given["dims"]]
    return aten.permute.default, {"self": new, "dims": [dims.index(d) for d in range(len(dims))]}


BACK: Mapping[OpOverload, Callable[[Ref, Ref, Given, tuple[int, ...]], Made]] = {
    aten.detach.default: _same,  # also what `.data` gives
    aten.alias.default: _same,  # a slice of all there is
    aten.slice.Tensor: _slice,
    aten.select.int: _select,
    aten.diagonal.default: _diagonal,
    aten.view.default: _reshaped,
    aten._unsafe_view.default: _reshaped,
    aten.unsqueeze.default: _reshaped,
    aten.squeeze.dim: _reshaped,
    aten.squeeze.default: _reshaped,
    aten.squeeze.dims: _reshaped,
    aten.transpose.int: _transposed,
    aten.t.default: _turned,
    aten.permute.default: _permuted,
}
"""By the view's operator: from the base, what is there now, the view's arguments and the base's shape, the new base."""

CUTTING = frozenset(
    getattr(getattr(aten, name), overload)
    for name, overload in (
        ("split", "Tensor"), ("split_with_sizes", "default"), ("unbind", "int"), ("chunk", "default"),
        ("unsafe_split", "Tensor"), ("unsafe_split_with_sizes", "default"), ("unsafe_chunk", "default"),
    )
)  # fmt: skip
"""Views of which no two have an element in common: what is written into one does nothing to the others."""

UNSAID: Mapping[OpOverload, tuple[str, ...]] = {
    aten.native_batch_norm.default: ("running_mean", "running_var"),
    aten.cudnn_batch_norm.default: ("running_mean", "running_var"),
    aten.miopen_batch_norm.default: ("running_mean", "running_var"),
}
"""Arguments that operators write in training, of which their schemas say nothing."""


def is_alias(func: OpOverload) -> bool:
    """Whether an operator that runs now gives what it takes: none of the graph, but where a gradient ends."""
    return func in _ALIASES or (func is aten.view.default and of_hooks())


def unsaid(operator: OpOverload, arguments: Given) -> list[str]:
    """Those of a node, by name."""
    names = UNSAID.get(operator, ()) if arguments.get("training") else ()
    return [name for name in names if isinstance(arguments.get(name), Ref)]
