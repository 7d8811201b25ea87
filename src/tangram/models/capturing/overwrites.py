"""What is written through a view, as operators that give new tensors: a graph has no memory that values could share.

    x[..., :3].copy_(y)      slice, copy_            ->  slice, copy_, slice_scatter: a new value for x
    x.view(-1).add_(1)       view, add_              ->  view, add_, view back

One row a view: how the base follows from what was written. A view that has no row is refused by the capture.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch._ops import OpOverload

from tangram.models.capturing.graph import Ref

aten = torch.ops.aten
Given = Mapping[str, Any]
Made = tuple[OpOverload, dict[str, Any]]
"""An operator and its arguments, all of them, in the schema's order."""


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
    aten.slice.Tensor: _slice,
    aten.select.int: _select,
    aten.diagonal.default: _diagonal,
    aten.view.default: _reshaped,
    aten._unsafe_view.default: _reshaped,
    aten.unsqueeze.default: _reshaped,
    aten.squeeze.dim: _reshaped,
    aten.squeeze.default: _reshaped,
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


def unsaid(operator: OpOverload, arguments: Given) -> list[str]:
    """Those of a node, by name."""
    names = UNSAID.get(operator, ()) if arguments.get("training") else ()
    return [name for name in names if isinstance(arguments.get(name), Ref)]
