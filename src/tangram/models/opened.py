"""Operators that are taken apart before they are seen: a graph has what they are made of.

    fused on one kind of processor     a weight norm as products and sums
    that call functions of Python      torch.cond, scan, while_loop and map, step by step, with the steps that they take
    of a backward that code asks for   what torch decomposes, as the backward of a slice

`Opening` is a mode that does it; whoever captures, or rehearses what was captured, derives from it, so both see alike.
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
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map  # pyright: ignore[reportUnknownVariableType]

aten = torch.ops.aten
DECOMPOSED = (
    aten.select_backward.default,
    aten.slice_backward.default,
    aten.diagonal_backward.default,
    aten.unfold_backward.default,
)
"""As torch decomposes them."""


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


def _norm(x: Tensor, p: float = 2) -> Tensor:
    return torch.linalg.vector_norm(x, p)


OPENED: Mapping[OpOverload, Callable[..., Any]] = {
    **{one: cast("Mapping[OpOverload, Callable[..., Any]]", decomposition_table)[one] for one in DECOMPOSED},
    aten._weight_norm_interface.default: _weight_norm,
    aten._weight_norm_interface_backward.default: _weight_norm_backward,
    aten.norm.Scalar: _norm,
}


# ------------------------------------------------------------ operators that call functions


def _stacked(rows: Sequence[Any]) -> list[Any]:
    """Of results of steps, which are flat, each stacked."""
    return [torch.stack([*one]) if isinstance(one[0], Tensor) else one[0] for one in zip(*rows, strict=True)]


def _flat(found: Any) -> list[Any]:
    return [*found] if isinstance(found, list | tuple) else [found]


def _cond(pred: Any, true_fn: Callable[..., Any], false_fn: Callable[..., Any], operands: Sequence[Any] = ()) -> Any:
    return true_fn(*operands) if bool(pred) else false_fn(*operands)


def _scan(combine: Callable[..., Any], init: Sequence[Any], xs: Sequence[Tensor], more: Sequence[Any] = ()) -> Any:
    carry, rows = [*init], list[list[Any]]()
    for i in range(xs[0].shape[0]):
        found = _flat(combine(*carry, *(x.select(0, i) for x in xs), *more))
        carry, row = found[: len(init)], found[len(init) :]
        rows.append(row)
    return (*carry, *_stacked(rows))


def _map(function: Callable[..., Any], xs: Sequence[Tensor], more: Sequence[Any]) -> Any:
    return tuple(_stacked([_flat(function(*(x.select(0, i) for x in xs), *more)) for i in range(xs[0].shape[0])]))


def _turns(
    going: Callable[..., Any], body: Callable[..., Any], carried: Sequence[Any], more: Sequence[Any]
) -> Generator[list[Any]]:
    """What a loop carries, after each of its turns."""
    now = [*carried]
    while bool(going(*now, *more)):
        now = _flat(body(*now, *more))
        yield now


def _while(going: Any, body: Any, carried: Sequence[Any], more: Sequence[Any]) -> Any:
    turns = [*_turns(going, body, carried, more)]
    return tuple(turns[-1] if turns else [x.clone() if isinstance(x, Tensor) else x for x in carried])


def _while_stacked(going: Any, body: Any, carried: Sequence[Any], more: Sequence[Any]) -> Any:
    rows = [*_turns(going, body, carried, more)]
    return tuple(_stacked(rows or [[x.clone() if isinstance(x, Tensor) else x for x in carried]]))


STEPS: Mapping[str, Callable[..., Any]] = {
    "cond": _cond,
    "scan": _scan,
    "map_impl": _map,
    "while_loop": _while,
    "while_loop_stack_output": _while_stacked,
}
"""By the name of torch's operator, which is called so below autograd."""


class Opening(TorchDispatchMode):
    """What runs below it, with such operators taken apart."""

    supports_higher_order_operators = True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = {**(kwargs or {})}
        parts = STEPS.get(func.name()) if isinstance(func, HigherOrderOperator) else OPENED.get(func)
        if parts is None and isinstance(func, HigherOrderOperator):
            raise NotImplementedError(f"torch.ops.higher_order.{func.name()} has no steps")
        if parts is None:
            return self.ran_below(func, args, given)
        return self.opened(parts, args, given)

    def opened(self, parts: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Run what an operator is made of. Its gradient is that of the operator, which stands above."""
        with self:
            return _values(parts(*args, **kwargs))

    def ran_below(self, func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Run an operator."""
        return func(*args, **kwargs)


def _values(found: Any) -> Any:
    """Two results of an operator are two tensors."""
    seen: set[int] = set()

    def own(x: Any) -> Any:
        if isinstance(x, Tensor) and id(x) in seen:
            x = x.clone()
        seen.add(id(x))
        return x

    return tree_map(own, found)


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
