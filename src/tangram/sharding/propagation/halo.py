"""Windows over a cut dim: what a part of the result needs of the input, and the operator run on just that.

The input lies as the result does, cut in the same way (`alike`), by any map; what a part's windows read beyond its
borders comes from whichever parts hold it, not only the next, for a part may be smaller than a window. Each stretch of
a part is run by itself (`stretches`): what is outside of the tensor is put there as padding, and the operator runs
without padding of its own along the dim. The notes say how:

    window, spread, pad, times      which elements a window has (`tangram.sharding.ops.windows`)
    outside(least)          padding is less than anything, or the argument that is named; else it is nothing
    places(1)               result 1 counts places in the dims that are read by windows: in the whole tensor
    mean(divisor_override count_include_pad)    the mean of each window: divided by what it has in the whole tensor

Scans over a cut dim: each rank scans the stretches of its part, and what lies before each has in total is joined.

    cumsum : ... {dim} ... -> ... {dim} ... ; scan({dim} sum)

What a rank tells the others is one slice for each stretch, the last of its result: in chunks that is one, in a zigzag
two. Joining is associative, so totals may be gathered, or passed on from rank to rank. A maximum or minimum comes with
the place where it is.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from tangram.layout.intervals import IntSet, intersect, size, union
from tangram.layout.intervals import rank as positions
from tangram.sharding.ops.bind import BoundOp
from tangram.sharding.ops.calls import OpCall
from tangram.sharding.ops.rank_part import RankPart, peers, stands
from tangram.sharding.ops.windows import SlidingWindow, entry_of, kind_of


def needed(bound: BoundOp, part: RankPart, factor: str) -> IntSet:
    """The elements of the input's dim that a part of a cut factor reads, within the tensor: for each stretch of it one.

    Where the stretches' windows overlap, an element is there once.
    """
    window = bound.windows[factor]
    return union(*(window.reads((one,)) for one in part.indices[factor]))


def exchanged(
    bound: BoundOp, parts: Sequence[RankPart], inputs: Sequence[Sequence[Tensor | None]]
) -> list[Sequence[Tensor | None]]:
    """The tensors of ranks that are all here, with what each reads of the others: plain slices, put side by side.

    `inputs`: for each of `parts` its part of each input. One dim after the other, so that corners come along.
    """
    found = list(inputs)
    for factor, window in bound.windows.items():
        if factor not in parts[0].indices:
            continue
        have = [stands(part, factor, window.n) for part in parts]
        before = list(found)
        for group in peers(parts, factor):
            for i in group:
                own = list(before[i])
                own[window.place] = _read(before, group, have, needed(bound, parts[i], factor), window, i)
                found[i] = own
    return found


def _read(
    inputs: Sequence[Sequence[Tensor | None]],
    group: Sequence[int],
    have: Sequence[IntSet],
    target: IntSet,
    window: SlidingWindow,
    rank: int,
) -> Tensor:
    pieces = sorted((one, i) for i in group for one in intersect(have[i], target))
    found: list[Tensor] = []
    for (a, b), i in pieces:
        ((start, _),) = positions(have[i], ((a, b),))
        found.append(_tensor(inputs[i], window).narrow(window.dim, start, b - a))
    return torch.cat(found, window.dim) if found else _tensor(inputs[rank], window).narrow(window.dim, 0, 0)


def _tensor(inputs: Sequence[Tensor | None], window: SlidingWindow) -> Tensor:
    return cast(Tensor, inputs[window.place])


def _cut(bound: BoundOp, part: RankPart) -> list[tuple[str, SlidingWindow, int, int]]:
    """The windows over cut dims, and from where to where this rank has the result."""
    found: list[tuple[str, SlidingWindow, int, int]] = []
    for factor, window in bound.windows.items():
        if part.indices.get(factor):
            ((lo, hi),) = part.indices[factor]  # `stretches` runs each by itself
            found.append((factor, window, lo, hi))
    return found


def padded(call: OpCall, bound: BoundOp, part: RankPart, tensors: Sequence[Tensor | None]) -> list[Tensor | None]:
    """The tensors with padding where windows stick out of the whole tensor."""
    found = list(tensors)
    for _, window, lo, hi in _cut(bound, part):
        start, stop = window.run_on(lo, hi)
        there = window.reads(((lo, hi),))
        before = there[0][0] - start if there else stop - start
        behind = stop - start - before - size(there)
        if before or behind:
            own = _tensor(found, window)
            pads = [0, 0] * (own.ndim - 1 - window.dim) + [before, behind]
            found[window.place] = torch.ops.aten.constant_pad_nd(own, pads, _outside(call, bound, own.dtype))
    return found


def _outside(call: OpCall, bound: BoundOp, dtype: torch.dtype) -> float:
    (name,) = bound.rule.note("outside") or ("",)
    return 0 if not name else least(dtype) if name == "least" else call.arguments[name]


def least(dtype: torch.dtype) -> float:
    """What is less than anything."""
    return False if dtype == torch.bool else -torch.inf if dtype.is_floating_point else torch.iinfo(dtype).min


def most(dtype: torch.dtype) -> float:
    """What is more than anything."""
    return True if dtype == torch.bool else torch.inf if dtype.is_floating_point else torch.iinfo(dtype).max


def arguments(call: OpCall, bound: BoundOp, part: RankPart) -> dict[str, Any]:
    """The arguments that say what is padded, as a part has them whose padding is there already."""
    found: dict[str, Any] = {}
    kind, args = kind_of(bound.rule)
    if kind == "times":
        made = [entry_of(call.arguments[args[0]], i) for i in range(len(bound.windows))]
        for _, window, lo, hi in _cut(bound, part):
            start, stop = window.run_on(lo, hi)
            made[window.entry] = (stop - start) * window.stride
        return {args[0]: made}
    for window in (window for factor, window in bound.windows.items() if factor in part.indices):
        if kind == "pad":
            pads = found.setdefault(args[0], [*call.arguments[args[0]]])
            at = 2 * (len(bound.inputs[window.place] or ()) - 1 - window.dim)
            pads[at : at + 2] = [0] * len(pads[at : at + 2])
            continue
        for name in (args[2], *(args[4:5] if kind == "spread" else ())):
            value = call.arguments[name]
            if name not in found:
                listed = [*cast("Sequence[int]", value)] if isinstance(value, list | tuple) else [value]
                found[name] = listed * len(bound.windows) if len(listed) == 1 else listed
            found[name][window.entry] = 0
    if (mean := bound.rule.note("mean")) is not None and _counts(call, bound, part) is not None:
        found[mean[0]] = 1
    return found


def put_right(call: OpCall, bound: BoundOp, part: RankPart, results: Sequence[Any]) -> tuple[Any, ...]:
    """The results with what windows say of the whole tensor."""
    found = list(results)
    cut = _cut(bound, part)
    for factor, window, lo, hi in cut:
        extra = lo - window.first(window.run_on(lo, hi)[0])
        for i, dims in enumerate(bound.outputs):
            if window.spread and (factor,) in dims:
                found[i] = found[i].narrow(dims.index((factor,)), extra, hi - lo)
    if cut and (places := bound.rule.note("places")) is not None:
        found[int(places[0])] = _placed(bound, part, found[int(places[0])])
    counts = _counts(call, bound, part)
    if cut and counts is not None:
        how = None if found[0].is_floating_point() or found[0].is_complex() else "trunc"
        found[0] = torch.div(found[0], counts.to(found[0].device, found[0].dtype), rounding_mode=how)
    return tuple(found)


def _placed(bound: BoundOp, part: RankPart, places: Tensor) -> Tensor:
    """Places among the elements that a part's windows read as places in the whole tensor."""
    cut = {window.entry: window.run_on(lo, hi) for _, window, lo, hi in _cut(bound, part)}
    windows = sorted(bound.windows.values(), key=lambda window: window.entry)
    whole, times = torch.zeros_like(places), 1
    for window in reversed(windows):
        start, stop = cut.get(window.entry, (0, window.n))
        at = places % (stop - start) + start
        places = places // (stop - start)
        if start < 0:  # of a window without a largest element torch says the first place that is in the tensor
            at = torch.where(at < 0, at % window.dilation, at)
        whole, times = whole + at * times, times * window.n
    return whole


def _counts(call: OpCall, bound: BoundOp, part: RankPart) -> Tensor | None:
    """How many elements each window of a mean has; None where all that are cut are full, or the call says it."""
    mean = bound.rule.note("mean")
    if mean is None or call.arguments[mean[0]] is not None:
        return None
    cut = {factor: range(lo, hi) for factor, _, lo, hi in _cut(bound, part)}
    own = {
        factor: [max(1, w.covered(o, padding=call.arguments[mean[1]])) for o in cut.get(factor, range(w.m))]
        for factor, w in bound.windows.items()
    }
    if all(n == bound.windows[factor].extent for factor in cut for n in own[factor]):
        return None
    ndim = len(bound.windows)
    shaped = [
        torch.tensor(own[f]).reshape([-1 if w.entry == e else 1 for e in range(ndim)]) for f, w in bound.windows.items()
    ]
    return math.prod(shaped[1:], start=shaped[0])


Scanned = tuple[Tensor, ...]
"""The results of a scan, or the last slice of each."""


def _sum(before: Scanned, own: Scanned) -> Scanned:
    return (own[0] + before[0],)


def _prod(before: Scanned, own: Scanned) -> Scanned:
    return (own[0] * before[0],)


def _logsumexp(before: Scanned, own: Scanned) -> Scanned:
    return (torch.logaddexp(own[0], before[0]),)


def _extreme(before: Scanned, own: Scanned, *, largest: bool) -> Scanned:
    """As torch has it: of equal values the later counts, and what is no number is more than any."""
    (old, at), (new, here) = before, own
    later = (new >= old) if largest else (new <= old)
    taken = new.isnan() | (later & ~old.isnan())
    return torch.where(taken, new, old), torch.where(taken, here, at)


JOIN: Mapping[str, Callable[[Scanned, Scanned], Scanned]] = {
    "sum": _sum,
    "prod": _prod,
    "logsumexp": _logsumexp,
    "max": functools.partial(_extreme, largest=True),
    "min": functools.partial(_extreme, largest=False),
}
"""By the reduction that a rule's note names: the total of what comes before, joined to a scan of what follows."""


def counted(results: Scanned, start: int) -> Scanned:
    """A part's results with its places counted in the whole tensor; the part begins at `start`."""
    return (results[0], *(places + start for places in results[1:]))


def total(results: Scanned, dim: int) -> Scanned:
    """What the other ranks need of a part's results."""
    return tuple(one.narrow(dim, one.shape[dim] - 1, 1) for one in results)


def joined(bound: BoundOp, parts: Sequence[RankPart], results: Sequence[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """The results of ranks that are all here, each with what comes before it."""
    found = list(results)
    for factor, op in bound.scans.items():
        if factor not in parts[0].indices:
            continue
        dim = bound.outputs[0].index((factor,))
        for group in peers(parts, factor):
            before: Scanned | None = None
            done: dict[int, list[Scanned]] = {}
            for (start, stop), at in sorted((one, i) for i in group for one in parts[i].indices[factor]):
                begun = sum(one[0].shape[dim] for one in done.get(at, ()))
                own = counted(tuple(one.narrow(dim, begun, stop - start) for one in found[at]), start)
                done.setdefault(at, []).append(own if before is None else JOIN[op](before, own))
                last = total(own, dim)
                before = last if before is None else JOIN[op](before, last)
            for at, some in done.items():
                found[at] = some[0] if len(some) == 1 else tuple(torch.cat(x, dim) for x in zip(*some, strict=True))
    return found


def with_others(
    op: str,
    results: Scanned,
    dim: int,
    held: IntSet,
    every: Sequence[IntSet],
    told: Callable[[Tensor], Tensor],
) -> Scanned:
    """One rank's results, each stretch with what comes before it. `every`: what each rank holds, this one among them,
    in as many stretches; `told`: slices of all ranks side by side, given those of this one."""
    own: list[Scanned] = []
    begun = 0
    for start, stop in held:
        own.append(counted(tuple(one.narrow(dim, begun, stop - start) for one in results), start))
        begun += stop - start
    totals = tuple(told(torch.cat(some, dim)) for some in zip(*(total(one, dim) for one in own), strict=True))
    starts = [start for one in every for start, _ in one]
    found: list[Scanned] = []
    for (start, _), one in zip(held, own, strict=True):
        earlier = sorted((other, i) for i, other in enumerate(starts) if other < start)
        before = [tuple(some.narrow(dim, i, 1) for some in totals) for _, i in earlier]
        found.append(JOIN[op](functools.reduce(JOIN[op], before), one) if before else _tied(one, totals[0], dim))
    return tuple(torch.cat(some, dim) for some in zip(*found, strict=True))


def _tied(results: Scanned, totals: Tensor, dim: int) -> Scanned:
    """The first stretch, which needs no totals, in the graph of those: others wait for their gradients."""
    if not totals.requires_grad:
        return results
    return (results[0] + totals.narrow(dim, 0, 0).sum(), *results[1:])
