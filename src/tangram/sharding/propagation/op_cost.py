"""What an operator costs a rank, from its line: operations, bytes of its results.

    product    2 for each element of the product of all factors of two tensors that share a contracted one; of rows in
               groups, each of which meets one matrix of many, as experts have, what an even share of them costs
    else       1 for each element of the largest tensor; views, and what is filled with nothing, cost nothing

The trade-off: a line knows factors and no kernels, so a softmax counts like an addition. What matters for a plan is
the products, and these are exact; a convolution with a stride is counted by the size of its result.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from tangram.layout import Layout, Mesh
from tangram.layout.intervals import size
from tangram.layout.locate import indices_of_rank
from tangram.layout.syntax import Dim
from tangram.sharding.ops.bind import BoundOp, Dims
from tangram.sharding.ops.calls import OpCall
from tangram.sharding.ops.cut_trees import Tree, dim_of


def results(call: OpCall) -> tuple[Any, ...] | None:
    """What a call gives, as tensors without memory; None where the shapes depend on values."""
    known = vars(call)
    if "_results" not in known:
        known["_results"] = _results(call)
    return known["_results"]


def _results(call: OpCall) -> tuple[Any, ...] | None:
    try:
        return call.with_tensors([None if t is None else t.to("meta") for t in call.tensors]).run()
    except (NotImplementedError, RuntimeError):
        return None


def largest(dim: Dim, mesh: Mesh) -> int:
    """How many elements of a dim the rank holds that has most of it."""
    if not dim.terms and not any(cut.map for cut in dim.cuts):
        n = dim.n
        for cut in dim.cuts:
            n = -(-n // mesh.axes[cut.axis][0])
        return n
    at = dict.fromkeys(dim.axes, 0)  # the first part is never smaller than others, but for sizes that are given
    for cut in (cut for node in dim.nodes for cut in node.cuts):
        if cut.map == "sizes" and not isinstance(cut.args, str):
            at[cut.axis] = cut.args.index(max(cut.args))
    return size(indices_of_rank(dim, mesh, at))


def memory(outputs: Sequence[Layout], full: Sequence[Any] | None, mesh: Mesh) -> int | None:
    """Bytes of the results on the rank that holds most of each."""
    if full is None:
        return None
    total = 0
    for layout, result in zip(outputs, full, strict=True):
        if isinstance(result, Tensor):
            total += math.prod(largest(dim, mesh) for dim in layout.dims) * result.element_size()
    return total


def flops(call: OpCall, bound: BoundOp, trees: Mapping[str, Tree], mesh: Mesh, full: Sequence[Any] | None) -> int:
    """Operations of the rank that has most to do."""
    if not bound.rule.inputs[0].pieces and call.tensors and call.tensors[0] is not None and call.tensors[0].ndim:
        return 0  # a view has an empty rule: its factors are those of its strides
    if bound.rule.note("undefined") == ():
        return 0
    sizes = {f: largest(dim_of(trees[f], n), mesh) if f in trees else n for f, n in bound.sizes.items()}
    contracted = _contracted(bound)
    if contracted:
        total = _products(call, bound, sizes, contracted, full)
        _, groups = bound.rule.note("ragged") or ("", "none")
        return total // max(bound.sizes.get(groups, 1), 1)  # of rows in groups each meets the matrix of one
    tensors = [(t, dims) for t, dims in zip(call.tensors, bound.inputs, strict=True) if t is not None and dims]
    counted = bound.rule.note("offset") is not None  # what is looked up is what is read
    inside = {f: -(-sizes[f] * w.n // bound.sizes[f]) for f, w in bound.windows.items() if bound.sizes[f]}
    elements = [] if counted else [_elements(t.shape, dims, {**sizes, **inside}) for t, dims in tensors]
    made = zip(full or (), bound.outputs, strict=False)
    elements += [_elements(t.shape, dims, sizes) for t, dims in made if isinstance(t, Tensor)]
    return max(elements, default=0)


def _elements(shape: Sequence[int], dims: Dims, sizes: Mapping[str, int]) -> int:
    return math.prod(
        math.prod(sizes[f] for f in factors) if factors else n for factors, n in zip(dims, shape, strict=True)
    )


def _contracted(bound: BoundOp) -> set[str]:
    """The factors of two inputs or more that the first result lacks."""
    made = {f for dim in bound.outputs[0] for f in dim}
    times: dict[str, int] = {}
    for dims in bound.inputs:
        for f in {f for dim in dims or () for f in dim} - made:
            times[f] = times.get(f, 0) + 1
    return {f for f, n in times.items() if n > 1 and any(p != "{" for p in f[:1])}


def _products(
    call: OpCall, bound: BoundOp, sizes: Mapping[str, int], contracted: set[str], full: Sequence[Any] | None
) -> int:
    """The inputs multiplied one after the other; one that has no factor of its own is applied as soon as it can be."""
    once = {int(i) for i in bound.rule.note("once") or ()}
    shapes = [(t.shape, dims) for i, (t, dims) in enumerate(zip(call.tensors, bound.inputs, strict=True))
              if t is not None and dims is not None and i not in once]  # fmt: skip
    todo = [{f for dim in dims for f in dim} for _, dims in shapes]
    made = {f for dim in bound.outputs[0] for f in dim}
    extra = _windows(bound, shapes, full)
    total = 0
    have = todo.pop(0)
    while todo:
        ready = next((i for i, own in enumerate(todo) if own <= have), None)
        other = todo.pop(ready or 0)
        shared = contracted & have & other
        have = have | other
        if ready is None or shared:
            total += (2 if shared else 1) * math.prod(sizes[f] for f in have)
        have &= made.union(*todo)
    return int(total * extra)


def _windows(bound: BoundOp, shapes: Sequence[tuple[Sequence[int], Dims]], full: Sequence[Any] | None) -> float:
    """Of what is read by windows: each place of the result has one; of what is spread, each place of the input."""
    extra = 1.0
    for f, window in bound.windows.items():
        extra *= window.extent * (window.n / bound.sizes[f] if window.spread and bound.sizes[f] else 1)
    result = full[0].shape if full and isinstance(full[0], Tensor) else None
    for f in bound.uncut.difference(bound.windows):
        if f not in bound.sizes:
            continue
        found = [shape[i] for shape, dims in shapes for i, dim in enumerate(dims) if dim == (f,)]
        if len({*found}) > 1:
            places = [result[i] for i, dim in enumerate(bound.outputs[0]) if dim == (f,)] if result else []
            extra *= found[1] * (places[0] if places else found[0]) / bound.sizes[f]
    return extra
