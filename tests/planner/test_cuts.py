"""Cuts of a chain into unlike stages: as trying every cut finds them."""

from __future__ import annotations

from itertools import combinations, pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tangram.planner.space.stage_cuts import best_cut

Chain = tuple[list[np.ndarray], list[np.ndarray], int, list[float]]


@st.composite
def chains(draw: st.DrawFn) -> Chain:
    blocks, stages = draw(st.integers(1, 7)), draw(st.integers(1, 4))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    kinds = rng.integers(0, 3, blocks)
    costs, reaches = [], []
    for _ in range(stages):
        each = np.concatenate([[0.0], np.cumsum(rng.integers(1, 6, 3)[kinds])]).astype(float)
        costs.append(each[None, :] - each[:, None] + float(rng.integers(0, 3)))
        reach = np.minimum(np.arange(blocks + 1) + rng.integers(1, 5), blocks)
        reaches.append(np.maximum.accumulate(reach).astype(np.int64))
    beside = rng.integers(0, 9, stages) * draw(st.sampled_from([1.0, 0.1]))
    return costs, reaches, draw(st.integers(1, 40)), beside.tolist()


def took(chain: Chain, ends: list[int]) -> float:
    costs, _, micros, beside = chain
    pieces = list(pairwise([0, *ends]))
    each = [cost[start, end] for (start, end), cost in zip(pieces, costs, strict=True)]
    once = max(b * (end - start) for (start, end), b in zip(pieces, beside, strict=True))
    return float((micros - 1) * max(each) + sum(each) + once)


def tried(chain: Chain) -> float:
    costs, reaches, *_ = chain
    blocks, best = costs[0].shape[0] - 1, np.inf
    for inner in combinations(range(1, blocks), len(costs) - 1):
        ends = [*inner, blocks]
        if all(end <= reach[start] for (start, end), reach in zip(pairwise([0, *ends]), reaches, strict=True)):
            best = min(best, took(chain, ends))
    return best


@given(chains())
@settings(deadline=None, max_examples=300)
def test_the_cut_is_that_of_trying_all(chain: Chain) -> None:
    step, ends = best_cut(*chain)
    assert step == pytest.approx(tried(chain))
    if ends:
        assert took(chain, ends) == pytest.approx(step)
        assert ends[-1] == chain[0][0].shape[0] - 1


def test_few_micro_batches_bear_a_longer_stage() -> None:
    """Of five blocks the quick stage takes one more where the sum counts, and one less where the longest does."""
    places = np.arange(6.0)
    costs = [(places[None, :] - places[:, None]) * each for each in (4.0, 3.0)]
    reaches = [np.full(6, 5, dtype=np.int64)] * 2
    assert best_cut(costs, reaches, 1, [0, 0]) == (16.0, [1, 5])
    assert best_cut(costs, reaches, 2, [0, 0]) == (26.0, [2, 5])
    assert best_cut(costs, reaches, 1, [2, 2]) == (17.0 + 6, [2, 5])  # four blocks of one stage are longer beside it


def test_where_nothing_reaches_the_end_there_is_no_cut() -> None:
    costs, reaches = [np.ones((4, 4))] * 2, [np.array([1, 2, 3, 3])] * 2
    assert best_cut(costs, reaches, 3, [1, 1]) == (np.inf, [])
