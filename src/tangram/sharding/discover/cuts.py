"""What can be cut in one call, by trying: cut dims, run the operator on each part, put the results together.

Every dim of every input is cut alone, then together with dims of other inputs of its size, until one way is valid: each
result is then the parts side by side, the same on all of them, their sum, their maximum or their minimum, whichever is
true for all draws of values and for two and three parts. A dim is tried no further once it has a way.

A value can coincide where a rule does not hold, and parts of nothing are left out: what is found is a candidate, which
the proof has yet to confirm.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tangram.sharding.ops.calls import OpCall
from tangram.sharding.proof.execute import REDUCE, differs
from tangram.sharding.proof.samples import samples

TRIES = 160
"""Of sets of dims of one call."""
Dims = tuple[tuple[int, int], ...]
"""Which dim of which input; at most one of each."""
Way = tuple[str, int]
"""What becomes of a result: `("cut", dim)`, or `sum`, `max`, `min` and `same` with -1."""
SAME: Way = ("same", -1)
RANDOM = "its results are random or undefined: two runs with the same values differ"
OF_VALUES = "the shape of its results depends on the values of its inputs"


class NotTriedError(Exception):
    """A call of which nothing can be found, and why."""


@dataclass(frozen=True)
class DimsTogether:
    """Dims that can be cut together."""

    dims: Dims
    outputs: tuple[Way, ...]
    once: tuple[int, ...] = ()
    """Inputs that only the first part may add."""
    scale: bool = False
    """Whether each part counts by its share."""


@dataclass(frozen=True)
class _Draw:
    call: OpCall
    results: tuple[Any, ...]


def cuts_in(call: OpCall) -> list[DimsTogether]:
    """The sets of dims of a call that can be cut. Raises NotTriedError where it cannot be told, with the reason."""
    return cuts_with(call, itertools.islice(candidates(call), TRIES))


def cuts_with(call: OpCall, tried: Iterable[Dims]) -> list[DimsTogether]:
    """Those of some sets of dims that can be cut, each dim once. Raises NotTriedError."""
    draws = _draws(call)
    some: list[DimsTogether] = []
    done: set[tuple[int, int]] = set()
    for dims in tried:
        if done.isdisjoint(dims) and (found := _tried(draws, dims)) is not None:
            some.append(found)
            done.update(dims)
    return some


def _draws(call: OpCall) -> list[_Draw]:
    """The call with several values, and what the operator gives. Raises NotTriedError where that cannot be cut."""
    found: list[_Draw] = []
    for other in (call, samples.drawn(call, 1), _sparse(call)):
        try:
            results = other.run()
        except Exception:  # noqa: BLE001, S112  these values are not of its domain
            continue
        if not _alike(results, other.run()):
            raise NotTriedError(RANDOM)
        if not all(isinstance(r, Tensor) for r in results):
            raise NotTriedError("its results are no tensors")
        found.append(_Draw(other, results))
    if not found:
        raise NotTriedError("it cannot be run with the sample")
    if len({tuple(tuple(r.shape) for r in draw.results) for draw in found}) > 1:
        raise NotTriedError(OF_VALUES)
    return found


def _sparse(call: OpCall) -> OpCall:
    """Few small numbers, many of them nothing: what counts, tests and compares needs them."""
    generator = torch.Generator().manual_seed(2)
    return call.with_tensors(
        [
            t
            if t is None or not t.is_floating_point()
            else torch.randint(-2, 3, t.shape, generator=generator).to(t.dtype)
            * (torch.rand(t.shape, generator=generator) < 0.5).to(t.dtype)
            for t in call.tensors
        ]
    )


def _alike(one: Sequence[Any], other: Sequence[Any]) -> bool:
    return len(one) == len(other) and all(
        a.shape == b.shape and a.dtype == b.dtype and not differs(a, b)
        if isinstance(a, Tensor) and isinstance(b, Tensor)
        else a is b or a == b
        for a, b in zip(one, other, strict=True)
    )


def candidates(call: OpCall) -> Iterator[Dims]:
    """What may be cut, dims of one size: one alone; those at the same place from either end; then all others."""
    spots = [(i, d, n) for i, t in enumerate(call.tensors) if t is not None for d, n in enumerate(t.shape) if n > 1]
    yield from (((i, d),) for i, d, _ in spots)
    seen: set[Dims] = set()
    ndim = {i: t.ndim for i, t in enumerate(call.tensors) if t is not None}
    for from_end in (True, False):
        groups: dict[tuple[int, int], list[tuple[int, int]]] = {}
        for i, d, n in spots:
            groups.setdefault((d - ndim[i] * from_end, n), []).append((i, d))
        for some in groups.values():
            if len(some) > 1 and tuple(some) not in seen:
                seen.add(tuple(some))
                yield tuple(some)
    for size in range(2, min(len(ndim), 5) + 1):
        for some in itertools.combinations(spots, size):
            dims = tuple((i, d) for i, d, _ in some)
            if len({i for i, _ in dims}) == size and len({n for _, _, n in some}) == 1 and dims not in seen:
                seen.add(dims)
                yield dims


def _tried(draws: Sequence[_Draw], dims: Dims) -> DimsTogether | None:
    """What comes of cutting these dims together; None where the parts do not make the whole."""
    plain = _ways(draws, dims)
    if plain and all(plain):
        return DimsTogether(dims, tuple(map(_best, plain)))
    if plain and all(plain[1:]):
        scaled = [*_ways(draws, dims, scale=True)[:1], *plain[1:]]
        if all(scaled):
            return DimsTogether(dims, tuple(map(_best, scaled)), scale=True)
    first = draws[0].call.tensors
    cut = {i for i, _ in dims}
    for i, tensor in enumerate(first):
        if tensor is None or i in cut or not (tensor.is_floating_point() or tensor.is_complex()):
            continue
        added = _ways(draws, dims, once=i)
        if added and all(("sum", -1) in some for some in added):
            return DimsTogether(dims, tuple(("sum", -1) for _ in added), once=(i,))
    return None


def _best(some: set[Way]) -> Way:
    """Of several ways that fit, as for results that are all nothing: side by side, else the same, else a sum."""
    return min(some, key=lambda way: ("cut", "same", "sum", "max", "min").index(way[0]))


def _ways(draws: Sequence[_Draw], dims: Dims, scale: bool = False, once: int = -1) -> list[set[Way]]:
    """Of each result, the ways of putting the parts together that are right for all draws; empty sets for none."""
    kept: list[set[Way]] | None = None
    n = next(t.shape[d] for i, d in dims for t in [draws[0].call.tensors[i]] if t is not None)
    for draw, count in itertools.product(draws, (2, 3)):
        if count > n:
            continue
        try:
            parts = _parts(draw.call, dims, count, once)
        except Exception:  # noqa: BLE001  parts that do not fit together
            return [set() for _ in draw.results]
        now = [
            _joined([part[i] for part in parts], want, _shares(n, count) if scale else None)
            if all(len(part) == len(draw.results) for part in parts)
            else set[Way]()
            for i, want in enumerate(draw.results)
        ]
        kept = now if kept is None else [a & b for a, b in zip(kept, now, strict=True)]
        if not all(kept[1:]) or (len(kept) == 1 and not kept[0]):
            break
    return kept or []


def _bounds(n: int, count: int) -> list[tuple[int, int]]:
    """Parts none of which is of nothing: they differ in size where they must."""
    ends = [(n * i + count - 1) // count for i in range(count + 1)]
    return list(itertools.pairwise(ends))


def _shares(n: int, count: int) -> list[float]:
    return [(b - a) / n for a, b in _bounds(n, count)]


def _parts(call: OpCall, dims: Dims, count: int, once: int) -> list[tuple[Any, ...]]:
    places = dict(dims)
    found: list[tuple[Any, ...]] = []
    for number in range(count):
        local: list[Tensor | None] = []
        for i, tensor in enumerate(call.tensors):
            if tensor is not None and i in places:
                a, b = _bounds(tensor.shape[places[i]], count)[number]
                local.append(tensor.narrow(places[i], a, b - a).contiguous())
            else:
                local.append(torch.zeros_like(tensor) if tensor is not None and i == once and number else tensor)
        found.append(call.with_tensors(local).run())
    return found


def _joined(parts: Sequence[Any], want: Tensor, shares: Sequence[float] | None) -> set[Way]:
    """The ways in which parts make the whole."""
    if not all(isinstance(p, Tensor) and p.dtype == want.dtype and p.ndim == want.ndim for p in parts):
        return set()
    if shares is not None:
        return _reduced([p * share for p, share in zip(parts, shares, strict=True)], want, {"sum": torch.add})
    found: set[Way] = set()
    if all(p.shape == want.shape for p in parts):
        found |= _reduced(parts, want, REDUCE)
        if all(not differs(p, want) for p in parts):
            found.add(SAME)
    for d in range(want.ndim):
        others = [(*p.shape[:d], *p.shape[d + 1 :]) for p in parts]
        fits = set(others) == {(*want.shape[:d], *want.shape[d + 1 :])}
        if fits and sum(p.shape[d] for p in parts) == want.shape[d] and not differs(torch.cat(list(parts), d), want):
            found.add(("cut", d))
    return found


def _reduced(parts: Sequence[Tensor], want: Tensor, by: Any) -> set[Way]:
    found: set[Way] = set()
    reduce: Callable[[Tensor, Tensor], Tensor]
    for op, reduce in by.items():
        try:
            if not differs(functools.reduce(reduce, parts).to(want.dtype), want):
                found.add((op, -1))
        except RuntimeError:  # complex numbers have no maximum
            continue
    return found
