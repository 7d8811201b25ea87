"""The ratio of pairs: right where all are alike, and unsure where they differ."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tangram.hardware.measuring.measure import paired

SECONDS = st.floats(1e-6, 1e3)


@given(st.lists(st.tuples(SECONDS, SECONDS), min_size=1, max_size=30))
def test_the_median_lies_within_its_interval(times: list[tuple[float, float]]) -> None:
    found = paired(times, draws=50)
    ratios = sorted(a / b for a, b in times)
    assert ratios[0] <= found.low <= found.high <= ratios[-1]
    assert ratios[0] <= found.ratio <= ratios[-1]


def test_a_machine_that_slows_down_for_both_changes_nothing() -> None:
    found = paired([(2.0 * slow, 1.0 * slow) for slow in (1.0, 5.0, 1.0, 9.0, 2.0)])
    assert (found.ratio, found.low, found.high) == (2.0, 2.0, 2.0)
    assert (found.ours, found.peer) == (4.0, 2.0)


def test_pairs_that_differ_leave_room() -> None:
    found = paired([(1.0, 1.0), (1.5, 1.0), (2.0, 1.0)] * 5)
    assert found.low < found.high
    assert "95 of 100 within" in found.row("a step", 1.02).figure


def test_no_pair_is_an_error() -> None:
    with pytest.raises(ValueError, match="there is no pair"):
        paired([])
