"""The shuffle is a permutation for every size and key, and looks like one drawn at random."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tangram.training.data.mix import permuted


@given(st.integers(1, 3000), st.text(max_size=8))
def test_it_is_a_bijection(n: int, key: str) -> None:
    order = permuted(np.arange(n), n, key)
    assert np.array_equal(np.sort(order), np.arange(n))


@given(st.integers(1, 2**62), st.integers(0, 2**62))
def test_a_place_is_found_alone_in_any_size(n: int, place: int) -> None:
    places = np.array([place % n, 0, n - 1])
    together = permuted(places, n, "key")
    assert np.all((together >= 0) & (together < n))
    assert [int(permuted([each], n, "key")[0]) for each in places] == together.tolist()


def test_keys_choose_other_orders() -> None:
    orders = {tuple(permuted(np.arange(8), 8, str(key)).tolist()) for key in range(2000)}
    assert len(orders) > 1800  # 2000 draws of the 20160 even permutations give some 1900


@pytest.mark.parametrize("n", [10, 257])
def test_it_spreads_like_a_drawn_one(n: int) -> None:
    orders = np.stack([permuted(np.arange(n), n, str(key)) for key in range(2000)])
    assert abs(np.mean(orders == np.arange(n)) * n - 1) < 0.1  # one fixed point on average
    assert abs(np.mean(np.diff(orders) == 1) * n - 1) < 0.2  # one pair of neighbours that stayed neighbours
    for place in (0, n // 2, n - 1):  # each element as often as any other: within six standard deviations
        tenths = np.bincount(orders[:, place] * 10 // n, minlength=10)
        assert np.all(np.abs(tenths - 200) < 6 * np.sqrt(180))
    correlation = np.corrcoef(orders[:, 0], orders[:, 1])[0, 1]
    assert abs(correlation) < 0.15 + 1 / n


@pytest.mark.parametrize(("place", "n"), [(5, 5), (-1, 5), (0, 0)])
def test_a_place_outside_is_a_fault(place: int, n: int) -> None:
    with pytest.raises(ValueError, match="places of a permutation"):
        permuted([place], n, "key")
