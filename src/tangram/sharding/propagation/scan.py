"""Scans over a cut dim: each rank scans the stretches of its part, and what lies before each has in total is joined.

    cumsum : ... {dim} ... -> ... {dim} ... ; scan({dim} sum)

What a rank tells the others is one slice for each stretch, the last of its result: in chunks that is one, in a zigzag
two. Joining is associative, so totals may be gathered, or passed on from rank to rank. A maximum or minimum comes with
the place where it is.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from tangram.layout.intervals import IntSet
from tangram.sharding.ops.bind import BoundOp
from tangram.sharding.ops.rank_part import RankPart, peers

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
