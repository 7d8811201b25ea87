"""The cheapest choice by elimination against every choice tried; the algebra of states."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tangram.sharding.derive.problem.states import SAME, SEVERAL, SUM, State, cut, price, way
from tangram.sharding.derive.solve import solve
from tangram.sharding.derive.solve.bounded import bounded, gap
from tangram.sharding.derive.solve.solve import SolverCosts, Table, TooWideError, eliminated, least

EVERY = [SAME, SEVERAL, SUM, cut(0), cut(1), cut(0, 4)]
DUAL = {"same": "same", "several": "sum", "sum": "several", "cut": "cut"}


@settings(deadline=None, max_examples=150)
@given(st.data())
def test_elimination_finds_the_least(data: st.DataObject) -> None:
    count = data.draw(st.integers(1, 5))
    sizes = [data.draw(st.integers(1, 3)) for _ in range(count)]
    costs = SolverCosts()
    numbers = st.sampled_from([0.0, 1.0, 2.0, 5.0, float("inf")])
    for i, n in enumerate(sizes):
        costs.variable(i, [data.draw(numbers) for _ in range(n)])
    for _ in range(data.draw(st.integers(0, 6))):
        a, b = data.draw(st.integers(0, count - 1)), data.draw(st.integers(0, count - 1))
        table = [[data.draw(numbers) for _ in range(sizes[b])] for _ in range(sizes[a])]
        costs.pair(a, b, np.array(table))
    found = least(costs)
    every = [costs.of(dict(enumerate(choice))) for choice in itertools.product(*map(range, sizes))]
    assert costs.of(found) == min(every)


@settings(deadline=None, max_examples=25)
@given(st.data())
def test_what_is_too_wide_gets_a_choice_and_what_no_choice_costs_less_than(data: st.DataObject) -> None:
    """Tables of at most 12 entries, of graphs that need up to 3^6."""
    costs = SolverCosts()
    numbers = st.sampled_from([0.0, 1.0, 2.0, 5.0, 7.0, float("inf")])
    for i in range(6):
        costs.variable(i, [float(data.draw(st.integers(0, 3))) for _ in range(3)])
    for a, b in itertools.combinations(range(6), 2):
        costs.pair(a, b, np.array([[data.draw(numbers) for _ in range(3)] for _ in range(3)]))
    least_of_all = min(costs.of(dict(enumerate(choice))) for choice in itertools.product(range(3), repeat=6))
    try:
        found = bounded(costs, 12)
    except TooWideError:
        return  # nothing that can be was found, and nothing is claimed
    assert found.bound <= least_of_all
    if found.bound > 0 and np.isfinite(found.bound):
        assert least_of_all <= costs.of(found.choice) <= (found.bound * (1 + gap(costs, found))) * (1 + 1e-9)


def test_tables_are_small_once_the_time_is_over() -> None:
    """A search of Qwen3-Next over three axes went on for minutes after its seconds."""
    costs, numbers = SolverCosts(), np.random.default_rng(0)
    for i in range(12):
        costs.variable(i, [0.0] * 3)
    for a, b in itertools.combinations(range(12), 2):
        costs.pair(a, b, numbers.random((3, 3)))
    widest: dict[float, int] = {}
    bounds: dict[float, float] = {}
    for stop in (math.inf, 0.0):
        buckets: list[Table] = []
        bounds[stop] = eliminated(costs, 1 << 20, buckets=buckets, stop=stop, late=27).bound
        widest[stop] = max(table.size for _, table in buckets)
    assert widest == {math.inf: 3**12, 0.0: 27}
    assert bounds[0.0] <= bounds[math.inf]


def test_variables_of_one_choice_need_no_dims() -> None:
    """As of a model with a state that 67 operators share: NumPy's arrays have at most 64 dims."""
    costs = SolverCosts()
    costs.variable("shared", [3.0, 1.0])
    for i in range(70):
        costs.variable(i, [1.0])
        costs.pair("shared", i, np.array([[0.0], [0.5]]))
    for a, b in itertools.pairwise(range(70)):
        costs.pair(a, b, np.array([[1.0]]))
    costs.pair(0, "free", np.array([[0.0, 2.0]]))
    costs.variable("free", [5.0, 1.0])
    found = eliminated(costs, 1 << 10, exact=True)
    assert found.choice == {"shared": 0, "free": 1} | dict.fromkeys(range(70), 0)
    assert found.bound == costs.of(found.choice) == 3 + 70 + 69 + 3


def test_a_wide_graph_is_chosen_better_than_by_parts_alone() -> None:
    """A ring of pairs in which the parts see no reason to differ: another look at the shared ones finds it."""
    generator = np.random.default_rng(3)
    costs = SolverCosts()
    for i in range(9):
        costs.variable(i, generator.random(4))
    for a, b in itertools.combinations(range(9), 2):
        costs.pair(a, b, generator.random((4, 4)))
    alone, found = eliminated(costs, 64), bounded(costs, 64)
    exact = costs.of(least(costs))
    assert found.bound <= exact <= costs.of(found.choice) < costs.of(alone.choice)
    assert costs.of(found.choice) <= 1.1 * exact
    assert gap(costs, found) > 0
    assert gap(costs, bounded(costs)) == 0.0


def test_an_exact_choice_of_a_graph_that_is_too_wide_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(solve, "LIMIT", 50)
    costs = SolverCosts()
    for i in range(5):
        costs.variable(i, [0.0, 1.0, 2.0])
    for a, b in itertools.combinations(range(5), 2):
        costs.pair(a, b, np.ones((3, 3)))
    with pytest.raises(TooWideError, match="mark more of the tensors"):
        least(costs)


def _dual(state: State) -> State:
    return state._replace(kind=DUAL[state.kind])


@pytest.mark.parametrize(("a", "b"), list(itertools.product(EVERY, EVERY)))
def test_the_way_of_a_gradient_is_the_dual_way_back(a: State, b: State) -> None:
    there, back = way(a, b), way(_dual(b), _dual(a))
    if there is None or back is None:
        assert price(a, b, 8.0, 2, differentiable=True) == float("inf") or back is None
        return
    paid = {"all-gather", "all-reduce", "reduce-scatter", "all-to-all"}
    assert (there.backward if there.backward in paid else "") == (back.forward if back.forward in paid else "")


def test_what_ranks_receive() -> None:
    assert price(cut(0), SAME, 800.0, 4, differentiable=False) == 600
    assert price(cut(0), SEVERAL, 800.0, 4, differentiable=True) == 1200
    assert price(SUM, SAME, 800.0, 4, differentiable=True) == 1200
    assert price(SUM, cut(1), 800.0, 4, differentiable=True) == 1200
    assert price(cut(0), cut(1), 800.0, 4, differentiable=True) == 300
