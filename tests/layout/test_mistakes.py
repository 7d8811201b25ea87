"""Mistakes in what is passed: each is a sentence, and nothing that means nothing is let through."""

from collections.abc import Callable

import numpy as np
import pytest

from tangram.layout import Layout, LayoutError, NotationError, Region, coverage
from tests.counting import lines_run

ROWS, SQUARE = Region.full((4,)), Region.full((4, 2))


@pytest.mark.parametrize(
    ("mistake", "message"),
    [
        (lambda: Region.box([-2], [4]), r"offsets \[-2\] and sizes \[4\]: neither is negative"),
        (lambda: Region.box([0], [-4]), r"offsets \[0\] and sizes \[-4\]: neither is negative"),
        (lambda: Region.full((3, -1)), "neither is negative"),
        (lambda: Region.parse("[0:3 4:2]"), "4:2 ends before it begins"),
        (lambda: ROWS & SQUARE, "regions of 1 and 2 dims"),
        (lambda: ROWS - SQUARE, "regions of 1 and 2 dims"),
        (lambda: ROWS.runs((4, 2)), r"\[0:4\] is outside a tensor of shape \[4, 2\]"),
        (lambda: ROWS.runs((3,)), r"\[0:4\] is outside a tensor of shape \[3\]"),
        (lambda: Layout.parse("(g d)").bind((8,), g=2.0), "g=2.0: a size is a whole number"),  # type: ignore[arg-type]
        (lambda: Layout.parse("(g d)").bind((8,), g="2"), "g='2': a size is a whole number"),  # type: ignore[arg-type]
        (lambda: Layout.parse("s/a:[x]").bind((8,), x=(4.0, 4)), "x=4.0: a size is a whole number"),  # type: ignore[arg-type]
        (lambda: Layout.parse("a=" + "9" * 5000), "a number is too long"),
        (lambda: Layout.parse("(" * 5000 + "a" + ")" * 5000), "too many brackets inside each other"),
    ],
)
def test_a_sentence(mistake: Callable[[], object], message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        mistake()


def test_a_reversed_run_is_pointed_at() -> None:
    with pytest.raises(NotationError) as error:
        Region.parse("[0:3 4:2]")
    assert error.value.position == 5


def test_a_region_below_zero_is_outside() -> None:
    assert not Region.of([(((-1, 2),),)]).within((4,))
    assert Region.full((4,)).within((4,))


def test_numbers_of_numpy_are_sizes() -> None:
    assert Layout.parse("(g d)").bind((8,), g=np.int64(2)).shape == (8,)  # type: ignore[arg-type]


def test_thousands_of_boxes_cost_no_square() -> None:
    def prove(n: int) -> None:
        found = Region.of([(((2 * i, 2 * i + 1),), ((i % 7, i % 7 + 3),)) for i in range(n)])
        proof = coverage(Region.full((2 * n, 9)), [found])
        assert found.size == 3 * n
        assert proof.missing.size == 2 * n * 9 - 3 * n

    prove(40_000)
    assert lines_run(lambda: prove(4000)) < 6 * lines_run(lambda: prove(1000))  # a square would be 16 times


def test_a_square_is_seen() -> None:
    def compare_all(n: int) -> None:
        seen: list[int] = []
        for i in range(n):
            assert not any(i == j for j in seen)
            seen.append(i)

    assert lines_run(lambda: compare_all(400)) > 10 * lines_run(lambda: compare_all(100))
