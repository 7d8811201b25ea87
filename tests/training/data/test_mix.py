"""After any number of samples each source has had its share, to within one sample."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tangram.errors import UserError
from tangram.training.data.mix import MOST_SLOTS, make_mix


@given(st.lists(st.integers(1, 40), min_size=1, max_size=12))
def test_every_prefix_has_the_shares_to_within_one_sample(weights: list[int]) -> None:
    mix = make_mix(tuple(map(float, weights)))
    length = len(mix.source_W)
    assert sum(weights) % length == 0
    sources, _ = mix.places(np.arange(2 * length))
    given_so_far = np.cumsum(sources[:, None] == np.arange(len(weights)), axis=0)
    exact = np.arange(1, 2 * length + 1)[:, None] * np.array(weights) / sum(weights)
    assert np.abs(given_so_far - exact).max() < 1
    assert np.allclose(given_so_far[length - 1], exact[length - 1])


@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.integers(0, 10**12))
def test_a_source_numbers_its_samples_without_gaps(weights: list[int], first: int) -> None:
    mix = make_mix(tuple(map(float, weights)))
    sources, numbers = mix.places(np.arange(first, first + 300))
    for source in range(len(weights)):
        own = numbers[sources == source]
        assert np.array_equal(own, np.arange(own[0], own[0] + len(own))) if len(own) else weights[source] == 1
        assert not first or not len(own) or abs(own[0] - first * weights[source] / sum(weights)) <= 1 + 1e-3


def test_shares_that_no_cycle_has_exactly_are_rounded() -> None:
    weights = (1.0, np.pi, np.e)
    mix = make_mix(weights)
    assert len(mix.source_W) == MOST_SLOTS
    assert np.abs(mix.slots_N / MOST_SLOTS - np.array(weights) / sum(weights)).max() < 1 / MOST_SLOTS


def test_decimal_weights_are_exact() -> None:
    assert make_mix((0.7, 0.2, 0.1)).slots_N.tolist() == [7, 2, 1]
    assert make_mix((5.0,)).source_W.tolist() == [0]
    assert make_mix((1e300, 1e300)).slots_N.tolist() == [1, 1]


def test_a_weight_too_small_to_get_a_sample_is_refused() -> None:
    with pytest.raises(UserError, match=r"the weight 1e-09 in data\.sources is less than one sample in 4096"):
        make_mix((1.0, 1e-9))
