"""How often a run saves where nobody says it: by what a save costs beside a step."""

import pytest

from tangram.training.state.checkpointer import LAST, Pace


def saves(pace: Pace, steps: int, step: float, cost: float, start: float = 0.0) -> list[int]:
    """The steps after which a run saves whose steps take `step` seconds and whose saves cost `cost` more."""
    found, now = list[int](), start
    for number in range(1, steps + 1):
        wanted = pace.due(now)
        now += step
        if wanted:
            pace.begun()
            pace.cost(cost)
            found.append(number)
            now += cost
    return found


@pytest.mark.parametrize(("step", "cost", "every"), [(1.0, 0.0, 1), (1.0, 0.03, 1), (0.26, 0.02, 3), (0.1, 0.2, 67)])
def test_what_saves_cost_stays_below_the_share(step: float, cost: float, every: int) -> None:
    found = saves(Pace(), 40 * every, step, cost)
    assert found[0] == 1, "there is something to go back to after the first step"
    assert {b - a for a, b in zip(found[LAST:], found[LAST + 1 :], strict=False)} <= {every - 1, every}
    assert cost * len(found[LAST:]) <= 0.035 * step * 40 * every


def test_one_slow_save_among_others_changes_nothing() -> None:
    pace = Pace()
    saves(pace, 20, 1.0, 0.01)
    pace.cost(50.0)
    assert pace.every == 1


def test_a_slow_first_save_does_not_put_the_next_one_off_for_long() -> None:
    """It makes files and memory that later ones find; where a rank was lost after ten steps all was done again."""
    pace = Pace()
    assert saves(pace, 1, 0.1, 3.0) == [1]
    found = saves(pace, 100, 0.1, 0.003, start=3.1)
    assert found[:3] == [2, 6, 7], "twice as long after each as long as few are known"
    assert pace.every == 1
    assert len(found) > 80


def test_saves_that_come_to_cost_more_come_less_often() -> None:
    pace = Pace()
    assert len(saves(pace, 20, 1.0, 0.01)) == 20
    assert len(saves(pace, 200, 1.0, 1.0, start=20.2)) < 15


def test_it_is_told_once_how_often() -> None:
    pace = Pace()
    assert pace.news() == ""
    saves(pace, 200, 0.26, 0.02)
    assert "a snapshot every 3 steps: one costs 20 ms, and steps take 260 ms" in pace.news()
    assert pace.news() == ""
