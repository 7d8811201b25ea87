"""The search beside every choice tried: random costs, limits, and too little time."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tangram.sharding.choose import search
from tangram.sharding.choose.costs import Both
from tangram.sharding.derive.solve import bounded
from tangram.sharding.derive.solve.solve import Name, SolverCosts, Table, eliminated, marginals


def random_costs(seed: int, count: int, sizes: tuple[int, int], pairs: int, *, never: float = 0.1) -> Both:
    """Seconds with choices that cannot be, bytes that are 0 for most pairs."""
    draw = np.random.default_rng(seed)
    both = Both(SolverCosts(), SolverCosts())
    n = draw.integers(sizes[0], sizes[1] + 1, count)
    for i in range(count):
        both.seconds.variable(i, [float(x) for x in draw.integers(0, 20, int(n[i]))])
        both.nbytes.variable(i, [float(x) for x in draw.integers(0, 20, int(n[i]))])
    for _ in range(pairs):
        a, b = draw.choice(count, 2, replace=False)
        table = draw.integers(0, 20, (n[a], n[b])).astype(float)
        table[draw.random(table.shape) < never] = np.inf
        both.seconds.pair(int(a), int(b), table)
        if draw.random() < 0.5:
            both.nbytes.pair(int(a), int(b), draw.integers(0, 6, (n[a], n[b])).astype(float))
    return both


def every(both: Both) -> list[tuple[float, float]]:
    """Seconds and bytes of every choice that can be."""
    sizes = list(both.seconds.sizes.values())
    choices: Iterator[dict[Name, int]] = (dict(enumerate(one)) for one in itertools.product(*map(range, sizes)))
    found = [(both.seconds.of(one), both.nbytes.of(one)) for one in choices]
    return [one for one in found if np.isfinite(one[0])]


@settings(deadline=None, max_examples=120)
@given(st.integers(0, 10**6), st.integers(2, 5), st.integers(0, 7), st.floats(0, 1.2))
def test_the_least_of_all_that_fit(seed: int, count: int, pairs: int, part: float) -> None:
    both = random_costs(seed, count, (1, 4), pairs)
    all_of = every(both)
    if not all_of:
        assert search.search(both, None, 10.0).best is None
        return
    low, high = min(b for _, b in all_of), max(b for _, b in all_of)
    limit = low - 1 + part * (high - low + 1)
    found = search.search(both, limit, 10.0)
    fit = [s for s, b in all_of if b <= limit]
    if not fit:
        assert found.best is None
        assert found.smallest == low
        return
    assert found.best is not None
    assert found.best.nbytes <= limit
    assert found.best.seconds == min(fit) == pytest.approx(found.bound)
    assert (both.seconds.of(found.best.choice), both.nbytes.of(found.best.choice)) == (
        found.best.seconds, found.best.nbytes,
    )  # fmt: skip


@pytest.mark.parametrize("seed", range(12))
def test_bounds_hold_with_tables_that_are_too_large_and_without_time(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    both = random_costs(seed, 6, (2, 3), 14, never=0.02)
    all_of = every(both)
    limit = float(np.median([b for _, b in all_of]))
    least = min(s for s, b in all_of if b <= limit)
    monkeypatch.setattr(search, "ENTRIES", 30)
    hasty = search.search(both, limit, 0.0)
    assert hasty.bound <= least
    assert hasty.best is None or hasty.best.seconds >= least
    found = search.search(both, limit, 20.0)
    assert found.best is not None
    assert found.best.seconds == least == pytest.approx(found.bound)


@pytest.mark.parametrize("seed", range(8))
def test_what_is_left_out_is_not_needed(seed: int) -> None:
    both = random_costs(seed, 5, (2, 4), 5)
    kept = bounded.reduced([both.seconds, both.nbytes], float("inf"))
    less = Both(bounded.restricted(both.seconds, kept), bounded.restricted(both.nbytes, kept))
    all_of, left = every(both), every(less)
    for limit in {b for _, b in all_of}:
        assert min(s for s, b in all_of if b <= limit) == min(s for s, b in left if b <= limit)


@pytest.mark.parametrize("seed", range(8))
def test_marginals_are_the_least_with_each_choice(seed: int) -> None:
    costs = random_costs(seed, 5, (2, 3), 6).seconds
    buckets: list[Table] = []
    least = eliminated(costs, 1 << 20, buckets=buckets).bound
    sizes = list(costs.sizes.values())
    want = [np.full(n, np.inf) for n in sizes]
    for one in itertools.product(*map(range, sizes)):
        cost = costs.of(dict(enumerate(one)))
        for i, x in enumerate(one):
            want[i][x] = min(want[i][x], cost)
    for i, found in marginals(buckets).items():
        assert isinstance(i, int)
        np.testing.assert_allclose(found, want[i] - least)
