"""Regions against boolean masks of the whole tensor."""

import itertools
import math
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tangram.layout import Box, LayoutError, Region, coverage
from tangram.layout.intervals import IntSet
from tangram.layout.region import box_intersect, box_size, box_subtract
from tests.layout.oracle import flat_elements
from tests.layout.strategies import as_intervals, as_list, drawn, examples, random_region, random_set

SHAPES = [(), (0,), (1,), (7,), (4, 5), (3, 0), (3, 4, 2), (2, 2, 2, 3)]
Shape = tuple[int, ...]


def mask(region: Region, shape: Shape) -> np.ndarray:
    """True where the region is."""
    out = np.zeros(math.prod(shape), bool)
    out[flat_elements(region, shape)] = True
    return out.reshape(shape)


def of_mask(where: np.ndarray) -> Region:
    """The region of a mask, one box per element."""
    points = [tuple(int(i) for i in p) for p in np.argwhere(where)]
    return Region.of([tuple((((i, i + 1),)) for i in p) for p in points])


def some_regions(count: int) -> st.SearchStrategy[tuple[Shape, list[Region]]]:
    """A shape and that many regions inside it."""

    def make(rng: Random, size: int) -> tuple[Shape, list[Region]]:
        shape = rng.choice(SHAPES)
        return shape, [random_region(rng, shape, size + 1) for _ in range(count)]

    return drawn(make)


@examples(600)
@given(some_regions(2))
def test_algebra(case: tuple[Shape, list[Region]]) -> None:
    shape, (x, y) = case
    a, b = mask(x, shape), mask(y, shape)
    for found, want in ((x & y, a & b), (x - y, a & ~b), (x | y, a | b)):
        np.testing.assert_array_equal(mask(found, shape), want)
        assert bool(found) == bool(want.any())
        assert found.size == int(want.sum())


@examples(400)
@given(some_regions(2))
def test_equal_elements_are_equal_regions(case: tuple[Shape, list[Region]]) -> None:
    """However a region was made: its form is canonical, so that it may be compared, hashed and kept as a key."""
    shape, (x, y) = case
    ways = [x | y, y | x, (x - y) | (y - x) | (x & y), of_mask(mask(x, shape) | mask(y, shape)), (x | y) - Region()]
    assert len({hash(w) for w in ways}) == 1
    assert all(w == ways[0] for w in ways)
    assert Region.parse(str(ways[0])) == ways[0]
    assert (x == y) == bool((mask(x, shape) == mask(y, shape)).all())
    for box in ways[0].boxes:
        assert all(as_list(s) for s in box), "no box is empty, every set in normal form"


@examples(300)
@given(some_regions(1))
def test_measures(case: tuple[Shape, list[Region]]) -> None:
    shape, (x,) = case
    where = mask(x, shape)
    assert x.nbytes(4) == 4 * int(where.sum())
    assert as_list(x.runs(shape)) == np.flatnonzero(where).tolist()
    assert x.within(shape)
    points = np.argwhere(where)
    if not len(points):
        with pytest.raises(LayoutError, match="the empty region has no hull"):
            _ = x.hull
        assert (x.local_shape, str(x)) == (None, "nothing")
        return
    assert x.hull == tuple((int(c.min()), int(c.max()) + 1) for c in points.T)
    if shape:
        assert not x.within([stop - 1 for _, stop in x.hull])
    assert not x.within((*shape, 1))
    sides = [len(set(c.tolist())) for c in points.T]
    assert x.local_shape == (tuple(sides) if math.prod(sides) == len(points) else None)


@examples(300)
@given(st.sampled_from(SHAPES), st.integers(-3, 30), st.integers(-3, 30))
def test_flat_ranges(shape: Shape, start: int, stop: int) -> None:
    n = math.prod(shape)
    want = list(range(max(start, 0), min(stop, n)))
    found = Region.flat(shape, start, stop)
    assert flat_elements(found, shape) == want
    assert len(found.boxes) <= max(1, 2 * len(shape) - 1)


@examples(300)
@given(some_regions(2))
def test_boxes_are_subtracted_into_disjoint_boxes(case: tuple[Shape, list[Region]]) -> None:
    """One box less another: at most one box per dim, and none has an element of another."""
    shape, (x, y) = case
    for a, b in itertools.product(x.boxes[:1], y.boxes[:1]):
        want = sorted(set(flat_elements(Region.of([a]), shape)) - set(flat_elements(Region.of([b]), shape)))
        left = box_subtract(a, b)
        assert sorted(i for box in left for i in flat_elements(Region.of([box]), shape)) == want
        assert len(left) <= max(1, len(shape))
        assert sum(box_size(box) for box in left) == len(want)
        common = box_intersect(a, b)
        assert (common is None) == (len(want) == box_size(a))


def test_scalars_and_the_empty_region() -> None:
    scalar, nothing = Region.full(()), Region()
    assert (str(scalar), str(nothing)) == ("[]", "nothing")
    assert scalar
    assert not nothing
    assert (scalar.size, scalar.nbytes(8), scalar.local_shape, scalar.hull) == (1, 8, (), ())
    assert scalar.runs(()) == ((0, 1),)
    assert (scalar & scalar, scalar - scalar, scalar | scalar) == (scalar, nothing, scalar)
    assert (scalar - nothing, nothing - scalar, scalar & nothing) == (scalar, nothing, nothing)
    assert Region.parse("[]") == scalar
    assert Region.parse(" nothing ") == nothing
    assert Region.flat((), 0, 1) == scalar
    assert Region.full((3, 0)) == nothing
    assert nothing.within((3,))


def test_box_and_full() -> None:
    assert str(Region.box([2, 0], [3, 4])) == "[2:5 0:4]"
    assert Region.box([2, 0], [0, 4]) == Region()
    assert Region.full((2, 3)) == Region.box([0, 0], [2, 3])
    with pytest.raises(LayoutError, match="2 offsets but 1 sizes"):
        Region.box([0, 0], [1])
    with pytest.raises(LayoutError, match="different numbers of dims"):
        Region.parse("[0:1] + [0:1 0:1]")
    with pytest.raises(LayoutError, match="different numbers of dims"):
        _ = Region.full((2,)) | Region.full((2, 2))


# ---------------------------------------------------------------- coverage


@examples(600)
@given(some_regions(4))
def test_coverage_counts_every_element(case: tuple[Shape, list[Region]]) -> None:
    shape, (whole, *parts) = case
    count = sum((mask(p, shape).astype(int) for p in parts), np.zeros(shape, int))
    wanted = mask(whole, shape)
    found = coverage(whole, parts)
    np.testing.assert_array_equal(mask(found.missing, shape), wanted & (count == 0))
    np.testing.assert_array_equal(mask(found.doubled, shape), count > 1)
    np.testing.assert_array_equal(mask(found.outside, shape), ~wanted & (count > 0))
    assert found.exact == bool((count == wanted).all())


def random_grid(rng: Random, size: int) -> tuple[Shape, list[Region]]:
    """A tensor cut into a grid of ragged sets, in any order."""
    shape = tuple(rng.randint(1, 6) for _ in range(size))
    cuts: list[list[IntSet]] = []
    for n in shape:
        first = random_set(rng, n)
        rest = as_intervals(set(range(n)) - {i for a, b in first for i in range(a, b)})
        cuts.append([s for s in (first, rest) if s])
    parts = [Region.of([box]) for box in itertools.product(*cuts)]
    rng.shuffle(parts)
    return shape, parts


@examples(200)
@given(drawn(random_grid))
def test_a_partition_is_exact_and_one_part_too_few_or_too_many_is_not(case: tuple[Shape, list[Region]]) -> None:
    shape, parts = case
    whole = Region.full(shape)
    assert coverage(whole, parts).exact
    last = parts[-1]
    assert coverage(whole, parts[:-1]).missing == last
    assert coverage(whole, [*parts, last]).doubled == last
    assert coverage(whole - last, parts).outside == last
    for broken in (coverage(whole, parts[:-1]), coverage(whole, [*parts, last]), coverage(whole - last, parts)):
        assert not broken.exact


def test_coverage_of_scalars_and_of_nothing() -> None:
    scalar, nothing = Region.full(()), Region()
    assert coverage(nothing, []).exact
    assert coverage(nothing, [nothing]).exact
    assert coverage(scalar, [scalar]).exact
    assert coverage(scalar, []).missing == scalar
    assert coverage(scalar, [scalar, scalar]).doubled == scalar
    assert coverage(nothing, [scalar]).outside == scalar
    with pytest.raises(LayoutError, match="different numbers of dims"):
        coverage(scalar, [Region.full((1,))])


def test_coverage_of_a_large_grid_costs_its_parts() -> None:
    """65,536 parts: were each compared with each, this would take hours."""
    n = 256
    parts = [Region.box([i, j], [1, 1]) for i in range(n) for j in range(n)]
    assert coverage(Region.full((n, n)), parts).exact
    assert str(coverage(Region.full((n, n)), parts[:-1]).missing) == "[255:256 255:256]"


def test_a_box_is_a_product_of_sets() -> None:
    box: Box = (((0, 2), (5, 6)), ((1, 3),))
    region = Region.of([box])
    assert str(region) == "[0:2,5:6 1:3]"
    assert region.local_shape == (3, 2)
    assert region.runs((6, 4)) == ((1, 3), (5, 7), (21, 23))
