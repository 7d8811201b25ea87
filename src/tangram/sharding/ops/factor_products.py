"""Cuts of a product of factors as cuts of the factors, and the other way round, where both hold the same elements.

`n/x` with n = a * b is `(a/x b)` when the chunks of n end where rows of b end: 6/2 of (2 3) does, of (3 2) does not.
All maps scale in the same way. What does not pass is refused, never rounded.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from tangram.layout import Mesh
from tangram.layout.syntax import VOID, Cut, Dim


def flat(dim: Dim, mesh: Mesh) -> tuple[Cut, ...] | None:
    """The cuts inside a bracket as cuts of the whole dim, where they hold the same elements; else None."""
    terms = dim.terms
    if not terms or not dim.inner_axes:
        return dim.cuts
    factors, *others = terms
    if others:
        return None
    found: list[Cut] = []
    before = 1  # how much a rank holds of the factors so far; None: it is not the same on all ranks
    for i, x in enumerate(factors):
        if x.axes:
            inside = flat(x, mesh)
            local, rest = x.n, math.prod(y.n for y in factors[i + 1 :])
            if inside is None or before != 1:
                return None
            for at, cut in enumerate(inside):
                made = scaled(cut, local, mesh.axes[cut.axis][0], rest, up=True)
                if made is None or (made[1] is None and at + 1 < len(inside)):
                    return None
                found.append(made[0])
                local = made[1] or 0  # 0: unequal, so that nothing behind it can be cut
            before = local
        else:
            before *= x.n
    return (*found, *dim.cuts)


def scaled(cut: Cut, n: int, k: int, rest: int, *, up: bool) -> tuple[Cut, int | None] | None:
    """A cut of a factor of `n` elements as one of `n * rest` (`up`), or back; None where rows of `rest` are torn.

    Also how much each of the `k` parts has of the factor; None where that differs.
    """
    args: Sequence[int] = () if isinstance(cut.args, str) else cut.args
    if not rest:
        return None
    times = _times(cut.map, args, k)
    if cut.map in ("", "zigzag"):
        torn = any(-(-m * rest // times) % rest for m in _own(args, rest, up) or (n,))
    else:
        torn = cut.map == "strided" and rest > 1 and n % times != 0
    if torn:
        return None
    if cut.map not in ("", "strided") and args:
        own = _own(args, rest, up)
        if any(m * rest != given for m, given in zip(own, args, strict=True)) and not up:
            return None
        made = replace(cut, args=tuple([a * rest for a in args]) if up else own)
        equal = cut.map == "sizes" and len(set(own)) == 1
        even = equal or (cut.map == "cyclic" and n % (own[0] * k) == 0)
    elif cut.map == "cyclic":  # blocks of one element
        if not up and rest > 1:
            return None
        made, even = (replace(cut, args=(rest,)) if rest > 1 else cut), n % k == 0
    else:
        made, even = cut, n % times == 0
    return made, n // k if even else None


def _times(name: str, args: Sequence[int], k: int) -> int:
    """How many chunks a map makes."""
    return 2 * k if name == "zigzag" else k * args[0] if name == "strided" else k


def _own(args: Sequence[int], rest: int, up: bool) -> tuple[int, ...]:
    return tuple(args) if up else tuple([a // rest for a in args])


def split(cuts: Sequence[Cut], sizes: Sequence[int], mesh: Mesh) -> tuple[list[tuple[Cut, ...]], list[str]]:
    """The cuts of a product as cuts of its factors; the axes that do not pass."""
    found: list[list[Cut]] = [[] for _ in sizes]
    at, local = 0, sizes[0]
    for i, cut in enumerate(cuts):
        while local == 1 and at + 1 < len(sizes):
            at += 1
            local = sizes[at]
        made = scaled(cut, local, mesh.axes[cut.axis][0], math.prod(sizes[at + 1 :]), up=False)
        if made is None or not local:
            return [tuple(x) for x in found], [c.axis for c in cuts[i:]]
        found[at].append(made[0])
        local = made[1] or 0
    return [tuple(x) for x in found], []


def split_bracket(dim: Dim, sizes: Sequence[int], mesh: Mesh) -> tuple[list[Dim], list[str]] | None:
    """The same of a bracket with cuts inside; None where its factors are not these."""
    if len(dim.terms) != 1:
        return None
    dealt = _dealt(list(dim.terms[0]), sizes, mesh)
    if dealt is None:
        return None
    locals_ = [local(x, mesh) for x in dealt]
    for i, cut in enumerate(dim.cuts):
        at = next((j for j, n in enumerate(locals_) if n != 1), len(sizes) - 1)
        n, after = locals_[at], [m or 0 for m in locals_[at + 1 :]]
        made = None if not n or 0 in after else scaled(cut, n, mesh.axes[cut.axis][0], math.prod(after), up=False)
        if made is None:
            return dealt, [c.axis for c in dim.cuts[i:]]
        dealt[at] = replace(dealt[at], cuts=(*dealt[at].cuts, made[0]))
        locals_[at] = made[1]
    return dealt, []


def _dealt(factors: list[Dim], sizes: Sequence[int], mesh: Mesh) -> list[Dim] | None:
    """The factors of a bracket dealt out to products of these sizes."""
    found: list[Dim] = []
    for size in sizes:
        taken: list[Dim] = []
        n = 1
        while n < size and factors:
            x = factors.pop(0)
            if size % (n * x.n) == 0:
                taken.append(x)
                n *= x.n
                continue
            if x.terms and not x.cuts and len(x.terms) == 1:
                factors[:0] = x.terms[0]
                continue
            part = size // n
            if x.terms or size % n or x.n % part:
                return None
            (first, second), torn = split(x.cuts, (part, x.n // part), mesh)
            if torn:
                return None
            taken.append(Dim(VOID, part, cuts=first))
            factors.insert(0, Dim(VOID, x.n // part, cuts=second))
            n = size
        if n != size:
            return None
        found.append(taken[0] if len(taken) == 1 else Dim(terms=(tuple(taken),)) if taken else Dim(VOID, 1))
    return found if all(x.n == 1 and not x.axes for x in factors) else None


def local(dim: Dim, mesh: Mesh) -> int | None:
    """How many elements of a dim each rank holds; None where that differs."""
    n = 0 if dim.terms else dim.n
    for term in dim.terms:
        each = [local(x, mesh) for x in term]
        if None in each:
            return None
        n += math.prod(m or 0 for m in each)
    for cut in dim.cuts:
        made = scaled(cut, n, mesh.axes[cut.axis][0], 1, up=True)
        if made is None or made[1] is None:
            return None
        n = made[1]
    return n
