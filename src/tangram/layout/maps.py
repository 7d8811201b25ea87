"""Index maps: which positions of a list each part of a cut holds. One row per map.

A row is a pair of functions that must agree: `holds(n, k, i, args)` is the set of positions of part `i` of `k` in a
list of `n`, and `who(n, k, s, args)` finds the parts that hold a set `s`, in time proportional to the overlaps and
never to `k`. The parts of a map are disjoint and cover the list; a property test holds every row to that.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import accumulate

from tangram.layout.errors import LayoutError
from tangram.layout.intervals import IntSet, normal, shift, span

Args = tuple[int, ...]
Parts = list[tuple[int, IntSet]]


@dataclass(frozen=True)
class IndexMap:
    """One row: `holds` and `who` as above; `check(n, k, args)` raises LayoutError when the arguments cannot fit."""

    holds: Callable[[int, int, int, Args], IntSet]
    who: Callable[[int, int, IntSet, Args], Parts]
    check: Callable[[int, int, Args], None]


def _chunk_holds(n: int, k: int, i: int, _: Args = ()) -> IntSet:
    c = -(-n // k)
    return span(min(i * c, n), min(i * c + c, n))


def _chunk_who(n: int, k: int, s: IntSet, _: Args = ()) -> Parts:
    return _blocks(s, -(-n // k))


def _blocks(s: IntSet, c: int) -> Parts:
    """`s` cut at the multiples of `c`: `[(block number, its part of s)]`, ascending."""
    out: dict[int, list[tuple[int, int]]] = {}
    for a, b in s:
        for j in range(a // c, (b - 1) // c + 1):
            out.setdefault(j, []).append((max(a, j * c), min(b, j * c + c)))
    return [(j, tuple(pairs)) for j, pairs in out.items()]


def _zigzag_holds(n: int, k: int, i: int, docs: Args) -> IntSet:
    out: list[tuple[int, int]] = []
    base = 0
    for m in docs or (n,):
        for j in (i, 2 * k - 1 - i):
            out += shift(_chunk_holds(m, 2 * k, j), base)
        base += m
    return normal(out)


def _zigzag_who(n: int, k: int, s: IntSet, docs: Args) -> Parts:
    out: dict[int, list[tuple[int, int]]] = {}
    for _, (start, length), part in _segments(s, docs or (n,)):
        for j, sub in _chunk_who(length, 2 * k, shift(part, -start)):
            out.setdefault(min(j, 2 * k - 1 - j), []).extend(shift(sub, start))
    return [(j, normal(pairs)) for j, pairs in out.items()]


def _segments(s: IntSet, lengths: Args) -> list[tuple[int, tuple[int, int], IntSet]]:
    """`s` cut at the borders of consecutive segments: `[(segment, (start, length), part)]` of those it touches."""
    ends = list(accumulate(lengths))
    out: dict[int, list[tuple[int, int]]] = {}
    for a, b in s:
        while a < b:
            j = bisect_right(ends, a)
            stop = min(b, ends[j])
            out.setdefault(j, []).append((a, stop))
            a = stop
    return [(j, (ends[j] - lengths[j], lengths[j]), tuple(pairs)) for j, pairs in out.items()]


def _cyclic_holds(n: int, k: int, i: int, args: Args) -> IntSet:
    block = args[0] if args else 1
    return normal((a, min(a + block, n)) for a in range(i * block, n, k * block))


def _cyclic_who(n: int, k: int, s: IntSet, args: Args) -> Parts:
    del n
    out: dict[int, list[tuple[int, int]]] = {}
    for j, part in _blocks(s, args[0] if args else 1):
        out.setdefault(j % k, []).extend(part)
    return [(j, normal(pairs)) for j, pairs in out.items()]


def _strided_holds(n: int, k: int, i: int, args: Args) -> IntSet:
    """DTensor's `_StridedShard(split_factor)`: chunk into `split_factor` pieces, then each piece into `k`."""
    out: list[tuple[int, int]] = []
    for j in range(args[0]):
        for a, b in _chunk_holds(n, args[0], j):
            out += shift(_chunk_holds(b - a, k, i), a)
    return normal(out)


def _strided_who(n: int, k: int, s: IntSet, args: Args) -> Parts:
    out: dict[int, list[tuple[int, int]]] = {}
    for j, part in _chunk_who(n, args[0], s):
        ((a, b),) = _chunk_holds(n, args[0], j)
        for i, sub in _chunk_who(b - a, k, shift(part, -a)):
            out.setdefault(i, []).extend(shift(sub, a))
    return [(i, normal(pairs)) for i, pairs in out.items()]


def _sizes_holds(n: int, k: int, i: int, args: Args) -> IntSet:
    del n, k
    start = sum(args[:i])
    return span(start, start + args[i])


def _sizes_who(n: int, k: int, s: IntSet, args: Args) -> Parts:
    del n, k
    return [(j, part) for j, _, part in _segments(s, args)]


def _no_args(n: int, k: int, args: Args) -> None:
    del n, k
    if args:
        raise LayoutError(f"a plain cut takes no arguments, got {list(args)}")


def _check_docs(n: int, k: int, docs: Args) -> None:
    del k
    if docs and sum(docs) != n:
        raise LayoutError(f"zigzag over documents of {sum(docs)} elements in all, but there are {n} to cut")


def _check_block(n: int, k: int, args: Args) -> None:
    del n, k
    if len(args) > 1 or 0 in args:
        raise LayoutError(f"cyclic takes one block size of at least 1, got {list(args)}")


def _check_factor(n: int, k: int, args: Args) -> None:
    del n, k
    if len(args) != 1 or args[0] < 1:
        raise LayoutError(f"strided takes one split factor of at least 1, got {list(args)}")


def _check_sizes(n: int, k: int, sizes: Args) -> None:
    if len(sizes) != k or sum(sizes) != n:
        raise LayoutError(f"sizes {list(sizes)} do not cut {n} elements into {k} parts")


MAPS: Mapping[str, IndexMap] = {
    "": IndexMap(_chunk_holds, _chunk_who, _no_args),
    "zigzag": IndexMap(_zigzag_holds, _zigzag_who, _check_docs),
    "cyclic": IndexMap(_cyclic_holds, _cyclic_who, _check_block),
    "strided": IndexMap(_strided_holds, _strided_who, _check_factor),
    "sizes": IndexMap(_sizes_holds, _sizes_who, _check_sizes),
}
"""`""` is the plain cut: chunks of ceil(n / k), as `torch.chunk`, trailing ones possibly empty."""
