"""One rank's part of a call: its tensors cut, its arguments as the part needs them, its results put right.

What an operator computes with beside its tensors' elements is global: sizes, indices into a cut factor, a mean's
divisor, a bias that is added to a sum. The notes of a rule say which:

    size(size)      an argument that is the shape of the result
    offset(1 v)     input 1 holds indices into factor v: counted from the part's first; others give nothing, and a
                    pending sum
    scale(k)        the result is divided by the size of k: the part counts by its share
    once(0)         input 0 is added once, though the result is a pending sum
    product(C g c)  an argument that is a product of factors
    equal           a dim of one element is not broadcast to a larger one: where they differ, both are whole
    filled          the operator refuses tensors of nothing, which a part may be

What parts need of each other, by windows and scans (`tangram.sharding.propagation.halo`), `run` does without:
`run_all` runs ranks together that are all in this process, and a runtime moves `halo.needed` there and `halo.total`
back by itself.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor

from tangram.layout.intervals import IntSet, elements, rank, size
from tangram.sharding.local_ops import local_variants
from tangram.sharding.ops.bind import BoundOp, Dims
from tangram.sharding.ops.calls import OpCall
from tangram.sharding.ops.rank_part import Cuts, RankPart, factor_dim, layout_of, part_of, piece
from tangram.sharding.propagation import halo
from tangram.sharding.propagation.axis_choices import written
from tangram.sharding.propagation.halo import needed
from tangram.sharding.propagation.op_cost import results as without_memory

__all__ = ["Cuts", "RankPart", "as_it_is", "factor_dim", "layout_of", "part_of", "piece", "run", "run_all"]


MISTOLD = "batch_norm"
"""Part of the names of operators whose statistics without memory have another type or shape than on a processor."""


def as_it_is(bound: BoundOp, part: RankPart) -> bool:
    """Whether a part of a call is the operator itself on the part's tensors, but for sizes among its arguments."""
    for name, args in bound.rule.notes:
        named = [a for a in args if not a.isdigit()]
        touched = any(f in part.indices for a in named for f in (a, f"{a}0")) or (not named and bool(part.indices))
        if name in local_variants.RUNNERS and touched:
            return False
        if name == "offset" and _local_inputs(part, args[1]) is not None:
            return False
        if name == "once" and any(bound.after(f, 0) == "sum" for f in part.indices):
            return False
    empty = any(not held for held in part.indices.values())
    return not (empty or bound.windows or any(f in part.indices for f in bound.scans)) and _share(bound, part) == 1


def run_all(
    call: OpCall,
    bound: BoundOp,
    parts: Sequence[RankPart],
    local: Sequence[Sequence[Tensor | None]],
    *,
    in_place: bool = False,
) -> list[tuple[Any, ...]]:
    """The operator on the tensors of ranks that are all here, with what they need of each other. As `run`, for each."""
    given = halo.exchanged(bound, parts, local) if bound.windows else local
    results = [run(call, bound, part, own, in_place=in_place) for part, own in zip(parts, given, strict=True)]
    if not any(f in parts[0].indices for f in bound.scans):
        return results
    if not in_place:
        return halo.joined(bound, parts, results)
    copies = [tuple(one.clone() for one in own) for own in results]  # what is written may be kept for backward
    for own, found in zip(results, halo.joined(bound, parts, copies), strict=True):
        own[0].copy_(found[0])
    return results


def run(
    call: OpCall, bound: BoundOp, part: RankPart, local: Sequence[Tensor | None], *, in_place: bool = False
) -> tuple[Any, ...]:
    """The operator on one rank's tensors, as `OpCall.run`; of what windows read, all that they need.

    Raises what the operator raises.
    """
    if not bound.linked or all(len(part.indices.get(f, ())) < 2 for f in bound.linked):
        return _run(call, bound, part, local, in_place=in_place)
    results = each(bound, part, local, functools.partial(_run, call, bound))
    if not in_place:
        return results
    (place,) = written(call)
    own = cast(Tensor, local[place])
    return (own.copy_(results[0]), *results[1:])


def _run(
    call: OpCall, bound: BoundOp, part: RankPart, local: Sequence[Tensor | None], *, in_place: bool = False
) -> tuple[Any, ...]:
    tensors = halo.padded(call, bound, part, local) if bound.windows else list(local)
    masks: list[Tensor] = []
    for name, args in bound.rule.notes:
        if name == "once":
            for i in map(int, args):
                tensors[i] = _once(tensors[i], bound, i, part)
        elif name == "offset" and args[0].isdigit() and (held := _local_inputs(part, args[1])) is not None:
            i = int(args[0])
            tensors[i], mask = _own_indices(cast(Tensor, tensors[i]), held)
            masks.append(_spread(mask, bound.inputs[i] or (), bound.outputs[0]))
    nothing = _of_nothing(call, bound, part, masks)
    own = local_variants.of(call.with_tensors(tensors, **arguments_of(call, bound, part)), bound, part.indices)
    results = _with_gradient(nothing, tensors) if nothing else own.run(in_place=in_place)
    if bound.windows and not nothing:
        results = halo.put_right(call, bound, part, results)
    for mask in masks:
        results = (torch.where(mask, results[0], torch.zeros((), dtype=results[0].dtype)), *results[1:])
    if bound.rule.note("shape") is not None:  # a dim of one element here may have more elsewhere
        results = tuple(
            r.reshape([_size(f, bound, part) for f in d]) for r, d in zip(results, bound.outputs, strict=True)
        )
    share = _share(bound, part)
    if share == 1:
        return results
    return (results[0] * share if share else torch.zeros_like(results[0]), *results[1:])


def _local_inputs(part: RankPart, name: str) -> IntSet | None:
    """What is held of a factor, or of the only one of a slot."""
    return next((held for factor, held in part.indices.items() if factor in (name, f"{name}0")), None)


def _of_nothing(call: OpCall, bound: BoundOp, part: RankPart, masks: Sequence[Tensor]) -> tuple[Any, ...] | None:
    """What operators refuse to do with nothing: its results are empty, nothing to add, or less than anything."""
    empty = [f for f, held in part.indices.items() if not held]
    after = [{bound.after(f, i) for f in empty} for i in range(len(bound.outputs))]
    refuses = masks or bound.rule.note("filled") is not None or any(some & {"max", "min"} for some in after)
    once = [int(i) for i in bound.rule.note("once") or () if call.tensors[int(i)] is not None]
    adds = "cut" not in after[0] and any(_adds(bound, i, part) for i in once)
    # Of some, as transposed convolutions, a result of nothing is refused or not by how many samples there are.
    gone = bound.rule.note("filled") is not None and any(bound.sizes[f] == 0 for d in bound.outputs[0] for f in d)
    if not gone and (not empty or not refuses or adds):
        return None
    like = (None if MISTOLD in call.name else without_memory(call)) or call.run()
    return tuple(
        None  # as gradients are that nobody asked for
        if whole is None
        else torch.full(
            [
                _size(f, bound, part) if part.indices.keys() & {*f} else n
                for f, n in zip(dims, whole.shape, strict=True)
            ],
            halo.least(whole.dtype) if "max" in some else halo.most(whole.dtype) if "min" in some else 0,
            dtype=whole.dtype,
        )
        for whole, dims, some in zip(like, bound.outputs, after, strict=True)
    )


def _with_gradient(results: tuple[Any, ...], tensors: Sequence[Tensor | None]) -> tuple[Any, ...]:
    """Results of nothing with gradients of nothing: other ranks wait for what this one sends on the way back."""
    taken = [t for t in tensors if t is not None and t.requires_grad]
    if not taken or not torch.is_grad_enabled():
        return results
    zero = torch.stack([t.reshape(-1)[:0].sum().abs() for t in taken]).sum()
    floating = [r is not None and (r.is_floating_point() or r.is_complex()) for r in results]
    return tuple(r + zero.to(r.dtype) if own else r for r, own in zip(results, floating, strict=True))


def _size(factors: Sequence[str], bound: BoundOp, part: RankPart) -> int:
    n = 1
    for f in factors:
        n *= size(part.indices[f]) if f in part.indices else bound.sizes[f]
    return n


def _once(tensor: Tensor | None, bound: BoundOp, i: int, part: RankPart) -> Tensor | None:
    if tensor is None or _adds(bound, i, part):
        return tensor
    nowhere = torch.zeros((), dtype=torch.bool, device=tensor.device)
    return torch.where(nowhere, tensor, torch.zeros_like(tensor))  # nothing, with a gradient of nothing: not of None


def _adds(bound: BoundOp, i: int, part: RankPart) -> bool:
    """Whether it is this rank that adds an input to a pending sum."""
    added = [
        f for f in part.indices if not any(f in dim for dim in bound.inputs[i] or ()) and bound.after(f, 0) == "sum"
    ]
    return all(part.first_along(f) for f in added)


def _own_indices(indices: Tensor, inputs: IntSet) -> tuple[Tensor, Tensor]:
    """Indices into what this rank holds of a factor, and which of them are there at all."""
    n = size(inputs)
    if len(inputs) == 1:
        own = indices.long() - inputs[0][0]
        there = (own >= 0) & (own < n)
        return torch.where(there, own, torch.zeros_like(own)).to(indices.dtype), there
    table = torch.full((inputs[-1][1] + 1 if inputs else 1,), n, dtype=torch.int64)
    if n:
        table[torch.tensor(elements(inputs))] = torch.arange(n)
    own = table[indices.long().clamp(max=len(table) - 1)]  # of bytes, torch would take them for a mask
    there = own < n
    return torch.where(there, own, torch.zeros_like(own)).to(indices.dtype), there


def _own_index(index: int, inputs: IntSet) -> int:
    """A place in what this rank holds of a factor; -1 where it is not there."""
    before = 0
    for first, stop in inputs:
        if first <= index < stop:
            return before + index - first
        before += stop - first
    return -1


def _spread(mask: Tensor, own: Dims, result: Dims) -> Tensor:
    """A mask over some factors as one that broadcasts over a result: by the names of their factors."""
    order = [dim for dim in result if dim in own and dim]
    places = [own.index(dim) for dim in order]
    shape = [mask.shape[own.index(dim)] if dim in own and dim else 1 for dim in result]
    return mask.permute(places).reshape(shape)


def _share(bound: BoundOp, part: RankPart) -> float:
    share = 1.0
    for name, args in bound.rule.notes:
        if name == "scale":
            for factor, held in part.indices.items():
                if any(factor == a or factor.rstrip("0123456789") == a for a in args):
                    share *= size(held) / bound.sizes[factor]
    return share


def arguments_of(call: OpCall, bound: BoundOp, part: RankPart) -> dict[str, Any]:
    """The arguments that are sizes, as this rank has them."""
    found = halo.arguments(call, bound, part) if bound.windows else dict[str, Any]()
    for factor, held in part.indices.items():
        if factor in call.arguments:
            found[factor] = size(held)
    for name, args in bound.rule.notes:
        if name == "offset" and not args[0].isdigit() and (held := _local_inputs(part, args[1])) is not None:
            found[args[0]] = _own_index(call.arguments[args[0]], held)
        if name == "product" and any(f in part.indices for f in args[1:]):
            found[args[0]] = _size(args[1:], bound, part)
        if name == "size":
            own = [int(n) for n in args[1:]] or list(cast("Sequence[int]", call.arguments[args[0]]))
            shift = len(bound.outputs[0]) - len(own)
            for i, factors in enumerate(bound.outputs[0][shift:]):
                if any(f in part.indices for f in factors):
                    own[i] = _size(factors, bound, part)
            found[args[0]] = own
    return found


# ----------------------------------------------------------------
# A part in several stretches, where parts need each other: the operator runs on each stretch, one after the other.
# By a map such as `zigzag` or `strided[2]` a rank holds of a dim what is in several places of it all. Windows do not
# reach from one stretch into the next, and a scan of one begins anew: so each is run as the part in one stretch that it
# would be on a rank of its own, and the results are put side by side. Over two dims it is each stretch of the one with
# each of the other.


Run = Callable[[RankPart, Sequence[Tensor | None]], tuple[Any, ...]]
"""An operator on a part in one stretch."""


def each(bound: BoundOp, part: RankPart, local: Sequence[Tensor | None], run: Run) -> tuple[Any, ...]:
    """The results of a part; `local`: its tensors, of what windows read all that it needs."""
    factor = next((f for f, held in part.indices.items() if f in bound.linked and len(held) > 1), None)
    if factor is None:
        return run(part, local)
    found: list[tuple[Any, ...]] = []
    for one in part.indices[factor]:
        own = replace(part, indices={**part.indices, factor: (one,)})
        found.append(each(bound, own, _narrowed(bound, part, local, factor, (one,)), run))
    return tuple(
        _side_by_side(some, dims, factor, bound, part)
        for some, dims in zip(zip(*found, strict=True), bound.outputs, strict=True)
    )


def _narrowed(
    bound: BoundOp, part: RankPart, local: Sequence[Tensor | None], factor: str, one: IntSet
) -> list[Tensor | None]:
    """The tensors of one stretch."""
    found = list(local)
    window = bound.windows.get(factor)
    for i, (tensor, dims) in enumerate(zip(local, bound.inputs, strict=True)):
        if tensor is None or dims is None or (factor,) not in dims:
            continue
        at = rank(part.indices[factor], one) if window is None else rank(needed(bound, part, factor), window.reads(one))
        start, stop = at[0] if at else (0, 0)
        found[i] = tensor.narrow(dims.index((factor,)), start, stop - start)
    return found


def _side_by_side(some: Sequence[Any], dims: Dims, factor: str, bound: BoundOp, part: RankPart) -> Any:
    """One result of all stretches; in a dim that is a product the factor is put together by itself."""
    at = next(i for i, factors in enumerate(dims) if factor in factors)
    inside = dims[at].index(factor)
    before = math.prod(size(part.indices[f]) if f in part.indices else bound.sizes[f] for f in dims[at][:inside])
    opened = [one.unflatten(at, (before, one.shape[at] // max(1, before))) for one in some]
    return torch.cat(opened, at + 1).flatten(at, at + 1)
