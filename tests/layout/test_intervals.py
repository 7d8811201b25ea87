"""Interval sets against python's own sets, and every result in normal form."""

from hypothesis import given
from hypothesis import strategies as st

from tangram.layout import intervals
from tests.layout.strategies import as_intervals, as_list, examples, int_sets

BELOW = 24
sets = int_sets(BELOW)


@examples(300)
@given(st.lists(st.tuples(st.integers(0, BELOW), st.integers(0, BELOW))))
def test_normal_is_the_union_of_any_pairs(pairs: list[tuple[int, int]]) -> None:
    want = {i for a, b in pairs for i in range(a, b)}
    assert as_list(intervals.normal(pairs)) == sorted(want)
    assert intervals.normal(pairs) == as_intervals(want)


@given(st.integers(0, 9), st.integers(0, 9))
def test_span(a: int, b: int) -> None:
    assert as_list(intervals.span(a, b)) == list(range(a, b))


@examples(300)
@given(sets, st.integers(0, 9))
def test_size_shift_elements_show(s: frozenset[int], k: int) -> None:
    x = as_intervals(s)
    assert intervals.size(x) == len(s)
    assert intervals.elements(x) == sorted(s)
    assert as_list(intervals.shift(x, k)) == [i + k for i in sorted(s)]
    assert intervals.shift(intervals.shift(x, k), -k) == x
    runs = [tuple(map(int, run.split(":"))) for run in intervals.show(x).split(",") if run]
    assert sorted(i for a, b in runs for i in range(a, b)) == sorted(s)


@examples(500)
@given(sets, sets)
def test_intersect_and_subtract(x: frozenset[int], y: frozenset[int]) -> None:
    a, b = as_intervals(x), as_intervals(y)
    assert as_list(intervals.intersect(a, b)) == sorted(x & y)
    assert as_list(intervals.subtract(a, b)) == sorted(x - y)


@examples(300)
@given(st.lists(sets, max_size=4))
def test_union(xs: list[frozenset[int]]) -> None:
    assert as_list(intervals.union(*map(as_intervals, xs))) == sorted(frozenset().union(*xs))


@examples(500)
@given(sets, sets)
def test_take_picks_positions_of_the_sorted_list(s: frozenset[int], positions: frozenset[int]) -> None:
    listed = sorted(s)
    want = [listed[p] for p in sorted(positions) if p < len(listed)]
    assert as_list(intervals.take(as_intervals(s), as_intervals(positions))) == want


@examples(500)
@given(sets, sets)
def test_rank_finds_positions_and_take_undoes_it(s: frozenset[int], wanted: frozenset[int]) -> None:
    listed = sorted(s)
    x, y = as_intervals(s), as_intervals(wanted)
    found = intervals.rank(x, y)
    assert as_list(found) == [listed.index(i) for i in sorted(s & wanted)]
    assert as_list(intervals.take(x, found)) == sorted(s & wanted)


@examples(400)
@given(st.data(), st.lists(st.integers(0, 6), max_size=3))
def test_product_is_row_major(data: st.DataObject, sizes: list[int]) -> None:
    sets = [data.draw(int_sets(n)) for n in sizes]
    want = {0}
    for s, n in zip(sets, sizes, strict=True):
        want = {i * n + j for i in want for j in s}
    assert as_list(intervals.product([as_intervals(s) for s in sets], sizes)) == sorted(want)


@examples(600)
@given(int_sets(60), st.integers(1, 12))
def test_digits_are_disjoint_products(s: frozenset[int], n: int) -> None:
    found = intervals.digits(as_intervals(s), n)
    points = [i * n + j for outer, inner in found for i in as_list(outer) for j in as_list(inner)]
    assert sorted(points) == sorted(s)
    assert all(j < n for _, inner in found for j in as_list(inner))
    inners = [inner for _, inner in found]
    assert len(set(inners)) == len(inners), "one product for every distinct inner set"


@given(st.integers(1, 50), st.integers(1, 9))
def test_digits_of_a_regular_set_are_one_product(rows: int, n: int) -> None:
    """A column of a matrix costs one product, whatever the number of rows."""
    column = as_intervals({i * n for i in range(rows)})
    assert intervals.digits(column, n) == [(((0, rows),), ((0, 1),))]


def test_long_sets_cost_their_intervals_and_not_their_elements() -> None:
    far = 10**15
    x, y = ((0, far),), ((far // 2, 2 * far),)
    assert intervals.intersect(x, y) == ((far // 2, far),)
    assert intervals.subtract(x, y) == ((0, far // 2),)
    assert intervals.union(x, y) == ((0, 2 * far),)
    assert intervals.take(y, ((1, 2),)) == ((far // 2 + 1, far // 2 + 2),)
    assert intervals.rank(y, x) == ((0, far - far // 2),)
    assert intervals.product([x, ((0, far),)], [far, far]) == ((0, far * far),)
    assert intervals.digits(((far // 2, far),), far) == [(((0, 1),), ((far // 2, far),))]
