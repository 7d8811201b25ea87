"""What hypothesis draws for the tests of the notation: sets, meshes, layouts, mappings and regions, as values."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import settings
from hypothesis import strategies as st

from tangram.layout import Cut, Dim, Layout, Mapping, Mesh, Region, Statement, TensorPattern
from tangram.layout.intervals import IntSet
from tangram.layout.syntax import Index, Wild


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


@st.composite
def regions(draw: st.DrawFn, shape: tuple[int, ...], max_boxes: int = 4) -> Region:
    """A union of boxes, which may overlap, inside a shape."""
    boxes = draw(st.lists(st.tuples(*[int_sets(n) for n in shape]), max_size=max_boxes))
    return Region.of([tuple(as_intervals(s) for s in box) for box in boxes])


# ---------------------------------------------------------------- meshes and layouts that can be carried out


@st.composite
def meshes(draw: st.DrawFn, max_axes: int = 3) -> Mesh:
    """One view, axes `x0`, `x1`, ... of 1 to 4 ranks."""
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=max_axes))
    return Mesh((tuple((f"x{i}", n) for i, n in enumerate(sizes)),))


@st.composite
def sized_dims(draw: st.DrawFn, free: list[str], mesh: Mesh, depth: int = 2) -> Dim:
    """A dim with sizes. Axes are taken out of `free`; the terms of a sum may share them."""
    if depth and draw(st.integers(0, 2)):
        terms: list[tuple[Dim, ...]] = []
        left = list(free)
        for _ in range(draw(st.integers(1, 3))):
            mine = list(free)
            terms.append(tuple(draw(sized_dims(mine, mesh, depth - 1)) for _ in range(draw(st.integers(1, 2)))))
            left = [a for a in left if a in mine]
        free[:] = left
        dim = Dim(terms=tuple(terms))
    else:
        dim = Dim("", draw(st.integers(0, 5)) or draw(st.integers(0, 1)))
    cuts: list[Cut] = []
    while free and draw(st.integers(0, 2)) == 0:
        axis = free.pop(draw(st.integers(0, len(free) - 1)))
        cuts.append(Cut(axis, *draw(st.sampled_from([(), (), (), ("zigzag",), ("cyclic", (2,)), ("strided", (2,))]))))
    return replace(dim, cuts=tuple(cuts))


@st.composite
def sized_layouts(draw: st.DrawFn, flat: bool = True) -> tuple[Mesh, Layout]:
    """A mesh and a layout which is legal on it, with sizes, small enough to list its elements."""
    mesh = draw(meshes())
    free = [axis for axis, _ in mesh.views[0]]
    dims = tuple(draw(sized_dims(free, mesh)) for _ in range(draw(st.integers(1, 2))))
    flats = (Cut(free.pop()),) if flat and free and draw(st.integers(0, 3)) == 0 else ()
    at: tuple[tuple[str, tuple[int, ...]], ...] = ()
    if free and draw(st.integers(0, 5)) == 0:
        axis = free.pop()
        at = ((axis, tuple(draw(st.sets(st.integers(0, mesh.axis(axis)[0] - 1), min_size=1)))),)
    return mesh, Layout(dims, flats, (), at)


# ---------------------------------------------------------------- text only

names = st.from_regex(r"[A-Za-z][A-Za-z0-9_]{0,5}", fullmatch=True)
numbers = st.integers(0, 99)
maps = st.one_of(
    st.just(("", ())),
    st.tuples(st.sampled_from(["zigzag", "cyclic", "strided"]), st.lists(numbers, max_size=3).map(tuple)),
    st.tuples(st.sampled_from(["zigzag", "sizes"]), names),
    st.tuples(st.just("sizes"), st.lists(numbers, min_size=1, max_size=4).map(tuple)),
)
cuts = st.builds(lambda axis, m: Cut(axis, *m), names, maps)
cut_lists = st.lists(cuts, max_size=2).map(tuple)


def factors(cut: st.SearchStrategy[tuple[Cut, ...]]) -> st.SearchStrategy[Dim]:
    """One factor as a text may write it: a name, a name with a size, a number, `_`."""
    return st.one_of(
        st.builds(Dim, names, st.none() | numbers, cuts=cut),
        st.builds(Dim, st.just(""), numbers, cuts=cut),
        st.builds(Dim, st.just("_"), st.none() | numbers, cuts=cut),
    )


def dims(cut: st.SearchStrategy[tuple[Cut, ...]]) -> st.SearchStrategy[Dim]:
    """Factors and brackets, three levels deep at most."""

    def bracket(inner: st.SearchStrategy[Dim]) -> st.SearchStrategy[Dim]:
        term = st.lists(inner, min_size=1, max_size=3).map(tuple)
        return st.builds(lambda terms, c: Dim(terms=tuple(terms), cuts=c), st.lists(term, min_size=1, max_size=3), cut)

    return st.recursive(factors(cut), bracket, max_leaves=6)


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    """Any layout that can be written, whether or not it makes sense on a mesh."""
    out = draw(st.lists(dims(cut_lists), max_size=3))
    if draw(st.integers(0, 4)) == 0:
        out.insert(draw(st.integers(0, len(out))), Dim("..."))
    pending = draw(st.lists(st.tuples(st.sampled_from(["sum", "avg", "max", "min"]), names), max_size=2))
    at = draw(st.lists(st.tuples(names, st.lists(numbers, min_size=1, max_size=3).map(tuple)), max_size=2))
    return Layout(tuple(out), tuple(draw(st.lists(cuts, max_size=2))), tuple(pending), tuple(at))


uncut = st.just(())
literals = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9_./-]{0,7}", fullmatch=True).filter(lambda s: not s.endswith("-"))
indices = st.builds(Index, dims(uncut), st.integers(0, 9))
wilds = st.builds(Wild, names)


@st.composite
def tensors(draw: st.DrawFn) -> TensorPattern:
    """A tensor or a family of them; two literals never stand side by side, as in any text."""
    parts: list[str | Index | Wild] = [draw(st.one_of(literals, indices, wilds))]
    for _ in range(draw(st.integers(0, 3))):
        nexts = st.one_of(indices, wilds) if isinstance(parts[-1], str) else st.one_of(literals, indices, wilds)
        parts.append(draw(nexts))
    own = draw(st.none() | st.lists(dims(uncut), max_size=3).map(tuple))
    return TensorPattern(tuple(parts), draw(st.none() | names), own)


options = st.one_of(
    st.tuples(names, st.none()),
    st.tuples(names, st.floats(allow_nan=False)),
    st.tuples(names, names),
    st.tuples(names, st.tuples(names, names).map(":".join)),
).filter(lambda o: not (isinstance(o[1], str) and o[1] in ("inf", "nan")))
sides = st.lists(st.lists(tensors(), min_size=1, max_size=2).map(tuple), max_size=2).map(tuple)
statements = st.builds(Statement, sides, sides, st.lists(options, max_size=2).map(tuple)).filter(
    lambda s: bool(s.source or s.target)
)
mappings = st.lists(statements, max_size=3).map(lambda s: Mapping(tuple(s)))
