"""Products of groups of rows (`_grouped_mm`, as experts have), on one rank's part.

Where groups end is counted through the whole tensor's rows, so a part counts its own: of the rows that it holds, and of
the groups whose weights it has. It computes the rows of its groups and leaves others nothing, to be added up. Rows that
no group has are nothing, too. The kernels want rows that begin at multiples of 16 bytes, which an uneven part has not:
it is filled up with zeros.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import DynamicOutputShapeException
from torch.nn import functional

from tangram.layout.intervals import IntSet, elements
from tangram.sharding.ops.calls import OpCall

ALIGNED = 16
"""Bytes."""


def run(call: OpCall, rows: IntSet | None, groups: IntSet | None) -> tuple[Any, ...]:
    """A part's call. `rows`, `groups`: what it holds of either in the whole call; None: all."""
    a, b, ends = call.arguments["self"], call.arguments["mat2"], call.arguments["offs"]
    if ends is None:
        return (_product(call, a, b, None),)
    along = (a.ndim == 3, b.ndim == 3)  # where its groups lie: in both, the rows are contracted
    n = b.shape[1] if along[0] else a.shape[1] if not along[1] else a.shape[0]
    if rows is not None:
        ends = torch.searchsorted(torch.tensor(elements(rows), dtype=ends.dtype, device=ends.device), ends).int()
    if groups is None:
        return (_product(call, a, b, ends),)
    begins = torch.cat([ends.new_zeros(1), ends[:-1]])
    own = torch.tensor(elements(groups), dtype=torch.int64, device=ends.device)
    index = _rows_of(begins, ends, own, n)
    ends = (ends - begins)[own].cumsum(0).int()
    if along[1]:
        found = _product(call, a.index_select(0, index), b, ends)
        return (found.new_zeros(n, found.shape[1]).index_copy(0, index, found),)
    found = _product(call, a, b.index_select(1, index), ends)
    return (found.new_zeros(found.shape[0], n).index_copy(1, index, found),)


@torch.library.custom_op("tangram::rows_of", mutates_args=())
def _rows_of(begins: Tensor, ends: Tensor, own: Tensor, n: int) -> Tensor:
    """The numbers of the rows, of `n`, that lie in groups `own`."""
    every = torch.arange(n, device=ends.device)
    limits = cast("list[list[int]]", torch.stack([begins[own], ends[own]], 1).tolist())
    return torch.cat([every[:0], *(every[begin:end] for begin, end in limits)])


@_rows_of.register_fake
def _(begins: Tensor, ends: Tensor, own: Tensor, n: int) -> Tensor:
    """How many they are, no shape tells: a number that is unknown, or where none may be (a run without memory, of one
    size), as many as if all groups had as many."""
    try:
        count = cast(int, torch.library.get_ctx().new_dynamic_size())
    except DynamicOutputShapeException:
        count = -(-n * own.shape[0] // max(1, ends.shape[0]))
    return torch.empty(count, dtype=torch.int64, device=ends.device)


def _product(call: OpCall, a: Tensor, b: Tensor, ends: Tensor | None) -> Tensor:
    """The operator, on tensors that its kernel takes."""
    rows, columns = a.shape[-2], b.shape[-1]
    dense = columns * b.element_size() % ALIGNED == 0  # the result's gradient goes into a kernel as well
    if not (dense and _kernel_accepts(a) and _kernel_accepts(b)):
        a, b = _filled(a), _filled(b)
    found = call.with_tensors([a, b, ends, call.arguments["bias"]]).operator(
        a, b, ends, call.arguments["bias"], call.arguments["out_dtype"]
    )
    return found[..., :rows, :columns]


def _kernel_accepts(tensor: Tensor) -> bool:
    """Whether a kernel takes a tensor as it lies: one of its last dims dense, the other in steps of whole lines."""
    size = tensor.element_size()
    return 0 not in tensor.shape and any(
        tensor.stride(one) == 1 and tensor.stride(other) >= max(1, tensor.shape[one])
        and tensor.stride(other) * size % ALIGNED == 0 for one, other in ((-1, -2), (-2, -1))
    )  # fmt: skip


def _filled(tensor: Tensor) -> Tensor:
    line = ALIGNED // tensor.element_size()
    more = [-n % line or line * (n == 0) for n in tensor.shape[-2:]]
    return functional.pad(tensor, [0, more[1], 0, more[0]])
