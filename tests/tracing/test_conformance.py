"""The sequence of a step, learned and held against later ones: each kind of deviation, and none where none is."""

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from tangram.tracing.conformance import Cursor, Deviation, Expected, Key, deviation, left_out
from tangram.tracing.sites import Site, caller, site_of

GROUPS = ["dp", "tp"]


def call(name: str) -> Expected:
    """A call by a letter: capitals over dp, small ones over tp; "A8" has another size."""
    size = int(name[1:] or 4)
    key = Key(int(name[0].islower()), "abc".index(name[0].lower()), size, torch.float32, -1)
    return Expected(key, Site(line=f"train.py:{ord(name[0])}"), ord(name[0]), None)


def run(steps: list[str]) -> list[Deviation]:
    """What is noted of steps, each a row of calls."""
    cursor, found = Cursor(strict=True), list[Deviation]()
    for number, step in enumerate(steps, 1):
        cursor.begin()
        for name in step.split():
            one = call(name)
            if cursor.due(one.key) is None and cursor.came(one):
                noted = deviation(cursor, one, number, GROUPS)
                found += [noted] if noted else []
        last = left_out(cursor, number, GROUPS)
        found += [last] if last else []
    return found


USUAL = ["A a B", "A a B b", "A a B b"]


@pytest.mark.parametrize(
    ("step", "kinds", "text"),
    [
        ("A a B b", [], ""),
        ("A B b", ["skipped"], "skipped all-reduce over tp (train.py:97) in step 4 and called all-gather over dp"),
        ("A b", ["skipped"], "skipped all-reduce over tp (train.py:97) and 1 more in step 4"),
        ("A a", ["skipped"], "ended step 4 without all-gather over dp (train.py:66) and 1 more"),
        ("", ["skipped"], "ended step 4 without all-reduce over dp (train.py:65) and 3 more"),
        ("A a C B b", ["extra"], "called reduce-scatter over dp (train.py:67) in step 4, which is not due"),
        ("A a B b A", ["extra"], "called all-reduce over dp (train.py:65) in step 4, which is not due"),
        ("A a8 B b", ["mis-sized"], "with 8 bytes of float32 instead of 4 bytes of float32"),
        ("A B a b", ["skipped", "reordered"], "called all-reduce over tp (train.py:97) in step 4 after calls that"),
    ],
)
def test_a_deviation_is_called_what_it_is(step: str, kinds: list[str], text: str) -> None:
    found = run([*USUAL, step, "A a B b"])
    assert [one.kind for one in found] == kinds
    assert not kinds or text in found[-1].text, found
    assert all(one.step == 4 for one in found)


def test_what_a_job_calls_from_some_step_on_is_told_of_once_and_then_usual() -> None:
    found = run([*USUAL, "A a B b C", "A a B b C", "A a B b C", "A a B b C", "A a B b"])
    assert [(one.kind, one.step) for one in found] == [("extra", 4)]


def test_steps_of_two_kinds_in_turn_are_told_of_once_each() -> None:
    found = run([*USUAL, *(["A a B b C", "A a B b", "A a"] * 5)])
    assert [(one.kind, one.step) for one in found] == [("extra", 4), ("skipped", 6)]
    assert [one.step for one in run([*USUAL, *(["A a B b C", "A a B b"] * 5), "A B b"])] == [4, 14]


def test_the_first_steps_may_differ() -> None:
    assert run(["A a a a B", "A", "A a B b", "A a B", "A a B b", "A a B b", "A a B b"]) == []


@given(st.lists(st.sampled_from(["A", "a", "B", "b", "C", "c"]), min_size=1, max_size=12), st.integers(3, 6))
def test_equal_steps_never_deviate(step: list[str], times: int) -> None:
    assert run([" ".join(step)] * times) == []


@given(st.data())
def test_a_call_that_is_left_out_is_found_in_its_step(data: st.DataObject) -> None:
    step = data.draw(st.lists(st.sampled_from(["A", "a", "B", "b", "C", "c"]), min_size=2, max_size=12))
    at = data.draw(st.integers(0, len(step) - 1))
    found = run([" ".join(step)] * 4 + [" ".join(step[:at] + step[at + 1 :])])
    assert found
    assert {one.step for one in found} == {5}
    assert found[0].kind in ("skipped", "mis-sized")


@given(st.data())
def test_a_call_too_many_is_found_in_its_step(data: st.DataObject) -> None:
    step = data.draw(st.lists(st.sampled_from(["A", "a", "B", "b"]), min_size=2, max_size=8))
    at = data.draw(st.integers(0, len(step)))
    found = run([" ".join(step)] * 4 + [" ".join([*step[:at], "C", *step[at:]])])
    assert [one.kind for one in found] == ["extra"]


def test_a_line_of_no_file_is_nobodys_code() -> None:
    """As the first one of a process that was started with one."""
    found: list[str] = []
    names = {"__name__": "__main__", "found": found, "site_of": site_of, "caller": caller}
    exec(compile("found.append(site_of({}, caller(0))[0].line)", "<string>", "exec"), names)  # noqa: S102
    assert "test_conformance.py:" in found[0]
