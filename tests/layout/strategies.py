"""What hypothesis draws for the tests of the notation: sets, meshes, layouts, mappings and regions, as values.

Sets are drawn element by element, so that a failure shrinks well. The larger values are made from a seed and a size
(only these shrink): a layout or a mapping is hundreds of choices, and thousands of them should cost seconds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import TypeVar

from hypothesis import settings
from hypothesis import strategies as st

from tangram.layout import Cut, Dim, Layout, Mapping, Mesh, Region, Statement, TensorPattern
from tangram.layout.intervals import IntSet
from tangram.layout.syntax import Index, Wild

T = TypeVar("T")


def examples(n: int) -> settings:
    """`n` examples in the quick profile, and as many times more as the chosen profile searches harder than it."""
    return settings(max_examples=max(1, n * settings.default.max_examples // 50))


def as_intervals(elements: set[int] | frozenset[int] | range | list[int]) -> IntSet:
    """The normal form of a set of integers, found one element at a time."""
    out: list[tuple[int, int]] = []
    for i in sorted(elements):
        if out and out[-1][1] == i:
            out[-1] = (out[-1][0], i + 1)
        else:
            out.append((i, i + 1))
    return tuple(out)


def as_list(s: IntSet) -> list[int]:
    """The elements of a set, checked to stand in normal form."""
    flat = [e for run in s for e in run]
    assert flat == sorted(set(flat)), f"{s} is not ascending, disjoint and non-touching"
    assert all(isinstance(run, tuple) for run in s)
    return [i for a, b in s for i in range(a, b)]


def int_sets(below: int, min_size: int = 0) -> st.SearchStrategy[frozenset[int]]:
    """Python sets of integers below a bound, ragged and regular."""
    if below == 0:
        return st.just(frozenset())
    ragged = st.frozensets(st.integers(0, below - 1), min_size=min_size)
    runs = st.tuples(st.integers(0, below - 1), st.integers(1, below)).map(
        lambda ab: frozenset(range(ab[0], min(ab[0] + ab[1], below)))
    )
    combs = st.tuples(st.integers(0, below - 1), st.integers(2, 5)).map(
        lambda ab: frozenset(range(ab[0], below, ab[1]))
    )
    return st.one_of(ragged, runs, combs, st.just(frozenset(range(below))))


def drawn(make: Callable[[Random, int], T]) -> st.SearchStrategy[T]:
    """What `make` makes of a random source and a size of 1 to 3."""
    return st.builds(lambda size, seed: make(Random(seed), size), st.integers(1, 3), st.integers(0, 2**32 - 1))


def some(rng: Random, make: Callable[[], T], most: int, least: int = 0) -> tuple[T, ...]:
    """`least` to `most` of what `make` makes."""
    return tuple(make() for _ in range(rng.randint(least, most)))


def random_set(rng: Random, below: int) -> IntSet:
    """Some integers below a bound: ragged, a run, a comb, all, none."""
    a, b = rng.randint(0, below), rng.randint(0, below)
    ragged = [i for i in range(below) if rng.random() < 0.5]
    return as_intervals(rng.choice([ragged, range(min(a, b), max(a, b)), range(a, below, b or 1), range(below)]))


def random_region(rng: Random, shape: tuple[int, ...], boxes: int) -> Region:
    """A union of boxes, which may overlap, inside a shape."""
    made = some(rng, lambda: tuple(random_set(rng, n) for n in shape), boxes)
    return Region.of(made)


def regions(shape: tuple[int, ...]) -> st.SearchStrategy[Region]:
    """Regions of tensors of one shape."""
    return drawn(lambda rng, size: random_region(rng, shape, size + 1))


# ---------------------------------------------------------------- meshes and layouts that can be carried out

MAPS = [("", ())] * 4 + [("zigzag", ()), ("cyclic", ()), ("cyclic", (2,)), ("strided", (2,)), ("strided", (3,))]


def random_mesh(rng: Random, axes: int) -> Mesh:
    """One view, axes `x0`, `x1`, ... of 1 to 4 ranks."""
    return Mesh((tuple((f"x{i}", rng.choice([1, 2, 2, 3, 3, 4])) for i in range(axes)),))


def random_sized_dim(rng: Random, free: list[str], depth: int) -> Dim:
    """A dim with sizes. Axes are taken out of `free`; the terms of a sum may share them."""
    if depth and rng.randrange(3):
        terms: list[tuple[Dim, ...]] = []
        left = set(free)
        for _ in range(rng.choice([1, 2, 2, 3])):
            mine = list(free)
            terms.append(some(rng, lambda mine=mine: random_sized_dim(rng, mine, depth - 1), 2, 1))
            left &= set(mine)
        free[:] = sorted(left)
        dim = Dim(terms=tuple(terms))
    else:
        dim = Dim("", rng.choice([0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 7]))
    cuts: list[Cut] = []
    while free and rng.randrange(5) < 2:
        cuts.append(Cut(free.pop(rng.randrange(len(free))), *rng.choice(MAPS)))
    return replace(dim, cuts=tuple(cuts))


def random_sized_layout(rng: Random, size: int) -> tuple[Mesh, Layout]:
    """A mesh and a layout which is legal on it, with sizes, small enough to list its elements."""
    mesh = random_mesh(rng, rng.randint(1, 3))
    free = [axis for axis, _ in mesh.views[0]]
    dims = some(rng, lambda: random_sized_dim(rng, free, size - 1), 3 if size == 1 else 2)
    rng.shuffle(free)
    flat = (Cut(free.pop(), *rng.choice(MAPS)),) if free and rng.randrange(3) == 0 else ()
    pending = (("sum", free.pop()),) if free and rng.randrange(6) == 0 else ()
    at: tuple[tuple[str, tuple[int, ...]], ...] = ()
    if free and rng.randrange(4) == 0:
        axis = free.pop()
        n = mesh.axis(axis)[0]
        at = ((axis, tuple(rng.sample(range(n), rng.randint(1, n)))),)
    return mesh, Layout(dims, flat, pending, at)


sized_layouts = drawn(random_sized_layout)
meshes = drawn(random_mesh)

# ---------------------------------------------------------------- text only

WORDS = ["h", "d", "heads", "x1", "A_b", "sum", "avg", "max", "as", "inf", "nan", "infx", "zigzag", "sizes", "e5", "tp"]
LITERALS = ["w", "0.weight", "a.b_c", "3x", "x/y-z", "as", "sum.max", "_.q", "layers.", "._", "7.", "-x", "m.1e5", "h"]
NUMBERS = [0.0, 1 / 3, -1.5, 1e300, 5e-324, float("inf"), -float("inf"), 3.0, 0.1]


def random_cut(rng: Random) -> Cut:
    """A cut as a text may write it, by any map."""
    name = rng.choice(["", "", "zigzag", "cyclic", "strided", "sizes"])
    args: tuple[int, ...] | str = some(rng, lambda: rng.randrange(99), 3, int(name == "sizes")) if name else ()
    if name and rng.randrange(3) == 0:
        args = rng.choice(WORDS)
    return Cut(rng.choice(WORDS), name, args)


def random_dim(rng: Random, depth: int, cut: bool) -> Dim:
    """Factors and brackets, with or without cuts."""
    cuts = some(rng, lambda: random_cut(rng), 2) if cut else ()
    if depth and rng.randrange(3) == 0:
        terms = some(rng, lambda: some(rng, lambda: random_dim(rng, depth - 1, cut), 3, 1), 3, 1)
        return Dim(terms=terms, cuts=cuts)
    name = rng.choice([*WORDS, "_", "_", "", "", ""])
    return Dim(name, rng.randrange(99) if not name or rng.randrange(4) == 0 else None, cuts=cuts)


def random_layout(rng: Random, size: int) -> Layout:
    """Any layout that can be written, whether or not it makes sense on a mesh."""
    dims = list(some(rng, lambda: random_dim(rng, size, cut=True), 3))
    if rng.randrange(5) == 0:
        dims.insert(rng.randint(0, len(dims)), Dim("..."))
    return Layout(
        tuple(dims),
        some(rng, lambda: random_cut(rng), 2),
        some(rng, lambda: (rng.choice(["sum", "avg", "max", "min"]), rng.choice(WORDS)), 2),
        some(rng, lambda: (rng.choice(WORDS), some(rng, lambda: rng.randrange(99), 3, 1)), 2),
    )


def random_tensor(rng: Random, size: int) -> TensorPattern:
    """A tensor or a family of them; two literals never stand side by side, as in any text."""
    parts: list[str | Index | Wild] = []
    for _ in range(rng.randint(1, 4)):
        kind = rng.randrange(3)
        if kind == 0 and not (parts and isinstance(parts[-1], str)):
            parts.append(rng.choice(LITERALS))
        elif kind == 1:
            parts.append(Wild(rng.choice(WORDS)))
        else:
            parts.append(Index(random_dim(rng, size - 1, cut=False), rng.choice([0, 0, 3])))
    dims = some(rng, lambda: random_dim(rng, size, cut=False), 3) if rng.randrange(3) else None
    return TensorPattern(tuple(parts), rng.choice([None, *WORDS]) if rng.randrange(2) else None, dims)


def random_statement(rng: Random, size: int) -> Statement:
    """One statement, with a tensor on one side at least."""

    def side(least: int) -> tuple[tuple[TensorPattern, ...], ...]:
        return some(rng, lambda: some(rng, lambda: random_tensor(rng, size), 2, 1), 2, least)

    def value() -> float | str | None:
        word = rng.choice([w for w in WORDS if w not in ("inf", "nan")])
        return rng.choice([None, rng.choice(NUMBERS), word, f"{word}:{rng.choice(WORDS)}"])

    least = rng.randrange(2)
    return Statement(side(least), side(1 - least), some(rng, lambda: (rng.choice(WORDS), value()), 2))


layouts = drawn(random_layout)
mappings = drawn(lambda rng, size: Mapping(some(rng, lambda: random_statement(rng, size), size)))
