"""Calls that a rank carries out otherwise than by the operator on its part: a note of the rule says which.

    counted              random numbers belong to the elements of the whole tensor
    ragged(t e)          rows t come in groups e, whose ends are counted through all rows
    triangle(r c)        rows r above or below the diagonal of columns c, counted in the whole matrix
    looked(1 v)          input 1 holds indices into v of input 0: others' give nothing, and a pending sum
    spill(1 v)           input 1 holds indices into v of input 0, which is written there: what is others' is dropped
    causal(s)            queries s attend to keys up to their own place in the whole sequence
    taken(index v)       the argument `index` counts through v: others give nothing, and a pending sum

A runner has what the part holds of the factors, and the operator's arguments as the part has them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import DynamicOutputShapeException, FakeTensor
from torch.nn import functional

from tangram.layout.intervals import IntSet, elements, size
from tangram.sharding.local_ops import random_numbers, random_ops
from tangram.sharding.ops.calls import OpCall

if TYPE_CHECKING:
    from tangram.sharding.ops.bind import BoundOp

LocalInputs = Mapping[str, IntSet]
Runner = Callable[[OpCall, "BoundOp", LocalInputs, Sequence[str], bool], tuple[Any, ...]]


@dataclass(frozen=True, eq=False)
class Otherwise(OpCall):
    """A call that is run by something else."""

    how: Callable[[OpCall, bool], tuple[Any, ...]]

    def run(self, *, in_place: bool = False) -> tuple[Any, ...]:
        """As `OpCall.run`."""
        return self.how(self, in_place)


def of(call: OpCall, bound: BoundOp, inputs: LocalInputs) -> OpCall:
    """A part's call as it is to be run: itself, where the rule says nothing else. `inputs`: of the cut factors."""
    for name, args in bound.rule.notes:
        if name in RUNNERS:
            return Otherwise(call.operator, call.arguments, partial(_run, RUNNERS[name], bound, inputs, args))
    return call


def _run(
    runner: Runner, bound: BoundOp, inputs: LocalInputs, args: Sequence[str], call: OpCall, in_place: bool
) -> tuple[Any, ...]:
    return runner(call, bound, inputs, args, in_place)


def for_comparison(call: OpCall, bound: BoundOp) -> OpCall:
    """A whole call as it is to be run, to compare parts with."""
    return of(call, bound, {}) if bound.rule.note("counted") is not None else call


def _counted(call: OpCall, bound: BoundOp, inputs: LocalInputs, args: Sequence[str], in_place: bool) -> tuple[Any, ...]:
    tensors = [t for t in call.tensors if t is not None]
    if isinstance(tensors[0], FakeTensor):
        return _with(call, call.tensors).run(in_place=in_place)
    local = cast("Sequence[int]", torch.broadcast_shapes(*[t.shape for t in tensors]))
    sets: list[IntSet] = []
    shape: list[int] = []
    for factors, n in zip(bound.outputs[0], local, strict=True):
        shape.append(math.prod(bound.sizes[f] for f in factors) if factors else n)
        sets.append(_product([inputs.get(f, _all(bound.sizes[f])) for f in factors], [bound.sizes[f] for f in factors])
                    if factors else _all(n))  # fmt: skip
    return random_ops.draw(call, random_numbers.numbered(sets, shape, tensors[0].device), in_place, shape)


def _all(n: int) -> IntSet:
    return ((0, n),) if n else ()


def _product(sets: Sequence[IntSet], sizes: Sequence[int]) -> IntSet:
    """The indices into a product of factors, of which these are held; the last one moves fastest."""
    if len(sets) == 1:
        return sets[0]
    found = cast("list[int]", random_numbers.numbered([*sets], [*sizes]).flatten().tolist())
    return tuple((i, i + 1) for i in found)


def _ragged(call: OpCall, bound: BoundOp, inputs: LocalInputs, args: Sequence[str], in_place: bool) -> tuple[Any, ...]:
    rows, groups = (inputs.get(name) for name in args)
    return _grouped_matmul(call, rows, groups)


def _triangle(
    call: OpCall, bound: BoundOp, inputs: LocalInputs, args: Sequence[str], in_place: bool
) -> tuple[Any, ...]:
    """A part that begins at a row, or a column, has its diagonal shifted; one of several runs is masked."""
    (x,) = call.tensors
    assert x is not None
    diagonal: int = call.arguments["diagonal"]
    rows, columns = (inputs.get(name, _all(n)) for name, n in zip(args, x.shape[-2:], strict=True))
    if len(rows) <= 1 and len(columns) <= 1:
        shift = (rows[0][0] if rows else 0) - (columns[0][0] if columns else 0)
        plain = OpCall(call.operator, {**call.arguments, "diagonal": diagonal + shift})
        return plain.run(in_place=in_place)
    above = _steps(columns, x)[None, :] - _steps(rows, x)[:, None] - diagonal
    keep = above <= 0 if "tril" in call.name else above >= 0
    if call.name.partition(".")[0].endswith("_"):
        return ((x if in_place else x.clone()).masked_fill_(~keep, 0),)
    return (torch.where(keep, x, torch.zeros((), dtype=x.dtype, device=x.device)),)


def _own(indices: Tensor, inputs: IntSet, n: int) -> tuple[Tensor, Tensor]:
    """Indices into `n` elements as places among those that are held, or behind them; and which of them are there."""
    table = torch.full((n,), size(inputs), dtype=torch.int64, device=indices.device)
    table[_steps(inputs, indices)] = torch.arange(size(inputs), device=indices.device)
    own = table[torch.where(indices < 0, indices + n, indices).long()]
    return own, own < size(inputs)


def _pairs(bound: BoundOp, inputs: LocalInputs, args: Sequence[str]) -> list[tuple[int, int, IntSet, int]]:
    """Of `1 v`, where v is cut: the input, the dim of input 0 that it indexes, what is held there, and of how many."""
    found: list[tuple[int, int, IntSet, int]] = []
    for place, name in zip(args[::2], args[1::2], strict=True):
        factor = f"{name}0" if name.startswith("{") else name
        if factor in inputs:
            dim = next(d for d, factors in enumerate(bound.inputs[0] or ()) if factor in factors)
            found.append((int(place), dim, inputs[factor], bound.sizes[factor]))
    return found


def _looked(call: OpCall, bound: BoundOp, inputs: LocalInputs, args: Sequence[str], in_place: bool) -> tuple[Any, ...]:
    tensors = _tensors(call)
    there = torch.ones((), dtype=torch.bool, device=tensors[0].device)
    pairs = _pairs(bound, inputs, args)
    for place, dim, own, n in pairs:
        places, here = _own(tensors[place], own, n)
        there = there & here
        tensors[0] = _longer(tensors[0], dim)  # so that there is something to look up
        tensors[place] = places
    (found,) = _with(call, tensors).run()
    if not pairs:
        return (found,)
    behind = [*bound.outputs[0]]
    while behind and there.ndim and not any(f.startswith("i") for f in behind[-1]):
        behind.pop()
    more = len(bound.outputs[0]) - len(behind) if there.ndim else 0
    return (torch.where(there.reshape([*there.shape, *[1] * more]), found, found.new_zeros(())),)


def _spill(call: OpCall, bound: BoundOp, inputs: LocalInputs, args: Sequence[str], in_place: bool) -> tuple[Any, ...]:
    """What is written elsewhere goes to a place behind the last, which is then left out."""
    tensors = _tensors(call)
    pairs = _pairs(bound, inputs, args)
    if not pairs:
        return _with(call, tensors).run(in_place=in_place)
    x = tensors[0]
    for place, dim, own, n in pairs:
        tensors[0] = _longer(tensors[0], dim)
        tensors[place] = _own(tensors[place], own, n)[0]
    (found,) = _with(call, tensors).run()
    for _, dim, _, _ in pairs:
        found = found.narrow(dim, 0, found.shape[dim] - 1)
    return (x.copy_(found) if in_place else found,)


def _selected(
    call: OpCall, bound: BoundOp, inputs: LocalInputs, args: Sequence[str], in_place: bool
) -> tuple[Any, ...]:
    """`select`: of a part that has it not, nothing, with a gradient of nothing: other ranks wait for it."""
    (x,) = _tensors(call)
    dim, index = call.arguments["dim"] % x.ndim, call.arguments[args[0]]
    own, n = inputs.get(f"{args[1]}0"), x.shape[dim]
    if own is None:
        return _with(call, [x]).run(in_place=in_place)
    n = bound.sizes[f"{args[1]}0"]
    at = elements(own).index(index % n) if index % n in elements(own) else -1
    if at >= 0:
        return OpCall(call.operator, {**call.arguments, "index": at}).run(in_place=in_place)
    return (x.narrow(dim, 0, 0).sum(dim, dtype=x.dtype),)


def _causal(call: OpCall, bound: BoundOp, inputs: LocalInputs, args: Sequence[str], in_place: bool) -> tuple[Any, ...]:
    """A part that begins with the first query is causal by itself; others are told what to hide."""
    query, key = _tensors(call)[:2]
    own = inputs.get(args[0])
    if own is None or (len(own) == 1 and own[0][0] == 0):
        return _with(call, call.tensors).run()
    hidden = _steps(own, query)[:, None] < torch.arange(key.shape[-2], device=query.device)[None, :]
    mask = torch.zeros(hidden.shape, dtype=query.dtype, device=query.device).masked_fill(hidden, -torch.inf)
    return OpCall(call.operator, {**call.arguments, "is_causal": False, "attn_mask": mask[None, None]}).run()


def _tensors(call: OpCall) -> list[Any]:
    return [*call.tensors]


def _with(call: OpCall, tensors: Sequence[Tensor | None]) -> OpCall:
    """A call of the operator itself."""
    return OpCall(call.operator, call.with_tensors(tensors).arguments)


def _longer(x: Tensor, dim: int) -> Tensor:
    return torch.cat([x, x.new_zeros([1 if d == dim else n for d, n in enumerate(x.shape)])], dim)


def _steps(inputs: IntSet, like: Tensor) -> Tensor:
    return torch.tensor(elements(inputs) if size(inputs) else [], dtype=torch.int64, device=like.device)


RUNNERS: Mapping[str, Runner] = {
    "counted": _counted,
    "ragged": _ragged,
    "triangle": _triangle,
    "looked": _looked,
    "spill": _spill,
    "taken": _selected,
    "causal": _causal,
}
"""By the note that asks for it."""


# ----------------------------------------------------------------
# Products of groups of rows (`_grouped_mm`, as experts have). Where groups end is counted through the whole tensor's
# rows, so a part counts its own: of the rows that it holds, and of the groups whose weights it has. It computes the
# rows of its groups and leaves others nothing, to be added up. The kernels want rows that begin at multiples of 16
# bytes, which an uneven part has not: it is filled up with zeros.

ALIGNED = 16
"""Bytes."""


def _grouped_matmul(call: OpCall, rows: IntSet | None, groups: IntSet | None) -> tuple[Any, ...]:
    """A part's call. `rows`, `groups`: what it holds of either in the whole call; None: all."""
    a, b, ends = call.arguments["self"], call.arguments["mat2"], call.arguments["offs"]
    if ends is None:
        return (_grouped_product(call, a, b, None),)
    along = (a.ndim == 3, b.ndim == 3)  # where its groups lie: in both, the rows are contracted
    n = b.shape[1] if along[0] else a.shape[1] if not along[1] else a.shape[0]
    if rows is not None:
        # How many of this part's rows come before each end.
        ends = torch.searchsorted(torch.tensor(elements(rows), dtype=ends.dtype, device=ends.device), ends).int()
    if groups is None:
        return (_grouped_product(call, a, b, ends),)
    begins = torch.cat([ends.new_zeros(1), ends[:-1]])
    own = torch.tensor(elements(groups), dtype=torch.int64, device=ends.device)
    index = _rows_of(begins, ends, own, n)
    ends = (ends - begins)[own].cumsum(0).int()
    if along[1]:
        found = _grouped_product(call, a.index_select(0, index), b, ends)
        return (found.new_zeros(n, found.shape[1]).index_copy(0, index, found),)
    found = _grouped_product(call, a, b.index_select(1, index), ends)
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


def _grouped_product(call: OpCall, a: Tensor, b: Tensor, ends: Tensor | None) -> Tensor:
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
