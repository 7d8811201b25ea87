"""Placements of experts: every one somewhere, as many on each rank, and never worse than in their own order."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tangram.errors import UserError
from tangram.planner.expert_placement import balance, in_order, place, ranks_do

CASES = st.tuples(st.integers(1, 4), st.integers(1, 3), st.integers(1, 3), st.integers(1, 2)).flatmap(
    lambda n: st.tuples(
        st.just(n),
        st.lists(st.integers(0, 1000), min_size=n[0] * n[1] * n[2] * n[3], max_size=n[0] * n[1] * n[2] * n[3]),
        st.integers(0, 3),
    )
)


@settings(max_examples=200, deadline=None)
@given(CASES)
def test_every_expert_has_a_slot_and_no_placement_is_worse(case: tuple[tuple[int, ...], list[int], int]) -> None:
    (per_rank, on_node, groups, nodes), loads, more = case
    ranks, groups = on_node * nodes, groups * nodes
    experts = per_rank * ranks * (groups // nodes)
    assert len(loads) == experts
    slots = experts + more * ranks
    found = place(loads, ranks, slots, nodes=nodes, groups=groups)
    assert [len(own) for own in found] == [slots // ranks] * ranks
    assert {e for own in found for e in own} == set(range(experts))
    assert balance(loads, found) >= balance(loads, in_order(experts, ranks, slots)) - 1e-12
    assert sum(ranks_do(loads, found)) == pytest.approx(sum(loads))
    assert 0 < balance(loads, found) <= 1 + 1e-12


def test_the_published_example() -> None:
    """That of the repository deepseek-ai/EPLB: two layers of 12 experts in 4 groups, 16 slots, 8 ranks on 2 nodes."""
    loads = [90, 132, 40, 61, 104, 165, 39, 4, 73, 56, 183, 86], [20, 107, 104, 64, 19, 197, 187, 157, 172, 86, 16, 27]
    published = (
        [5, 6, 5, 7, 8, 4, 3, 4, 10, 9, 10, 2, 0, 1, 11, 1],
        [7, 10, 6, 8, 6, 11, 8, 9, 2, 4, 5, 1, 5, 0, 3, 1],
    )
    for own, slots in zip(loads, published, strict=True):
        found = place(own, 8, 16, nodes=2, groups=4)
        pairs = [tuple(sorted(slots[i : i + 2])) for i in range(0, 16, 2)]
        assert [sorted(found[:4]), sorted(found[4:])] == [sorted(pairs[:4]), sorted(pairs[4:])]


def test_a_busy_expert_is_in_several_places() -> None:
    loads = [100, 1, 1, 1]
    assert balance(loads, in_order(4, 4, 4)) == pytest.approx(103 / 4 / 100)
    found = place(loads, 4, 8)
    assert all(0 in own for own in found)
    assert balance(loads, found) == pytest.approx(103 / 4 / 40)  # one rank has two of its five copies
    assert balance([0, 0], in_order(2, 2, 2)) == 1.0


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (([1, 2, 3], 2, 5), "must divide evenly among 2 ranks"),
        (([1, 2, 3, 4], 2, 2), "2 slots hold no 4 experts"),
        (([1, -2], 2, 2), "none of them is negative"),
        (([], 1, 1), "one for each expert"),
    ],
)
def test_numbers_that_fit_nowhere_are_refused(args: tuple[list[float], int, int], said: str) -> None:
    with pytest.raises(UserError, match=said):
        place(*args)


def test_nodes_that_do_not_divide_are_refused() -> None:
    with pytest.raises(UserError, match="among 2 nodes"):
        place([1, 2, 3], 3, 3, nodes=2)
    with pytest.raises(UserError, match="3 experts in their order"):
        in_order(3, 2, 4)
