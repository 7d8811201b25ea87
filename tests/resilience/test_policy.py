"""When a job goes on, and when it stops: of histories alone."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from tangram.resilience.policy import DAY, Cause, Failure, Limits, lost_capacity, verdict


def killed(step: int) -> Failure:
    return Failure(Cause.KILLED, "rank 1 of 4 was killed", step)


def raised(step: int, words: str = "ValueError: no") -> Failure:
    return Failure(Cause.RAISED, words, step)


def test_a_job_that_gets_further_goes_on() -> None:
    assert verdict([killed(step) for step in range(50)], Limits()) == ""
    assert verdict([raised(3), killed(3), raised(4)], Limits()) == ""


def test_an_error_that_comes_again_at_the_same_step_stops_it() -> None:
    assert "would come again" in verdict([raised(3), raised(3)], Limits())
    assert verdict([raised(3), raised(4)], Limits()) == ""
    assert verdict([raised(3), raised(3, "OSError: disk")], Limits()) == ""
    hang = Failure(Cause.HANG, "no rank has moved", 3)
    assert "would come again" in verdict([hang, hang], Limits())
    one, other = (f"rank {n} of 2 ended the job: NoMemoryError: what flows took {n + 1.5} MB" for n in range(2))
    assert "would come again" in verdict([raised(3, one), raised(3, other)], Limits()), "other ranks, other figures"


def test_failures_without_a_new_step_stop_it() -> None:
    assert verdict([killed(3)] * 3, Limits()) == ""
    assert "failed 4 times in a row after step 3" in verdict([killed(3)] * 4, Limits())


def test_capacity_is_lost_where_ranks_are_killed_again_and_again() -> None:
    limits = Limits(in_a_row=2)
    assert not lost_capacity([killed(3)] * 2, limits)
    assert lost_capacity([killed(3)] * 3, limits)
    assert lost_capacity([raised(2), *[killed(3)] * 3], limits)
    assert not lost_capacity([raised(3), *[killed(3)] * 2], limits), "an error may be the job's own"
    assert not lost_capacity([killed(3), killed(4), killed(5)], limits)
    memory = replace(killed(3), cause=Cause.MEMORY)
    assert lost_capacity([killed(3), memory, memory], limits), "fewer need less of it"


def test_there_is_a_last_restart() -> None:
    assert verdict([killed(step) for step in range(2)], Limits(restarts=2)) == ""
    assert "started again 2 times in a day already" in verdict([killed(step) for step in range(3)], Limits(restarts=2))
    assert "started again 0 times in a day already" in verdict([killed(0)], Limits(restarts=0))


def test_a_run_of_months_goes_on() -> None:
    """Llama 3 (arXiv 2407.21783): 419 interruptions that nobody planned in 54 days, between which it got further."""
    every = [replace(killed(n), at=n * 54 * DAY / 419) for n in range(419)]
    assert all(verdict(every[: n + 1], Limits()) == "" for n in range(419))
    often = [replace(killed(n), at=n * DAY / 101) for n in range(200)]
    assert [n for n in range(200) if verdict(often[: n + 1], Limits())] == [*range(100, 200)]


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 2)), max_size=60))
def test_no_history_is_endless(history: list[tuple[bool, int]]) -> None:
    """Whatever fails: without new steps a job stops after a few failures more."""
    steps, found = 0, list[Failure]()
    for is_killed, more in history:
        steps += more
        found.append(killed(steps) if is_killed else raised(steps))
        if verdict(found, Limits()):
            break
    stuck = [*found, *[killed(steps)] * 4]
    assert any(verdict(stuck[: n + 1], Limits()) for n in range(len(stuck)))
