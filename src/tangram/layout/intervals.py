"""Sets of non-negative integers, kept as sorted intervals: what one rank holds of one tensor dim.

An `IntSet` is a tuple of `(start, stop)` pairs: ascending, disjoint, not touching, none empty. The empty set is `()`.
A plain tuple rather than a class, because these sets are created by the million while copies are planned, hash and
compare at C speed, and serve as cache keys. Every function below costs time in the number of intervals, S, never in the
number of elements, except where the result itself has more intervals.

Index maps: which positions of a list each part of a cut holds. One row per map.

A row is a pair of functions that must agree: `holds(n, k, i, args)` is the set of positions of part `i` of `k` in a
list of `n`, and `who(n, k, s, args)` finds the parts that hold a set `s`, in time proportional to the overlaps and
never to `k`. The parts of a map are disjoint and cover the list; a property test holds every row to that.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain

from tangram.layout.errors import LayoutError

IntSet = tuple[tuple[int, int], ...]
"""Sorted, disjoint, non-touching, non-empty `(start, stop)` intervals."""


def span(start: int, stop: int) -> IntSet:
    """The integers `start <= x < stop`; empty when `stop <= start`."""
    return ((start, stop),) if start < stop else ()


def normal(pairs: Iterable[tuple[int, int]]) -> IntSet:
    """The union of any intervals, in any order, overlapping or empty."""
    out: list[tuple[int, int]] = []
    for a, b in sorted(pairs):
        if a >= b:
            continue
        if out and a <= out[-1][1]:
            if b > out[-1][1]:
                out[-1] = (out[-1][0], b)
        else:
            out.append((a, b))
    return tuple(out)


def size(s: IntSet) -> int:
    """How many integers the set has."""
    return sum([b - a for a, b in s])


def shift(s: IntSet, k: int) -> IntSet:
    """Every element plus `k`."""
    return tuple([(a + k, b + k) for a, b in s]) if k else s


def intersect(x: IntSet, y: IntSet) -> IntSet:
    """The elements in both sets."""
    if x == y:
        return x
    out: list[tuple[int, int]] = []
    i = j = 0
    while i < len(x) and j < len(y):
        (a, b), (c, d) = x[i], y[j]
        lo, hi = (a if a > c else c), (b if b < d else d)
        if lo < hi:
            out.append((lo, hi))
        if b < d:
            i += 1
        else:
            j += 1
    return tuple(out)


def subtract(x: IntSet, y: IntSet) -> IntSet:
    """The elements of `x` that are not in `y`."""
    if not x or not y:
        return x
    low = min(x[0][0], y[0][0])
    high = max(x[-1][1], y[-1][1])
    edges = [low, *chain.from_iterable(y), high]
    gaps = tuple([(a, b) for a, b in zip(edges[::2], edges[1::2], strict=True) if a < b])
    return intersect(x, gaps)


def union(*sets: IntSet) -> IntSet:
    """The elements in any of the sets."""
    return normal(chain.from_iterable(sets))


def take(s: IntSet, positions: IntSet) -> IntSet:
    """The elements of `s` that stand at these positions of its ascending list. `rank` is its inverse."""
    if len(s) == 1:
        a, b = s[0]
        inside = not positions or positions[-1][1] <= b - a
        return shift(positions if inside else intersect(positions, ((0, b - a),)), a)
    places = accumulate((b - a for a, b in s), initial=0)
    return _moved([(p, p + b - a, a - p) for p, (a, b) in zip(places, s, strict=False)], positions)


def rank(s: IntSet, elements: IntSet) -> IntSet:
    """The positions, in the ascending list of `s`, of those `elements` that `s` has."""
    if len(s) == 1:
        inside = not elements or (s[0][0] <= elements[0][0] and elements[-1][1] <= s[0][1])
        return shift(elements if inside else intersect(elements, s), -s[0][0])
    places = accumulate((b - a for a, b in s), initial=0)
    return _moved([(a, b, p - a) for p, (a, b) in zip(places, s, strict=False)], elements)


def _moved(runs: Iterable[tuple[int, int, int]], wanted: IntSet) -> IntSet:
    """Of ascending runs (first, last + 1, by how much what is in them moves) what is wanted, moved."""
    out: list[tuple[int, int]] = []
    j = 0
    for a, b, by in runs:
        while j < len(wanted) and wanted[j][1] <= a:
            j += 1
        k = j
        while k < len(wanted) and wanted[k][0] < b:
            out.append((max(a, wanted[k][0]) + by, min(b, wanted[k][1]) + by))
            k += 1
    return normal(out)


def product(sets: Sequence[IntSet], sizes: Sequence[int]) -> IntSet:
    """Row-major positions of a product of sets, one per digit, over digits of these sizes.

    `product([rows, cols], [n_rows, n_cols])` is `{r * n_cols + c}`. Costs O(elements of the outer sets) only where an
    inner set is not whole.
    """
    if not sets:
        return ((0, 1),)
    s, n = sets[-1], sizes[-1]
    for outer, m in zip(reversed(sets[:-1]), reversed(sizes[:-1]), strict=True):
        if not s or not outer:
            return ()
        if len(s) == 1:
            ((a, b),) = s
            if b - a == n:
                s = tuple([(lo * n, hi * n) for lo, hi in outer])
            else:
                s = tuple([(i * n + a, i * n + b) for lo, hi in outer for i in range(lo, hi)])
        else:
            s = normal([(i * n + a, i * n + b) for lo, hi in outer for i in range(lo, hi) for a, b in s])
        n *= m
    return s


def digits(s: IntSet, n: int) -> list[tuple[IntSet, IntSet]]:
    """`s` over two digits (outer, inner of size `n`), as disjoint products: `[(outer set, inner set)]`.

    One product for every distinct inner set, so a regular set gives one or two whatever its length. The inverse is the
    union of `product([outer, inner], [_, n])` over the list.
    """
    if n == 1:
        return [(s, ((0, 1),))] if s else []
    if len(s) == 1 and not s[0][0] % n and not s[0][1] % n:  # whole rows, by far the most frequent
        return [(((s[0][0] // n, s[0][1] // n),), ((0, n),))]
    rows: dict[int, list[tuple[int, int]]] = {}
    whole: list[tuple[int, int]] = []
    for a, b in s:
        first, last = a // n, (b - 1) // n
        if first == last and b - a < n:
            rows.setdefault(first, []).append((a % n, a % n + b - a))
            continue
        if a % n:
            rows.setdefault(first, []).append((a % n, n))
            first += 1
        if b % n:
            rows.setdefault(last, []).append((0, b % n))
        if first < b // n:
            whole.append((first, b // n))
    groups: dict[IntSet, list[tuple[int, int]]] = {((0, n),): whole} if whole else {}
    for row, inner in rows.items():
        groups.setdefault(tuple(inner), []).append((row, row + 1))
    return [(normal(outer), inner) for inner, outer in groups.items()]


def elements(s: IntSet) -> list[int]:
    """The set as a list. O(elements): for short sets such as layers and experts."""
    return [i for a, b in s for i in range(a, b)]


def show(s: IntSet) -> str:
    """As the notation writes a set: `0:4,8:12`."""
    return ",".join(f"{a}:{b}" for a, b in s)


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
