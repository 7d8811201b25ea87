"""Stretches of a flattened product as boxes, in the order of their positions."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from tangram.layout import intervals
from tangram.layout.region import stretch


@given(st.lists(st.integers(1, 4), max_size=4), st.data())
def test_boxes_come_one_behind_the_other(shape: list[int], data: st.DataObject) -> None:
    sets = tuple(
        intervals.normal((i, i + 1) for i in data.draw(st.sets(st.integers(0, 9), min_size=n, max_size=n)))
        for n in shape
    )
    every = list(itertools.product(*(intervals.elements(s) for s in sets)))
    start = data.draw(st.integers(0, len(every)))
    stop = data.draw(st.integers(start, len(every)))
    found = [
        element
        for box in stretch(sets, start, stop)
        for element in itertools.product(*(intervals.elements(s) for s in box))
    ]
    assert found == every[start:stop]
